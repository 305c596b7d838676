#!/usr/bin/env bash
# Creates an interpreter for the servers of one environment, in venvs/NAME.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: scripts/setup_env.sh NAME [--install REQUIREMENT ...]

Creates venvs/NAME with what an environment server needs: a web server, the packages of the
environment's extra in pyproject.toml, if it has one, and the given requirements. Then
  env.python = {"NAME": "venvs/NAME/bin/python"}
runs the environment's servers with it, and scripts/train_*.sh --env_name NAME uses it by itself.
Environment variables: PYTHON is the interpreter to copy (python3).
EOF
}

die() {
  echo "setup_env.sh: $*" >&2
  exit 2
}

(($#)) || { usage >&2; exit 2; }
case $1 in -h | --help) usage; exit 0 ;; esac
name=$1
shift
[[ $name =~ ^[A-Za-z0-9_]+$ ]] || die "NAME must be the name of an environment, not '$name'"
requirements=()
if (($#)); then
  [[ $1 == --install ]] || die "unknown argument '$1'; see --help"
  shift
  (($#)) || die "--install needs at least one requirement"
  requirements=("$@")
fi
python=${PYTHON:-python3}
command -v "$python" >/dev/null || die "no interpreter '$python'; set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is older than Python 3.11"
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mapfile -t base < <(
  "$python" - "$root/pyproject.toml" "$name" <<'EOF'
import re, sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
serving = {"fastapi", "uvicorn", "httptools", "uvloop"} | ({"minigrid"} if sys.argv[2] == "babyai" else set())
named = [r for r in project["dependencies"] if re.match(r"[\w-]+", r)[0] in serving]
print(*named, *project["optional-dependencies"].get(sys.argv[2], []), sep="\n")
EOF
)
((${#base[@]})) || die "cannot read $root/pyproject.toml"
[[ -x venvs/$name/bin/python ]] || "$python" -m venv "venvs/$name" || die "cannot create venvs/$name"
"venvs/$name/bin/python" -m pip install -q "${base[@]}" "${requirements[@]}" || die "pip could not install: ${base[*]} ${requirements[*]}"
echo "env.python = {\"$name\": \"venvs/$name/bin/python\"}"
