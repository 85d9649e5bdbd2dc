"""The paper's batch-size result end to end: decode batches, and whole workloads under each policy, on real servers.

CPU platform, with the paged decode kernel and a model whose steps are mostly decode attention; see docs/locality.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from feather_sglang.bench import batches, serving
from feather_sglang.bench.server import Server
from feather_sglang.bench.serving import Setting, Workload, served
from feather_sglang.bench.tiny_model import ATTENTION, model_in

#: All prefixes and all running requests fit, so what differs is who decodes together.
FLAGS = (*serving.CPU, "--max-total-tokens=300000", "--chunked-prefill-size=16384")


def make(name: str, workload: Workload, slots: int) -> Setting:
    """A workload on one server, all at once and as the stream of its ``rate``, chosen above what fcfs can serve."""
    return Setting(
        name,
        (dataclasses.replace(workload, rate=None), workload),
        flags=(f"--max-running-requests={slots}",),
        cpu_flags=FLAGS,
        shape=ATTENTION,
    )


#: The first of the settings was fixed before any policy was measured on it, and the others were not tuned. Eight
#: prefixes of 8,192 tokens are 134 MB a layer, more than the last-level cache holds.
MAIN, MAIN_SLOTS = Workload(8, 30, 8192, 32, 128, rate=16), 32
SETTINGS = (
    make("main", MAIN, MAIN_SLOTS),
    make("longer-prefix", Workload(8, 15, 16384, 32, 96, rate=8), slots=16),
    make("many-groups", Workload(16, 15, 4096, 64, 96, rate=16), slots=24),
)


def measure_batches(folder: Path, runs: int, say: Callable[[str], None]) -> list[batches.BatchRow]:
    """Prefixes of 8,192 tokens; see :mod:`feather_sglang.bench.batches`. Raises ``ServerError``."""
    flags = [f"--model-path={model_in(folder, ATTENTION)}", "--max-running-requests=64", *FLAGS]
    with served("batches", Server(flags, folder / "server-batches.log")) as server:
        return batches.measure(server.url, batches.Prompts(8, 8192, 32), 64, runs, say)
