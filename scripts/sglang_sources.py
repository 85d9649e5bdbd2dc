"""SGLang's releases as source trees, from the wheels that pip downloads into .compat/ once."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

WHEELS = Path(__file__).resolve().parent.parent / ".compat"


def unpack(release: str, folder: Path) -> Path:
    """A release's Python files and metadata in a folder; returns its folder ``sglang``.

    Raises:
        RuntimeError: pip cannot download it; with pip's last words.
    """
    with zipfile.ZipFile(_wheel(release)) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith((".py", "/METADATA"))])
    return folder / "sglang"


def _wheel(release: str) -> Path:
    found = sorted(WHEELS.glob(f"sglang-{release}-*.whl"))
    if found:
        return found[0]
    print(f"downloading sglang {release}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(WHEELS), f"sglang=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"cannot download sglang {release}\n{done.stderr.strip()[-2000:]}")
    return next(WHEELS.glob(f"sglang-{release}-*.whl"))
