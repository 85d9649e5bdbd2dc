"""How much of a running server's scheduler time is Feather's, with about a thousand requests waiting."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from feather_sglang.bench import serving


def measure(model: Path) -> dict[str, Any]:
    """Serve 1,200 requests on the CPU server and read Feather's trace while 800 and more wait.

    Returns the seconds in Feather's hooks, the seconds that passed, the passes, and the share. Raises ``RuntimeError``
    if the queue never got that long.
    """
    workload = serving.Workload(groups=24, per_group=50, prefix_tokens=512, output_tokens=16)
    with tempfile.TemporaryDirectory(prefix="feather-share-") as folder:
        trace = Path(folder) / "trace.jsonl"
        flags = (*serving.CPU_FLAGS, f"--feather-trace={trace}")
        serving.run_policy("feather", model, flags, workload, log=Path(folder) / "server.log")
        records = [json.loads(line) for line in trace.read_text().splitlines()]
    busy = [record for record in records if record["waiting"] >= 800]
    if len(busy) < 2:
        raise RuntimeError("the queue never held 800 requests for two admissions: the measurement is void")
    hook_s = busy[-1]["hook_s"] - busy[0]["hook_s"]
    time_s = busy[-1]["time_s"] - busy[0]["time_s"]
    return {
        "waiting": [min(record["waiting"] for record in busy), max(record["waiting"] for record in busy)],
        "passes": busy[-1]["pass"] - busy[0]["pass"],
        "hook_s": round(hook_s, 6),
        "time_s": round(time_s, 3),
        "share": round(hook_s / time_s, 6),
    }
