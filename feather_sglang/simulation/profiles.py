"""Named hardware, models and scheduling costs: the YAML files beside this one, and profiles of ``calibrate``."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml

_Profile = TypeVar("_Profile", "Hardware", "Model", "PassCost")


class ProfileError(ValueError):
    """A profile is unknown or wrong: one line that says what, where, and what is valid."""


@dataclass(frozen=True)
class Hardware:
    """One device. GB are 10**9 bytes; ``cache`` is the last level before memory."""

    source: str
    memory_gb: float
    memory_gb_s: float
    bf16_tflops: float
    cache_mb: float
    cache_gb_s: float
    step_overhead_ms: float


@dataclass(frozen=True)
class Model:
    """A decoder with 16-bit weights and KV."""

    source: str
    parameters: float
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        """Of all weights."""
        return 2 * self.parameters

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def weight_tokens(self) -> int:
        """Tokens whose KV is as large as the weights; a server finds it out at start."""
        return int(self.weight_bytes / self.kv_bytes_per_token)


@dataclass(frozen=True)
class PassCost:
    """What a policy's passes cost the engine's process, in microseconds."""

    source: str
    #: A pass that asks for candidates.
    pass_us: float
    #: Each waiting request matched against the cache, and each 1,000 of its tokens that match.
    matched_us: float
    matched_1k_tokens_us: float
    admitted_us: float
    #: Each arrival, and each 1,000 tokens of its prompt.
    arrived_us: float
    arrived_1k_tokens_us: float
    left_us: float


def hardware_names() -> list[str]:
    """The hardware that is known by name."""
    return list(_table("hardware"))


def model_names() -> list[str]:
    """The models that are known by name."""
    return list(_table("models"))


def load_model(name: str) -> Model:
    """Raises ``ProfileError``."""
    return _named(Model, "model", name, "models")


def load_pass_cost(policy: str) -> PassCost:
    """Raises ``ProfileError``."""
    return _named(PassCost, "policy", "feather" if policy.startswith("feather") else policy, "scheduling")


def load_hardware(name: str, like: str | None = None) -> Hardware:
    """Hardware by name, from a YAML file of the same fields, or from a profile that ``feather-sglang calibrate`` wrote.

    Args:
        name: a known name, or a path that ends in .yaml, .yml or .json.
        like: a profile of ``calibrate`` has bandwidths and cache size; what it lacks is taken from this.

    Raises:
        ProfileError: in one line.
    """
    if not name.endswith((".yaml", ".yml", ".json")):
        return _named(Hardware, "hardware", name, "hardware", " or a .yaml or .json file")
    try:
        content = yaml.safe_load(Path(name).read_text())  # JSON is YAML
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"can't read '{name}': {error}") from None
    except yaml.YAMLError as error:
        raise ProfileError(f"'{name}' is not valid YAML or JSON: {' '.join(str(error).split())}") from None
    if isinstance(content, dict) and "derived" in content:
        return _calibrated(name, content, like)
    return _parse(Hardware, content, f"'{name}'")


def _calibrated(name: str, content: Mapping[str, Any], like: str | None) -> Hardware:
    if like is None:
        raise ProfileError(
            f"'{name}' has no memory size, FLOPs and overhead: name hardware that has, with --like; "
            f"valid: {', '.join(hardware_names())}"
        )
    base = load_hardware(like)
    try:
        derived, machine = content["derived"], content["machine"]["name"]
        size = derived["cache_bytes"]
        measured = {
            "memory_gb_s": float(derived["memory_gb_s"]),
            "cache_gb_s": float(derived["cache_gb_s"]),
            "cache_mb": base.cache_mb if size is None else size / 1e6,
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"'{name}' is no profile of feather-sglang calibrate: {error!r}") from None
    source = f"calibrate on {machine}; memory size, FLOPs and overhead of {like}"
    return _parse(Hardware, dataclasses.asdict(base) | measured | {"source": source}, f"'{name}'")


def _table(file: str) -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load(files(__package__).joinpath(f"{file}.yaml").read_text())
    return table


def _named(kind: type[_Profile], what: str, name: str, file: str, more: str = "") -> _Profile:
    table = _table(file)
    if name not in table:
        raise ProfileError(f"unknown {what} '{name}'; valid: {', '.join(table)}{more}")
    return _parse(kind, table[name], f"{file}.yaml: {name}")


def _parse(kind: type[_Profile], content: Any, where: str) -> _Profile:
    names = [field.name for field in dataclasses.fields(kind)]
    if not isinstance(content, dict) or sorted(content) != sorted(names):
        raise ProfileError(f"{where} must hold exactly {', '.join(names)}")
    values: dict[str, Any] = {}
    for name, value in content.items():
        if name == "source":
            values[name] = str(value)
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        lowest_allowed = kind is PassCost or name == "step_overhead_ms"
        if not math.isfinite(number) or number < 0 or (number == 0 and not lowest_allowed):
            raise ProfileError(f"{where}: {name} must be a positive, finite number, got {value!r}")
        values[name] = number if isinstance(value, str | float) else value
    return kind(**values)


def describe(profile: Hardware | Model) -> str:
    """For reports: the figures as JSON."""
    return json.dumps(dataclasses.asdict(profile))
