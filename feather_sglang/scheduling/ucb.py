"""Contextual bandit with upper confidence bounds (paper, Part B), discounted.

The discount is that of Garivier and Moulines, "On Upper-Confidence Bound Policies for Switching Bandit Problems":
evidence loses weight with every visit of its cell, so what has not been tried for long looks promising again.
"""

from __future__ import annotations

from feather_sglang.scheduling.learning import Arms, LearnedPolicy
from feather_sglang.scheduling.settings import Settings


class UCBPolicy(LearnedPolicy):
    """Values are discounted means of returns; trials deviate only where the upper confidence bound says so."""

    name = "ucb"

    def __init__(self, settings: Settings, max_batch: int) -> None:
        super().__init__(settings, max_batch)
        self._keep = 1 - 1 / settings.memory

    def _credit(self, arms: Arms, action: int, value: float) -> None:
        arms.weight = [weight * self._keep for weight in arms.weight]
        arms.weight[action] += 1
        arms.value[action] += (value - arms.value[action]) / arms.weight[action]
