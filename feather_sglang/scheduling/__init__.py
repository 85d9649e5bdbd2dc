"""Layer 2, engine-neutral scheduling: who waits, who runs, whom to admit next and when to stop."""

from feather_sglang.scheduling.policy import BatchingPolicy, BatchState, StaticPolicy
from feather_sglang.scheduling.scheduler import FeatherScheduler, Plan, Stop
from feather_sglang.scheduling.settings import Settings, SettingsError

__all__ = [
    "BatchState",
    "BatchingPolicy",
    "FeatherScheduler",
    "Plan",
    "Settings",
    "SettingsError",
    "StaticPolicy",
    "Stop",
]
