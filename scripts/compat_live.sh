#!/usr/bin/env bash
# Serves with one SGLang release in a clean environment, both ways: through the plugin loader, then with the installed
# package patched and the plugin loader told to leave Feather out. Needs 14 GB of disk until it ends, and about 20
# minutes on two cores. Further arguments go to pytest instead of the tests named below.
#   bash scripts/compat_live.sh VERSION
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
release=${1:-}
[ -n "$release" ] || { echo "usage: compat_live.sh VERSION [pytest arguments]" >&2; exit 2; }
shift
mkdir -p "$root/.compat"
folder=$(mktemp -d "$root/.compat/live-XXXXXX")
trap 'rm -rf "$folder"' EXIT

echo "installing sglang $release in $folder: about 11 GB, some minutes" >&2
"$(find_python)" -m venv "$folder"
# SGLang up to 0.5.12.post1 asks for any "kernels", and its transformers cannot be imported with those of today.
"$folder/bin/pip" install --quiet --disable-pip-version-check "sglang==$release" "kernels<0.15" ||
    fail "pip cannot install sglang $release; its message is above"
"$folder/bin/pip" install --quiet --disable-pip-version-check "$root" pytest pytest-timeout hypothesis
package=$(cd "$folder" && ls -d lib/python*/site-packages/sglang)
package=$folder/$package

tests=("$@")
[ ${#tests[@]} -gt 0 ] || tests=(tests/server/test_serving.py -k "greedy or homogeneous or everybody")
cd "$root"
status=0
serve() {
    echo "== sglang $release, $1" >&2
    shift
    env "$@" "$folder/bin/pytest" -q -p no:cacheprovider --timeout 1800 "${tests[@]}" || status=1
}
"$folder/bin/feather-sglang" doctor || status=1
serve "plugin loader" FEATHER_TEST_PATCHED=0
"$folder/bin/feather-sglang" patch apply "$package"
serve "patched" FEATHER_TEST_PATCHED=1
"$folder/bin/feather-sglang" patch revert "$package"
exit $status
