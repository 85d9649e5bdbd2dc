"""What the learned batching policies have in common: the decisions they take, their trials and their credit.

docs/policies.md says why it is done like this. Everything here is a function of the sequence of calls: no clock, no
chance, no set is iterated over, so the copies on all tensor parallel ranks stay the same.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import KeysView, Mapping, Sequence
from typing import Any, NamedTuple

from feather_sglang.scheduling.bins import Bins
from feather_sglang.scheduling.policy import BatchingPolicy, BatchState, StaticPolicy
from feather_sglang.scheduling.settings import Settings

STOP, ADD = 0, 1
# A decision: its cell and its action.
Decision = tuple[int, int]

# Intervals that wait for a reward. Rewards are a few steps late; more are pending only if nobody sends any.
_MAX_PENDING = 256
# So many decisions about strangers without a sign of sharing, and the traffic is taken to share nothing.
_SHARING_MEMORY = 256
# A return is made of this many episodes, which must be enough to see what comes after a drained batch.
_STEPS = 8
# Intervals in which nothing new was decided that still belong to one episode.
_LONGEST_EPISODE = 16

# Batch sizes that trials use as thresholds, relative to the one they start from.
_THRESHOLDS = (0.5, 0.25, 2.0, 0.125, 1.01, 4.0)
_TRIAL_EPISODES = 10
_TRIAL_INTERVALS = 200
_MAX_EXTENSIONS = 20
_EXTENSION_GAIN = 1.05
_MAX_PATIENCE = 64
_SURPRISE = 0.25


class Arms:
    """What a cell knows: of each action (``STOP``, ``ADD``) its value in tokens/s and the weight of the evidence."""

    __slots__ = ("value", "weight")

    def __init__(self, value: Sequence[float] = (0.0, 0.0), weight: Sequence[float] = (0.0, 0.0)) -> None:
        self.value = list(value)
        self.weight = list(weight)

    def best(self, preferred: int, min_gain: float) -> int:
        """``preferred``, unless the other action is known to be better by more than the share ``min_gain``."""
        other = 1 - preferred
        if not (self.weight[preferred] and self.weight[other]):
            return preferred
        return other if self.value[other] > self.value[preferred] * (1 + min_gain) else preferred

    def highest(self) -> float:
        """The value of the better known action; 0 if none is known."""
        return max(value if weight else 0.0 for value, weight in zip(self.value, self.weight, strict=True))


class Episode:
    """Decisions that formed a batch, and the mean reward of the intervals until something else was decided."""

    __slots__ = ("decisions", "intervals", "reward")

    def __init__(self, decisions: dict[Decision, bool]) -> None:
        #: To whether it was taken on trial, in the order in which they were taken.
        self.decisions = decisions
        self.reward = 0.0
        self.intervals = 0

    def add(self, reward: float) -> None:
        """One more interval, in tokens/s."""
        self.intervals += 1
        self.reward += (reward - self.reward) / self.intervals


class Trial(NamedTuple):
    """While it lasts, the batch takes those of one kind below a threshold and none from there on."""

    #: Whether it is about relatives that cost depth, or about strangers.
    related: bool
    #: Requests, those held included.
    threshold: float
    #: First interval that may show what it brings.
    start: int


class LearnedPolicy(BatchingPolicy):
    """Decides where the static rule may be wrong, and learns from the throughput that came of it.

    Left to :class:`StaticPolicy`: relatives that cost no depth (they always join), strangers while the batch's own
    followers are held, strangers where nothing in the traffic is shared, and every cell in which not both actions have
    been seen. With ``settings.freeze`` nothing is tried out and nothing learned.
    """

    #: Name in settings and in state files.
    name: str

    def __init__(self, settings: Settings, max_batch: int) -> None:
        self.freeze = settings.freeze
        self.bins = Bins.of(settings)
        self.cells: dict[int, Arms] = {}
        #: Counters, for metrics: decisions looked up, intervals, those of them on trial, trials, bad rewards.
        self.decisions = self.intervals = self.trial_intervals = self.trials = self.ignored_rewards = 0
        self._static = StaticPolicy(settings, max_batch)
        self._min_gain = settings.min_gain
        self._discount = settings.discount
        self._spacing = 1 / settings.exploration if settings.exploration else 0.0
        # Decisions
        self._shared = 0  # decisions about strangers left until the traffic is taken to share nothing
        self._chosen: dict[int, int] = {}  # cell -> action, for the rest of the interval
        self._taken: dict[Decision, tuple[int, bool]] = {}  # since the last formed(): -> batch, on trial
        self._interval = -1
        self._followed: dict[Decision, bool] = {}  # in this interval -> on trial
        self._pending: deque[tuple[int, dict[Decision, bool]]] = deque(maxlen=_MAX_PENDING)  # followed, no reward yet
        self._episodes: deque[Episode] = deque()  # rewarded, return not complete
        # Trials
        self._trial: Trial | None = None
        self._length = 0  # intervals of the trial, or of its last extension
        self._changes = 0  # how often the decisions of its intervals changed
        self._extensions = 0
        self._last: KeysView[Decision] = {}.keys()
        self._rest = 0.0  # intervals until another one may start
        self._patience = 1  # factor of that; grows while trials bring nothing
        self._usual = self._past = self._on_trial = 0.0  # means of the reward: recent, long, of the trial
        self._rewards = 0

    # --------------------------------------------------------------- deciding

    def admit(self, state: BatchState) -> bool:
        """O(log edges of the bins)."""
        batch, delta, sharing, related, held = state
        if related or delta:
            self._shared = _SHARING_MEMORY
            if not delta:
                return True
        elif self._shared:
            self._shared -= 1
        if not related and (held or not self._shared):
            return self._static.admit(state)
        # Those who are held join whatever is decided, so they count.
        cell = self.bins.cell(batch + held, delta, sharing)
        action = self._chosen.get(cell)
        if action is None:
            action = self._choose(cell, state)
        on_trial = self._trial is not None and self._trial.related == related
        if self._trial is not None and on_trial:
            action = ADD if batch + held < self._trial.threshold else STOP
        # Of several adds in one cell the first counts, of several stops the last.
        if action == STOP or (cell, ADD) not in self._taken:
            self._taken[cell, action] = (batch, on_trial)
        return action == ADD

    def admit_run(self, state: BatchState, holds: Sequence[int]) -> int:
        """O(1) for relatives that cost no depth."""
        if state.related and not state.delta:
            self._shared = _SHARING_MEMORY
            return len(holds)
        return super().admit_run(state, holds)

    def _choose(self, cell: int, state: BatchState) -> int:
        preferred = int(self._static.admit(state))
        self.decisions += 1
        arms = self.cells.get(cell)
        best = preferred if arms is None else arms.best(preferred, self._min_gain)
        if arms is not None and self._trial is None and self._spacing and not self.freeze and self._rest <= 0:
            self._start_trial(arms, best, state)
        self._chosen[cell] = best
        return best

    # --------------------------------------------------------------- learning

    def formed(self, interval: int, batch: int) -> None:
        """O(cells in which the plan decided)."""
        if interval != self._interval:
            self._count_interval(self._followed.keys())
            self._interval = interval
            self._followed = {}
            self._chosen = {}
        new = {}
        for decision, (at, on_trial) in self._taken.items():
            if (at == batch if decision[1] == STOP else at < batch) and decision not in self._followed:
                new[decision] = on_trial
        self._taken = {}
        if new:
            self._followed.update(new)
            self._pending.append((interval, new))

    def learn(self, interval: int, reward: float) -> None:
        """O(cells decided in since the last one). The credit is given when the return is complete, episodes later."""
        if not (math.isfinite(reward) and reward > 0):
            self.ignored_rewards += 1
            return
        decisions: dict[Decision, bool] = {}
        while self._pending and self._pending[0][0] <= interval:
            decisions.update(self._pending.popleft()[1])
        if self.freeze:
            return
        self._compare(interval, reward)
        last = self._episodes[-1] if self._episodes else None
        if decisions and not (last and decisions.keys() <= last.decisions.keys() and last.intervals < _LONGEST_EPISODE):
            # What a trial brings says nothing about the decisions before it.
            cut = any(decisions.values()) and last is not None and not any(last.decisions.values())
            cell = next(iter(decisions))[0]
            while self._episodes and (cut or len(self._episodes) >= _STEPS):
                self._close(cell)
            last = Episode(decisions)
            self._episodes.append(last)
        if last is not None:
            last.add(reward)

    def _close(self, following: int) -> None:
        """Credit the oldest episode with its return; ``following`` is the cell in which the next one begins."""
        total, left = 0.0, 1.0
        for episode in self._episodes:
            total += left * (1 - self._discount) * episode.reward
            left *= self._discount
        episode = self._episodes.popleft()
        # What is beyond the last episode is taken to be as good as what is known: a mean in tokens/s all in all.
        beyond = self._beyond(following) or total / (1 - left)
        for cell, action in episode.decisions:
            arms = self.cells.get(cell)
            if arms is None:
                arms = self.cells[cell] = Arms()
            self._credit(arms, action, total + left * beyond)

    def _beyond(self, cell: int) -> float:
        """The value in tokens/s of what follows, seen from this cell; 0: unknown."""
        return 0.0

    @abstractmethod
    def _credit(self, arms: Arms, action: int, value: float) -> None:
        """Learn that ``action`` brought ``value`` tokens/s."""

    # ----------------------------------------------------------------- trials

    def _start_trial(self, arms: Arms, best: int, state: BatchState) -> None:
        size = state.batch + state.held
        for _ in _THRESHOLDS:
            threshold = size * _THRESHOLDS[self.trials % len(_THRESHOLDS)]
            self.trials += 1
            if best == (ADD if size < threshold else STOP) or self._worth_trying(arms, 1 - best):
                self._trial = Trial(state.related, threshold, self._interval + 1)
                self._length = self._changes = self._extensions = 0
                self._last = {}.keys()
                self._on_trial = self._usual
                return

    def _worth_trying(self, arms: Arms, action: int) -> bool:
        """Whether a trial may begin with an action that is not thought best."""
        return True

    def _count_interval(self, decisions: KeysView[Decision]) -> None:
        """An interval is over."""
        self.intervals += 1
        if self._trial is None:
            self._rest = max(0.0, self._rest - 1)
            return
        self.trial_intervals += 1
        self._length += 1
        if decisions and decisions != self._last:
            self._changes += 1
            self._last = decisions
        if self._changes < _TRIAL_EPISODES and self._length < _TRIAL_INTERVALS:
            return
        if self._extensions < _MAX_EXTENSIONS and self._on_trial > self._usual * _EXTENSION_GAIN:
            self._extensions += 1  # no cost, so go on and make sure of it
            self._changes = self._length = 0
            self._patience = 1
            return
        self._trial = None
        self._rest = (self._spacing - 1) * self._length * self._patience
        if self.trials % len(_THRESHOLDS) == 0:
            self._patience = min(_MAX_PATIENCE, 4 * self._patience)

    def _compare(self, interval: int, reward: float) -> None:
        """Keep the means that tell whether a trial pays, and whether the traffic has changed."""
        if self._trial is not None:
            if interval >= self._trial.start:
                self._on_trial += (reward - self._on_trial) * 0.05
            return
        self._rewards += 1
        self._usual += (reward - self._usual) * max(0.02, 1 / self._rewards)
        self._past += (reward - self._past) * max(0.002, 1 / self._rewards)
        if abs(self._usual - self._past) > _SURPRISE * self._past:
            self._past = self._usual
            self._rest /= self._patience
            self._patience = 1

    # ---------------------------------------------------------------- storing

    def snapshot(self) -> dict[str, Any]:
        """O(cells visited)."""
        cells = [[cell, *arms.value, *arms.weight] for cell, arms in self.cells.items()]
        return {"policy": self.name, "bins": self.bins.describe(), "cells": cells}

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take the cells over; trials and returns that were under way begin anew."""
        if data.get("policy") != self.name:
            raise ValueError(f"it is of policy {data.get('policy')!r}, not {self.name!r}")
        if data.get("bins") != self.bins.describe():
            raise ValueError(f"it has the bins {data.get('bins')}, not {self.bins.describe()}")
        cells: dict[int, Arms] = {}
        rows = data.get("cells")
        for row in rows if isinstance(rows, list) else [rows]:
            if not (
                isinstance(row, list)
                and len(row) == 5
                and all(type(each) in (int, float) and math.isfinite(each) and each >= 0 for each in row)
                and type(row[0]) is int
                and row[0] < len(self.bins)
            ):
                raise ValueError(f"it holds {row!r} where a cell was expected")
            cells[row[0]] = Arms([float(each) for each in row[1:3]], [float(each) for each in row[3:]])
        self.cells = cells
        self._episodes.clear()
        self._trial = None
