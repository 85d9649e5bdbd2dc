"""Results as a table, as JSON and as a plot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from feather_sglang.simulation.metrics import Result
from feather_sglang.simulation.run import Setup
from feather_sglang.simulation.workload import Workload

_COLUMNS: tuple[tuple[str, str, float, str], ...] = (
    ("output_tokens_per_s", "output tok/s", 1, ",.0f"),
    ("requests_per_s", "req/s", 1, ".2f"),
    ("decode_tokens_per_s", "decode tok/s", 1, ",.0f"),
    ("ttft_p50_s", "TTFT p50 s", 1, ".2f"),
    ("ttft_p95_s", "TTFT p95", 1, ".2f"),
    ("ttft_p99_s", "TTFT p99", 1, ".2f"),
    ("tpot_p50_s", "TPOT p50 ms", 1e3, ".1f"),
    ("tpot_p95_s", "TPOT p95", 1e3, ".1f"),
    ("tpot_p99_s", "TPOT p99", 1e3, ".1f"),
    ("longest_wait_s", "longest wait s", 1, ".1f"),
    ("cached_share", "from cache", 1, ".1%"),
    ("mean_batch", "batch", 1, ".1f"),
    ("mean_shared_depth", "shared depth", 1, ",.0f"),
    ("scheduling_share", "scheduling", 1, ".2%"),
    ("retracted", "retracted", 1, "d"),
)


def cells(result: Result) -> list[str]:
    """The figures of a line, formatted."""
    values = dataclasses.asdict(result)
    return [format(values[name] * scale if scale != 1 else values[name], form) for name, _, scale, form in _COLUMNS]


def headings() -> list[str]:
    """One for each of ``cells``."""
    return [heading for _, heading, _, _ in _COLUMNS]


def table(results: Sequence[Result]) -> str:
    """A line for each policy, for reading."""
    rows = [["policy", *headings()], *([result.policy, *cells(result)] for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        row[0].ljust(widths[0]) + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    )


def heading(workload: Workload, setup: Setup, hardware: str, model: str) -> str:
    """What was simulated, on what; two lines."""
    engine = setup.engine
    chunk = f"{engine.chunked_prefill_tokens:,}" if engine.chunked_prefill_tokens else "unsplit"
    return (
        f"simulated: {workload.name}: {workload.about}\n"
        f"{hardware} ({setup.hardware.source}), {model}, {engine.kv_tokens:,} tokens of KV, {engine.max_running} "
        f"running slots, prefill chunks {chunk}; at most {_most_cached(workload):.1%} can come from cache"
    )


def _most_cached(workload: Workload) -> float:
    return workload.shared_tokens / workload.prompt_tokens


def as_dict(workload: Workload, setup: Setup, results: Sequence[Result]) -> dict[str, Any]:
    """Everything for machines."""
    return {
        "simulated": True,
        "workload": {
            "name": workload.name,
            "about": workload.about,
            "requests": len(workload.requests),
            "prompt_tokens": workload.prompt_tokens,
            "shared_tokens": workload.shared_tokens,
        },
        "hardware": dataclasses.asdict(setup.hardware),
        "model": dataclasses.asdict(setup.model),
        "engine": dataclasses.asdict(setup.engine),
        "settings": dataclasses.asdict(setup.settings),
        "rows": [dataclasses.asdict(result) for result in results],
    }


def as_json(workload: Workload, setup: Setup, results: Sequence[Result]) -> str:
    """See :func:`as_dict`."""
    return json.dumps(as_dict(workload, setup, results), indent=2)


def figure(results: Sequence[Result], title: str) -> Any:
    """Four panels, a bar for each policy: throughput, TTFT, TPOT, share from cache. Needs matplotlib."""
    from matplotlib.figure import Figure

    names = [result.policy for result in results]
    panels = (
        ("output tokens/s", [[result.output_tokens_per_s for result in results]], [""]),
        ("time to first token, s", [[r.ttft_p50_s for r in results], [r.ttft_p99_s for r in results]], ["p50", "p99"]),
        (
            "time per output token, ms",
            [[r.tpot_p50_s * 1e3 for r in results], [r.tpot_p99_s * 1e3 for r in results]],
            ["p50", "p99"],
        ),
        ("prompt tokens from cache, %", [[result.cached_share * 100 for result in results]], [""]),
    )
    drawing = Figure(figsize=(11, 6.2), layout="constrained")
    for axis, (label, series, legends) in zip(drawing.subplots(2, 2).flat, panels, strict=True):
        height = 0.8 / len(series)
        for number, (values, legend) in enumerate(zip(series, legends, strict=True)):
            at = [place + (number - (len(series) - 1) / 2) * height for place in range(len(names))]
            bars = axis.barh(at, values, height * 0.92, color=("#3b6ea5", "#b7cbe0")[number], label=legend or None)
            axis.bar_label(bars, [f"{value:,.4g}" for value in values], padding=3, fontsize=8)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_xlabel(label)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            axis.legend(frameon=False, fontsize=8)
    drawing.suptitle(f"simulated: {title}".replace("$", r"\$"), fontsize=11)
    return drawing
