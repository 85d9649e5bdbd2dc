"""Feather's flags, beside SGLang's, and how they reach the processes that SGLang spawns.

Every setting is a flag (``--feather-min-batch 8``), an environment variable (``FEATHER_MIN_BATCH=8``) and a key of the
YAML file that ``--feather-config`` or ``FEATHER_CONFIG`` names (``min_batch: 8``). A flag beats the environment, which
beats the file, which beats the default. Flags travel as environment variables, since those are what a spawned scheduler
inherits.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from feather_sglang.scheduling import Settings, SettingsError
from feather_sglang.scheduling.policies import make_policy

POLICY_NAME = "feather"
_PREFIX = "FEATHER_"
_CONFIG = _PREFIX + "CONFIG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``feather`` to ``--schedule-policy`` and Feather's flags in a group of their own."""
    for action in parser._actions:
        choices = action.choices
        if "--schedule-policy" in action.option_strings and choices is not None and POLICY_NAME not in choices:
            action.choices = [*choices, POLICY_NAME]  # a patched SGLang has it already
    group = parser.add_argument_group("feather", "used with --schedule-policy feather (feather-sglang)")
    group.add_argument("--feather-config", metavar="FILE.yaml", help="YAML file with any of the settings below")
    for spec in dataclasses.fields(Settings):
        default = "auto" if spec.name == "min_batch" else spec.default
        group.add_argument(
            "--feather-" + spec.name.replace("_", "-"),
            metavar="N" if isinstance(spec.default, int) else spec.name.rsplit("_", 1)[-1].upper(),
            help=f"{spec.metadata['help']} (default: {default if default != '' else 'none'})",
        )


def export_arguments(args: argparse.Namespace, environ: MutableMapping[str, str] = os.environ) -> None:
    """Put the flags that were given into the environment, for this process and those it spawns."""
    for name, value in vars(args).items():
        if name.startswith("feather_") and value is not None:
            environ[_PREFIX + name.removeprefix("feather_").upper()] = str(value)


def load_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings in force.

    Raises:
        SettingsError: in one line, what is wrong, where, and what is valid.
    """
    values: dict[str, Any] = {}
    path = environ.get(_CONFIG)
    if path:
        values.update(_read_yaml(path))
        Settings.parse(values, path)  # so that a mistake names the file
    names = {spec.name for spec in dataclasses.fields(Settings)}
    given = {name: environ[_PREFIX + name.upper()] for name in sorted(names) if _PREFIX + name.upper() in environ}
    for name, value in given.items():
        Settings.parse({name: value}, f"--feather-{name.replace('_', '-')} or {_PREFIX}{name.upper()}")
    return Settings.parse({**values, **given}, path or "the environment")


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: must hold settings as 'name: value' lines, got a {type(content).__name__}")
    return content


def unsupported_policy(settings: Settings) -> str | None:
    """What keeps this batching policy or state file from working here, or ``None``.

    Raises:
        SettingsError: the user's own policy cannot be imported or built.
    """
    make_policy(settings, 1)
    folder = Path(settings.state).absolute().parent
    if settings.state and not os.access(folder, os.W_OK | os.X_OK):
        return f"--feather-state or FEATHER_STATE: nothing can be written in {folder}; name a file in another folder"
    return None


def unsupported(args: Any) -> str | None:
    """Why these SGLang arguments do not go with ``feather``, or ``None``. Works on a parsed namespace or ServerArgs."""
    if getattr(args, "enable_priority_scheduling", False):
        return (
            "--enable-priority-scheduling does not go with --schedule-policy feather; "
            "drop it, or use --schedule-policy fcfs or lof"
        )
    if (getattr(args, "pp_size", 1) or 1) > 1:
        return "--pp-size above 1 is not supported with --schedule-policy feather; use --pp-size 1"
    if getattr(args, "disaggregation_mode", "null") not in (None, "null"):
        return "--disaggregation-mode is not supported with --schedule-policy feather; drop one of the two"
    if getattr(args, "enable_dp_attention", False):
        return "--enable-dp-attention is not supported with --schedule-policy feather; drop one of the two"
    if getattr(args, "dllm_algorithm", None):
        return "--dllm-algorithm is not supported with --schedule-policy feather; drop one of the two"
    return None


def refuse(message: str) -> NoReturn:
    """One line on stderr, and exit with code 2, as argparse does."""
    print(f"feather-sglang: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)
