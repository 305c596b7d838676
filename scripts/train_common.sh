# Shared by train_ppo.sh and train_grpo.sh: starts environment servers, trains, stops the servers.
# shellcheck shell=bash
#
# The servers never outlive the script, and the script returns the trainer's exit code. Servers and
# trainer have their own process groups, so Ctrl-C reaches only this script, which forwards it to the
# trainer; the trainer saves its step and exits. If the script itself is killed, the servers notice
# (--parent_pid) and exit too.

usage() {
  cat <<EOF
usage: scripts/train_$ALGORITHM.sh [options] [-- options of python -m manus_jax.train]

  --env_name NAME          environment to train on (webshop)
  --num_servers N          number of servers to start (1), on base_port, base_port + 1, ...
  --base_port PORT         port of the first server (AgentGym's default for this environment)
  --data_dir DIR           directory with train.parquet and test.parquet (or val, .json, .jsonl);
                           by default, the environment's own tasks
  --exp_name_suffix TEXT   appended to the name of the run, runs/${ALGORITHM}_NAME
  --env_urls URL[,URL...]  use running servers, for instance AgentGym's, and start none;
                           tasks are read from --data_dir (data/NAME)
  --env_spec MODULE:SPEC   serve an environment that is not part of this project
  --env_python PATH        interpreter that runs the servers (venvs/NAME/bin/python if
                           scripts/setup_env.sh has created it, else that of the trainer)
  --hardware NAME          file of configs/hardware/ (gpus_one_host)

Settings come from configs/envs/NAME.gin (configs/base.gin if there is none), then
configs/recipes/$ALGORITHM.gin, then configs/hardware/NAME.gin. Options after -- are passed to the
trainer and override them:
  scripts/train_$ALGORITHM.sh --env_name maze -- --gin_param='train.total_steps = 100'
Environment variables: BASE_MODEL=DIR sets model.path, PYTHON the interpreter.
EOF
}

die() {
  echo "train_$ALGORITHM.sh: $*" >&2
  exit 2
}

# Accepts only text that is safe between single quotes in a gin binding.
require_plain() {
  case $2 in
    *[\'\\]* | *$'\n'*) die "$1 must not contain quotes, backslashes or newlines: $2" ;;
  esac
}

require_number() {
  if ! [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || (($2 > $3)); then
    die "$1 must be a number from 1 to $3, not '$2'"
  fi
}

parse_arguments() {
  env_name=webshop num_servers=1 base_port='' data_dir='' exp_name_suffix='' env_urls='' env_spec='' env_python=''
  hardware=gpus_one_host
  trainer_options=()
  while (($#)); do
    case $1 in
      --env_name | --num_servers | --base_port | --data_dir | --exp_name_suffix | --env_urls | --env_spec | \
        --env_python | --hardware)
        (($# > 1)) || die "$1 needs a value"
        require_plain "$1" "$2"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
      -h | --help)
        usage
        exit 0
        ;;
      --)
        shift
        trainer_options=("$@")
        break
        ;;
      *) die "unknown argument '$1'; see --help; options of the trainer go after --" ;;
    esac
  done
  [[ $env_name =~ ^[A-Za-z0-9_]+$ ]] || die "--env_name must be a name, not '$env_name'"
  require_number --num_servers "$num_servers" 1000
  [[ -z $base_port ]] || require_number --base_port "$base_port" 65535
  [[ -z $env_urls || -z $env_spec$env_python ]] ||
    die "--env_spec and --env_python have no effect with --env_urls, which starts no server"
  if [[ -z $env_python && -x venvs/$env_name/bin/python ]]; then env_python=venvs/$env_name/bin/python; fi
  env_python=${env_python:-$PYTHON}
  command -v "$env_python" >/dev/null || die "no interpreter '$env_python' for --env_python"
}

# Prints the first existing task file in data_dir with one of the given names.
task_file() {
  local name ending
  for name in "$@"; do
    for ending in parquet json jsonl; do
      if [[ -f $data_dir/$name.$ending ]]; then
        echo "$data_dir/$name.$ending"
        return
      fi
    done
  done
  die "--data_dir $data_dir contains no $1.parquet, $1.json or $1.jsonl"
}

# Sets urls or base_port, and train_file and val_file.
find_servers() {
  if [[ -n $env_urls ]]; then
    IFS=, read -ra urls <<<"$env_urls"
    data_dir=${data_dir:-data/$env_name}
    [[ -d $data_dir ]] || die "no directory $data_dir with tasks for --env_urls; set --data_dir"
  else
    local served
    served=$("$PYTHON" - "$env_name" "${env_spec:-$env_name}" 2>&1 <<'EOF'
import sys
from envs.registry import UnknownEnvironment, load
from manus_jax.agentgym.table import ENVIRONMENTS
name, spec = sys.argv[1:]
row = ENVIRONMENTS[name] if name in ENVIRONMENTS else None
try:
    load(spec)
except UnknownEnvironment as error:
    port = row.port if row else "PORT"
    sys.exit(f"{error}. To use running AgentGym servers: --env_urls http://HOST:{port}")
print(row.port if row else 36001)
EOF
    ) || die "$served"
    base_port=${base_port:-$served}
    ((base_port + num_servers - 1 <= 65535)) || die "--base_port $base_port leaves no room for $num_servers servers"
  fi
  if [[ -n $data_dir ]]; then
    train_file=$(task_file train) || exit 2
    val_file=$(task_file test val) || exit 2
  fi
}

# Starts the servers, each with its log, and waits until all of them serve; sets urls.
start_servers() {
  local i port log pid
  urls=()
  for ((i = 0; i < num_servers; i++)); do
    port=$((base_port + i))
    log=$logs/server_$port.log
    PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} "$env_python" -m envs.serve "${env_spec:-$env_name}" --port "$port" --parent_pid $$ \
      >"$log" 2>&1 </dev/null &
    servers+=($!)
    urls+=("http://127.0.0.1:$port")
  done
  for ((i = 0; i < num_servers; i++)); do
    port=$((base_port + i)) log=$logs/server_$((base_port + i)).log pid=${servers[i]}
    local deadline=$((SECONDS + 120))
    # Wait for this server's own output: another process may answer on the port.
    until grep -q '^serving ' "$log"; do
      kill -0 "$pid" 2>/dev/null || die "the server on port $port exited: $(tail -n 1 "$log")"
      ((SECONDS < deadline)) || die "the server on port $port is not ready after 120 s; see $log"
      sleep 0.1
    done
  done
  "$PYTHON" - "${urls[@]}" <<'EOF' || die "a server started but does not answer; see $logs"
import os, sys, urllib.request
key = os.environ.get("MANUS_JAX_ENV_KEY", "")
headers = {"Authorization": f"Bearer {key}"} if key else {}
for url in sys.argv[1:]:
    request = urllib.request.Request(url + "/", headers=headers)
    assert urllib.request.urlopen(request, timeout=10).status == 200
EOF
}

stop_servers() {
  local pid
  for pid in "${servers[@]}"; do kill -TERM -- "-$pid" 2>/dev/null; done
  for pid in "${servers[@]}"; do wait "$pid" 2>/dev/null; done
}

# Starts the trainer, forwards signals to it and waits for its end; sets code.
train() {
  "$PYTHON" -m manus_jax.train "$@" </dev/null &
  trainer=$!
  trap 'kill -INT "$trainer" 2>/dev/null' INT
  trap 'kill -TERM "$trainer" 2>/dev/null' TERM HUP
  code=0
  while wait "$trainer" || code=$?; do
    kill -0 "$trainer" 2>/dev/null || break # otherwise a signal interrupted wait
    code=0
  done
}

main() {
  PYTHON=${PYTHON:-python} servers=() trainer='' logs=''
  local root config machine urls=() train_file='' val_file='' run params=() code
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  parse_arguments "$@"
  command -v "$PYTHON" >/dev/null || die "no interpreter '$PYTHON'; activate an environment or set PYTHON"
  config=$root/configs/envs/$env_name.gin
  [[ -f $config ]] || config=$root/configs/base.gin
  machine=$root/configs/hardware/$hardware.gin
  [[ -f $machine ]] ||
    die "--hardware must be one of $(basename -as .gin "$root"/configs/hardware/*.gin | paste -sd ' '), not '$hardware'"
  run=${ALGORITHM}_$env_name$exp_name_suffix
  logs=logs/$run
  find_servers
  mkdir -p "$logs" || die "cannot write $logs"

  set -m
  trap stop_servers EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM HUP
  if [[ -z $env_urls ]]; then
    start_servers
    if [[ -z $train_file ]]; then
      train_file=$logs/train.json val_file=$logs/test.json
      "$PYTHON" -m envs.items "${env_spec:-$env_name}" --out "$logs" || exit
    fi
  fi
  params=(
    "--gin_param=env.names = ['$env_name']"
    "--gin_param=env.urls = {'$env_name': [$(printf "'%s'," "${urls[@]}")]}"
    "--gin_param=data.train_files = ['$train_file']"
    "--gin_param=data.val_files = ['$val_file']"
    "--gin_param=train.run_dir = 'runs/$run'"
  )
  if [[ -n ${BASE_MODEL:-} ]]; then
    require_plain BASE_MODEL "$BASE_MODEL"
    params+=("--gin_param=model.path = '$BASE_MODEL'")
  fi
  train "--gin_file=$config" "--gin_file=$root/configs/recipes/$ALGORITHM.gin" "--gin_file=$machine" \
    "${params[@]}" "${trainer_options[@]}"
  exit "$code"
}
