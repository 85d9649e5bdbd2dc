"""``feather-sglang patch`` on small trees of a pretended release, and what it ships."""

from __future__ import annotations

import difflib
import json
import shutil
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feather_sglang import patching
from feather_sglang.cli import main
from feather_sglang.engines.sglang.releases import RELEASES
from feather_sglang.patching import PatchError

OLD = {
    "srt/server_args.py": "choices = [\n    'fcfs',\n    'lpm',\n]\n",
    "srt/managers/scheduler.py": "class Scheduler:\n    def init(self):\n        self.policy = 1\n",
}
NEW = {
    "srt/server_args.py": "choices = [\n    'fcfs',\n    'feather',\n    'lpm',\n]\n",
    "srt/managers/scheduler.py": "class Scheduler:\n    def init(self):\n        hook()\n        self.policy = 1\n",
}
FIRST, SECOND = OLD


def digest(text):
    return sha256(text.encode()).hexdigest()


def diff(old, new, path="f.py"):
    name = f"python/sglang/{path}"
    lines = (text.splitlines(keepends=True) for text in (old, new))
    return "".join(difflib.unified_diff(*lines, f"a/{name}", f"b/{name}"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A checkout of release 0.5.23 whose patch is the difference between OLD and NEW."""
    patches = tmp_path / "patches"
    patches.mkdir()
    (patches / "a.patch").write_text("".join(diff(OLD[path], NEW[path], path) for path in OLD))
    files = {path: [digest(OLD[path]), digest(NEW[path])] for path in OLD}
    (patches / "index.json").write_text(json.dumps({"0.5.23": {"patch": "a.patch", "files": files}}))
    monkeypatch.setattr(patching, "PATCHES", patches)
    return tree(tmp_path / "checkout" / "python" / "sglang")


def tree(package, version="0.5.23"):
    for path, text in {**OLD, "_version.py": f"__version__ = version = '{version}'\n", "other.py": "x = 1\n"}.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(text)
    return package


def content(package):
    return {str(path.relative_to(package)): path.read_bytes() for path in package.rglob("*") if path.is_file()}


def run(capsys, *arguments):
    code = main(["patch", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert err.count("\n") == (code != 0), "an error is one line"
    return code, out + err


def test_apply_is_idempotent_and_revert_restores_every_byte(package, capsys):
    (package / "other.py").write_text("x = 2  # a local edit elsewhere\n")
    before = content(package)
    assert run(capsys, "check", package) == (0, f"SGLang 0.5.23 in {package}: not patched; a.patch fits\n")
    assert content(package) == before
    for _ in range(2):
        assert run(capsys, "apply", package) == (0, f"SGLang 0.5.23 in {package}: patched with a.patch\n")
        patched = content(package)
        assert {path: patched[path].decode() for path in NEW} == NEW
        assert set(patched) - set(before) == {patching.RECORD} and patched["other.py"] == before["other.py"]
        assert run(capsys, "check", package)[0] == 0
    for _ in range(2):
        assert run(capsys, "revert", package)[0] == 0
        assert content(package) == before


def test_every_kind_of_directory_is_understood(package, capsys):
    root = package.parents[1]
    for directory in (root, root / "python", package):
        assert run(capsys, "status", directory)[0] == 0
    installed = root / "site-packages" / "sglang"
    shutil.copytree(package, installed)
    (installed / "_version.py").unlink()
    assert "cannot tell the release" in run(capsys, "status", installed)[1]
    (installed.parent / "sglang-0.5.23.dist-info").mkdir()
    (installed.parent / "sglang-0.5.23.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    assert run(capsys, "status", installed)[0] == 0
    code, message = run(capsys, "status", root / "docs")
    assert code == 2 and "no SGLang in" in message


def test_in_a_checkout_the_tag_counts_and_not_what_an_old_build_left(package, capsys):
    root = package.parents[1]

    def git(*arguments):
        command = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    (package / "_version.py").write_text("__version__ = version = '0.5.10'\n")
    git("init")
    git("add", ".")
    git("commit", "--message", "all")
    git("tag", "v0.5.23")
    assert run(capsys, "status", root)[0] == 0
    git("tag", "--delete", "v0.5.23")
    git("tag", "v0.5.24rc1")
    code, message = run(capsys, "status", root)
    assert code == 3 and "no patch for SGLang 0.5.24rc1" in message and "0.5.23" in message


@pytest.mark.parametrize("action", ["check", "apply", "revert", "status"])
def test_an_unknown_release_is_refused(package, action, capsys):
    tree(package, "0.5.10")
    before = content(package)
    code, message = run(capsys, action, package)
    assert code == 3 and "no patch for SGLang 0.5.10" in message and content(package) == before


@pytest.mark.parametrize("action", ["check", "apply", "revert"])
@pytest.mark.parametrize("patched", [False, True])
def test_an_edited_target_is_named_and_left_alone(package, action, patched, capsys):
    if patched:
        patching.apply(package)
    (package / SECOND).write_text((package / SECOND).read_text() + "# mine\n")
    before = content(package)
    code, message = run(capsys, action, package)
    assert code == 1 and SECOND in message and FIRST not in message and content(package) == before
    assert patching.status(package).state == "dirty"


def test_a_missing_target_is_named(package, capsys):
    (package / FIRST).unlink()
    code, message = run(capsys, "apply", package)
    assert code == 1 and FIRST in message


def test_a_crash_between_two_files_is_recognised_and_can_be_reverted(package, monkeypatch, capsys):
    before = content(package)
    write = patching._write

    def killed(target, new):
        if target.name == "scheduler.py":
            raise KeyboardInterrupt  # not an OSError: nothing tidies up, as when the process is killed
        write(target, new)

    monkeypatch.setattr(patching, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        patching.apply(package)
    monkeypatch.setattr(patching, "_write", write)
    half = content(package)
    for action in ("check", "apply"):
        code, message = run(capsys, action, package)
        assert code == 1 and "half-applied" in message and FIRST in message and content(package) == half
    assert patching.status(package).state == "half-applied"
    assert run(capsys, "revert", package)[0] == 0
    assert content(package) == before


def test_a_disk_error_leaves_nothing_changed(package, monkeypatch, capsys):
    before = content(package)
    replace = patching.os.replace

    def full(source, target):
        if Path(target).name == "scheduler.py":
            raise OSError("no space left")
        replace(source, target)

    monkeypatch.setattr(patching.os, "replace", full)
    assert main(["patch", "apply", str(package)]) == 1
    assert "no space left" in capsys.readouterr().err
    assert content(package) == before


def test_a_patch_that_gives_something_else_changes_nothing(package, monkeypatch, capsys):
    index = json.loads((patching.PATCHES / "index.json").read_text())
    index["0.5.23"]["files"][SECOND][1] = digest("something else")
    (patching.PATCHES / "index.json").write_text(json.dumps(index))
    before = content(package)
    code, message = run(capsys, "apply", package)
    assert code == 1 and "nothing was changed" in message and content(package) == before


def test_what_another_version_of_feather_put_in_comes_out(package):
    before = content(package)
    patching.apply(package)
    (patching.PATCHES / "index.json").write_text("{}")
    assert patching.status(package).state == "applied"
    patching.revert(package)
    assert content(package) == before


def test_the_record_of_a_release_that_was_here_before_does_not_count(package):
    patching.apply(package)
    index = json.loads((patching.PATCHES / "index.json").read_text())
    later = {path: text + "# of the next release\n" for path, text in OLD.items()}
    files = {path: [digest(later[path]), digest(NEW[path] + "# of the next release\n")] for path in OLD}
    (patching.PATCHES / "index.json").write_text(json.dumps({**index, "0.5.24": {"patch": "a.patch", "files": files}}))
    tree(package, "0.5.24")
    for path, text in later.items():
        (package / path).write_text(text)
    assert patching.status(package).state == "clean"
    patching.apply(package)
    assert patching.status(package).patch.release == "0.5.24"
    patching.revert(package)
    assert not (package / patching.RECORD).exists()


def test_a_patch_put_in_with_git_is_recognised_and_comes_out(package):
    before = content(package)
    command = ["git", "apply", str(patching.PATCHES / "a.patch")]
    subprocess.run(command, cwd=package.parents[1], check=True, capture_output=True)
    assert patching.status(package).state == "applied"
    patching.revert(package)
    assert content(package) == before


def test_json(package, capsys):
    assert main(["patch", "status", str(package), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["release"], report["state"], report["touches"]) == ("0.5.23", "clean", sorted(OLD))
    (package / FIRST).write_text("")
    assert main(["patch", "check", str(package), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == 1 and FIRST in report["error"]


lines = st.lists(st.sampled_from(["a\n", "b\n", "    c\n", "-x\n", "+y\n", "@@ z\n", "\n"]), max_size=25)


@given(lines, lines)
@settings(max_examples=1000)
def test_a_diff_applied_gives_the_new_text_or_says_why_not(old, new):
    old, new = "".join(old), "".join(new)
    hunks = patching.parse(diff(old, new)).get("f.py", [])
    for source, target, reverse in ((old, new, False), (new, old, True)):
        try:
            assert patching.apply_hunks(source, hunks, reverse) == target
        except PatchError as error:
            assert "instead of once" in str(error)


def test_context_must_match_exactly_and_once():
    hunks = patching.parse(diff("a\nb\n", "a\nx\nb\n"))["f.py"]
    assert patching.apply_hunks("0\na\nb\n", hunks) == "0\na\nx\nb\n"
    assert patching.apply_hunks("ba\na\nb\n", hunks) == "ba\na\nx\nb\n"
    for text in ("a \nb\n", "a\nb\na\nb\n", " a\nb\n", ""):
        with pytest.raises(PatchError):
            patching.apply_hunks(text, hunks)


def test_every_supported_release_has_a_patch_that_is_shipped():
    index = json.loads((patching.PATCHES / patching.INDEX).read_text())
    assert tuple(index) == RELEASES
    named = {entry["patch"] for entry in index.values()}
    assert named == {path.name for path in patching.PATCHES.glob("*.patch")}
    for entry in index.values():
        assert set(patching.parse((patching.PATCHES / entry["patch"]).read_text())) == set(entry["files"])


def test_a_wheel_carries_the_patches(tmp_path):
    root = Path(__file__).parents[2]
    for folder in ("feather_sglang", "patches"):
        shutil.copytree(
            root / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(root / name, tmp_path)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "out",
    ]
    subprocess.run([*command, "."], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    index = json.loads((patching.PATCHES / patching.INDEX).read_text())
    for name in {patching.INDEX, *(entry["patch"] for entry in index.values())}:
        assert f"feather_sglang/patches/{name}" in names
