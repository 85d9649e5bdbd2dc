"""Trials: a learned policy lets a threshold on the batch size decide for a while, to see what that brings.

Single decisions find nothing here: one stop does not drain a batch, and one add only spoils it. A threshold that is in
force for some batches shows its effect, and one that proves itself becomes the rule that cells start from.
"""

from __future__ import annotations

import math
from collections.abc import KeysView
from typing import NamedTuple

# A decision: its cell and its action.
Decision = tuple[int, int]

# What a trial's first intervals bring is still the batch from before: so many changes of decision, or intervals.
_SETTLING, _SETTLING_INTERVALS = 3, 25
# A round of a trial is over after so many changes of decision since, or intervals in all.
_CHANGES, _INTERVALS = 10, 120
# Fewer rewards than this say nothing.
_REWARDS = 6
# A trial ends early at these shares of the usual throughput, the second one after a single reward. Above the third it
# goes on for some rounds before it becomes the rule, since one batch differs much from the next.
_BAD, _VERY_BAD, _GOOD = 0.85, 0.6, 1.04
_ROUNDS = 4
# Intervals before the first trial, without which the usual throughput is not known.
_WARM_UP = 40
_MAX_PATIENCE = 64
# The usual throughput has moved by this share: the traffic has changed.
_SURPRISE = 0.3
# What an arm showed counts less with every trial of its kind.
_KEEP = 0.9


class Trial(NamedTuple):
    """While it lasts, the batch takes those of one kind below a threshold and none from there on."""

    #: Whether it is about relatives that cost depth, or about strangers.
    related: bool
    #: Which of the thresholds.
    arm: int
    #: Requests, those held included; ``None``: what the static rule says.
    threshold: float | None
    #: First interval that may show what it brings.
    start: int


class Rate:
    """Output tokens/s over a memory of some intervals, each weighted by its seconds."""

    __slots__ = ("keep", "seconds", "tokens")

    def __init__(self, keep: float = 1.0) -> None:
        self.keep = keep
        self.tokens = self.seconds = 0.0

    def add(self, reward: float, seconds: float) -> None:
        """One more interval."""
        self.tokens = self.keep * self.tokens + reward * seconds
        self.seconds = self.keep * self.seconds + seconds

    def mean(self) -> float:
        """0 before the first interval."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Trials:
    """Which threshold to try when, within a bounded share of the decode time.

    A bandit with an arm for each threshold; what an arm shows is its throughput as a multiple of the present rule's, so
    that a change of load does not favour those tried last.

    Args:
        exploration: the largest share of the time on trial.
        max_batch: the engine's running slots.
        width: of an arm's confidence bound after one trial.
    """

    def __init__(self, exploration: float, max_batch: int, width: float) -> None:
        self._spacing = 1 / exploration if exploration else 0.0
        self._width = width
        ladder = [float(2**power) for power in range(1, max_batch.bit_length()) if 2**power < max_batch]
        ladder.append(max_batch + 1.0)  # everybody
        self._arms: list[float | None] = [*ladder[::2], *ladder[1::2], None]  # None: the static rule
        #: The rule: thresholds for strangers, and for relatives that cost depth; ``None``: the static rule.
        self.rule: list[float | None] = [None, None]
        self.running: Trial | None = None
        #: For metrics.
        self.begun = self.intervals = 0
        self._usual, self._past, self._here = Rate(0.99), Rate(0.998), Rate()
        self._heard = 0
        self._rest_s = 0.0  # decode seconds until another one may start
        self._patience = 1  # factor of that; grows while trials bring nothing
        self._in_vain = 0  # trials since one paid
        self._last_arm = -1
        # Of the trial under way
        self._last: KeysView[Decision] = {}.keys()
        self._rounds = 0
        self._spent_s = self._longest_s = 0.0
        self._settled = False
        self._round_length = self._changes = self._rewards = 0
        self._forget_arms()

    def _forget_arms(self) -> None:
        self._gain = [[1.0] * len(self._arms) for _ in range(2)]
        self._weight = [[0.0] * len(self._arms) for _ in range(2)]

    # ----------------------------------------------------------------- events

    def begin(self, related: bool, interval: int) -> None:
        """A decision about this kind is due: start a trial if the budget allows. O(arms), and seldom."""
        if self.running is not None or self._rest_s > 0 or self._heard < _WARM_UP or not self._spacing:
            return
        arm = self._next_arm(related)
        if arm is None:
            self._rest_s = self._longest_s * self._patience
            self._weight = [[weight * _KEEP for weight in row] for row in self._weight]
            self._fruitless()
            return
        self._last_arm = arm
        self.begun += 1
        self.running = Trial(related, arm, self._arms[arm], interval + 1)
        self._rounds, self._spent_s = 0, 0.0
        self._last = {}.keys()
        self._settled = False
        self._here, self._rewards = Rate(), 0
        self._round_length = self._changes = 0

    def interval_over(self, decisions: KeysView[Decision]) -> bool:
        """An interval in which these decisions were followed is over; whether the rule has changed."""
        if self.running is None:
            return False
        self.intervals += 1
        self._round_length += 1
        if decisions and decisions != self._last:
            self._changes += 1
            self._last = decisions
        if not self._settled:
            self._settled = self._changes >= _SETTLING or self._round_length >= _SETTLING_INTERVALS
            if self._settled:
                self._changes = 0
            return False
        if not self._rewards:
            return self._end(self.running, 1.0) if self._round_length >= 2 * _INTERVALS else False
        gain = self._here.mean() / self._usual.mean()
        full = self._changes >= _CHANGES or self._round_length >= _INTERVALS
        if gain < _VERY_BAD or (self._rewards >= _REWARDS and (gain < _BAD or full)):
            return self._judge(self.running, gain)
        return False

    def heard(self, interval: int, reward: float, seconds: float) -> bool:
        """A reward has come; whether the traffic has changed."""
        if self.running is not None:
            self._spent_s += seconds
            if self._settled and interval >= self.running.start:
                self._rewards += 1
                self._here.add(reward, seconds)
            return False
        self._heard += 1
        self._rest_s -= seconds
        self._usual.add(reward, seconds)
        self._past.add(reward, seconds)
        past = self._past.mean()
        if self._heard < 2 * _WARM_UP or abs(self._usual.mean() - past) <= _SURPRISE * past:
            return False
        self._as_usual(self._usual)
        return True

    def go_back(self, rule: list[float | None]) -> None:
        """Another rule is in force from now on."""
        ladder = [threshold for threshold in self._arms if threshold is not None]
        # It may come from a server with other slots.
        self.rule = [None if each is None else min(ladder, key=lambda arm: abs(arm - each)) for each in rule]
        self.running = None
        self._forget_arms()

    def be_eager(self) -> None:
        """That trials have brought nothing up to now says nothing any more."""
        self._rest_s /= self._patience
        self._patience, self._in_vain = 1, 0

    # ---------------------------------------------------------------- inside

    def _next_arm(self, related: bool) -> int | None:
        """Those never tried first, then the one with the highest bound; ``None``: all are known to be worse."""
        present = self._arms.index(self.rule[related])
        # Beginning behind the last one, so that a reset of what is known doesn't bring the same few again and again.
        order = [(self._last_arm + step) % len(self._arms) for step in range(1, 1 + len(self._arms))]
        others = [arm for arm in order if arm != present]
        weight, gain = self._weight[related], self._gain[related]
        for arm in others:
            if not weight[arm]:
                return arm
        total = math.log(max(math.e, sum(weight)))
        bounds = {arm: gain[arm] + self._width * math.sqrt(total / weight[arm]) for arm in others}
        best = max(others, key=bounds.__getitem__)
        return best if bounds[best] > _GOOD else None

    def _judge(self, trial: Trial, gain: float) -> bool:
        """A round is over, or the trial is too bad to go on; whether its threshold is the rule now."""
        if gain <= _GOOD:
            return self._end(trial, gain)
        self._rounds += 1  # no cost, so go on and make sure of it
        if self._rounds < _ROUNDS:
            self._round_length = self._changes = 0
            return False
        self.rule[trial.related] = trial.threshold
        self._forget_arms()
        self._as_usual(self._here)
        self._rest_s = 0.0
        self.running = None
        return True

    def _end(self, trial: Trial, gain: float) -> bool:
        """Nothing comes of it but what is known of its arm now."""
        weight, gains = self._weight[trial.related], self._gain[trial.related]
        weight[:] = [each * _KEEP for each in weight]
        weight[trial.arm] += 1
        gains[trial.arm] += (gain - gains[trial.arm]) / weight[trial.arm]
        self.running = None
        self._rest_s = (self._spacing - 1) * self._spent_s * self._patience
        self._longest_s = max(self._longest_s, self._spent_s)
        self._fruitless()
        return False

    def _fruitless(self) -> None:
        self._in_vain += 1
        if self._in_vain % len(self._arms) == 0:
            self._patience = min(_MAX_PATIENCE, 4 * self._patience)

    def _as_usual(self, rate: Rate) -> None:
        """From now on this is the usual throughput, and whatever the thresholds showed is to be seen anew."""
        mean = rate.mean()
        for each in (self._usual, self._past):
            each.tokens, each.seconds = mean * rate.seconds, rate.seconds
        self._heard = 0
        self.be_eager()
        self._weight = [[0.0 for _ in row] for row in self._weight]
