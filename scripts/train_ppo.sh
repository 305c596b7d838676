#!/usr/bin/env bash
# Trains with PPO on an environment: starts its servers, trains, stops them. See --help.
#
#   scripts/train_ppo.sh --env_name textcraft --num_servers 4
set -uo pipefail
export ALGORITHM=ppo
# shellcheck source=scripts/train_common.sh
. "$(dirname "${BASH_SOURCE[0]}")/train_common.sh"
main "$@"
