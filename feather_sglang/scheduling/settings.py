"""Feather's settings: every key, its default, its valid values and what it means."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

POLICIES = ("static",)
FALLBACKS = ("fcfs", "lpm", "dfs-weight")


class SettingsError(ValueError):
    """A setting is wrong: one line that says what, where, and which values are valid."""


def _setting(default: Any, help_: str, *, low: int | None = None, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help_, "low": low, "choices": choices})


@dataclass(frozen=True)
class Settings:
    """All of Feather's settings. Depths are in chunks."""

    policy: str = _setting("static", "batching policy: when to stop adding to a batch", choices=POLICIES)
    chunk_size: int = _setting(64, "tokens per chunk of the hash tree", low=1)
    depth_tolerance: int = _setting(4, "chunks of shared depth that one admission may cost the batch", low=0)
    crowd: int = _setting(10, "waiting requests at the remaining depth from which crowd_tolerance applies", low=1)
    crowd_tolerance: int = _setting(6, "depth_tolerance where a crowd waits at the remaining depth", low=0)
    min_batch: int = _setting(
        0, "batch too small to be worth protecting below this; 0: a quarter of the running slots, at least 8", low=0
    )
    max_passes: int = _setting(
        2048, "scheduling passes that a waiting request may be passed over before it is served next", low=1
    )
    fallback_policy: str = _setting(
        "fcfs", "SGLang policy that takes over a pass in which Feather fails", choices=FALLBACKS
    )
    trace: str = _setting("", "file to which every admission pass is written as a line of JSON; empty: none")

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str) -> Settings:
        """Settings from names and values (strings are converted); what is not named keeps its default.

        Args:
            values: setting names to values, from a YAML file, flags or the environment.
            source: where they came from, for the message.

        Raises:
            SettingsError: unknown name, wrong type, or a value out of range.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        parsed: dict[str, Any] = {}
        for name, value in values.items():
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"valid: {', '.join(fields)}"
                raise SettingsError(f"{source}: unknown setting '{name}'; {hint}")
            parsed[name] = _convert(fields[name], value, f"{source}: {name}")
        return cls(**parsed)


def _convert(spec: dataclasses.Field[Any], value: Any, where: str) -> Any:
    low, choices = spec.metadata["low"], spec.metadata["choices"]
    if isinstance(spec.default, int):
        number = _integer(value)
        if number is None or (low is not None and number < low):
            raise SettingsError(f"{where} must be an integer of at least {low}, got {value!r}")
        return number
    if not isinstance(value, str) or (choices and value not in choices):
        valid = f"one of {', '.join(choices)}" if choices else "a string"
        raise SettingsError(f"{where} must be {valid}, got {value!r}")
    return value


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    try:
        return int(value) if isinstance(value, str) else None
    except ValueError:
        return None
