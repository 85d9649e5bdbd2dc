#!/usr/bin/env bash
# Sets everything up and runs the main job: a tiny model served on the CPU with fcfs, lpm, dfs-weight and feather in
# turn, the same shared-prefix workload for each, and one table. Arguments go to "feather-sglang demo".
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up
exec "$venv/bin/feather-sglang" demo --folder "$root/.demo" "$@"
