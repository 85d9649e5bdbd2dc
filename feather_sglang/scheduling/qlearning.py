"""Tabular n-step Q-learning (paper, Part B)."""

from __future__ import annotations

from feather_sglang.scheduling.learning import Arms, LearnedPolicy
from feather_sglang.scheduling.settings import Settings


class QLearningPolicy(LearnedPolicy):
    """Values move towards n-step returns that end in the value of the better action of the cell that follows."""

    name = "qlearning"

    def __init__(self, settings: Settings, max_batch: int) -> None:
        super().__init__(settings, max_batch)
        self._rate = settings.learning_rate

    def _credit(self, arms: Arms, action: int, value: float) -> None:
        arms.weight[action] += 1  # visits
        arms.value[action] += (value - arms.value[action]) * max(self._rate, 1 / arms.weight[action])

    def _beyond(self, cell: int) -> float:
        arms = self.cells.get(cell)
        return 0.0 if arms is None else arms.highest()
