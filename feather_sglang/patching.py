"""Put Feather's patch into an SGLang source tree, and take it out again: whole or not at all, nothing but the patch.

``patches/index.json`` knows each release's patch, and what the files it touches contain before and after it. A file of
any other content is somebody else's work and is left alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import feather_sglang

PATCHES = Path(__file__).parent / "patches"
INDEX = "index.json"
#: Written into the patched package before anything else, and the last thing to go.
RECORD = ".feather-patch.json"
#: Patches name files as an SGLang checkout does.
_PREFIX = "python/sglang/"
_NEW = ".feather-new"


class PatchError(Exception):
    """One line on what is wrong; ``code`` is the exit code: 1 failed, 2 bad use, 3 unsupported release."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Patch:
    """One release's patch.

    Args:
        release: of SGLang.
        name: of the patch file.
        text: the unified diff.
        files: path in the package -> SHA-256 of the file (without the patch, with it).
    """

    release: str
    name: str
    text: str
    files: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Status:
    """A tree, and how the patch stands in it.

    Args:
        package: the folder ``sglang``.
        patch: the release's, or the one that was applied.
        state: ``clean``, ``applied``, ``half-applied`` or ``dirty``.
        files: those that make it half-applied (patched already) or dirty.
    """

    package: Path
    patch: Patch
    state: str
    files: tuple[str, ...] = ()

    def describe(self) -> str:
        """In one line."""
        where = f"SGLang {self.patch.release} in {self.package}"
        names = ", ".join(self.files)
        return {
            "clean": f"{where}: not patched; {self.patch.name} fits",
            "applied": f"{where}: patched with {self.patch.name}",
            "half-applied": f"{where}: half-applied, only {names} has the patch; "
            "'feather-sglang patch revert' takes it out",
            "dirty": f"{where}: {names} differs from the release's, by local edits or as a commit that is no "
            "release; restore it first (in a git checkout: git checkout, or git stash)",
        }[self.state]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "package": str(self.package),
            "release": self.patch.release,
            "patch": self.patch.name,
            "state": self.state,
            "files": list(self.files),
            "touches": sorted(self.patch.files),
        }


def status(directory: Path) -> Status:
    """How the patch stands in a git checkout, an unpacked source tree or an installed package's folder.

    Raises:
        PatchError: no SGLang there, or a release without a patch.
    """
    package = _find_package(directory)
    recorded = package / RECORD
    if recorded.is_file():
        stands = _compare(package, _from_json(json.loads(recorded.read_text())))
        if stands.state != "dirty":  # otherwise the record may be left from a release that was here before
            return stands
    return _compare(package, _patch_for(package))


def _compare(package: Path, patch: Patch) -> Status:
    found = {path: _digest(package / path) for path in patch.files}
    strange = tuple(path for path, digest in found.items() if digest not in patch.files[path])
    patched = tuple(path for path, digest in found.items() if digest == patch.files[path][1])
    if strange:
        return Status(package, patch, "dirty", strange)
    if len(patched) == len(found):
        return Status(package, patch, "applied")
    return Status(package, patch, "half-applied" if patched else "clean", patched)


def check(directory: Path) -> Status:
    """Whether the patch is in, or could be put in.

    Raises:
        PatchError: it could not.
    """
    found = status(directory)
    if found.state not in ("clean", "applied"):
        raise PatchError(found.describe())
    return found


def apply(directory: Path) -> Status:
    """Put the patch in; nothing to do if it is in.

    Raises:
        PatchError: it does not fit, and nothing was changed.
    """
    found = check(directory)
    if found.state == "clean":
        _replace(found, reverse=False)
    return Status(found.package, found.patch, "applied")


def revert(directory: Path) -> Status:
    """Take the patch out, also the half of it that a crash left, byte for byte; nothing to do if it is not in.

    Raises:
        PatchError: a file was edited since.
    """
    found = status(directory)
    if found.state == "dirty":
        raise PatchError(found.describe())
    _replace(found, reverse=True)
    return Status(found.package, found.patch, "clean")


def _replace(found: Status, reverse: bool) -> None:
    """Make all new texts before the first is written. The record tells a crash in between."""
    package, patch = found.package, found.patch
    hunks = parse(patch.text)
    texts: dict[Path, tuple[bytes, bytes]] = {}
    for path, hashes in patch.files.items():
        old = (package / path).read_bytes()
        if sha256(old).hexdigest() != hashes[reverse]:
            continue
        new = apply_hunks(old.decode(), hunks[path], reverse).encode()
        if sha256(new).hexdigest() != hashes[not reverse]:
            raise PatchError(f"{patch.name} does not give the {path} that it should; nothing was changed")
        texts[package / path] = (old, new)
    if not reverse:
        _write(package / RECORD, (json.dumps(as_json(patch), indent=1) + "\n").encode())
    written: list[Path] = []
    try:
        for target, (_, new) in texts.items():
            _write(target, new)
            written.append(target)
    except OSError:
        for target in written:
            _write(target, texts[target][0])
        if not reverse:
            (package / RECORD).unlink()
        raise
    if reverse:
        (package / RECORD).unlink(missing_ok=True)


def _write(target: Path, content: bytes) -> None:
    """The old content or the new one, whenever the machine stops."""
    beside = target.with_name(target.name + _NEW)
    try:
        beside.write_bytes(content)
        if target.exists():
            beside.chmod(target.stat().st_mode & 0o7777)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


# ------------------------------------------------------------- unified diffs

#: The lines that a hunk takes away and those that it puts there, context in both.
Hunk = tuple[str, str]


def parse(diff: str) -> dict[str, list[Hunk]]:
    """Hunks by path in the package. Line numbers are not used: a hunk belongs where its lines are."""
    hunks: dict[str, list[Hunk]] = {}
    path = ""
    for line in diff.splitlines(keepends=True):
        if line.startswith("+++ "):
            path = line[4:].strip().removeprefix("b/").removeprefix(_PREFIX)
        elif line.startswith("@@"):
            hunks.setdefault(path, []).append(("", ""))
        elif path in hunks and line[0] in " +-" and not line.startswith("--- "):
            old, new = hunks[path][-1]
            hunks[path][-1] = (old + line[1:] * (line[0] != "+"), new + line[1:] * (line[0] != "-"))
    return hunks


def apply_hunks(text: str, hunks: list[Hunk], reverse: bool = False) -> str:
    """A file's new text.

    Raises:
        PatchError: a hunk's lines are not in the file exactly once.
    """
    places = []
    for before, after in hunks:
        old, new = (after, before) if reverse else (before, after)
        # Looking ahead finds places that overlap too.
        starts = [match.start() for match in re.finditer(f"^(?={re.escape(old)})", text, re.M)]
        if len(starts) != 1:
            raise PatchError(f"the patch's lines are there {len(starts)} times instead of once: {old.splitlines()[:1]}")
        places.append((starts[0], starts[0] + len(old), new))
    for start, end, new in reversed(places):
        text = text[:start] + new + text[end:]
    return text


# ----------------------------------------------------------- which tree it is


def _find_package(directory: Path) -> Path:
    for package in (directory, directory / "sglang", directory / "python" / "sglang"):
        if (package / "srt" / "managers").is_dir():
            return package.resolve()
    raise PatchError(
        f"no SGLang in '{directory}'; name a checkout, an unpacked source tree, or the folder of an installed sglang", 2
    )


def _patch_for(package: Path) -> Patch:
    index = json.loads((PATCHES / INDEX).read_text())
    release = next(_releases(package), None)
    if release is None:
        raise PatchError(
            f"cannot tell the release of the SGLang in {package}: no _version.py, package metadata or git tag", 3
        )
    if release not in index:
        raise PatchError(
            f"there is no patch for SGLang {release} in {package}; there is one for: {', '.join(index)}", 3
        )
    name = index[release]["patch"]
    return _from_json({"release": release, "name": name, "text": (PATCHES / name).read_text(), **index[release]})


def _releases(package: Path) -> Iterator[str]:
    """The release, from the best source there is. In a checkout that is git: its ``_version.py`` is from some build."""
    if package.parts[-2:] == ("python", "sglang") and (package.parents[1] / ".git").exists():
        command = ["git", "-C", str(package), "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*"]
        try:
            tag = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except FileNotFoundError:
            tag = ""
        if tag:
            yield tag.removeprefix("v")
    version = package / "_version.py"
    if version.is_file():
        yield from re.findall(r"^__version__\b.*= ['\"]([^'\"]+)['\"]", version.read_text(), re.M)
    for metadata in sorted(package.parent.glob("sglang-*.dist-info/METADATA")):
        yield from re.findall(r"^Version: (\S+)", metadata.read_text(), re.M)


def as_json(patch: Patch) -> dict[str, Any]:
    """What the record in a patched tree holds."""
    return {"feather_sglang": feather_sglang.__version__, **asdict(patch)}


def _from_json(record: dict[str, Any]) -> Patch:
    files = {path: (before, after) for path, (before, after) in record["files"].items()}
    return Patch(record["release"], record["name"], record["text"], files)


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
