"""The operator's page and that of the settings, run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from conftest import BASE

from feather_sglang.bench.server import Server

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def test_the_operators_page_runs_as_it_stands(model, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MODEL": str(model)}
    server = None
    page = blocks("docs/operator.md")
    assert len(page) >= 5
    page += blocks("docs/settings.md")  # on the file that the operator's page has written
    try:
        for block in page:
            if "launch_server" in block:
                command = os.path.expandvars(block.replace("$MODEL", str(model)))
                command = command.replace("feather.yaml", str(tmp_path / "feather.yaml"))
                small = (*BASE, "--max-total-tokens=20000", "--max-running-requests=8")
                server = Server(small, tmp_path / "server.log", {"PATH": path}, shlex.split(command))
                server.start()
                continue
            if "localhost:30000" in block:
                assert server is not None, "the page asks a server before it starts one"
                block = block.replace("localhost:30000", server.url.removeprefix("http://"))
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0 and done.stdout, f"{block}\n{done.stdout}\n{done.stderr}"
    finally:
        if server is not None:
            server.stop()
