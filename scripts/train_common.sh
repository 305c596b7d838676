# What train_ppo.sh and train_grpo.sh share: environment servers up, train, servers down.
# shellcheck shell=bash
#
# The one idea: whatever happens, the servers end with the script, and the script ends with the
# trainer's exit code. Servers and trainer run in process groups of their own, so that Ctrl-C reaches
# this script alone, which passes it on to the trainer; that one saves its step and leaves. Should the
# script itself be killed, the servers notice (--parent_pid) and leave too.

usage() {
  cat <<EOF
usage: scripts/train_$ALGORITHM.sh [options] [-- options of python -m manus_jax.train]

  --env_name NAME          the environment to train on (webshop)
  --num_servers N          servers to start (1), on base_port, base_port + 1, ...
  --base_port PORT         the first server's port (AgentGym's own for this environment)
  --data_dir DIR           train.parquet and test.parquet (or val, or .json, .jsonl) in it;
                           without it: the environment's own tasks
  --exp_name_suffix TEXT   put after the name of the run, runs/${ALGORITHM}_NAME
  --env_urls URL[,URL...]  servers that run elsewhere, AgentGym's for instance: none is started,
                           and the tasks are those of --data_dir (data/NAME)
  --env_spec MODULE:SPEC   what to serve for an environment from outside this project

Settings are those of configs/${ALGORITHM}_NAME.gin, or of configs/${ALGORITHM}_base.gin where there
is none. What follows -- goes to the trainer as it is and wins:
  scripts/train_$ALGORITHM.sh --env_name maze -- --gin_param='train.total_steps = 100'
BASE_MODEL=DIR in the environment stands for model.path, PYTHON for the interpreter.
EOF
}

die() {
  echo "train_$ALGORITHM.sh: $*" >&2
  exit 2
}

# A text that can stand between single quotes in a gin binding.
require_plain() {
  case $2 in
    *[\'\\]* | *$'\n'*) die "$1 must not hold quotes, backslashes or newlines: $2" ;;
  esac
}

require_number() {
  if ! [[ $2 =~ ^[1-9][0-9]{0,4}$ ]] || (($2 > $3)); then
    die "$1 must be a number from 1 to $3, not '$2'"
  fi
}

parse_arguments() {
  env_name=webshop num_servers=1 base_port='' data_dir='' exp_name_suffix='' env_urls='' env_spec=''
  trainer_options=()
  while (($#)); do
    case $1 in
      --env_name | --num_servers | --base_port | --data_dir | --exp_name_suffix | --env_urls | --env_spec)
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
      *) die "unknown argument '$1'; --help lists them, and what is for the trainer goes after --" ;;
    esac
  done
  [[ $env_name =~ ^[A-Za-z0-9_]+$ ]] || die "--env_name must be a name, not '$env_name'"
  require_number --num_servers "$num_servers" 1000
  [[ -z $base_port ]] || require_number --base_port "$base_port" 65535
  [[ -z $env_urls || -z $env_spec ]] || die "--env_urls starts no server, so --env_spec serves nothing"
}

# The first of the names, with any of the endings that tasks come in, that is a file in data_dir.
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
  die "--data_dir $data_dir holds no $1.parquet (nor .json, nor .jsonl)"
}

# Where the environment is served, and its tasks: sets urls, train_file, val_file.
find_servers() {
  if [[ -n $env_urls ]]; then
    IFS=, read -ra urls <<<"$env_urls"
    data_dir=${data_dir:-data/$env_name}
    [[ -d $data_dir ]] || die "no directory $data_dir with the tasks to play on --env_urls: --data_dir DIR"
  else
    local served
    served=$("$PYTHON" - "$env_name" "${env_spec:-$env_name}" 2>&1 <<'EOF'
import sys
from envs.registry import UnknownEnvironment, load
from manus_jax.agentgym.table import ENVIRONMENTS
name, spec = sys.argv[1:]
row = ENVIRONMENTS.get(name)
try:
    load(spec)
except UnknownEnvironment as error:
    port = row.port if row else "PORT"
    sys.exit(f"{error}. For AgentGym servers that run already: --env_urls http://HOST:{port}")
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

# Servers on base_port.., each with its log; sets urls when all of them serve.
start_servers() {
  local i port log pid
  urls=()
  for ((i = 0; i < num_servers; i++)); do
    port=$((base_port + i))
    log=$logs/server_$port.log
    "$PYTHON" -m envs.serve "${env_spec:-$env_name}" --port "$port" --parent_pid $$ \
      >"$log" 2>&1 </dev/null &
    servers+=($!)
    urls+=("http://127.0.0.1:$port")
  done
  for ((i = 0; i < num_servers; i++)); do
    port=$((base_port + i)) log=$logs/server_$((base_port + i)).log pid=${servers[i]}
    local deadline=$((SECONDS + 120))
    # The line that it prints is of this very server; whoever answers on the port may be another.
    until grep -q '^serving ' "$log"; do
      kill -0 "$pid" 2>/dev/null || die "the server on port $port ended: $(tail -n 1 "$log")"
      ((SECONDS < deadline)) || die "the server on port $port does not serve after 120 s: see $log"
      sleep 0.1
    done
  done
  "$PYTHON" - "${urls[@]}" <<'EOF' || die "a server that has started does not answer: see $logs"
import sys, urllib.request
for url in sys.argv[1:]:
    assert urllib.request.urlopen(url + "/", timeout=10).status == 200
EOF
}

stop_servers() {
  local pid
  for pid in "${servers[@]}"; do kill -TERM -- "-$pid" 2>/dev/null; done
  for pid in "${servers[@]}"; do wait "$pid" 2>/dev/null; done
}

# Starts the trainer, passes signals on to it, and waits for its end; sets code.
train() {
  "$PYTHON" -m manus_jax.train "$@" </dev/null &
  trainer=$!
  trap 'kill -INT "$trainer" 2>/dev/null' INT
  trap 'kill -TERM "$trainer" 2>/dev/null' TERM HUP
  code=0
  while wait "$trainer" || code=$?; do
    kill -0 "$trainer" 2>/dev/null || break # else it was a signal that ended the wait
    code=0
  done
}

main() {
  PYTHON=${PYTHON:-python} servers=() trainer='' logs=''
  local root config urls=() train_file='' val_file='' run params=() code
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  parse_arguments "$@"
  command -v "$PYTHON" >/dev/null || die "no interpreter '$PYTHON'; activate the environment, or set PYTHON"
  config=$root/configs/${ALGORITHM}_$env_name.gin
  [[ -f $config ]] || config=$root/configs/${ALGORITHM}_base.gin
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
  train "--gin_file=$config" "${params[@]}" "${trainer_options[@]}"
  exit "$code"
}
