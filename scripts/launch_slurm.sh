#!/usr/bin/env bash
# Trains on a SLURM cluster of GPU nodes: some run the learner, the others vLLM servers. See --help.
set -euo pipefail
# shellcheck source=scripts/launch_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/launch_common.sh"

usage() {
  cat <<'EOF2'
usage: scripts/launch_slurm.sh [options] [-- options of python -m manus_jax.train]

  --name NAME              name of the job
  --gin_file FILE          config; repeatable, later files override
  --run_dir DIR            train.run_dir, on a file system shared by all nodes
  --learner_nodes N        nodes for the learner, one JAX process on each (1)
  --vllm_nodes N           nodes for vLLM servers (0: the config selects the engine)
  --gpus_per_node N        GPUs of every node (8)
  --tensor_parallel N      GPUs per vLLM server; a node runs gpus_per_node / N servers (1)
  --model DIR              Hugging Face directory: model.path and the servers' first weights
  --port PORT              port of a node's first server (8000)
  --max_length N           maximum tokens of prompt plus generation, at least rollout.max_total_tokens
  --pool_dir DIR           shared directory for weights and server addresses (RUN_DIR/pool)
  --api_key_file FILE      shared file, readable only by you, with the key that servers require
  --python PYTHON          Python of the learner (python)
  --vllm_python PYTHON     Python of the environment that has vLLM
  --log_dir DIR            directory of the job's log (logs)
  --sbatch_option=OPTION   option for sbatch, such as --time=24:00:00; repeatable
  --dry_run                print the sbatch command without running it

When SLURM preempts the job or its time limit is reached, it is requeued and resumes.
EOF2
}

parse_arguments() {
  name='' gin_file=() run_dir='' learner_nodes=1 vllm_nodes=0 gpus_per_node=8 tensor_parallel=1 model=''
  port=8000 max_length='' pool_dir='' api_key_file='' python=python vllm_python='' log_dir=logs dry_run=''
  sbatch_options=() trainer_options=()
  while (($#)); do
    case $1 in
      --name | --run_dir | --learner_nodes | --vllm_nodes | --gpus_per_node | --tensor_parallel | \
        --model | --port | --max_length | --pool_dir | --api_key_file | --python | --vllm_python | --log_dir)
        (($# > 1)) || die "$1 needs a value"
        require_plain "$1" "$2"
        [[ $2 != *,* ]] || die "$1 must not contain a comma, which separates variables for sbatch"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
      --gin_file)
        require_plain "$1" "${2-}"
        [[ -f ${2-} ]] || die "--gin_file ${2-} does not exist"
        gin_file+=("$2")
        shift 2
        ;;
      --sbatch_option=*) sbatch_options+=("${1#--sbatch_option=}") && shift ;;
      --dry_run) dry_run=1 && shift ;;
      -h | --help) usage && exit 0 ;;
      --) shift && trainer_options=("$@") && break ;;
      *) die "unknown argument '$1'; see --help; options of the trainer go after --" ;;
    esac
  done
  require_options name gin_file run_dir
  require_name --name "$name"
  local option
  for option in learner_nodes gpus_per_node tensor_parallel; do require_number "--$option" "${!option}" 1; done
  require_number --vllm_nodes "$vllm_nodes"
  [[ $run_dir == /* ]] || die "--run_dir must be an absolute path on a shared file system, not '$run_dir'"
  if ((vllm_nodes)); then
    require_options model max_length api_key_file vllm_python
    require_number --max_length "$max_length" 1
    require_number --port "$port" 1
    [[ -s $api_key_file ]] || die "--api_key_file $api_key_file is missing or empty"
    ((gpus_per_node % tensor_parallel == 0)) ||
      die "$gpus_per_node GPUs per node are not divisible by --tensor_parallel $tensor_parallel"
  else
    for option in max_length pool_dir api_key_file vllm_python; do
      [[ -z ${!option} ]] || die "--$option requires --vllm_nodes > 0"
    done
  fi
  [[ -n $dry_run ]] || command -v sbatch >/dev/null || die "sbatch is not on PATH"
}

main() {
  local root variables train pool_options=()
  parse_arguments "$@"
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  pool_dir=${pool_dir:-$run_dir/pool}
  train=("$python" -m manus_jax.train "${gin_file[@]/#/--gin_file=}" "--gin_param=train.run_dir = '$run_dir'")
  [[ -z $model ]] || train+=("--gin_param=model.path = '$model'")
  variables="ALL,LEARNER_NODES=$learner_nodes,VLLM_NODES=$vllm_nodes,GPUS_PER_NODE=$gpus_per_node"
  if ((vllm_nodes)); then
    pool_options_for "$pool_dir/addresses" "$pool_dir/weights"
    train+=("${pool_options[@]}")
    variables+=",SOURCE_DIR=$root,MODEL=$model,PORT=$port,MAX_LENGTH=$max_length,ADDRESS_FILE=$pool_dir/addresses"
    variables+=",API_KEY_FILE=$api_key_file,TENSOR_PARALLEL=$tensor_parallel,PYTHON=$python"
    variables+=",MANUS_JAX_VLLM_PYTHON=$vllm_python"
  fi
  [[ -n $dry_run ]] || mkdir -p "$log_dir" || die "cannot write $log_dir"
  run_or_print sbatch "--job-name=$name" "--nodes=$((learner_nodes + vllm_nodes))" "--gpus-per-node=$gpus_per_node" \
    "--output=$log_dir/$name-%j.log" "--export=$variables" "${sbatch_options[@]}" \
    "$root/scripts/slurm_gpu.sbatch" "${train[@]}" "${trainer_options[@]}"
}

main "$@"
