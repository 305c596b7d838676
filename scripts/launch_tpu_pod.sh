#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU slice: requests it, installs the project, runs the trainer, starts
# again after a preemption and deletes the slice at the end. See --help.
#
# The trainer's command resumes a run, so when a slice is lost, this script requests a new one and runs
# the same command there.
set -uo pipefail
# shellcheck source=scripts/launch_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

usage() {
  cat <<'EOF2'
usage: scripts/launch_tpu_pod.sh [options] [-- options of python -m manus_jax.train]

  --project P --zone Z         location of the slice
  --name NAME                  name of the queued resource and its node
  --accelerator_type TYPE      v5litepod-64, v5p-32, v6e-16, ...
  --runtime_version VERSION    v2-alpha-tpuv5-lite, v2-alpha-tpuv5, v2-alpha-tpuv6e, ...
  --gin_file FILE              config in this source tree; repeatable, later files override
  --model MODEL                Hugging Face directory, model.path: below a --mount; gs://BUCKET/PATH, which
                               every host downloads; a directory on this machine, which is copied to
                               every host; or none, for configs that train from scratch
  --run_dir DIR                train.run_dir, on a file system that all hosts share and that outlives the slice
  --mount SOURCE=DIR           mounted on every host: gs://BUCKET=DIR, or HOST:/PATH=DIR for NFS;
                               repeatable
  --address_file FILE          generate with vLLM servers, which write their addresses to this file
  --weights_dir DIR            new weights for the servers; hosts and servers share both paths
  --api_key_file FILE          the servers' key (or set VLLM_API_KEY); copied to the hosts as a
                               file, never part of a command
  --env_key_file FILE          the key of environment servers (or set MANUS_JAX_ENV_KEY), likewise
  --create_option=OPTION       option for gcloud ... queued-resources create; repeatable
  --spot                       request preemptible capacity
  --log_dir DIR                output of the hosts, one file per slice (logs/NAME)
  --max_restarts N             maximum number of new slices after the first (100)
  --poll_seconds N             interval between checks of the request (30)
  --keep                       do not delete the slice at the end
  --dry_run                    print the commands, one per line, without running them

The exit code is the trainer's. If the trainer was asked to stop (143), or the slice is suspended or has
failed, a new slice is requested. Ctrl-C lets the trainer save and deletes the slice.
EOF2
}

parse_arguments() {
  project='' zone='' name='' accelerator_type='' runtime_version='' gin_file=() run_dir='' model=''
  address_file='' weights_dir='' api_key_file='' env_key_file='' log_dir='' max_restarts=100 poll_seconds=30
  mounts=() create_options=() trainer_options=() keep='' dry_run=''
  while (($#)); do
    case $1 in
      --project | --zone | --name | --accelerator_type | --runtime_version | --run_dir | --model | \
        --address_file | --weights_dir | --api_key_file | --env_key_file | --log_dir | --max_restarts | --poll_seconds)
        (($# > 1)) || die "$1 needs a value"
        require_plain "$1" "$2"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
      --gin_file)
        require_plain "$1" "${2-}"
        gin_file+=("${2-}")
        shift 2
        ;;
      --mount)
        [[ ${2-} == *?=/?* ]] || die "--mount must be SOURCE=DIR, such as gs://bucket=/mnt/runs"
        mounts+=("$2")
        shift 2
        ;;
      --create_option=*) create_options+=("${1#--create_option=}") && shift ;;
      --spot) create_options+=(--spot) && shift ;;
      --keep) keep=1 && shift ;;
      --dry_run) dry_run=1 && shift ;;
      -h | --help) usage && exit 0 ;;
      --) shift && trainer_options=("$@") && break ;;
      *) die "unknown argument '$1'; see --help; options of the trainer go after --" ;;
    esac
  done
  require_options project zone name accelerator_type runtime_version gin_file run_dir model
  require_number --max_restarts "$max_restarts"
  require_number --poll_seconds "$poll_seconds"
  require_name --name "$name"
  [[ ${address_file:+given} == "${weights_dir:+given}" ]] || die "--address_file and --weights_dir must be given together"
  [[ $run_dir == /* ]] || die "--run_dir must be an absolute path on a shared file system, not '$run_dir'"
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  gin_file=("${gin_file[@]#"$root/"}")
  local file
  for file in "${gin_file[@]}"; do
    [[ $file != /* && -f $root/$file ]] || die "--gin_file $file is not in $root, which is copied to the hosts"
  done
  find_model
  for file in api_key_file env_key_file; do
    [[ -z ${!file} || -s ${!file} ]] || die "--$file ${!file} is missing or empty"
  done
  [[ -n $dry_run ]] || command -v gcloud >/dev/null || die "gcloud is not on PATH"
  log_dir=${log_dir:-logs/$name}
  where=("--project=$project" "--zone=$zone")
}

# Sets model_path, the model's directory on the hosts, and whether they download it or get a copy.
find_model() {
  local mount directory
  model_path='' model_source=''
  model=${model%/}
  case $model in
    none) return ;;
    gs://?*/?*)
      model_path=models/${model##*/} model_source=bucket
      return
      ;;
  esac
  for mount in "${mounts[@]}"; do
    directory=${mount#*=}
    if [[ $model/ == "${directory%/}"/* ]]; then
      model_path=$model
      return
    fi
  done
  [[ -f $model/config.json ]] ||
    die "--model $model is not below a --mount, and not a directory with a config.json on this machine; give one of these, gs://BUCKET/PATH, or none"
  model_path=models/$(basename "$model") model_source=copy
}

# Sets train: the trainer's command on the hosts.
trainer_command() {
  train=(.venv/bin/python -m manus_jax.train "${gin_file[@]/#/--gin_file=}" "--gin_param=train.run_dir = '$run_dir'")
  [[ -z $model_path ]] || train+=("--gin_param=model.path = '$model_path'")
  if [[ -n $address_file ]]; then
    pool_options_for "$address_file" "$weights_dir"
    train+=("${pool_options[@]}")
  fi
  train+=("${trainer_options[@]}")
}

queue() { run_or_print gcloud compute tpus queued-resources "$1" "$name" "${where[@]}" "${@:2}"; }

# Runs a command on every host; its words are quoted for the remote shell.
on_hosts() {
  run_or_print gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all \
    "--command=$(quoted bash manus_jax/scripts/tpu_worker.sh "$@")"
}

copy() { run_or_print gcloud compute tpus tpu-vm scp "$1" "$name:$2" "${where[@]}" --worker=all "${@:3}"; }

# Prints the state of the request, or 'unknown' after three failed queries.
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

# Requests the slice and waits until it is active; returns 1 if the request fails, 2 if it is refused.
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

# Installs the project, the key, the mounts and the model on every host.
install() {
  run_or_print tar -czf "$scratch/manus_jax.tgz" -C "$root" --exclude=__pycache__ \
    manus_jax envs configs scripts pyproject.toml README.md LICENSE || return
  copy "$scratch/manus_jax.tgz" manus_jax.tgz || return
  run_or_print gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all \
    '--command=mkdir -p manus_jax/models .manus_jax && chmod 700 .manus_jax && tar -xzf manus_jax.tgz -C manus_jax' || return
  local kind
  for kind in api_key env_key; do
    [[ -z ${keys[$kind]} ]] || copy "${keys[$kind]}" ".manus_jax/$kind" || return
  done
  [[ $model_source != copy ]] || copy "$model" manus_jax/models/ --recurse || return
  if [[ $model_source == bucket ]]; then
    on_hosts install --model "$model" "$model_path" "${mounts[@]}"
  else
    on_hosts install "${mounts[@]}"
  fi
}

# Sets keys[$1], the file of a key: the given one, or one with the value from the environment.
find_key() {
  keys[$1]=$2
  if [[ -z $2 && -n $3 ]]; then
    keys[$1]=$scratch/$1
    [[ -n $dry_run ]] || (umask 077 && printf %s "$3" >"$scratch/$1")
  fi
}

# Follows the trainer to its end, reconnecting if necessary, and returns its exit code.
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
    say "the connection was lost; reconnecting"
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
  say "$name could not be deleted; delete it by hand to stop the charges"
  return 1
}

finish() {
  local code=$?
  trap - EXIT
  [[ -n $keep ]] || delete_slice
  rm -rf "$scratch"
  exit "$code"
}

# Lets the trainer save before the slice is deleted.
stop() {
  trap '' INT TERM
  say "stopping"
  [[ -z $following ]] || { kill "$following" 2>/dev/null; on_hosts stop; }
  exit "$1"
}

main() {
  local train=() pool_options=() scratch='' owned='' following='' attempt code state
  parse_arguments "$@"
  trainer_command
  if [[ -n $dry_run ]]; then
    scratch=SCRATCH
  else
    scratch=$(mktemp -d)
    trap finish EXIT
    trap 'stop 130' INT
    trap 'stop 143' TERM HUP
    mkdir -p "$log_dir" || die "cannot write $log_dir"
  fi
  local -A keys=()
  find_key api_key "$api_key_file" "${VLLM_API_KEY:-}"
  find_key env_key "$env_key_file" "${MANUS_JAX_ENV_KEY:-}"
  for ((attempt = 1; ; attempt++)); do
    request_slice
    code=$?
    ((code != 2)) || exit 1 # gcloud has printed the reason
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
    say "$name is $state, the trainer ended with $code; requesting a new slice"
    delete_slice || exit 1
    sleep "$poll_seconds"
  done
}

main "$@"
