"""What a scheduling policy is to the simulated engine: a queue that says who comes next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from feather_sglang.simulation.cache import PrefixCache
from feather_sglang.simulation.job import Job


@dataclass
class Work:
    """What a policy has done, for the cost of its passes."""

    passes: int = 0
    #: Waiting requests that were matched against the cache, and the prompt tokens matched.
    matched: int = 0
    matched_tokens: int = 0
    admitted: int = 0
    arrived: int = 0
    arrived_tokens: int = 0
    left: int = 0


class Queue(ABC):
    """The waiting requests, under a policy.

    Args:
        cache: the engine's.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.work = Work()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def add(self, job: Job) -> None:
        """A request arrives, or is retracted: it waits."""

    @abstractmethod
    def candidates(self, slots: int) -> Sequence[Job]:
        """A pass: whom to offer, in this order. ``slots`` more fit into the batch."""

    @abstractmethod
    def admitted(self, jobs: Sequence[Job]) -> None:
        """The end of that pass: these of the candidates, the first so many, were admitted."""

    # What only a policy that keeps a picture of the batch wants to know:

    def skip(self, passes: int) -> int:
        """How many of the next passes would admit nobody, if nothing happens; they count as done."""
        return passes

    def begin(self, now_s: float) -> None:
        """A pass begins, whether or not it asks for candidates."""
        return

    def end(self, prefill: bool, tokens: int) -> None:
        """The pass is over: a prefill follows, or decode steps that make so many tokens until the next pass."""
        return

    def progress(self, job: Job) -> None:
        """More of a prompt is computed and cached."""
        return

    def left(self, job: Job) -> None:
        """A request is done."""
        return
