"""The paper's batch-size result end to end: decode batches, and whole workloads under each policy, on real servers.

CPU platform, with the paged decode kernel and a model whose steps are mostly decode attention; see docs/locality.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from feather_sglang.bench import batches, serving
from feather_sglang.bench.progress import ticking
from feather_sglang.bench.server import Server
from feather_sglang.bench.tiny_model import ATTENTION, make_tiny_model

#: All prefixes and all running requests fit, so what differs is who decodes together.
FLAGS = (
    "--device=cpu",
    "--dtype=float32",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=300000",
    "--chunked-prefill-size=16384",
)


@dataclass(frozen=True)
class Setting:
    """One workload; ``rate`` in requests per second is its Poisson stream's, chosen above what fcfs can serve."""

    name: str
    workload: serving.Workload
    slots: int
    rate: float


#: Eight prefixes of 8,192 tokens are 134 MB a layer, more than the last-level cache holds. The first setting was fixed
#: before any policy was measured on it, and the others were not tuned.
SETTINGS = (
    Setting("main", serving.Workload(8, 30, 8192, 32, 128), slots=32, rate=16),
    Setting("longer-prefix", serving.Workload(8, 15, 16384, 32, 96), slots=16, rate=8),
    Setting("many-groups", serving.Workload(16, 15, 4096, 64, 96), slots=24, rate=16),
)


@dataclass(frozen=True)
class Row:
    """One policy on one setting: medians over the runs."""

    setting: str
    arrivals: str
    policy: str
    output_tokens_per_s: float
    #: The lowest and the highest run.
    spread: tuple[float, float]
    cached_share: float
    ttft_median_ms: float
    #: Answers that differ from the first policy's, in the first run.
    differing: int


def measure_batches(folder: Path, runs: int, say: Callable[[str], None]) -> list[batches.BatchRow]:
    """Prefixes of 8,192 tokens; see :mod:`feather_sglang.bench.batches`. Raises ``ServerError``."""
    server = Server(
        [f"--model-path={_model(folder)}", "--max-running-requests=64", *FLAGS], folder / "server-batches.log"
    )
    with ticking("batches: starting the server"):
        server.start()
    try:
        return batches.measure(server.url, batches.Prompts(8, 8192, 32), 64, runs, say)
    finally:
        server.stop()


def measure_workload(
    setting: Setting, policies: Sequence[str], folder: Path, runs: int, say: Callable[[str], None]
) -> list[Row]:
    """Every policy in turn, the other way round in every second run. Raises ``ServerError`` or ``RuntimeError``."""
    found: dict[tuple[str, str], list[serving.Result]] = {}
    for run in range(runs):
        for policy in policies if run % 2 == 0 else reversed(policies):
            say(f"{setting.name}, run {run + 1} of {runs}: {policy}")
            for arrivals, result in _serve(setting, policy, folder):
                found.setdefault((arrivals, policy), []).append(result)
    rows = []
    for (arrivals, policy), results in sorted(found.items(), key=lambda each: each[0][0]):
        rates = [result.output_tokens_per_s for result in results]
        expected = found[arrivals, policies[0]][0].texts
        rows.append(
            Row(
                setting=setting.name,
                arrivals=arrivals,
                policy=policy,
                output_tokens_per_s=statistics.median(rates),
                spread=(min(rates), max(rates)),
                cached_share=statistics.median(result.cached_share for result in results),
                ttft_median_ms=statistics.median(result.ttft_median_ms for result in results),
                differing=sum(a != b for a, b in zip(results[0].texts, expected, strict=True)),
            )
        )
    return rows


def _serve(setting: Setting, policy: str, folder: Path) -> list[tuple[str, serving.Result]]:
    model = _model(folder)
    flags = [f"--model-path={model}", f"--schedule-policy={policy}", f"--max-running-requests={setting.slots}", *FLAGS]
    server = Server(flags, folder / f"server-{setting.name}-{policy}.log")
    with ticking(f"{policy}: starting the server"):
        server.start()
    try:
        results = []
        for arrivals, rate in (("at once", None), (f"{setting.rate:g}/s", setting.rate)):
            workload = serving.Workload(**{**asdict(setting.workload), "rate": rate})
            with ticking(f"{policy}: {workload.groups * workload.per_group} requests, {arrivals}"):
                results.append((arrivals, serving.drive(policy, server, model, workload)))
        return results
    finally:
        server.stop()


def table(rows: Sequence[Row]) -> str:
    """The rows for reading; *times* is a row's tokens/s over the policy's of the same setting and arrivals."""
    lines = [
        f"{'setting':<13}{'arrivals':<10}{'policy':<12}{'output tok/s':>13}{'lowest-highest':>16}{'from cache':>12}"
        f"{'TTFT p50 s':>12}{'feather is':>12}{'differing':>11}"
    ]
    feather = {(row.setting, row.arrivals): row.output_tokens_per_s for row in rows if row.policy == "feather"}
    for row in rows:
        ours = feather.get((row.setting, row.arrivals))
        times = "-" if ours is None else f"{ours / row.output_tokens_per_s:.2f} x"
        spread = f"{row.spread[0]:.0f}-{row.spread[1]:.0f}"
        lines.append(
            f"{row.setting:<13}{row.arrivals:<10}{row.policy:<12}{row.output_tokens_per_s:>13.0f}{spread:>16}"
            f"{row.cached_share:>12.1%}{row.ttft_median_ms / 1e3:>12.2f}{times:>12}{row.differing:>11}"
        )
    return "\n".join(lines)


def as_dict(batch_rows: Sequence[batches.BatchRow], rows: Sequence[Row]) -> dict[str, Any]:
    """The results for machines."""
    return {
        "model": asdict(ATTENTION),
        "settings": [asdict(setting) for setting in SETTINGS],
        "batches": [asdict(row) for row in batch_rows],
        "rows": [asdict(row) for row in rows],
    }


def _model(folder: Path) -> Path:
    return make_tiny_model(folder / "attention-model", shape=ATTENTION)
