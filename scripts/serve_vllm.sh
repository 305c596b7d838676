#!/usr/bin/env bash
# Runs N vLLM servers on one machine, on consecutive ports, until Ctrl-C.
#
#   MANUS_JAX_VLLM_PYTHON=vllm/bin/python scripts/serve_vllm.sh DIR [N [PORT]] [-- options]
#
# DIR is a Hugging Face directory or a directory of published versions. With GPUs
# (CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists), each server gets TENSOR_PARALLEL of them
# (default 1) and N defaults to as many servers as that allows; without GPUs, N defaults to 1. HOST is
# the address to listen on (127.0.0.1); a private address requires a key, in VLLM_API_KEY or
# --api-key-file. Each server prints "serving URL" when it is ready. Options after -- are those of
# python -m manus_jax.serve; options after a second -- are vLLM's.
set -euo pipefail

die() {
  echo "serve_vllm.sh: $*" >&2
  exit 2
}

if (($# < 1)) || [[ $1 == -* ]]; then
  echo "usage: scripts/serve_vllm.sh DIR [N [PORT]] [-- options of python -m manus_jax.serve]" >&2
  exit 2
fi
model=$1 count='' port=8000 host=${HOST:-127.0.0.1} group=${TENSOR_PARALLEL:-1}
shift
if (($#)) && [[ $1 != -- ]]; then count=$1 && shift; fi
if (($#)) && [[ $1 != -- ]]; then port=$1 && shift; fi
if (($#)) && [[ $1 != -- ]]; then die "unexpected '$1': options go after --"; fi
if (($#)); then shift; fi
for number in "${count:-1}" "$port" "$group"; do
  [[ $number =~ ^[1-9][0-9]{0,4}$ ]] || die "'$number' is not a number from 1 to 99999"
done
((port + ${count:-1} - 1 <= 65535)) || die "ports from $port on exceed 65535"

visible=${CUDA_VISIBLE_DEVICES-}
if [[ -z ${CUDA_VISIBLE_DEVICES+set} ]] && command -v nvidia-smi >/dev/null; then
  visible=$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd,) || visible=''
fi
IFS=, read -ra gpus <<<"$visible"
count=${count:-$((${#gpus[@]} ? ${#gpus[@]} / group : 1))}
if ((${#gpus[@]} && (count == 0 || count * group > ${#gpus[@]}))); then
  die "$count servers x TENSOR_PARALLEL $group = $((count * group)) GPUs, and there are ${#gpus[@]}: $visible"
fi

# Options of manus_jax.serve come before a second --, vLLM's after it.
own=() theirs=()
if ((group > 1)); then theirs+=(--tensor-parallel-size "$group"); fi
while (($#)) && [[ $1 != -- ]]; do own+=("$1") && shift; done
if (($#)); then shift; fi
theirs+=("$@")

servers=()
trap 'kill "${servers[@]}" 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT TERM
for ((n = 0; n < count; n++)); do
  mine=()
  if ((${#gpus[@]})); then mine=(--gpus "$(IFS=, && echo "${gpus[*]:n * group:group}")"); fi
  "${PYTHON:-python}" -m manus_jax.serve --model "$model" --host "$host" --port $((port + n)) \
    "${mine[@]}" "${own[@]}" -- "${theirs[@]}" &
  servers+=($!)
done
# Not "wait -n", which misses a server that ended while the others were being started.
while :; do
  for server in "${servers[@]}"; do
    kill -0 "$server" 2>/dev/null || { wait "$server" && exit 0 || exit $?; }
  done
  sleep 0.5
done
