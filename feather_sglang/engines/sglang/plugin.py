"""Entry point of the group ``sglang.srt.plugins``: SGLang calls it in every process, before it builds the engine."""

from __future__ import annotations


def register() -> None:
    """Register Feather's hooks. They do nothing until ``--schedule-policy feather`` is chosen."""
    from feather_sglang.engines.sglang import hooks

    hooks.register()
