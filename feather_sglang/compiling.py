"""Compile the modules of the scheduling pass to machine code, in place, with mypyc; plain Python stays beside it.

The same source runs both ways and passes the same tests. docs/performance.md has both.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import feather_sglang

#: What runs in a scheduling pass, relative to the package.
MODULES = (
    "cht/tree.py",
    "scheduling/arrivals.py",
    "scheduling/warm.py",
    "scheduling/counters.py",
    "scheduling/policy.py",
    "scheduling/scheduler.py",
    "engines/sglang/controller.py",
    "engines/sglang/timed.py",
    "engines/sglang/admission.py",
)

_PACKAGE = Path(feather_sglang.__file__).parent
_STAMP = _PACKAGE / "_compiled.json"


def is_compiled() -> bool:
    """Whether this process runs the compiled modules."""
    module = importlib.import_module("feather_sglang.cht.tree")
    return not str(module.__file__).endswith(".py")


def stale() -> bool:
    """Whether compiled modules are there that do not belong to the present source."""
    present = bool(_binaries())
    stamped = json.loads(_STAMP.read_text()) if _STAMP.exists() else None
    return present and stamped != _state()


def remove() -> int:
    """Take the compiled modules out again; returns how many files that were."""
    files = _binaries()
    for path in files:
        path.unlink()
    _STAMP.unlink(missing_ok=True)
    return len(files)


def compile_modules() -> None:
    """Compile, or leave the package as it was.

    Raises:
        RuntimeError: mypyc or a C compiler is missing, or the build failed; with the last lines of its output.
    """
    if not stale() and _binaries():
        return
    remove()
    with tempfile.TemporaryDirectory(prefix="feather-compile-") as folder:
        build = Path(folder)
        shutil.copytree(_PACKAGE, build / "feather_sglang", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        paths = [f"feather_sglang/{module}" for module in MODULES]
        (build / "setup.py").write_text(
            "from mypyc.build import mypycify\n"
            "from setuptools import setup\n"
            f"setup(name='feather-compiled', packages=[], ext_modules=mypycify({paths!r}, opt_level='3',"
            " group_name='feather_sglang.compiled'))\n"
        )
        (build / "mypy.ini").write_text("[mypy]\nfollow_imports = silent\nignore_missing_imports = True\n")
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            cwd=build,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "MYPYPATH": ""},
        )
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
            raise RuntimeError(
                "compiling failed; it needs a C compiler, Python's headers and: pip install 'feather-sglang[compile]'. "
                f"Feather runs as plain Python without it.\n{said}"
            )
        built = build / "feather_sglang"
        for path in built.rglob("*.so"):
            shutil.copy2(path, _PACKAGE / path.relative_to(built))
    _STAMP.write_text(json.dumps(_state()))


def _state() -> dict[str, str]:
    files = [*(_PACKAGE / module for module in MODULES)]
    return {str(path.relative_to(_PACKAGE)): sha256(path.read_bytes()).hexdigest() for path in files}


def _binaries() -> list[Path]:
    return sorted(_PACKAGE.rglob("*.so"))
