"""Compiled modules that do not belong to the source beside them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import feather_sglang
from feather_sglang import compiling


def test_modules_that_cannot_be_imported_any_more_are_named_with_the_way_out(tmp_path):
    package = Path(feather_sglang.__file__).parent
    copy = tmp_path / "feather_sglang"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (copy / "cht" / f"tree{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"of another version")
    command = [sys.executable, "-c", "import feather_sglang"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: feather_sglang: the compiled modules are of another")
    assert f"find '{copy}' -name '*.so' -delete" in last


def test_they_are_stale_where_the_source_has_changed(monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "_STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(compiling, "_binaries", lambda: [tmp_path / "tree.so"])
    assert compiling.stale(), "nobody knows what they were made of"
    compiling._STAMP.write_text(compiling.json.dumps(compiling._state()))
    assert not compiling.stale()
    monkeypatch.setattr(compiling, "MODULES", compiling.MODULES[1:])
    assert compiling.stale()
    monkeypatch.setattr(compiling, "_binaries", list)
    assert not compiling.stale(), "none are there"
