# What the launch_*.sh share: one line for a mistake, and commands that are run or only printed.
# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # options are set, and pool_options read, by whoever sources this

die() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

say() { echo "$(basename "$0"): $*" >&2; }

# A text that can stand between quotes in a gin binding, a shell and a manifest.
require_plain() {
  case $2 in
    *[\'\"\\\$\`]* | *$'\n'*) die "$1 must not hold quotes, backslashes, dollars or newlines" ;;
  esac
}

require_number() {
  if ! [[ $2 =~ ^[0-9]{1,6}$ ]] || (($2 < ${3:-0})); then
    die "$1 must be a number from ${3:-0} on, not '$2'"
  fi
}

require_name() {
  [[ $2 =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
    die "$1 must be at most 40 small letters, digits and dashes, not '$2'"
}

# Every named option must have a value.
require_options() {
  local option
  for option in "$@"; do
    [[ -n ${!option} ]] || die "--$option is missing; --help lists the arguments"
  done
}

# The words as a shell would have to be given them.
quoted() {
  local word line=''
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  echo "${line# }"
}

# Runs a command, or prints it.
do_or_say() {
  if [[ -n $dry_run ]]; then
    quoted "$@"
  else
    "$@"
  fi
}

# The trainer's options for a pool that writes its addresses to a file, in place of servers that the
# config would start; sets pool_options.
pool_options_for() {
  pool_options=(
    "--gin_param=engine.name = 'vllm'"
    "--gin_param=vllm.servers = 0"
    "--gin_param=vllm.gpus = None"
    "--gin_param=vllm.tensor_parallel = 1"
    "--gin_param=vllm.gpu_memory_utilization = None"
    "--gin_param=vllm.learner_memory_fraction = None"
    "--gin_param=vllm.address_file = '$1'"
    "--gin_param=vllm.weights_dir = '$2'"
  )
}
