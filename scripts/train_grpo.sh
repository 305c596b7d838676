#!/usr/bin/env bash
# Trains with GRPO on an environment: starts its servers, trains, stops them. See --help.
#
#   scripts/train_grpo.sh --env_name textcraft --num_servers 4
set -uo pipefail
export ALGORITHM=grpo
# shellcheck source=scripts/train_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"
main "$@"
