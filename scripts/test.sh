#!/usr/bin/env bash
# Sets everything up and runs the checks: ruff, mypy, the patches and hooks on the source of three releases, pytest with
# real servers, and the unit tests once more on the compiled modules. Arguments go to pytest; with any, that is the last
# thing that runs, after ruff and mypy.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up
cd "$root"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
# By hand: compiled modules of an older source may keep feather-sglang itself from starting.
find "$root/feather_sglang" -name '*.so' -delete
if [ $# -gt 0 ]; then
    exec "$venv/bin/python" -m pytest "$@"
fi
"$venv/bin/python" scripts/compat.py 0.5.11 0.5.16 0.5.23
if "$venv/bin/feather-sglang" compile; then
    trap '"$venv/bin/feather-sglang" compile --remove' EXIT
    "$venv/bin/python" -m pytest tests/unit
    "$venv/bin/feather-sglang" compile --remove
elif [ "${CI:-}" = true ]; then
    fail "CI needs a C compiler, for the unit tests on the compiled modules"
else
    echo "No compiled modules here, so the unit tests run on plain Python alone" >&2
fi
"$venv/bin/python" -m pytest
