"""From the name of a batching policy to the policy."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from feather_sglang.scheduling.policy import BatchingPolicy, StaticPolicy
from feather_sglang.scheduling.qlearning import QLearningPolicy
from feather_sglang.scheduling.settings import Settings, SettingsError
from feather_sglang.scheduling.ucb import UCBPolicy

_KNOWN: dict[str, Callable[[Settings, int], BatchingPolicy]] = {
    "static": StaticPolicy,
    "ucb": UCBPolicy,
    "qlearning": QLearningPolicy,
}


def make_policy(settings: Settings, max_batch: int) -> BatchingPolicy:
    """The batching policy that ``settings.policy`` names.

    Args:
        settings: see :class:`Settings`; also given to the policy.
        max_batch: the engine's running slots.

    Raises:
        SettingsError: the user's policy cannot be imported or built, or is no ``BatchingPolicy``; in one line.
    """
    known = _KNOWN.get(settings.policy)
    if known is not None:
        return known(settings, max_batch)
    module, _, name = settings.policy.partition(":")
    valid = f"valid: {', '.join(_KNOWN)} or package.module:Class"
    try:
        kind = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module does when it is imported
        raise SettingsError(f"policy: {settings.policy} cannot be imported: {_one_line(error)}; {valid}") from error
    if not (isinstance(kind, type) and issubclass(kind, BatchingPolicy)):
        raise SettingsError(f"policy: {settings.policy} is not a subclass of BatchingPolicy; {valid}")
    build: Callable[[Settings, int], BatchingPolicy] = kind
    try:
        return build(settings, max_batch)
    except Exception as error:
        raise SettingsError(
            f"policy: {settings.policy}(settings, {max_batch}) failed: {_one_line(error)}; {valid}"
        ) from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
