#!/usr/bin/env bash
# Sets everything up and runs the checks: ruff, mypy, and pytest with real servers. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up
cd "$root"
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
"$venv/bin/mypy"
exec "$venv/bin/python" -m pytest "$@"
