#!/usr/bin/env bash
# Rehearses a production run on one machine without accelerators. See --help.
#
# Everything is as on a pod with a vLLM pool, but small and on loopback: the model is made first, an
# environment server and vLLM servers with an API key run on their own, and two processes train as
# one program. They find the servers through the address file and give them new weights through the
# shared directory. The run is stopped after its first step and resumed by the same command.
set -uo pipefail

usage() {
  cat <<'EOF2'
usage: MANUS_JAX_VLLM_PYTHON=vllm/bin/python scripts/rehearse.sh [options]

  --dir DIR      where models, weights, the run and logs are written, and kept (a temporary directory)
  --servers N    number of vLLM servers, about 3 GB of memory each (1)
  --no_resume    do not stop and resume the run

Needs about five minutes of CPU time and 6 GB of memory. Ends with exit code 0 if the trained model is
exported, published and served: the weights that the servers hold are those of the export.
EOF2
}

die() {
  echo "rehearse.sh: $*" >&2
  exit 2
}

say() { echo "[$SECONDS s] $*"; }

# Starts a command in its own process group, with a log; its number is in the list of processes.
start() {
  local log=$logs/$1.log
  shift
  setsid "$@" >>"$log" 2>&1 </dev/null &
  processes+=($!)
}

stop_all() {
  local code=$? pid
  trap - EXIT
  for pid in "${processes[@]}"; do kill -TERM -- "-$pid" 2>/dev/null; done
  for pid in "${processes[@]}"; do wait "$pid" 2>/dev/null; done
  if ((code)); then
    echo "rehearse.sh: failed with exit code $code; logs are in $logs" >&2
  elif [[ -n $temporary ]]; then
    rm -rf "$directory"
  fi
  exit "$code"
}

# Waits until a command succeeds; fails when the process given by its number ends before.
await() {
  local what=$1 pid=$2 log=$3
  shift 3
  until "$@"; do
    kill -0 "$pid" 2>/dev/null || { tail -n 5 "$log" >&2 && die "$what ended: see $log"; }
    sleep 0.2
  done
}

lists_servers() { [[ $(grep -c . "$pool/addresses" 2>/dev/null) == "$servers" ]]; }

# Makes a small model that answers with valid actions, as a Hugging Face directory.
make_model() {
  "$PYTHON" -m manus_jax.train --gin_file=configs/quickstart.gin \
    --gin_param="train.run_dir = '$directory/first'" --gin_param='train.val_only = True' \
    --gin_param='train.val_tasks = 4' --gin_param='train.baselines = []' --gin_param='warm_start.steps = 80' \
    --gin_param='warm_start.traces = 150' --gin_param='train.next_command = ""' >"$logs/model.log" 2>&1 ||
    { tail -n 5 "$logs/model.log" >&2 && die "no model was made: see $logs/model.log"; }
  model=$directory/first/warm_start/export/80
}

# Runs both processes of the pod to their end; with an argument, SIGTERM is sent after the first step.
train() {
  local i pids=() code=0
  coordinator=127.0.0.1:$(free_port) # a port is not free right after its last user
  for i in 0 1; do
    start "learner-$i" env JAX_NUM_CPU_DEVICES=2 JAX_PLATFORMS=cpu XLA_FLAGS= "$PYTHON" -m manus_jax.train \
      --gin_file=configs/envs/babyai.gin --gin_file=configs/recipes/grpo.gin --gin_file=configs/rehearsal.gin \
      --gin_param="model.path = '$model'" --gin_param="train.run_dir = '$run'" \
      --gin_param="env.urls = {'babyai': ['http://127.0.0.1:$env_port']}" \
      --gin_param="vllm.address_file = '$pool/addresses'" --gin_param="vllm.weights_dir = '$pool/weights'" \
      --gin_param="distributed.coordinator = '$coordinator'" --gin_param='distributed.processes = 2' \
      --gin_param="distributed.process_id = $i"
    pids+=($!)
  done
  if [[ -n ${1-} ]]; then
    await "the run" "${pids[0]}" "$logs/learner-0.log" test -s "$run/metrics.jsonl"
    say "one host is preempted: SIGTERM to process 1"
    kill -TERM "${pids[1]}"
  fi
  for i in 0 1; do
    wait "${pids[i]}" || code=$?
  done
  return "$code"
}

free_port() { "$PYTHON" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

main() {
  PYTHON=${PYTHON:-python} processes=() directory='' temporary='' servers=1 resume=1
  local code=0 env_port first_port coordinator='' pool run logs model
  while (($#)); do
    case $1 in
      --dir | --servers)
        (($# > 1)) || die "$1 needs a value"
        [[ $1 == --dir ]] && directory=$2 || servers=$2
        shift 2
        ;;
      --no_resume) resume='' && shift ;;
      -h | --help) usage && exit 0 ;;
      *) die "unknown argument '$1'; see --help" ;;
    esac
  done
  [[ $servers =~ ^[1-8]$ ]] || die "--servers must be a number from 1 to 8, not '$servers'"
  [[ -n ${MANUS_JAX_VLLM_PYTHON:-} ]] || die "set MANUS_JAX_VLLM_PYTHON to the Python of an environment with vLLM (docs/vllm.md)"
  [[ -z $directory || ! -e $directory ]] || die "--dir $directory exists"
  cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
  if [[ -z $directory ]]; then
    directory=$(mktemp -d) temporary=1
  else
    mkdir -p "$directory" || exit
    directory=$(cd "$directory" && pwd)
  fi
  pool=$directory/shared/pool run=$directory/shared/run logs=$directory/logs
  mkdir -p "$pool" "$logs" || exit
  trap stop_all EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP

  say "making a small model ($directory)"
  make_model
  (umask 077 && "$PYTHON" -c 'import secrets; print(secrets.token_urlsafe(32))' >"$directory/key")
  VLLM_API_KEY=$(<"$directory/key")
  export VLLM_API_KEY

  env_port=$(free_port)
  say "starting an environment server on port $env_port"
  start environment "$PYTHON" -m envs.serve babyai --port "$env_port"
  await "the environment server" $! "$logs/environment.log" grep -q '^serving ' "$logs/environment.log"

  first_port=$(free_port)
  say "starting $servers vLLM server(s) with a key, from port $first_port"
  CUDA_VISIBLE_DEVICES='' start vllm scripts/serve_vllm.sh "$model" "$servers" "$first_port" -- \
    --address-file "$pool/addresses" --max-length 384 --slots 16 --dtype float32
  await "vLLM" $! "$logs/vllm.log" lists_servers
  say "servers in $pool/addresses: $(paste -sd ' ' "$pool/addresses")"

  if [[ -n $resume ]]; then
    say "training on two processes"
    train stop || code=$?
    ((code == 143)) || die "the preempted run ended with $code, not 143: see $logs/learner-0.log"
    say "both processes saved and ended with 143; the same command resumes"
  else
    say "training on two processes"
  fi
  train || die "the run ended with $?: see $logs/learner-0.log"
  "$PYTHON" -m manus_jax.report "$run" --watch

  say "comparing the served, the published and the exported weights"
  JAX_PLATFORMS=cpu "$PYTHON" scripts/check_served_model.py --run "$run" --pool "$pool" \
    --model "$model" || die "the check failed"
  say "done: trained, published and served"
}

main "$@"
