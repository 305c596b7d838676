#!/usr/bin/env bash
# Runs on every worker of a TPU slice, called by launch_tpu_pod.sh.
#
#   tpu_worker.sh install [--model gs://BUCKET/PATH DIR] [MOUNT...]
#                                          installs the project; MOUNT is gs://BUCKET=DIR or HOST:/PATH=DIR
#   tpu_worker.sh run ATTEMPT -- COMMAND   starts the command, or attaches to it, and waits for its end
#   tpu_worker.sh stop                     asks the command to save and exit, and waits for it
#
# The command keeps running when the connection is lost. `run` with the same ATTEMPT attaches to the
# running command, or returns its exit code if it has ended in the meantime.
set -uo pipefail
home=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
state=${MANUS_JAX_STATE:-$HOME/.manus_jax}
log=$state/train.log
cd "$home" || exit 1
mkdir -p "$state"

# Google's packages are not in Ubuntu's repositories.
install_gcsfuse() {
  local site=https://packages.cloud.google.com/apt keys=/usr/share/keyrings/cloud.google.asc
  curl -fsSL "$site/doc/apt-key.gpg" | sudo tee "$keys" >/dev/null || return
  echo "deb [signed-by=$keys] $site gcsfuse-$(. /etc/os-release && echo "$VERSION_CODENAME") main" |
    sudo tee /etc/apt/sources.list.d/gcsfuse.list >/dev/null || return
  install_packages gcsfuse
}

install_packages() { sudo apt-get update -q && sudo apt-get install -q -y "$@"; }

mount_one() {
  local source=${1%%=*} directory=${1#*=}
  if mountpoint -q "$directory"; then return; fi
  sudo mkdir -p "$directory" && sudo chown "$(id -u):$(id -g)" "$directory" || return
  case $source in
    # Hosts wait for each other's files, so that a file is missing must not be cached.
    gs://*)
      command -v gcsfuse >/dev/null || install_gcsfuse || return
      gcsfuse --implicit-dirs --metadata-cache-negative-ttl-secs=0 "${source#gs://}" "$directory"
      ;;
    *)
      command -v mount.nfs >/dev/null || install_packages nfs-common || return
      sudo mount -t nfs "$source" "$directory"
      ;;
  esac
}

install() {
  local python=python3.11 mount
  if [[ ${1-} == --model ]]; then
    mkdir -p "$3" && gcloud storage rsync --recursive "$2" "$3" || return
    shift 3
  fi
  command -v "$python" >/dev/null || install_packages "$python" "$python-venv" || return
  for mount in "$@"; do mount_one "$mount" || return; done
  "$python" -m venv .venv && .venv/bin/pip install -q -e '.[tpu]'
}

is_running() {
  [[ -f $state/pid ]] && kill -0 "$(<"$state/pid")" 2>/dev/null
}

export_key() {
  [[ -f $2 ]] || return 0
  printf -v "$1" %s "$(<"$2")"
  export "${1?}"
}

run() {
  local attempt=$1 first=+1
  shift 2
  if [[ $(cat "$state/attempt" 2>/dev/null) != "$attempt" ]]; then
    echo "$attempt" >"$state/attempt"
    rm -f "$state/code" "$state/pid"
    : >"$log"
    export_key VLLM_API_KEY "$state/api_key"
    export_key MANUS_JAX_ENV_KEY "$state/env_key"
    # shellcheck disable=SC2016 # expanded by the new shell
    # The shell survives a signal to its process group, to record the command's exit code.
    setsid bash -c 'trap : TERM; code=0; "$@" || code=$?; echo "$code" >"$0"' \
      "$state/code" "$@" >>"$log" 2>&1 </dev/null &
    echo $! >"$state/pid"
  else
    first=100
  fi
  tail -n "$first" -s 0.2 -f --pid="$(<"$state/pid")" "$log" | sed -u "s/^/[$(hostname)] /"
  [[ -f $state/code ]] || return 143 # it was killed together with its shell
  return "$(<"$state/code")"
}

stop() {
  is_running || return 0
  kill -TERM -- "-$(<"$state/pid")"
  while is_running; do sleep 1; done
}

case ${1-} in
  install | run | stop) "$@" ;;
  *) echo "tpu_worker.sh: the first argument must be install, run or stop, not '${1-}'" >&2 && exit 2 ;;
esac
