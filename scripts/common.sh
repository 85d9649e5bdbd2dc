# Sourced by demo.sh and test.sh: one virtual environment with SGLang, Feather and the development tools.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${FEATHER_VENV:-$root/.venv}
export HF_HUB_OFFLINE=1

fail() { echo "$(basename "$0"): error: $*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or 3.12; install it, or name one with PYTHON=/path/to/python"
}

# Installs what pyproject.toml asks for, unless this very pyproject.toml was installed here before.
set_up() {
    local stamp=$venv/.feather-installed wanted free python
    wanted=$(cksum < "$root/pyproject.toml")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        echo "Reusing the environment in $venv" >&2
        return
    fi
    python=$(find_python)
    "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "needs Python's venv module; on Debian: apt install python3-venv"
    free=$(df -Pk "$root" | awk 'NR == 2 { print int($4 / 1048576) }')
    if [ ! -d "$venv" ] && [ "$free" -lt 14 ]; then
        fail "needs 14 GB of free disk for SGLang and torch, $free GB are free at $root"
    fi
    echo "Setting up $venv with $("$python" --version): about 11 GB, some minutes" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[sglang,dev,plots,router]" >&2 ||
        fail "the installation failed; pip's message is above"
    printf '%s\n' "$wanted" > "$stamp"
}
