#!/usr/bin/env bash
# Does a table of training runs and writes a page with their results and learning curves. See --help.
set -uo pipefail

usage() {
  cat <<'EOF2'
usage: scripts/learn.sh [options]

  --runs FILE     the table of runs (configs/learn_runs.tsv)
  --page FILE     the Markdown page to write, with pictures in images/ next to it (docs/learning.md)
  --title TEXT    the title of the page (Learning curves)
  --dir DIR       where the runs are (runs/learn)
  --cores LIST    processor cores; each does one run at a time (0,1)
  --only PATTERN  do only the runs whose names match the glob pattern, such as 'maze_*'
  --report_only   do no runs; write the page from those that are finished
  --dry_run       print the commands of the runs and do nothing else

Each line of the table is a run of configs/learn_NAME.gin: name, recipe, seed, label and bindings, separated
by tabs; lines that start with # are comments. The run is in DIR/NAME_RECIPE_seedSEED, or with a label
other than "-" in DIR/NAME_RECIPE_seedSEED_LABEL, and its output in a file .log next to it. Finished runs are
not repeated, and interrupted ones are resumed; after a change of the config, delete the run's directory.

The page has all finished runs of the table. The exit code is 1 if a run that was to be done is not finished.
EOF2
}

die() {
  echo "learn.sh: $*" >&2
  exit 2
}

# Reads the table into `names` and, by name, the quoted commands into `commands`.
read_table() {
  local line fields name config binding arguments
  while IFS= read -r line || [[ -n $line ]]; do
    [[ -n $line && $line != \#* ]] || continue
    IFS=$'\t' read -ra fields <<<"$line"
    ((${#fields[@]} >= 4)) || die "$table: needs name, recipe, seed and label, separated by tabs: $line"
    config=configs/learn_${fields[0]}.gin
    [[ -f $config ]] || die "$table: there is no $config: $line"
    name=${fields[0]}_${fields[1]}_seed${fields[2]}
    [[ ${fields[3]} == - ]] || name+=_${fields[3]}
    [[ $name =~ ^[A-Za-z0-9_]+$ ]] || die "$table: '$name' is not a name of letters, digits and _: $line"
    [[ -z ${commands[$name]:-} ]] || die "$table: two lines are the run $name; give one a label"
    arguments=("--gin_file=$config" "--gin_param=algorithm.recipe = '${fields[1]}'"
      "--gin_param=train.seed = ${fields[2]}" "--gin_param=train.run_dir = '$directory/$name'")
    for binding in "${fields[@]:4}"; do arguments+=("--gin_param=$binding"); done
    names+=("$name")
    printf -v "commands[$name]" '%q ' "${arguments[@]}"
  done <"$table"
}

is_finished() { grep -q '"state": "finished"' "$directory/$1/status.json" 2>/dev/null; }

# Sets `core` to one on which no run is active; waits until there is one.
take_core() {
  while true; do
    for core in "${cores[@]}"; do
      kill -0 "${active[$core]:-}" 2>/dev/null || return
    done
    wait -n
  done
}

# Does one run and says how it ended.
do_run() {
  local name=$1 log=$directory/$1.log arguments
  eval "arguments=(${commands[$name]})" # quoted by read_table
  trap 'kill -TERM "$trainer" 2>/dev/null' TERM
  taskset -c "$core" "$PYTHON" -m manus_jax.train "${arguments[@]}" >>"$log" 2>&1 </dev/null &
  trainer=$!
  wait "$trainer" || wait "$trainer" # the first may be interrupted by a signal
  if is_finished "$name"; then
    echo "[$SECONDS s] $name: finished"
  else
    echo "[$SECONDS s] $name: not finished; see $log: $(tail -n 1 "$log")" >&2
  fi
}

# The trainers save their steps and end.
interrupt() {
  trap '' INT TERM
  kill -TERM "${active[@]}" 2>/dev/null
  wait
  echo "learn.sh: interrupted; the same command continues" >&2
  exit 143
}

do_runs() {
  local name core
  mkdir -p "$directory" || exit
  trap interrupt INT TERM
  for name in "${names[@]}"; do
    # shellcheck disable=SC2053 # a pattern
    [[ $name == $only ]] || continue
    is_finished "$name" && continue
    take_core
    echo "[$SECONDS s] $name: started on core $core"
    do_run "$name" &
    active[core]=$!
  done
  wait
}

write_page() {
  local name finished=()
  for name in "${names[@]}"; do is_finished "$name" && finished+=("$directory/$name"); done
  ((${#finished[@]})) || return
  "$PYTHON" -m manus_jax.report --compare "${finished[@]}" --out "$directory/comparison.html" \
    --markdown "$page.part" --images "$(dirname "$page")/images/$(basename "$page" .md)" || exit
  {
    cat <<EOF2
# $title

Written by \`scripts/learn.sh\` from the runs in \`$table\`; do not edit. Each run had one processor core. Results are those of
held-out tasks before the first and after the last update, as means over seeds with their range; the gain is also given as
a share of the gap between the start and the oracle. With shuffled rewards nothing can be learned. A row is reproduced by
\`python -m manus_jax.train --gin_file=CONFIG\` with the bindings that follow the file's name, its recipe and a seed. Bands
in the pictures are the range over seeds.

EOF2
    cat "$page.part"
  } >"$page" && rm "$page.part" || exit
  echo "wrote $page with ${#finished[@]} of ${#names[@]} runs"
}

main() {
  local PYTHON=${PYTHON:-python} table=configs/learn_runs.tsv page=docs/learning.md title='Learning curves'
  local directory=runs/learn cores only='*' runs=1 dry='' core_list=0,1 names=() missing=() name
  local -A commands=()
  local -a active=()
  while (($#)); do
    case $1 in
      --runs | --page | --title | --dir | --cores | --only)
        (($# > 1)) || die "$1 needs a value"
        case $1 in
          --runs) table=$2 ;;
          --page) page=$2 ;;
          --title) title=$2 ;;
          --dir) directory=$2 ;;
          --cores) core_list=$2 ;;
          --only) only=$2 ;;
        esac
        shift 2
        ;;
      --report_only) runs='' && shift ;;
      --dry_run) dry=1 && shift ;;
      -h | --help) usage && exit 0 ;;
      *) die "unknown argument '$1'; see --help" ;;
    esac
  done
  cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
  [[ $core_list =~ ^[0-9]{1,4}(,[0-9]{1,4})*$ ]] || die "--cores must be numbers separated by commas, not '$core_list'"
  IFS=, read -ra cores <<<"$core_list"
  [[ -f $table ]] || die "there is no table $table"
  [[ $page == *.md ]] || die "--page must be a file that ends in .md, not '$page'"
  [[ $directory != *[\'\\]* ]] || die "--dir must not contain quotes or backslashes"
  read_table
  if [[ -n $dry ]]; then
    for name in "${names[@]}"; do echo "python -m manus_jax.train ${commands[$name]}"; done
    exit 0
  fi
  ((${#names[@]})) || die "$table lists no runs"
  if [[ -n $runs ]]; then do_runs; fi
  write_page
  for name in "${names[@]}"; do
    # shellcheck disable=SC2053 # a pattern
    [[ $name != $only ]] || is_finished "$name" || missing+=("$name")
  done
  ((${#missing[@]} == 0)) || { echo "learn.sh: not finished: ${missing[*]}" >&2 && exit 1; }
}

main "$@"
