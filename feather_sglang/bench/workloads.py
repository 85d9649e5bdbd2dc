"""What ``feather-sglang bench serving`` drives servers with, by name."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from feather_sglang.bench import locality, serving
from feather_sglang.bench.serving import Setting, Workload
from feather_sglang.bench.stream import Stream
from feather_sglang.simulation import workload as simulated
from feather_sglang.simulation.scenarios import grouped
from feather_sglang.simulation.traces import MOONCAKE_BLOCK

NAMES = ("locality", "kv-pressure", "no-sharing", "mixed")


def make(name: str, **sizes: Any) -> Setting:
    """One of ``NAMES``, with other sizes where fields of ``Workload`` are given. Raises ``KeyError``."""
    if name == "locality":
        return locality.make(name, replace(locality.MAIN, **sizes), locality.MAIN_SLOTS)
    workload = {
        "kv-pressure": Workload(),
        "no-sharing": Workload(groups=320, per_group=1),
        "mixed": Workload(groups=16, rate=16),
    }[name]
    workload = replace(workload, **sizes)
    return Setting(name, (_mixed(workload) if name == "mixed" else workload,), flags=serving.KV_PRESSURE)


def _mixed(workload: Workload) -> Stream:
    """As many strangers as there are members of groups, of their lengths, in one stream."""
    sizes = [workload.per_group] * workload.groups + [1] * workload.requests
    asks = grouped(
        sizes,
        workload.prefix_tokens,
        workload.suffix_tokens,
        workload.output_tokens,
        random.Random(workload.seed),
        workload.rate,
    )
    about = (
        f"{workload.groups} groups of {workload.per_group} and {workload.requests} strangers, "
        f"{workload.prefix_tokens} + {workload.suffix_tokens} prompt tokens, {workload.output_tokens} output tokens"
    )
    return Stream(simulated.build("mixed", about, asks), workload.arrivals)


def traced(recorded: simulated.Workload, block_tokens: int, speedup: float) -> Setting:
    """A recorded trace; each block of 512 tokens becomes one of ``block_tokens``, and outputs shrink likewise."""
    arrivals = "as recorded" if speedup == 1 else f"{speedup:g} x as fast"
    stream = Stream(recorded, arrivals, block_tokens / MOONCAKE_BLOCK)
    return Setting("trace", (stream,), cpu_flags=serving.CPU_FLAGS)
