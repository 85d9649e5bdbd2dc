"""Feather's metrics on SGLang's ``/metrics``: the table, and how the counters get there.

SGLang's schedulers write their metrics into files of ``prometheus_client``'s multi-process mode, and its HTTP server
reads the files of all processes. What is written here appears there by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from feather_sglang.engines.sglang.controller import Controller
from feather_sglang.scheduling.counters import BATCH_BOUNDS, PASS_BOUNDS_S, Buckets

logger = logging.getLogger(__name__)

# A number, numbers by the values of a metric's own labels, or buckets.
Reading = float | Mapping[tuple[str, ...], float] | Buckets


class Metric(NamedTuple):
    """One of Feather's metrics."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    #: What it stands at; counters and histograms since the start.
    read: Callable[[Controller], Reading]
    #: Its labels beside those that SGLang gives to its scheduler's metrics.
    labels: tuple[str, ...] = ()
    #: Upper bounds of a histogram's buckets.
    bounds: tuple[float, ...] = ()


def _decisions(controller: Controller) -> dict[tuple[str, ...], float]:
    counters, now = controller.counters, controller.policy
    decided: dict[tuple[str, ...], float] = {("add", now): 0, ("stop", now): 0}
    decided.update({("add", policy): number for policy, number in counters.added.items()})
    decided.update({("stop", policy): number for policy, number in counters.stopped.items()})
    return decided


def _forced(controller: Controller) -> dict[tuple[str, ...], float]:
    counters = controller.counters
    return {("max_passes",): counters.forced_by_passes, ("max_wait_s",): counters.forced_by_wait}


METRICS: tuple[Metric, ...] = (
    Metric(
        "feather_in_charge",
        "gauge",
        "1 while Feather plans the scheduling passes, 0 while SGLang's own policy does.",
        lambda controller: not controller.disabled,
    ),
    Metric(
        "feather_decisions_total",
        "counter",
        "Requests added to the batch, and plans that the batching policy stopped although somebody could have joined.",
        _decisions,
        ("action", "policy"),
    ),
    Metric(
        "feather_passed_over_passes_total",
        "counter",
        "Scheduling passes in which the longest waiting request was passed over.",
        lambda controller: controller.counters.passed_over,
    ),
    Metric(
        "feather_forced_admissions_total",
        "counter",
        "Requests admitted because the bound on their wait was reached, by that bound.",
        _forced,
        ("bound",),
    ),
    Metric(
        "feather_decode_steps_total",
        "counter",
        "Decode steps that followed a scheduling pass of Feather's.",
        lambda controller: controller.counters.decode_steps,
    ),
    Metric(
        "feather_homogeneous_decode_steps_total",
        "counter",
        "Decode steps of two or more requests that all share a prefix of at least one chunk.",
        lambda controller: controller.counters.homogeneous_decode_steps,
    ),
    Metric(
        "feather_output_tokens_total",
        "counter",
        "One for each running request of each decode step.",
        lambda controller: controller.counters.output_tokens,
    ),
    Metric(
        "feather_shared_prefix_tokens",
        "gauge",
        "Tokens that all running requests share, in whole chunks; 0 with fewer than two.",
        lambda controller: controller.shared_tokens,
    ),
    Metric(
        "feather_batch_size_at_stop",
        "histogram",
        "Running requests where the batching policy stopped a plan.",
        lambda controller: controller.counters.stop_batch,
        bounds=BATCH_BOUNDS,
    ),
    Metric(
        "feather_pass_duration_seconds",
        "histogram",
        "Feather's part of a scheduling pass in which somebody waited.",
        lambda controller: controller.counters.pass_s,
        bounds=PASS_BOUNDS_S,
    ),
    Metric(
        "feather_waiting_requests",
        "gauge",
        "Requests in SGLang's waiting queue.",
        lambda controller: controller.waiting,
    ),
    Metric(
        "feather_reward_tokens_per_second",
        "gauge",
        "Decode throughput as last measured for a policy that learns; 0 under others.",
        lambda controller: controller.counters.reward,
    ),
    Metric(
        "feather_exploration_ratio",
        "gauge",
        "Share of the intervals between admissions that a policy that learns has spent on trials; 0 under others.",
        lambda controller: controller.counts()["exploration_share"],
    ),
    Metric(
        "feather_fallback_passes_total",
        "counter",
        "Scheduling passes planned by SGLang's own policy.",
        lambda controller: controller.counters.fallback_passes,
    ),
    Metric(
        "feather_failures_total",
        "counter",
        "Failures of Feather's own code.",
        lambda controller: controller.counters.failures,
    ),
    Metric(
        "feather_state_saves_total",
        "counter",
        "Times that what was learned was written to the state file.",
        lambda controller: controller.counts()["state_saves"],
    ),
)


def exporter(scheduler: Any) -> Exporter | None:
    """What brings the counts to SGLang's metrics; ``None`` where they are off. A failure is logged."""
    # Without --enable-metrics it is None, or to 0.5.12.post1 not there.
    collector = getattr(scheduler, "metrics_collector", None)
    if collector is None:
        return None
    try:
        return Exporter(collector.labels)
    except Exception:
        logger.exception("Feather's metrics cannot be exported; it goes on without.")
        return None


class Exporter:
    """Brings ``prometheus_client``'s metrics up to the controller's counts; to be called about once a second.

    Args:
        labels: names and values of the labels that SGLang gives to its scheduler's metrics.
    """

    def __init__(self, labels: Mapping[str, Any]) -> None:
        # Only here: where values are kept is settled on import, by a variable that SGLang sets when metrics are on.
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        #: Used where there is one process only, as in tests. Otherwise the files are what counts.
        self.registry = CollectorRegistry()
        self._labels = {name: str(value) for name, value in labels.items()}
        kinds: dict[str, Callable[..., Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
        self._families = {
            metric.name: kinds[metric.kind](
                metric.name,
                metric.help,
                (*self._labels, *metric.labels),
                registry=self.registry,
                **({"multiprocess_mode": "mostrecent"} if metric.kind == "gauge" else {}),
                **({"buckets": metric.bounds} if metric.kind == "histogram" else {}),
            )
            for metric in METRICS
        }
        self._series: dict[tuple[str, ...], Any] = {}
        self._exported: dict[tuple[str, ...], list[float]] = {}

    def __call__(self, controller: Controller) -> None:
        """O(metrics and buckets)."""
        for metric in METRICS:
            reading = metric.read(controller)
            by_labels = reading if isinstance(reading, Mapping) else {(): reading}
            for values, value in by_labels.items():
                self._export(metric, values, value)

    def _export(self, metric: Metric, values: tuple[str, ...], value: float | Buckets) -> None:
        key = (metric.name, *values)
        series = self._series.get(key)
        if series is None:
            own = dict(zip(metric.labels, values, strict=True))
            series = self._series[key] = self._families[metric.name].labels(**self._labels, **own)
        if metric.kind == "gauge":
            series.set(value)
            return
        now = [value.sum, *value.counts] if isinstance(value, Buckets) else [value]
        # observe() takes one value at a time, and there are a thousand a second; SGLang does it like this, too.
        targets = [series._sum, *series._buckets] if isinstance(value, Buckets) else [series]
        before = self._exported.get(key, [0.0] * len(now))
        for target, new, old in zip(targets, now, before, strict=True):
            if new > old:
                target.inc(new - old)
        self._exported[key] = now
