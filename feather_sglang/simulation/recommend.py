"""Which settings the simulated figures speak for, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from feather_sglang.scheduling.policy import default_min_batch
from feather_sglang.simulation.metrics import Result

#: What decides between runs: throughput, unless it differs by less than this.
_SAME = 0.02
_FEATHER = "feather-"


class Advice(NamedTuple):
    """A flag and its value, or nothing to set, and why."""

    flag: str
    reason: str


def min_batches(max_running: int) -> list[int]:
    """Values of ``min_batch`` worth a run beside the default: never mind others' batches, and two in between."""
    return sorted(
        {8, max(8, max_running // 8), max(8, max_running // 2), max_running} - {default_min_batch(max_running)}
    )


def better(one: Result, other: Result) -> bool:
    """Whether one run is better: more output tokens/s, or as many and the first tokens sooner."""
    more = one.output_tokens_per_s - other.output_tokens_per_s
    if abs(more) > _SAME * other.output_tokens_per_s:
        return more > 0
    return one.ttft_p99_s < (1 - _SAME) * other.ttft_p99_s


def best_of(results: Sequence[Result]) -> Result:
    """The best run; of equals the first."""
    best = results[0]
    for result in results[1:]:
        if better(result, best):
            best = result
    return best


def recommend(results: Sequence[Result], by_min_batch: Mapping[int, Result], shared: float) -> list[Advice]:
    """Advice from the policies' results, from those of ``feather-static`` by ``min_batch``, and from the traffic.

    Args:
        results: one for each policy that was asked for; the order decides between equals.
        by_min_batch: the default among them, under the number that it comes to.
        shared: share of the prompt tokens that an earlier request had too.
    """
    best = best_of(results)
    reason = (
        f"{best.output_tokens_per_s:,.0f} output tokens/s and a first token after {best.ttft_p99_s:,.2f} s (p99), "
        "which no other policy of this run beats"
    )
    if not best.policy.startswith(_FEATHER):
        advice = [Advice(f"--schedule-policy {best.policy}", reason)]
        if shared < _SAME:
            advice.append(
                Advice("", f"only {shared:.1%} of the prompt tokens are shared, so there is nothing to gather")
            )
        return advice
    advice = [
        Advice("--schedule-policy feather", reason),
        Advice(f"--feather-policy {best.policy.removeprefix(_FEATHER)}", "the best of the batching policies here"),
    ]
    if by_min_batch:
        advice.append(_min_batch(by_min_batch))
    fcfs = next((result for result in results if result.policy == "fcfs"), None)
    if fcfs is not None and best.longest_wait_s > 1.5 * fcfs.longest_wait_s > 0:
        advice.append(
            Advice(
                "--feather-max-passes 512",
                f"the longest wait is {best.longest_wait_s:,.0f} s beside {fcfs.longest_wait_s:,.0f} s with fcfs; a "
                "lower bound than the default of 2048 serves the passed over sooner",
            )
        )
    return advice


def _min_batch(by_min_batch: Mapping[int, Result]) -> Advice:
    runs = list(by_min_batch.items())  # the default first, so that it wins among equals
    best = best_of([result for _, result in runs])
    value, default = next(number for number, result in runs if result is best), runs[0][0]
    figures = "; ".join(f"{number}: {result.output_tokens_per_s:,.0f}" for number, result in sorted(runs))
    if value == default:
        return Advice(
            "", f"min_batch as it is by default ({default}); output tokens/s of feather-static by it: {figures}"
        )
    return Advice(f"--feather-min-batch {value}", f"output tokens/s of feather-static by min_batch: {figures}")
