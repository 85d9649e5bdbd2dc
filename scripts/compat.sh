#!/usr/bin/env bash
# Proves on source alone that the patches and the hooks fit SGLang's releases: those named, or all that are supported.
# Downloads each release's wheel once, 8 to 40 MB, into .compat/.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
set_up
exec "$venv/bin/python" "$root/scripts/compat.py" "$@"
