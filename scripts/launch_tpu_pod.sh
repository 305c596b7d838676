#!/usr/bin/env bash
# Trains on a Cloud TPU slice, all of its hosts: requests it, installs, runs, starts again after a
# preemption, deletes it at the end. --help says more.
#
# The one idea: a run is a command that resumes. Whatever takes the slice away, a new one is asked
# for and given the same command, until that ends by itself.
set -uo pipefail
# shellcheck source=scripts/launch_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

usage() {
  cat <<'EOF2'
usage: scripts/launch_tpu_pod.sh [options] [-- options of python -m manus_jax.train]

  --project P --zone Z         where
  --name NAME                  of the queued resource and its node
  --accelerator_type TYPE      v5litepod-64, v5p-32, v6e-16, ...
  --runtime_version VERSION    v2-alpha-tpuv5-lite, v2-alpha-tpuv5, v2-alpha-tpuv6e, ...
  --gin_file FILE              a config of this source tree
  --run_dir DIR                train.run_dir, on a file system that outlives the slice and all hosts see
  --mount SOURCE=DIR           put there on every host: gs://BUCKET=DIR, or HOST:/PATH=DIR for NFS;
                               as often as needed
  --address_file FILE          where vLLM servers write their addresses; with it, they generate
  --weights_dir DIR            where they find new weights; hosts and servers see both at these paths
  --api_key_file FILE          the servers' key, or VLLM_API_KEY in the environment; copied to the
                               hosts as a file and never part of a command
  --create_option=OPTION       given to gcloud ... queued-resources create; as often as needed
  --spot                       of preemptible capacity
  --log_dir DIR                what the hosts print, a file for each slice (logs/NAME)
  --max_restarts N             slices asked for again, at most (100)
  --poll_seconds N             between two looks at the request (30)
  --keep                       leaves the slice at the end
  --dry_run                    prints the commands, one a line, and runs none

Returns the trainer's exit code. A trainer that was asked to stop (143), and a slice that is suspended
or failed, are started again. Ctrl-C lets the trainer save, and deletes the slice.
EOF2
}

parse_arguments() {
  project='' zone='' name='' accelerator_type='' runtime_version='' gin_file='' run_dir=''
  address_file='' weights_dir='' api_key_file='' log_dir='' max_restarts=100 poll_seconds=30
  mounts=() create_options=() trainer_options=() keep='' dry_run=''
  while (($#)); do
    case $1 in
      --project | --zone | --name | --accelerator_type | --runtime_version | --gin_file | --run_dir | \
        --address_file | --weights_dir | --api_key_file | --log_dir | --max_restarts | --poll_seconds)
        (($# > 1)) || die "$1 needs a value"
        require_plain "$1" "$2"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
      --mount)
        [[ ${2-} == *?=/?* ]] || die "--mount is SOURCE=DIR, such as gs://bucket=/mnt/runs"
        mounts+=("$2")
        shift 2
        ;;
      --create_option=*) create_options+=("${1#--create_option=}") && shift ;;
      --spot) create_options+=(--spot) && shift ;;
      --keep) keep=1 && shift ;;
      --dry_run) dry_run=1 && shift ;;
      -h | --help) usage && exit 0 ;;
      --) shift && trainer_options=("$@") && break ;;
      *) die "unknown argument '$1'; --help lists them, and what is for the trainer goes after --" ;;
    esac
  done
  require_options project zone name accelerator_type runtime_version gin_file run_dir
  require_number --max_restarts "$max_restarts"
  require_number --poll_seconds "$poll_seconds"
  require_name --name "$name"
  [[ ${address_file:+given} == "${weights_dir:+given}" ]] || die "--address_file and --weights_dir go together: servers need both"
  [[ $run_dir == /* ]] || die "--run_dir must be an absolute path on a shared file system, not '$run_dir'"
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  gin_file=${gin_file#"$root/"}
  [[ $gin_file != /* && -f $root/$gin_file ]] || die "--gin_file $gin_file is no file of $root, which is what gets copied"
  [[ -z $api_key_file || -s $api_key_file ]] || die "--api_key_file $api_key_file is empty or not there"
  [[ -n $dry_run ]] || command -v gcloud >/dev/null || die "there is no gcloud on PATH"
  log_dir=${log_dir:-logs/$name}
  where=("--project=$project" "--zone=$zone")
}

# The trainer's command, as the hosts run it.
trainer_command() {
  train=(.venv/bin/python -m manus_jax.train "--gin_file=$gin_file" "--gin_param=train.run_dir = '$run_dir'")
  if [[ -n $address_file ]]; then
    pool_options_for "$address_file" "$weights_dir"
    train+=("${pool_options[@]}")
  fi
  train+=("${trainer_options[@]}")
}

queue() { do_or_say gcloud compute tpus queued-resources "$1" "$name" "${where[@]}" "${@:2}"; }

# A command on every host: its words are quoted here once, for the shell there.
on_hosts() {
  do_or_say gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all \
    "--command=$(quoted bash manus_jax/scripts/tpu_worker.sh "$@")"
}

copy() { do_or_say gcloud compute tpus tpu-vm scp "$1" "$name:$2" "${where[@]}" --worker=all; }

# The request's state; unknown when gcloud could not tell, three times.
state_of() {
  local i state
  for ((i = 0; i < 3; i++)); do
    if state=$(queue describe '--format=value(state.state)') && [[ -n $state ]]; then
      echo "$state"
      return
    fi
    sleep "$((i ? poll_seconds : 0))"
  done
  echo unknown
}

# Asks for the slice and waits for it; fails when it will not come.
request_slice() {
  queue create "--node-id=$name" "--accelerator-type=$accelerator_type" \
    "--runtime-version=$runtime_version" "${create_options[@]}" || return 2
  owned=1
  if [[ -n $dry_run ]]; then
    queue describe '--format=value(state.state)'
    return
  fi
  local state last=''
  while :; do
    state=$(state_of)
    [[ $state == "$last" ]] || say "$name is $state"
    last=$state
    case $state in
      ACTIVE) return 0 ;;
      FAILED | SUSPENDING | SUSPENDED) return 1 ;;
    esac
    sleep "$poll_seconds"
  done
}

# The project, its key and its mounts on every host.
install() {
  do_or_say tar -czf "$scratch/manus_jax.tgz" -C "$root" --exclude=__pycache__ \
    manus_jax envs configs scripts pyproject.toml README.md LICENSE || return
  copy "$scratch/manus_jax.tgz" manus_jax.tgz || return
  do_or_say gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all \
    '--command=mkdir -p manus_jax .manus_jax && chmod 700 .manus_jax && tar -xzf manus_jax.tgz -C manus_jax' || return
  if [[ -n $key ]]; then copy "$key" .manus_jax/api_key || return; fi
  on_hosts install "${mounts[@]}"
}

# Follows the trainer to its end, also over connections that break; its exit code.
train_once() {
  local broken code
  for ((broken = 0; ; broken++)); do
    if [[ -n $dry_run ]]; then
      on_hosts run "$attempt" -- "${train[@]}"
      return
    fi
    on_hosts run "$attempt" -- "${train[@]}" > >(tee -a "$log_dir/slice-$attempt.log") 2>&1 &
    following=$!
    code=0
    wait "$following" || code=$?
    following=''
    ((code == 255 && broken < 10)) || return "$code"
    [[ $(state_of) == ACTIVE ]] || return "$code"
    say "the connection broke; joining again"
    sleep "$poll_seconds"
  done
}

delete_slice() {
  [[ -n $owned ]] || return 0
  local i
  for ((i = 0; i < 3; i++)); do
    if queue delete --force --quiet; then
      owned=''
      return
    fi
    sleep "$poll_seconds"
  done
  say "$name could not be deleted: do it by hand, it costs money"
  return 1
}

finish() {
  local code=$?
  trap - EXIT
  [[ -n $keep ]] || delete_slice
  rm -rf "$scratch"
  exit "$code"
}

# Lets the trainer save before the slice goes.
stop() {
  trap '' INT TERM
  say "stopping"
  [[ -z $following ]] || { kill "$following" 2>/dev/null; on_hosts stop; }
  exit "$1"
}

main() {
  local train=() pool_options=() key='' scratch='' owned='' following='' attempt code state
  parse_arguments "$@"
  trainer_command
  if [[ -n $dry_run ]]; then
    scratch=SCRATCH
    key=${api_key_file:-${VLLM_API_KEY:+$scratch/api_key}}
  else
    scratch=$(mktemp -d)
    trap finish EXIT
    trap 'stop 130' INT
    trap 'stop 143' TERM HUP
    mkdir -p "$log_dir" || die "cannot write $log_dir"
    key=$api_key_file
    if [[ -z $key && -n ${VLLM_API_KEY:-} ]]; then
      key=$scratch/api_key
      (umask 077 && printf %s "$VLLM_API_KEY" >"$key")
    fi
  fi
  for ((attempt = 1; ; attempt++)); do
    request_slice
    code=$?
    ((code != 2)) || exit 1 # gcloud has said why
    if ((code == 0)); then
      { install && train_once; }
      code=$?
    else
      code=143
    fi
    if [[ -n $dry_run ]]; then
      [[ -n $keep ]] || delete_slice
      exit 0
    fi
    ((code != 0)) || exit 0
    state=$(state_of)
    if ((code != 143)) && [[ $state == ACTIVE ]]; then
      say "the trainer ended with $code: see $log_dir/slice-$attempt.log"
      exit "$code"
    fi
    ((attempt <= max_restarts)) || { say "$name was lost $attempt times"; exit "$code"; }
    say "$name is $state, the trainer ended with $code: asking again"
    delete_slice || exit 1
    sleep "$poll_seconds"
  done
}

main "$@"
