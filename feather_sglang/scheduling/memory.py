"""What each batching policy has learned, for when it is in charge again, and whose the state file is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from feather_sglang.scheduling.policy import BatchingPolicy
from feather_sglang.scheduling.state_file import StateFile

logger = logging.getLogger(__name__)


class Memory:
    """One state file holds what one policy has learned, and no other may write there.

    Args:
        file: ``None``: nothing is stored.
    """

    def __init__(self, file: StateFile | None) -> None:
        self._file = file
        self._owner: str | None = None  # the policy whose the file is; None: nobody's yet
        self._kept: dict[str, Mapping[str, Any]] = {}

    def begin(self, name: str, policy: BatchingPolicy) -> bool:
        """A server starts with this policy, and the file is its own if it learns. Whether anything was loaded."""
        if self._file is None or not policy.learns:
            return False
        self._owner = name
        return self._file.load(policy.restore)

    def keep(self, name: str, policy: BatchingPolicy, now_s: float) -> None:
        """This policy is not in charge for a while."""
        if policy.learns:
            self._kept[name] = policy.snapshot()
        if self._file is not None and name == self._owner:
            self._file.save_early(now_s)

    def resume(self, name: str, policy: BatchingPolicy) -> bool:
        """Restore what was kept of this policy; whether there was anything.

        Raises:
            ValueError: it does not fit the policy any more.
        """
        if name not in self._kept:
            return False
        policy.restore(self._kept[name])
        return True

    def load(self, name: str, fresh: Callable[[], BatchingPolicy]) -> Mapping[str, Any] | None:
        """What the file holds of a policy that takes over and of which nothing was kept; the file is its own then.

        Args:
            name: of the policy, in settings.
            fresh: makes one, on which what the file holds is tried.
        """
        if self._file is None or not fresh().learns:
            return None
        if self._owner is None and self._file.holder() in (None, name):
            self._owner = name
        if name != self._owner:
            logger.warning("%s: is not %s's, so what it learns is lost when the server ends.", self._file.path, name)
            return None
        found: list[Mapping[str, Any]] = []

        def try_out(data: Mapping[str, Any]) -> None:
            fresh().restore(data)
            found.append(data)

        self._file.load(try_out)
        return found[0] if found else None

    def file_of(self, name: str) -> StateFile | None:
        """Where this policy's learning is stored, if it is anywhere."""
        return self._file if name == self._owner else None

    def owned(self, name: str, policy: BatchingPolicy) -> Mapping[str, Any]:
        """What belongs into the file while this policy is in charge."""
        return policy.snapshot() if self._owner in (None, name) else self._kept[self._owner]
