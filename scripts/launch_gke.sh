#!/usr/bin/env bash
# Trains on GKE: a JobSet of TPU slices for the learner, a Deployment of vLLM servers on GPUs, and a
# shared volume. See --help.
#
# The manifests are scripts/kubernetes/*.yaml; this script fills in their ${placeholders}.
# shellcheck disable=SC2034 # render reads variables by name
set -euo pipefail
# shellcheck source=scripts/launch_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

usage() {
  cat <<'EOF2'
usage: scripts/launch_gke.sh [options] [-- options of python -m manus_jax.train]

  --name NAME               name of the JobSet; the other objects are NAME-vllm and NAME-shared
  --namespace NAMESPACE     (default)
  --image IMAGE             image with this project and jax[tpu] installed, sources in --source_dir
  --source_dir DIR          directory of the sources in the image (/manus_jax)
  --gin_file FILE           config in --source_dir; repeatable, later files override
  --accelerator KIND        TPU generation: v5e, v5p or v6e
  --topology TOPOLOGY       topology of a slice, such as 4x4
  --slices N                number of slices (1)
  --vllm_image IMAGE        image with vLLM and this project
  --vllm_replicas N         number of servers (1)
  --vllm_gpus N             GPUs per server, used as one tensor-parallel group (1)
  --vllm_max_length N       maximum tokens of prompt plus generation (the model's own limit)
  --gpu_type TYPE           GKE accelerator: nvidia-h100-80gb, nvidia-l4, ...
  --model DIR               Hugging Face directory on the shared volume: /shared/...
  --run_dir DIR             train.run_dir (/shared/runs/NAME)
  --storage_class CLASS     class with ReadWriteMany access, such as standard-rwx
  --storage_size SIZE       size of the shared volume (1Ti)
  --api_key_secret SECRET   existing Secret whose api-key the servers require; create it with
                            kubectl create secret generic SECRET --from-file=api-key=FILE
  --max_restarts N          restarts after failures other than preemptions (3)
  --grace_seconds N         time that the trainer gets to save when its pod is evicted (600)
  --spot                    run learner and servers on spot nodes
  --dry_run                 print the manifests without applying them
EOF2
}

parse_arguments() {
  name='' namespace=default image='' source_dir=/manus_jax gin_file=() accelerator='' topology='' slices=1
  vllm_image='' vllm_replicas=1 vllm_gpus=1 vllm_max_length='' gpu_type='' model='' run_dir=''
  storage_class='' storage_size=1Ti api_key_secret='' max_restarts=3 grace_seconds=600
  trainer_options=() spot='' dry_run=''
  while (($#)); do
    case $1 in
      --name | --namespace | --image | --source_dir | --accelerator | --topology | --slices | \
        --vllm_image | --vllm_replicas | --vllm_gpus | --vllm_max_length | --gpu_type | --model | --run_dir | \
        --storage_class | --storage_size | --api_key_secret | --max_restarts | --grace_seconds)
        (($# > 1)) || die "$1 needs a value"
        [[ $2 =~ ^[A-Za-z0-9_./:@=-]*$ ]] || die "$1 must be plain letters, digits and ./:@=_-, not '$2'"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
      --gin_file)
        [[ ${2-} =~ ^[A-Za-z0-9_./:@=-]+$ ]] || die "$1 must be plain letters, digits and ./:@=_-, not '${2-}'"
        gin_file+=("$2")
        shift 2
        ;;
      --spot) spot=1 && shift ;;
      --dry_run) dry_run=1 && shift ;;
      -h | --help) usage && exit 0 ;;
      --) shift && trainer_options=("$@") && break ;;
      *) die "unknown argument '$1'; see --help; options of the trainer go after --" ;;
    esac
  done
  require_options name image gin_file accelerator topology vllm_image gpu_type model storage_class api_key_secret
  local option
  for option in name namespace api_key_secret storage_class; do require_name "--$option" "${!option}"; done
  for option in slices vllm_replicas vllm_gpus; do require_number "--$option" "${!option}" 1; done
  for option in max_restarts grace_seconds; do require_number "--$option" "${!option}"; done
  [[ -z $vllm_max_length ]] || require_number --vllm_max_length "$vllm_max_length" 1
  [[ $model == /shared/?* ]] || die "--model must be on the shared volume, /shared/..., not '$model'"
  run_dir=${run_dir:-/shared/runs/$name}
  [[ $run_dir == /shared/?* ]] || die "--run_dir must be on the shared volume, /shared/..., not '$run_dir'"
  [[ -n $dry_run ]] || command -v kubectl >/dev/null || die "kubectl is not on PATH"
}

# Computes the node label, chips and hosts (four chips each) from accelerator and topology.
find_slice() {
  local flat="1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16" cube="2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16"
  local known each all=''
  case $accelerator in
    v5e) tpu_label=tpu-v5-lite-podslice known=$flat ;;
    v6e) tpu_label=tpu-v6e-slice known=$flat ;;
    v5p) tpu_label=tpu-v5p-slice known=$cube ;;
    *) die "--accelerator must be v5e, v5p or v6e, not '$accelerator'" ;;
  esac
  [[ $topology =~ ^[1-9][0-9]{0,2}(x[1-9][0-9]{0,2}){1,2}$ ]] || die "--topology must look like 4x4, not '$topology'"
  chips=$((${topology//x/*}))
  for each in $known; do all+=", $each = $((${each//x/*}))"; done
  [[ " $known " == *" $topology "* ]] ||
    die "$accelerator has no topology $topology (${topology//x/ x } = $chips chips); it has ${all#, } chips"
  chips_per_host=$((chips < 4 ? chips : 4))
  hosts=$((chips / chips_per_host))
  ((slices == 1 || hosts > 1)) ||
    die "--slices $slices of $topology: $chips chips are one host, and only slices of several can be joined; 4x4 has 4 hosts"
}

# Prints the words as a list that is valid JSON and YAML.
as_list() {
  local word list=''
  for word in "$@"; do
    word=${word//\\/\\\\} word=${word//\"/\\\"} word=${word//$'\n'/\\n} word=${word//$'\t'/\\t}
    list+=", \"$word\""
  done
  echo "[${list#, }]"
}

make_commands() {
  local pool=/shared/$name pool_options=() words
  pool_options_for "$pool/addresses" "$pool/weights"
  words=(python -m manus_jax.train "${gin_file[@]/#/--gin_file=}" "--gin_param=train.run_dir = '$run_dir'"
    "--gin_param=model.path = '$model'" "${pool_options[@]}" "${trainer_options[@]}")
  # Kubernetes expands $(NAME); escape it in the trainer's arguments.
  command=$(as_list "${words[@]//\$(/\$\$(}")
  # shellcheck disable=SC2016 # Kubernetes expands the pod's address
  words=(python3 -m manus_jax.serve --model "$model" --host '$(POD_IP)' --port 8000 --address-file "$pool/addresses")
  [[ -z $vllm_max_length ]] || words+=(--max-length "$vllm_max_length")
  words+=(--)
  ((vllm_gpus == 1)) || words+=(--tensor-parallel-size "$vllm_gpus")
  # Whichever server starts first creates the directory of the address file.
  vllm_command=$(as_list sh -c "mkdir -p $pool && exec \"\$@\"" sh "${words[@]}")
}

# Prints a manifest with its placeholders filled in.
render() {
  local text key
  text=$(<"$1")
  for key in name slices topology accelerator hosts chips_per_host max_restarts grace_seconds tpu_label image \
    source_dir key_variable api_key_secret storage_class storage_size vllm_replicas vllm_gpus gpu_type \
    vllm_image spot_selector vllm_command command; do # commands last: placeholders in their text are kept
    text=${text//"\${$key}"/"${!key}"}
  done
  printf '%s\n' "$text"
}

main() {
  local tpu_label chips chips_per_host hosts command vllm_command key_variable=VLLM_API_KEY spot_selector='' file
  parse_arguments "$@"
  find_slice
  make_commands
  [[ -z $spot ]] || spot_selector='cloud.google.com/gke-spot: "true"'
  local manifests=''
  for file in storage vllm learner; do
    manifests+="---"$'\n'$(render "$(dirname "${BASH_SOURCE[0]}")/kubernetes/$file.yaml")$'\n'
  done
  if [[ -n $dry_run ]]; then
    printf '%s' "$manifests"
  else
    printf '%s' "$manifests" | kubectl apply --namespace "$namespace" -f -
  fi
}

main "$@"
