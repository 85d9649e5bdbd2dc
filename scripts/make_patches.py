"""Make patches/ anew for every release in feather_sglang/engines/sglang/releases.py: python scripts/make_patches.py

What the patch does is described once, below. Neighbouring releases in which it reads the same share a patch file.
"""

from __future__ import annotations

import difflib
import json
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from sglang_sources import unpack

from feather_sglang.engines.sglang.releases import RELEASES
from feather_sglang.patching import INDEX, PATCHES, Hunk, parse


class Edit(NamedTuple):
    """Put lines behind a line that is there exactly once, in the first of the files that has it."""

    files: tuple[str, ...]
    behind: str
    lines: str


EDITS = (
    Edit(
        ("srt/arg_groups/fields/schedule.py", "srt/server_args.py"),
        '                "dfs-weight",\n',
        '                "feather",\n',
    ),
    Edit(
        ("srt/managers/scheduler.py",),
        "    def init_schedule_policy(self):\n",
        """        if self.schedule_policy == "feather":
            try:
                from feather_sglang.engines.sglang import patched
            except ImportError as error:
                raise RuntimeError(
                    "--schedule-policy feather needs the package feather-sglang; "
                    "install it into this environment (in its clone: pip install .)"
                ) from error
            return patched.init_schedule_policy(self)
""",
    ),
    Edit(
        ("srt/entrypoints/http_server.py",),
        '    Called by launch_server after subprocesses have been launched.\n    """\n',
        """    if server_args.schedule_policy == "feather":
        from feather_sglang.engines.sglang import patched

        patched.add_endpoints(app)
""",
    ),
)


class Made(NamedTuple):
    """A release's patch, and its files' hashes without it and with it."""

    release: str
    text: str
    files: dict[str, tuple[str, str]]

    def hunks(self) -> dict[str, list[Hunk]]:
        """What makes two releases' patches the same; line numbers don't."""
        return parse(self.text)


def make(release: str) -> Made:
    """Raises ``RuntimeError`` if a line that the description names is not there exactly once."""
    texts, files = [], {}
    with tempfile.TemporaryDirectory(prefix="feather-patches-") as folder:
        package = unpack(release, Path(folder))
        for edit in EDITS:
            path, old = _find(package, edit, release)
            new = old.replace(edit.behind, edit.behind + edit.lines)
            name = f"python/sglang/{path}"
            texts += difflib.unified_diff(
                old.splitlines(keepends=True), new.splitlines(keepends=True), f"a/{name}", f"b/{name}"
            )
            files[path] = (_digest(old), _digest(new))
    return Made(release, "".join(texts), files)


def _find(package: Path, edit: Edit, release: str) -> tuple[str, str]:
    for path in edit.files:
        text = (package / path).read_bytes().decode() if (package / path).is_file() else ""
        if text.count(edit.behind) == 1:
            return path, text
    raise RuntimeError(f"SGLang {release}: not exactly one line {edit.behind.strip()!r} in {' or '.join(edit.files)}")


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _ranges() -> Iterator[list[Made]]:
    for _, same in groupby((make(release) for release in RELEASES), Made.hunks):
        yield list(same)


def main() -> int:
    """Write every patch and the index, and remove patches that nobody needs any more."""
    index = {}
    texts = {}
    try:
        for made in _ranges():
            name = f"sglang-{made[0].release}-to-{made[-1].release}.patch"
            texts[name] = made[0].text
            index.update({each.release: {"patch": name, "files": each.files} for each in made})
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for old in PATCHES.glob("*.patch"):
        old.unlink()
    for name, text in texts.items():
        (PATCHES / name).write_text(text)
    (PATCHES / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    print(f"{len(texts)} patches for {len(index)} releases in {PATCHES.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
