#!/usr/bin/env bash
# N vLLM servers on one machine, one after the other's port, until Ctrl-C.
#
#   MANUS_JAX_VLLM_PYTHON=vllm/bin/python scripts/serve_vllm.sh DIR [N [PORT]] [-- options]
#
# DIR is a Hugging Face directory or one with published versions. With GPUs, server n gets GPU n.
# Options are those of python -m manus_jax.serve, and after a second -- vLLM's own.
set -euo pipefail

if (($# < 1)) || [[ $1 == -* ]]; then
  echo "usage: scripts/serve_vllm.sh DIR [N [PORT]] [-- options of python -m manus_jax.serve]" >&2
  exit 2
fi
model=$1 count=1 port=8000
shift
if (($#)) && [[ $1 != -- ]]; then count=$1 && shift; fi
if (($#)) && [[ $1 != -- ]]; then port=$1 && shift; fi
if (($#)); then shift; fi

servers=()
trap '((${#servers[@]})) && kill "${servers[@]}" 2>/dev/null; wait' EXIT
trap 'exit 130' INT TERM
for ((n = 0; n < count; n++)); do
  gpu=()
  if command -v nvidia-smi >/dev/null; then gpu=("CUDA_VISIBLE_DEVICES=$n"); fi
  env "${gpu[@]}" "${PYTHON:-python}" -m manus_jax.serve \
    --model "$model" --port $((port + n)) "$@" &
  servers+=($!)
  echo "http://127.0.0.1:$((port + n))"
done
wait -n
