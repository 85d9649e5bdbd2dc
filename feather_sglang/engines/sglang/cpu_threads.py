"""``SGLANG_CPU_OMP_THREADS_BIND`` without SGLang's CPU kernels: each rank's threads on its own cores.

SGLang reads the variable in ``srt/utils/numa_utils.py``, and acts on it only where a CPU build of sgl-kernel is there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"


def bind_threads(rank: int) -> None:
    """Keep this process's threads on the rank's cores, and torch at as many threads; nothing if the variable is unset.

    Raises:
        ValueError: the variable does not list cores, such as ``0-3,8|4-7``, for this rank.
    """
    import torch

    cores = rank_cores(os.environ.get(VARIABLE, ""), rank)
    if cores is None:
        return
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(task.name), cores)
    torch.set_num_threads(len(cores))


def rank_cores(setting: str, rank: int) -> set[int] | None:
    """The rank's cores in ``0-3,8|4-7``, one entry a rank; ``None`` for an empty setting or ``all``.

    Raises:
        ValueError: no such entry, or not numbers and ranges.
    """
    if setting in ("", "all"):
        return None
    entries = setting.split("|")
    try:
        cores: set[int] = set()
        for part in entries[rank].split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except (IndexError, ValueError):
        raise ValueError(f"{VARIABLE}={setting} names no cores for rank {rank}; expected 0-3,8|4-7, say") from None
    return cores
