#!/usr/bin/env bash
# Sets everything up, and starts two Feather servers of a tiny model on the CPU behind SGLang's router. The same
# shared-prefix workload goes through it with both kinds of routing; then it serves until Ctrl-C. About 3 minutes on two
# cores, once set up. Arguments go to scripts/router.py.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up
exec "$venv/bin/python" "$root/scripts/router.py" --folder "$root/.demo" "$@"
