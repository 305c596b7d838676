# Functions shared by the launch_*.sh scripts: argument checks, error messages and dry runs.
# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154 # options are set, and pool_options is read, by the sourcing script

die() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

say() { echo "$(basename "$0"): $*" >&2; }

# Accepts only text that is safe between quotes in a gin binding, a shell command and a manifest.
require_plain() {
  case $2 in
    *[\'\"\\\$\`]* | *$'\n'*) die "$1 must not contain quotes, backslashes, dollar signs or newlines" ;;
  esac
}

require_number() {
  if ! [[ $2 =~ ^[0-9]{1,6}$ ]] || (($2 < ${3:-0})); then
    die "$1 must be a number of at least ${3:-0}, not '$2'"
  fi
}

require_name() {
  [[ $2 =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
    die "$1 must be at most 40 lower-case letters, digits and dashes, not '$2'"
}

# Fails unless every named option has a value.
require_options() {
  local option
  for option in "$@"; do
    [[ -n ${!option:-} ]] || die "--$option is missing; --help lists the arguments"
  done
}

# Prints the words quoted for a shell.
quoted() {
  local word line=''
  for word in "$@"; do
    [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  echo "${line# }"
}

# Runs a command, or prints it in a dry run.
run_or_print() {
  if [[ -n $dry_run ]]; then
    quoted "$@"
  else
    "$@"
  fi
}

# Sets pool_options: the trainer's options for vLLM servers that write their addresses to a file.
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
