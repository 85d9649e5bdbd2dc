"""Prove on source alone that Feather fits SGLang's releases. Called by scripts/compat.sh.

For each release: the patch fits, goes in, goes in again without a change, compiles and comes out with every file of
the tree as it was; every hook's target exists with the parameters that Feather relies on, and so does what it reads.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from sglang_sources import unpack

from feather_sglang import patching
from feather_sglang.engines.sglang import source
from feather_sglang.engines.sglang.hooks import hooks_of
from feather_sglang.engines.sglang.releases import RELEASES


def prove(release: str) -> tuple[str, list[str]]:
    """A row of the table, and what does not hold."""
    with tempfile.TemporaryDirectory(prefix="feather-compat-") as folder:
        package = unpack(release, Path(folder))
        wrong = [f"hooks: {problem}" for problem in source.problems(package, release)]
        patch = patching.status(package).patch
        try:
            wrong += [f"patch: {problem}" for problem in _prove_patch(package)]
        except (patching.PatchError, SyntaxError, OSError) as error:
            wrong.append(f"patch: {error}")
    verdict = "ok" if not wrong else "NOT OK"
    return f"{release:14}{patch.name:36}{len(patch.files):5}{len(hooks_of(release)):7}  {verdict}", wrong


def _prove_patch(package: Path) -> list[str]:
    before = _tree(package)
    wrong = []

    def step(name: str, action: Callable[[Path], patching.Status], state: str) -> dict[str, str]:
        found = action(package)
        if found.state != state:
            wrong.append(f"after {name} the tree is {found.state} instead of {state}")
        return _tree(package)

    if step("check", patching.check, "clean") != before:
        wrong.append("check changed the tree")
    applied = step("apply", patching.apply, "applied")
    changed = {path for path in applied if applied[path] != before.get(path)} - {patching.RECORD}
    if changed != set(patching.status(package).patch.files):
        wrong.append(f"apply changed {', '.join(sorted(changed)) or 'nothing'}")
    for path in changed:
        compile((package / path).read_bytes(), path, "exec")
    if step("a second apply", patching.apply, "applied") != applied:
        wrong.append("a second apply changed the tree")
    if step("revert", patching.revert, "clean") != before:
        wrong.append("revert left the tree changed")
    return wrong


def _tree(package: Path) -> dict[str, str]:
    files = [path for path in sorted(package.rglob("*")) if path.is_file()]
    return {str(path.relative_to(package)): sha256(path.read_bytes()).hexdigest() for path in files}


def main() -> int:
    """All releases, or those named; exit code 1 if anything does not hold."""
    releases = sys.argv[1:] or list(RELEASES)
    unknown = [release for release in releases if release not in RELEASES]
    if unknown:
        print(f"error: unknown release '{unknown[0]}'; valid: {', '.join(RELEASES)}", file=sys.stderr)
        return 2
    print(f"{'release':14}{'patch':36}files  hooks")
    failures = []
    for release in releases:
        row, wrong = prove(release)
        print(row, flush=True)
        failures += [f"error: SGLang {release}: {each}" for each in wrong]
    print("\n".join(failures), file=sys.stderr, end="\n" if failures else "")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
