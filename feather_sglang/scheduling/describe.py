"""What a scheduler holds and whom it would admit next, in tokens and plain words. For people: it decides nothing."""

from __future__ import annotations

from typing import Any

from feather_sglang.scheduling.policy import BatchState
from feather_sglang.scheduling.scheduler import FeatherScheduler, Stop, Upcoming
from feather_sglang.scheduling.settings import Settings

_MAX_GROUPS = 20


def describe(core: FeatherScheduler, settings: Settings, slots: int, full: bool) -> dict[str, Any]:
    """The batch, the groups that wait, and the best candidate, for JSON but for ``rid``. O(requests).

    Args:
        core: between two plans; it is left as it is.
        settings: those that it runs with.
        slots: the engine's running slots.
        full: whether the engine says that its batch cannot grow.
    """
    size = settings.chunk_size
    groups = [group for group in core.tree.groups() if group.waiting]
    return {
        "batch": {
            "requests": core.tree.num_active,
            "shared_tokens": core.tree.common_depth * size,
            "held": core.held,
        },
        "groups": [
            {"tokens": group.depth * size, "waiting": group.waiting, "active": group.active}
            for group in groups[:_MAX_GROUPS]
        ],
        "best": _best(core, settings, slots, full),
        "last_stop": core.last_stop.name.lower(),
    }


def _best(core: FeatherScheduler, settings: Settings, slots: int, full: bool) -> dict[str, Any] | None:
    upcoming = core.upcoming()
    if upcoming is None:
        return None
    candidate, size = upcoming.candidate, settings.chunk_size
    admitted, why = _verdict(core, settings, slots, full, upcoming)
    return {
        "rid": candidate.rid,
        "shared_tokens": candidate.covered * size,
        "loses_tokens": _loses(core, upcoming) * size,
        "sharing": candidate.sharing,
        "admitted": admitted,
        "why": why,
    }


def _verdict(
    core: FeatherScheduler, settings: Settings, slots: int, full: bool, upcoming: Upcoming
) -> tuple[bool, str]:
    """Whether the next plan would admit it, as far as that can be said now, and why."""
    batch = core.tree.num_active
    if not batch:
        return True, f"nobody runs, and {'its prefix is cached' if upcoming.follows else 'it has waited longest'}"
    if batch >= slots:
        return False, f"no running slot is free, all {slots} are taken"
    if full:
        return False, "the engine says that its batch is full"
    if upcoming.must:
        return True, "it has been passed over for long enough"
    if core.tree.held(upcoming.candidate.rid):
        return False, "it follows once the prefix that it shares with the batch is computed"
    loses = _loses(core, upcoming)
    sharing, depth = upcoming.candidate.sharing, core.tree.common_depth
    state = BatchState(batch, loses, sharing, upcoming.related, core.held, depth)
    size = settings.chunk_size
    cost = f"adding it would cost the batch {loses * size} of {depth * size} shared tokens"
    said = core.policy.explain(state, size)
    if said is None:
        stopped = "stopped the batch here" if core.last_stop is Stop.POLICY else "decides in the next pass"
        said = False, f"{settings.policy} {stopped}"
    return said[0], f"{cost} ({said[1]})"


def _loses(core: FeatherScheduler, upcoming: Upcoming) -> int:
    return upcoming.candidate.delta if core.tree.num_active > 1 else 0  # a batch of one has none to lose
