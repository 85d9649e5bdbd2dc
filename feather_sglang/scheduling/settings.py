"""Feather's settings: every key, its default, its valid values and what it means.

``python scripts/settings_table.py`` puts them into docs/settings.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

POLICIES = ("static", "ucb", "qlearning")
FALLBACKS = ("fcfs", "lpm", "dfs-weight")

_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class SettingsError(ValueError):
    """A setting is wrong: one line that says what, where, and which values are valid."""


def _setting(
    default: Any,
    help_: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | None = None,
    edges: bool = False,
) -> Any:
    return field(
        default=default, metadata={"help": help_, "low": low, "high": high, "choices": choices, "edges": edges}
    )


@dataclass(frozen=True)
class Settings:
    """All of Feather's settings. Depths are in chunks."""

    policy: str = _setting(
        "static", "batching policy: when to stop adding to a batch; one of your own: package.module:Class"
    )
    chunk_size: int = _setting(
        64, "tokens per chunk of the hash tree; prefixes are told apart at multiples of it", low=1
    )
    depth_tolerance: int = _setting(4, "chunks of shared depth that one admission may cost the batch", low=0)
    crowd: int = _setting(10, "waiting requests at the remaining depth from which crowd_tolerance applies", low=1)
    crowd_tolerance: int = _setting(6, "depth_tolerance where a crowd waits at the remaining depth", low=0)
    min_batch: int = _setting(
        0,
        "batch too small to be worth protecting below this; 0: a quarter of the running slots, at least 8, and more "
        "where the weights outweigh what the batch shares",
        low=0,
    )
    weight_tokens: int = _setting(
        0,
        "tokens whose KV is as large as the model's weights, for min_batch 0; 0: found out at start, without limit "
        "where decode attention gains nothing from a shared prefix (torch_native)",
        low=0,
    )
    max_passes: int = _setting(
        2048, "scheduling passes that a waiting request may be passed over before it is served next", low=1
    )
    max_wait_s: float = _setting(
        0.0,
        "seconds after which the longest waiting request is served next, whatever the policy says, by rank 0's clock; "
        "0: none",
        low=0,
    )
    fallback_policy: str = _setting(
        "fcfs", "SGLang policy that takes over a pass in which Feather fails", choices=FALLBACKS
    )
    max_failures: int = _setting(
        10, "failures of Feather's own after which it leaves every pass to the fallback policy", low=1
    )
    freeze: bool = _setting(False, "a learned policy tries nothing out and learns nothing more")
    exploration: float = _setting(
        0.2,
        "largest share of the decode time that a learned policy spends on trials; it decays; 0: none",
        low=0,
        high=0.5,
    )
    min_gain: float = _setting(
        0.02, "share by which an action must beat the static rule's to be preferred to it", low=0, high=1
    )
    discount: float = _setting(
        0.9,
        "weight of each further episode in what a decision is credited with; 0: its own reward alone",
        low=0,
        high=0.99,
    )
    memory: int = _setting(50, "ucb: visits of a cell after which evidence has lost most of its weight", low=2)
    confidence_width: float = _setting(
        0.1,
        "width of a threshold's confidence bound after one trial, as a share of the usual throughput",
        low=0,
        high=10,
    )
    learning_rate: float = _setting(0.05, "qlearning: weight of a new return", low=0.001, high=1)
    batch_bins: str = _setting(
        "1,3,5,7,11,15,23,31,47,63,95,127,191,255,383,511", "upper edges of the bins of the batch size", edges=True
    )
    delta_bins: str = _setting("0,4,6,16,64", "upper edges of the bins of the depth lost, in chunks", edges=True)
    sharing_bins: str = _setting(
        "1,9,31", "upper edges of the bins of the requests that share what remains", edges=True
    )
    state: str = _setting(
        "",
        "file in which a learned policy keeps what it has learned, .dpN appended on data parallel rank N; empty: none",
    )
    state_period_s: int = _setting(60, "seconds between two saves of the state file", low=1)
    log_interval_s: int = _setting(60, "seconds between two lines of Feather's in the log; 0: none", low=0)
    trace: str = _setting(
        "",
        "file that gets a line of JSON for every pass that admitted somebody, .rankN appended on rank N; empty: none",
    )

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
                near = nearest(str(name), fields)
                hint = f"did you mean '{near}'?" if near else f"valid: {', '.join(fields)}"
                raise SettingsError(f"{source}: unknown setting '{name}'; {hint}")
            parsed[name] = _convert(fields[name], value, f"{source}: {name}")
        return cls(**parsed)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that this is probably a misspelling of."""
    return next(iter(difflib.get_close_matches(name, list(valid), n=1)), None)


def shown(name: str, value: Any) -> str:
    """A setting's value as people read it."""
    if name in ("min_batch", "weight_tokens") and value == 0:
        return "0 (auto)"
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value == "" else str(value)


def valid_values(spec: dataclasses.Field[Any]) -> str:
    """Which values a setting takes, as a phrase that fits after "must be"."""
    low, high, choices = (spec.metadata[key] for key in ("low", "high", "choices"))
    if isinstance(spec.default, bool):
        return "true or false"
    if high is not None:
        return f"a number from {low} to {high}"
    if low is not None:
        return f"{'an integer' if isinstance(spec.default, int) else 'a number'} of at least {low}"
    if spec.name == "policy":
        return f"one of {', '.join(POLICIES)} or package.module:Class"
    if spec.metadata["edges"]:
        return "ascending integers of at least 0, as in 1,3,7"
    return f"one of {', '.join(choices)}" if choices else "a string"


def bin_edges(text: str) -> list[int]:
    """``"1,3,7"`` as numbers. Raises ``ValueError`` unless they ascend from 0 or more."""
    edges = [int(part) for part in text.split(",")]
    if edges[0] < 0 or any(high <= low for low, high in itertools.pairwise(edges)):
        raise ValueError(f"not ascending: {text}")
    return edges


def _convert(spec: dataclasses.Field[Any], value: Any, where: str) -> Any:
    found: Any = None
    if isinstance(spec.default, bool):
        found = _BOOLEANS.get(str(value).lower())
    elif isinstance(spec.default, int | float):
        found = _number(spec, value)
    elif isinstance(value, str | int) and spec.metadata["edges"]:
        with contextlib.suppress(ValueError):
            found = ",".join(map(str, bin_edges(str(value))))
    elif isinstance(value, str) and _is_valid(spec, value):
        found = value
    if found is None:
        raise SettingsError(f"{where} must be {valid_values(spec)}, got {value!r}")
    return found


def _number(spec: dataclasses.Field[Any], value: Any) -> int | float | None:
    kind = int if isinstance(spec.default, int) else float
    low, high = spec.metadata["low"], spec.metadata["high"]
    if isinstance(value, bool) or not isinstance(value, str | int | kind):
        return None
    with contextlib.suppress(ValueError):
        number = kind(value)
        if low <= number and (high is None or number <= high):
            return number
    return None


def _is_valid(spec: dataclasses.Field[Any], value: str) -> bool:
    choices = POLICIES if spec.name == "policy" else spec.metadata["choices"]
    module, colon, name = value.partition(":") if spec.name == "policy" else ("", "", "")
    own = colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))
    return bool(own) or choices is None or value in choices
