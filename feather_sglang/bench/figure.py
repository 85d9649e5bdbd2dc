"""What the comparisons on real servers look like: a bar for each policy or batch, and a line from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feather_sglang.bench.batches import BatchRow
from feather_sglang.bench.compare import Row, Spread, by_traffic


@dataclass(frozen=True)
class _Panel:
    title: str
    label: str
    names: list[str]
    spreads: list[Spread]
    scale: float = 1.0


def figure(rows: Sequence[Row], batches: Sequence[BatchRow] = ()) -> Any:
    """Throughput and time to first token of each policy, and the throughput of batches. Needs matplotlib."""
    from matplotlib.figure import Figure

    panels = [*_batches(batches), *(panel for group in by_traffic(rows) for panel in _policies(group))]
    drawing = Figure(figsize=(11, 0.9 + 2.6 * (len(panels) // 2)), layout="constrained")
    for axes, panel in zip(drawing.subplots(len(panels) // 2, 2, squeeze=False).flat, panels, strict=True):
        _draw(axes, panel)
    drawing.suptitle("medians; lines from the lowest to the highest run", fontsize=11)
    return drawing


def _policies(rows: Sequence[Row]) -> tuple[_Panel, _Panel]:
    title = f"{rows[0].workload}, {rows[0].arrivals}"
    names = [row.policy for row in rows]
    return (
        _Panel(title, "output tokens/s", names, [row.output_tokens_per_s for row in rows]),
        _Panel(title, "time to first token, median, s", names, [row.ttft_p50_ms for row in rows], 1e-3),
    )


def _batches(rows: Sequence[BatchRow]) -> list[_Panel]:
    """Those of one prefix beside the mixed ones."""
    kinds = [[row for row in rows if (row.prefixes == 1) == alike] for alike in (True, False)] if rows else []
    return [
        _Panel(
            "decode batches",
            "output tokens/s",
            [f"{row.requests} of {row.prefixes} prefix{'es' if row.prefixes > 1 else ''}" for row in kind],
            [Spread(row.tokens_per_s, *row.spread) for row in kind],
        )
        for kind in kinds
    ]


def _draw(axes: Any, panel: _Panel) -> None:
    medians = [each.median * panel.scale for each in panel.spreads]
    below = [(each.median - each.lowest) * panel.scale for each in panel.spreads]
    above = [(each.highest - each.median) * panel.scale for each in panel.spreads]
    bars = axes.barh(panel.names, medians, color="#3b6ea5", xerr=[below, above], ecolor="#222222", capsize=3)
    axes.bar_label(bars, [f"{value:,.4g}" for value in medians], padding=4, fontsize=8)
    axes.invert_yaxis()
    axes.set(title=panel.title, xlabel=panel.label)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
