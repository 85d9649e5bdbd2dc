"""The same traffic under every policy, run after run in alternating order: medians, spread, and equality of answers."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from feather_sglang.bench.serving import Result, Serve, Setting, Traffic


@dataclass(frozen=True)
class Spread:
    """One figure over the runs."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One policy under one traffic; the counts of answers are of all runs together. Units as in ``Result``."""

    workload: str
    arrivals: str
    policy: str
    runs: int
    #: Of one run.
    requests: int
    most_cached: float
    completed: int
    failed: int
    #: Answers that are not those of the first policy's first run.
    differing: int
    requests_per_s: Spread
    output_tokens_per_s: Spread
    ttft_p50_ms: Spread
    ttft_p99_ms: Spread
    tpot_p50_ms: Spread
    tpot_p99_ms: Spread
    cached_share: Spread

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Row:
        """What ``dataclasses.asdict`` made of one."""
        values: dict[str, Any] = row | {name: Spread(**row[name]) for name in _MEASURED}
        return cls(**values)


_MEASURED = tuple(each.name for each in fields(Row) if each.type == "Spread")


class Comparison:
    """Drives servers, and keeps what is complete; so an interruption loses the measurement that it hit, and no other.

    Args:
        policies: in the order of the first run; answers are compared with the first one's.
        runs: of each policy, in the opposite order every second time, so that a drift of the machine's speed meets all.
        serve: starts a policy's server.
        say: told what is going on.
    """

    def __init__(self, policies: Sequence[str], runs: int, serve: Serve, say: Callable[[str], None]) -> None:
        self._policies = policies
        self._runs = runs
        self._serve = serve
        self._say = say
        self._found: dict[tuple[str, str], tuple[Traffic, list[Result]]] = {}

    def run(self, setting: Setting) -> None:
        """Measure one setting. Raises ``ServerError`` or ``RuntimeError``."""
        for run in range(self._runs):
            for policy in self._policies if run % 2 == 0 else reversed(self._policies):
                self._say(f"{setting.name}, run {run + 1} of {self._runs}: {policy}")
                with self._serve(setting, policy) as drive:
                    for traffic in setting.traffic:
                        result = drive(traffic)
                        self._found.setdefault((setting.name, traffic.arrivals), (traffic, []))[1].append(result)

    def rows(self) -> list[Row]:
        """One for each setting, arrivals and policy of which a run is complete."""
        found = []
        for (workload, arrivals), (traffic, results) in self._found.items():
            for policy in self._policies:
                of_policy = [result for result in results if result.policy == policy]
                if of_policy:
                    found.append(_row(workload, arrivals, traffic, of_policy, results[0].texts))
        return found


def _row(workload: str, arrivals: str, traffic: Traffic, results: Sequence[Result], expected: Sequence[str]) -> Row:
    texts = [zip(result.texts, expected, strict=True) for result in results]
    return Row(
        workload=workload,
        arrivals=arrivals,
        policy=results[0].policy,
        runs=len(results),
        requests=traffic.requests,
        most_cached=traffic.most_cached,
        completed=sum(result.completed for result in results),
        failed=sum(result.failed for result in results),
        differing=sum(got != wanted for got, wanted in itertools.chain.from_iterable(texts)),
        **{name: Spread.of([getattr(result, name) for result in results]) for name in _MEASURED},
    )


def by_traffic(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """The rows that may be compared with each other."""
    for _, group in itertools.groupby(rows, key=lambda row: (row.workload, row.arrivals)):
        yield list(group)


#: Field, head, width, and what its unit is multiplied with.
_COLUMNS = (
    ("requests_per_s", "requests/s", 12, 1),
    ("output_tokens_per_s", "output tok/s", 14, 1),
    ("ttft_p50_ms", "TTFT p50 s", 12, 1e-3),
    ("ttft_p99_ms", "p99 s", 11, 1e-3),
    ("tpot_p50_ms", "TPOT p50 ms", 13, 1),
    ("tpot_p99_ms", "p99 ms", 11, 1),
    ("cached_share", "cached %", 11, 100),
)


def table(rows: Sequence[Row]) -> str:
    """For reading: medians, below them the lowest and the highest run; ratios are feather's median over the row's."""
    return "\n\n".join("\n".join(_lines(group)) for group in by_traffic(rows))


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    runs = sorted({row.runs for row in rows})
    times = f"{runs[0]} run" + ("s" if runs[-1] > 1 else "") if len(runs) == 1 else f"{runs[0]} to {runs[-1]} runs"
    first = rows[0]
    yield (
        f"{first.workload}, {first.arrivals}: {first.requests} requests, {times}; "
        f"at most {first.most_cached:.1%} of the prompt tokens can come from cache"
    )
    yield (
        f"{'policy':<18}"
        + "".join(f"{head:>{width}}" for _, head, width, _ in _COLUMNS)
        + (f"{'feather is':>12}{'its TTFT':>10}{'done':>6}{'failed':>8}{'differing':>11}")
    )
    feather = next((row for row in rows if row.policy.startswith("feather")), None)
    for row in rows:
        yield f"{row.policy:<18}{_cells(row, 'median')}" + (
            f"{_ratio(feather, row, 'output_tokens_per_s'):>12}{_ratio(feather, row, 'ttft_p50_ms'):>10}"
            f"{row.completed:>6}{row.failed:>8}{row.differing:>11}"
        )
        if row.runs > 1:
            yield f"{'':<18}{_cells(row, 'lowest', 'highest')}"


def _cells(row: Row, *of_spread: str) -> str:
    cells = []
    for name, _, width, scale in _COLUMNS:
        figures = [_figure(getattr(getattr(row, name), each) * scale) for each in of_spread]
        cells.append(f"{'-'.join(figures):>{width}}")
    return "".join(cells)


def _figure(value: float) -> str:
    """Three digits or more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(feather: Row | None, row: Row, name: str) -> str:
    below = getattr(row, name).median
    return f"{getattr(feather, name).median / below:.2f} x" if feather and below else "-"


def as_dict(command: str, settings: Iterable[Setting], rows: Iterable[Row]) -> dict[str, Any]:
    """The results for machines; ``scripts/benchmark_tables.py`` puts them on the command's page of the docs."""
    return {
        "command": command,
        "settings": [setting.as_dict() for setting in settings],
        "rows": [asdict(row) for row in rows],
    }
