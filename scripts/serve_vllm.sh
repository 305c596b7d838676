#!/usr/bin/env bash
# Runs vLLM servers on one machine, on consecutive ports, until Ctrl-C. See --help.
set -euo pipefail

usage() {
  cat <<'EOF2'
usage: scripts/serve_vllm.sh DIR [N [PORT]] [-- options of python -m manus_jax.serve [-- options of vLLM]]

  DIR    a Hugging Face directory, or a directory of published versions
  N      number of servers (with GPUs, as many as there are groups of TENSOR_PARALLEL GPUs; otherwise 1)
  PORT   port of the first server (8000)

The GPUs are those of CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists. Each server prints "serving URL"
when it is ready. Environment variables:

  HOST                   address to listen on (127.0.0.1); a private one requires a key, in VLLM_API_KEY or
                         --api-key-file
  TENSOR_PARALLEL        GPUs per server (1)
  MANUS_JAX_VLLM_PYTHON  the interpreter that has vLLM
  PYTHON                 the interpreter that starts the servers (that of vLLM, or python)
EOF2
}

die() {
  echo "serve_vllm.sh: $*" >&2
  exit 2
}

case ${1-} in
  -h | --help) usage && exit 0 ;;
  '' | -*) die "the first argument must be the directory of a model; see --help" ;;
esac
model=$1 count='' port=8000 host=${HOST:-127.0.0.1} group=${TENSOR_PARALLEL:-1}
shift
if (($#)) && [[ $1 != -- ]]; then count=$1 && shift; fi
if (($#)) && [[ $1 != -- ]]; then port=$1 && shift; fi
if (($#)) && [[ $1 != -- ]]; then die "unexpected '$1': options go after --"; fi
if (($#)); then shift; fi
for number in "${count:-1}" "$port" "$group"; do
  [[ $number =~ ^[1-9][0-9]{0,4}$ ]] || die "'$number' is not a number from 1 to 99999"
done
python=${PYTHON:-${MANUS_JAX_VLLM_PYTHON:-python}}
command -v "$python" >/dev/null || die "no interpreter '$python'; set MANUS_JAX_VLLM_PYTHON"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # vLLM's environment does not have this project
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
trap 'exit 130' INT
trap 'exit 143' TERM
for ((n = 0; n < count; n++)); do
  mine=()
  if ((${#gpus[@]})); then mine=(--gpus "$(IFS=, && echo "${gpus[*]:n * group:group}")"); fi
  "$python" -m manus_jax.serve --model "$model" --host "$host" --port $((port + n)) \
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
