from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "unit"))

from feather_sglang import compiling


def pytest_configure(config):
    if compiling.stale():
        raise SystemExit("compiled modules are older than their source; run: feather-sglang compile --remove")


def pytest_report_header(config):
    return f"feather-sglang: {'compiled' if compiling.is_compiled() else 'plain Python'}"
