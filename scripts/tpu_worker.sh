#!/usr/bin/env bash
# What launch_tpu_pod.sh runs on every worker of a slice; nobody else needs it.
#
#   tpu_worker.sh install [MOUNT...]       the project and its mounts; MOUNT is gs://BUCKET=DIR or HOST:/PATH=DIR
#   tpu_worker.sh run ATTEMPT -- COMMAND   starts the command, or joins it, and follows it to its end
#   tpu_worker.sh stop                     asks it to save and leave, and waits until it has
#
# The one idea: the command lives on when the connection does not. `run` with the same ATTEMPT joins
# what runs already, and gives the exit code of what has ended meanwhile.
set -uo pipefail
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state=${MANUS_JAX_STATE:-$HOME/.manus_jax}
log=$state/train.log
cd "$home" || exit 1
mkdir -p "$state"

mount_one() {
  local source=${1%%=*} directory=${1#*=}
  if mountpoint -q "$directory"; then return; fi
  sudo mkdir -p "$directory" && sudo chown "$(id -u):$(id -g)" "$directory" || return
  case $source in
    gs://*) gcsfuse --implicit-dirs "${source#gs://}" "$directory" ;;
    *) sudo mount -t nfs "$source" "$directory" ;;
  esac
}

install() {
  local python=python3.11 mount
  if ! command -v "$python" >/dev/null; then
    sudo apt-get update -q && sudo apt-get install -q -y "$python" "$python-venv" || return
  fi
  for mount in "$@"; do mount_one "$mount" || return; done
  "$python" -m venv .venv && .venv/bin/pip install -q -e '.[tpu]'
}

lives() {
  [[ -f $state/pid ]] && kill -0 "$(<"$state/pid")" 2>/dev/null
}

run() {
  local attempt=$1 first=+1
  shift 2
  if [[ $(cat "$state/attempt" 2>/dev/null) != "$attempt" ]]; then
    echo "$attempt" >"$state/attempt"
    rm -f "$state/code" "$state/pid"
    : >"$log"
    if [[ -f $state/api_key ]]; then
      VLLM_API_KEY=$(<"$state/api_key")
      export VLLM_API_KEY
    fi
    # shellcheck disable=SC2016 # expanded by the shell that is started
    # The shell outlives a signal to the group, to write down how the command took it.
    setsid bash -c 'trap : TERM; code=0; "$@" || code=$?; echo "$code" >"$0"' \
      "$state/code" "$@" >>"$log" 2>&1 </dev/null &
    echo $! >"$state/pid"
  else
    first=100
  fi
  tail -n "$first" -s 0.2 -f --pid="$(<"$state/pid")" "$log" | sed -u "s/^/[$(hostname)] /"
  [[ -f $state/code ]] || return 143 # it was killed along with its shell
  return "$(<"$state/code")"
}

stop() {
  lives || return 0
  kill -TERM -- "-$(<"$state/pid")"
  while lives; do sleep 1; done
}

"$@"
