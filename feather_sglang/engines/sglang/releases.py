"""SGLang's releases, and the few shapes of SGLang's that changed between them. What the hooks need is in ``hooks``."""

from __future__ import annotations

import importlib.metadata
from typing import Any

#: Releases whose source Feather was checked against (``scripts/compat.sh``), oldest first: from the first with a plugin
#: system on, all of them.
RELEASES = (
    "0.5.11",
    "0.5.12",
    "0.5.12.post1",
    "0.5.13",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15",
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
OLDEST, NEWEST = RELEASES[0], RELEASES[-1]
SUPPORTED = f"{OLDEST} to {NEWEST}"
#: Some benchmarks build SGLang's objects themselves, as one release does.
NEEDS_NEWEST = f"this measures with SGLang {NEWEST} alone; run: pip install sglang=={NEWEST}"


def installed() -> str:
    """The version of the installed SGLang."""
    return importlib.metadata.version("sglang")


def is_newest() -> bool:
    """Whether the installed SGLang is ``NEWEST``."""
    return installed() == NEWEST


def within(release: str, since: str, until: str) -> bool:
    """Whether a release is one of those from ``since`` to ``until``. Raises ``ValueError`` for an unknown release."""
    return RELEASES.index(since) <= RELEASES.index(release) <= RELEASES.index(until)


def parallel(scheduler: Any) -> Any:
    """What has ``tp_rank``, ``tp_size`` and ``dp_rank`` of this scheduler process."""
    if hasattr(scheduler, "tp_rank"):
        return scheduler  # to 0.5.12.post1
    if hasattr(scheduler, "ps"):
        return scheduler.ps  # 0.5.13 to 0.5.20
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def prefix_len(req: Any) -> int:
    """Tokens of a request whose KV is cached or computed; to 0.5.21 the length of a tensor of slots."""
    length: int | None = getattr(req, "prefix_len", None)
    return len(req.prefix_indices) if length is None else length
