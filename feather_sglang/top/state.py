"""What ``GET /feather/state`` says of each scheduler, and what changed between two answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Counts that only grow, of those that a scheduler keeps; ``pass_s_sum`` is in seconds.
GROWING = (
    *("added", "stopped", "passed_over", "forced", "fallback_passes", "state_saves"),
    *("decode_steps", "homogeneous_decode_steps", "output_tokens", "pass_s_sum", "pass_count"),
)


@dataclass(frozen=True)
class Batch:
    """The running batch."""

    requests: int
    #: Length of the prefix that all of them share.
    shared_tokens: int
    #: Waiting requests that will join once their prefix is computed.
    held: int


@dataclass(frozen=True)
class Group:
    """Requests by the longest prefix that they share with another."""

    tokens: int
    waiting: int
    active: int


@dataclass(frozen=True)
class Candidate:
    """The waiting request that comes next, and what the policy says to it."""

    rid: str
    shared_tokens: int
    loses_tokens: int
    #: Waiting requests that share what would remain.
    sharing: int
    admitted: bool
    why: str


@dataclass(frozen=True)
class Scheduler:
    """One data parallel rank. Names and meanings are those of the answer."""

    version: str
    #: Who plans passes: ``feather``, or the SGLang policy that took over.
    scheduling: str
    #: Where that is not Feather: ``switched`` or ``failures``.
    why: str
    policy: str
    failures: int
    fallback_policy: str
    #: Seconds on a clock of its own: only differences mean something.
    time_s: float
    passes: int
    slots: int
    batch: Batch
    waiting: int
    groups: tuple[Group, ...]
    best: Candidate | None
    last_stop: str
    counts: Mapping[str, float]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Rates:
    """What happened between two answers."""

    #: Of ``passes`` and of each of ``GROWING``. Per second, so that of ``pass_s_sum`` is a share of the time.
    per_s: Mapping[str, float]
    #: Feather's part of a pass; ``None`` without one.
    pass_ms: float | None
    #: Share of the decode steps whose batch had one prefix; ``None`` without a step.
    homogeneous: float | None


def parse(answer: Any) -> tuple[Scheduler, ...]:
    """The schedulers in an answer. Raises ``KeyError``, ``TypeError`` or ``AttributeError`` if it is no such answer."""
    return tuple(_scheduler(raw) for raw in answer["schedulers"])


def _scheduler(raw: Mapping[str, Any]) -> Scheduler:
    plain: Scheduler = _pick(Scheduler, raw)
    return dataclasses.replace(
        plain,
        batch=_pick(Batch, raw["batch"]),
        groups=tuple(_pick(Group, group) for group in raw["groups"]),
        best=None if raw["best"] is None else _pick(Candidate, raw["best"]),
        counts={name: raw["counts"].get(name, 0) for name in (*GROWING, "reward", "exploration_share")},
    )


def _pick(kind: Any, raw: Mapping[str, Any]) -> Any:
    """What a newer server says beyond these fields is left out."""
    return kind(**{spec.name: raw[spec.name] for spec in dataclasses.fields(kind)})


def rates(before: Scheduler, after: Scheduler) -> Rates | None:
    """From two answers of a scheduler; ``None`` where no time passed, or it was started anew between them."""
    seconds = after.time_s - before.time_s
    change = {name: after.counts[name] - before.counts[name] for name in GROWING}
    change["passes"] = after.passes - before.passes
    if seconds <= 0 or min(change.values()) < 0:
        return None
    return Rates(
        per_s={name: number / seconds for name, number in change.items()},
        pass_ms=_ratio(1000 * change["pass_s_sum"], change["pass_count"]),
        homogeneous=_ratio(change["homogeneous_decode_steps"], change["decode_steps"]),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
