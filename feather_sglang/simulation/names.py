"""From the name of a policy to its queue."""

from __future__ import annotations

import dataclasses

from feather_sglang.scheduling import Settings
from feather_sglang.simulation.cache import PrefixCache
from feather_sglang.simulation.feather import Feather
from feather_sglang.simulation.peers import DfsWeight, Fcfs, Lpm
from feather_sglang.simulation.queues import Queue

_PEERS = {"fcfs": Fcfs, "lpm": Lpm, "dfs-weight": DfsWeight}
_FEATHER = "feather-"
POLICIES = (*_PEERS, "feather-static", "feather-ucb", "feather-qlearning")


def make_queue(policy: str, cache: PrefixCache, settings: Settings, max_running: int, token_budget: int) -> Queue:
    """The queue of one of ``POLICIES``. Raises ``KeyError`` for another name."""
    if policy.startswith(_FEATHER):
        chosen = dataclasses.replace(settings, policy=policy.removeprefix(_FEATHER))
        return Feather(cache, chosen, max_running, token_budget)
    return _PEERS[policy](cache)
