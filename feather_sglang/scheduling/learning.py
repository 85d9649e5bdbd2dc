"""What the learned batching policies have in common: the decisions they take, their trials and their credit.

docs/policies.md says why it is done like this. Everything here is a function of the sequence of calls: no clock, no
chance, no set is iterated over, so the copies on all tensor parallel ranks stay the same.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from feather_sglang.scheduling.bins import Bins
from feather_sglang.scheduling.champion import Champion
from feather_sglang.scheduling.policy import BatchingPolicy, BatchState, StaticPolicy
from feather_sglang.scheduling.settings import Settings
from feather_sglang.scheduling.trials import Decision, Rate, Trials

STOP, ADD = 0, 1

# Intervals that wait for a reward. Rewards are a few steps late; more are pending only if nobody sends any.
_MAX_PENDING = 256
# So many decisions about strangers without a sign of sharing, and the traffic is taken to share nothing.
_SHARING_MEMORY = 256
# Of an action that is not the rule's so much must have been seen: the others of its batch count for it, too.
_EVIDENCE = 5
# A return is made of this many episodes, which must be enough to see what comes after a drained batch.
_STEPS = 8
# Intervals in which nothing new was decided that still belong to one episode.
_LONGEST_EPISODE = 16


class Arms:
    """What a cell knows: of each action (``STOP``, ``ADD``) its value in tokens/s and the weight of the evidence."""

    __slots__ = ("value", "weight")

    def __init__(self, value: Sequence[float] = (0.0, 0.0), weight: Sequence[float] = (0.0, 0.0)) -> None:
        self.value = list(value)
        self.weight = list(weight)

    def best(self, preferred: int, min_gain: float) -> int:
        """``preferred``, unless the other action is known to be better by more than the share ``min_gain``."""
        other = 1 - preferred
        if not self.weight[preferred] or self.weight[other] < _EVIDENCE:
            return preferred
        return other if self.value[other] > self.value[preferred] * (1 + min_gain) else preferred

    def highest(self) -> float:
        """The value of the better known action; 0 if none is known."""
        return max(value if weight else 0.0 for value, weight in zip(self.value, self.weight, strict=True))


# All that is learned: cells, and thresholds.
Table = tuple[dict[int, Arms], list[float | None]]


class Episode:
    """Decisions that formed a batch, and the throughput until something else was decided."""

    __slots__ = ("decisions", "intervals", "rate")

    def __init__(self, decisions: dict[Decision, bool]) -> None:
        #: To whether it was taken on trial, in the order in which they were taken.
        self.decisions = decisions
        self.rate = Rate()
        self.intervals = 0

    def add(self, reward: float, seconds: float) -> None:
        """One more interval, in tokens/s."""
        self.intervals += 1
        self.rate.add(reward, seconds)


class LearnedPolicy(BatchingPolicy):
    """Decides where the static rule may be wrong, and learns from the throughput that came of it.

    Left to :class:`StaticPolicy`: relatives that cost no depth (they always join), strangers while the batch's own
    followers are held, strangers where nothing in the traffic is shared, and every cell in which not both actions had
    been seen when the champion's window began. With ``settings.freeze`` nothing is tried out and nothing learned.
    """

    #: Name in settings and in state files.
    name: str

    def __init__(self, settings: Settings, max_batch: int) -> None:
        self.freeze = settings.freeze
        self.bins = Bins.of(settings)
        #: What is learned; what decides is the copy that the champion has in force.
        self.cells: dict[int, Arms] = {}
        #: Counters, for metrics: decisions looked up, intervals, bad rewards.
        self.decisions = self.intervals = self.ignored_rewards = 0
        self._static = StaticPolicy(settings, max_batch)
        self._min_gain = settings.min_gain
        self._discount = settings.discount
        self.trials = Trials(0.0 if settings.freeze else settings.exploration, max_batch, settings.confidence_width)
        # Decisions
        self._shared = 0  # decisions about strangers left until the traffic is taken to share nothing
        self._chosen: dict[int, int] = {}  # cell -> action, for the rest of the interval
        self._taken: dict[Decision, tuple[int, bool]] = {}  # since the last formed(): -> batch, on trial
        self._interval = -1
        self._followed: dict[Decision, bool] = {}  # in this interval -> on trial
        self._pending: deque[tuple[int, dict[Decision, bool]]] = deque(maxlen=_MAX_PENDING)  # followed, no reward yet
        self._episodes: deque[Episode] = deque()  # rewarded, return not complete
        self._champion: Champion[Table] = Champion(_copy, (self.cells, self.trials.rule))

    @property
    def exploration_share(self) -> float:
        """Intervals on trial, of all so far."""
        return self.trials.intervals / self.intervals if self.intervals else 0.0

    # --------------------------------------------------------------- deciding

    def admit(self, state: BatchState) -> bool:
        """O(log edges of the bins)."""
        batch, delta, sharing, related, held, _ = state
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
        trial = self.trials.running
        on_trial = trial is not None and trial.related == related
        if trial is not None and on_trial:
            action = self._by_threshold(trial.threshold, state)
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
        preferred = self._by_threshold(self.trials.rule[state.related], state)
        self.decisions += 1
        self.trials.begin(state.related, self._interval)
        arms = self._champion.in_force[0].get(cell)
        action = preferred if arms is None else arms.best(preferred, self._min_gain)
        self._chosen[cell] = action
        return action

    def _by_threshold(self, threshold: float | None, state: BatchState) -> int:
        """Add below it; ``None`` stands for the static rule."""
        if threshold is None:
            return int(self._static.admit(state))
        return ADD if state.batch + state.held < threshold else STOP

    # --------------------------------------------------------------- learning

    def formed(self, interval: int, batch: int) -> None:
        """O(cells in which the plan decided)."""
        if interval != self._interval:
            self.intervals += 1
            if self.trials.interval_over(self._followed.keys()):
                self._new_rule()
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

    def learn(self, interval: int, reward: float, seconds: float) -> None:
        """O(cells decided in since the last one). The credit is given when the return is complete, episodes later."""
        if not (math.isfinite(reward) and reward > 0 and math.isfinite(seconds) and seconds > 0):
            self.ignored_rewards += 1
            return
        decisions: dict[Decision, bool] = {}
        while self._pending and self._pending[0][0] <= interval:
            decisions.update(self._pending.popleft()[1])
        if self.freeze:
            return
        self._judge(interval, reward, seconds)
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
            last.add(reward, seconds)

    def _close(self, following: int) -> None:
        """Credit the oldest episode with its return; ``following`` is the cell in which the next one begins."""
        total, left = 0.0, 1.0
        for episode in self._episodes:
            total += left * (1 - self._discount) * episode.rate.mean()
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

    # ------------------------------------------------------- the whole table

    def _judge(self, interval: int, reward: float, seconds: float) -> None:
        """What the whole table brings, or the trial; learning goes back to the best table if that is much better."""
        on_trial = self.trials.running is not None
        if self.trials.heard(interval, reward, seconds):
            self._champion.forget()
        if on_trial:
            return
        back = self._champion.hear(reward, seconds, (self.cells, self.trials.rule))
        if self._champion.changed:
            self.trials.be_eager()
        if back is not None:
            self.cells, rule = back
            self.trials.go_back(rule)
            self._episodes.clear()

    def _new_rule(self) -> None:
        """What the cells knew was under another rule."""
        self.cells = {}
        self._episodes.clear()
        self._champion.put_in_force((self.cells, self.trials.rule))

    # ---------------------------------------------------------------- storing

    def snapshot(self) -> dict[str, Any]:
        """The best table so far, which is not always the present one. O(cells visited)."""
        table = self._champion.table
        best, rule = (self.cells, self.trials.rule) if table is None else table
        cells = [[cell, *arms.value, *arms.weight] for cell, arms in best.items()]
        return {"policy": self.name, "bins": self.bins.describe(), "thresholds": list(rule), "cells": cells}

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
        thresholds = data.get("thresholds")
        if not (
            isinstance(thresholds, list)
            and len(thresholds) == 2
            and all(each is None or (type(each) in (int, float) and math.isfinite(each)) for each in thresholds)
        ):
            raise ValueError(f"it holds {thresholds!r} where two thresholds were expected")
        self.cells = cells
        self.trials.go_back(list(thresholds))
        self._champion.forget()
        self._champion.put_in_force((self.cells, self.trials.rule))
        self._episodes.clear()


def _copy(table: Table) -> Table:
    cells, rule = table
    return {cell: Arms(arms.value, arms.weight) for cell, arms in cells.items()}, list(rule)
