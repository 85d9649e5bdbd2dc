"""When to stop adding to a batch (paper, Part B)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mypy_extensions import mypyc_attr

from feather_sglang.scheduling.settings import Settings


class BatchState(NamedTuple):
    """What a policy sees at one admission; depths are in chunks."""

    #: Requests in the batch; at least one, since an empty batch is never refused anything.
    batch: int
    #: Shared depth that adding the candidate would cost; a batch of one has none to lose.
    delta: int
    #: Waiting requests, the candidate included, that share the depth that would remain.
    sharing: int
    #: Whether the candidate shares more with some active request than every request shares anyway.
    related: bool
    #: Waiting requests that will join as soon as a prefix now being prefilled is computed.
    held: int
    #: Depth that every request in the batch shares now.
    depth: int = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class BatchingPolicy(ABC):
    """Decides for the best candidate. Must be deterministic: every tensor parallel rank asks its own copy."""

    @abstractmethod
    def admit(self, state: BatchState) -> bool:
        """``True`` to add the candidate, ``False`` to stop and run the batch as it is. Called in the decode loop."""

    def admit_run(self, state: BatchState, holds: Sequence[int]) -> int:
        """How many to add of a run of candidates, each of which makes the batch one larger and ``sharing`` one less.

        ``holds`` has an entry for each: the waiting requests that it would add to ``held``. Override it where a run can
        be decided faster than one by one.
        """
        for number, hold in enumerate(holds):
            if not self.admit(state):
                return number
            batch, delta, sharing, related, held, depth = state
            state = BatchState(batch + 1, delta, sharing - 1, related, held + hold, depth)
        return len(holds)

    def explain(self, state: BatchState, chunk_size: int) -> tuple[bool, str] | None:
        """What :meth:`admit` would answer, and why, in tokens of shared prefix; ``None``: that cannot be foreseen.

        For people. It must change nothing: it is called on one rank only.
        """
        return None

    @property
    def learns(self) -> bool:
        """Whether it wants to hear rewards. With several ranks all hear those that rank 0 measured."""
        return type(self).learn is not BatchingPolicy.learn

    @property
    def exploration_share(self) -> float:
        """Share of the intervals so far in which it tried something out. For metrics."""
        return 0.0

    def formed(self, interval: int, batch: int) -> None:
        """A plan is closed: ``batch`` requests are active, and the decode steps that follow belong to ``interval``.

        Of the decisions since the last call those were followed that added at ``state.batch < batch`` or stopped at
        ``state.batch == batch``; the engine refused the others. Called again with the same number after a pass that
        admitted nobody.
        """
        return

    def learn(self, interval: int, reward: float, seconds: float) -> None:
        """The decode throughput of an interval, in output tokens/s, prefill excluded, and how long it decoded.

        It comes late, possibly after decisions for later intervals, and never for an interval without a decode step.
        """
        return

    def snapshot(self) -> dict[str, Any]:
        """What was learned, as a copy that JSON can hold. Called in the decode loop."""
        return {}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what :meth:`snapshot` gave. Raises ``ValueError``, in one line, if it does not fit."""
        if data:
            raise ValueError(f"{type(self).__name__} learns nothing, so there is nothing to restore")


# A step reads the weights once, whatever the batch. Kept apart, a batch saves each of its requests but the first the
# reading of the shared prefix, and reads the weights again for those who were kept out. So it is worth that where
# requests x shared tokens are several times the tokens whose KV is as large as the weights.
_WORTH = 4


@mypyc_attr(allow_interpreted_subclasses=True)
class StaticPolicy(BatchingPolicy):
    """The paper's static heuristic: admit while little shared depth is lost, or while the batch is small.

    The defaults are the authors' own, rescaled from chunks of 50 tokens to ours of 64; see ``Settings``.
    """

    def __init__(self, settings: Settings, max_batch: int) -> None:
        self._tolerance = settings.depth_tolerance
        self._crowd = settings.crowd
        self._crowd_tolerance = settings.crowd_tolerance
        self._min_batch = settings.min_batch or default_min_batch(max_batch)
        # Of a batch whose shared depth is a chunk; the operator's own figure holds whatever the depth.
        weights = 0 if settings.min_batch else _WORTH * settings.weight_tokens // settings.chunk_size
        self._weights, self._max_batch = weights, max_batch

    def admit(self, state: BatchState) -> bool:
        """O(1)."""
        tolerance = self._crowd_tolerance if state.sharing >= self._crowd else self._tolerance
        # explain() says the same in words.
        if state.related and state.delta <= tolerance:
            return True
        if state.batch + state.held < self._worth_protecting(state.depth):
            return True  # too small, even when those who are held have joined
        # The batch's own followers come before strangers; and without shared depth there is nothing to protect.
        return not state.held and state.delta == 0

    def _worth_protecting(self, depth: int) -> int:
        """Requests from which on a batch that shares this depth is kept as it is."""
        if not depth:
            return self._min_batch
        return max(self._min_batch, min(self._max_batch, self._weights // depth))

    def explain(self, state: BatchState, chunk_size: int) -> tuple[bool, str]:
        """O(1)."""
        tolerance = self._crowd_tolerance if state.sharing >= self._crowd else self._tolerance
        given_up = f"at most {tolerance * chunk_size} are given up"
        if state.related and state.delta <= tolerance:
            return True, given_up
        enough = self._worth_protecting(state.depth)
        if state.batch + state.held < enough:
            return True, f"a batch of fewer than {enough} takes anybody"
        if state.held:
            return False, f"{state.held} that share its prefix join first, once it is computed"
        if not state.delta:
            return True, "there is nothing to lose"
        return False, given_up if state.related else "none are given up for a stranger"

    def admit_run(self, state: BatchState, holds: Sequence[int]) -> int:
        """O(1) for relatives that cost little depth whatever the crowd, which is what a run usually is."""
        if state.related and state.delta <= min(self._tolerance, self._crowd_tolerance):
            return len(holds)
        return super().admit_run(state, holds)


def default_min_batch(max_batch: int) -> int:
    """A quarter of the running slots, at least 8: the smallest batch that is ever worth protecting.

    Each step has a cost of its own, whatever the batch; a quarter keeps its share small and still leaves room for the
    paper's result (batches of 100 against mixed ones of 400 and more).
    """
    return max(8, max_batch // 4)
