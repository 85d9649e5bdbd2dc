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
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from feather_sglang.scheduling import Settings, SettingsError
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.settings import nearest, shown

POLICY_NAME = "feather"
_PREFIX = "FEATHER_"
#: Beside the settings' names: what names the file.
_FILE = "config"


class Origin(NamedTuple):
    """Where a value in force came from."""

    #: ``flag``, ``environment``, ``file`` or ``default``.
    kind: str
    #: The flag, variable or file; empty for a default.
    name: str = ""


class Effective(NamedTuple):
    """The settings in force, and where each of them came from."""

    settings: Settings
    origins: Mapping[str, Origin]


def flag_of(name: str) -> str:
    """The flag of a setting, or of ``config``."""
    return "--feather-" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """Its environment variable."""
    return _PREFIX + name.upper()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``feather`` to ``--schedule-policy`` and Feather's flags in a group of their own."""
    for action in parser._actions:
        choices = action.choices
        if "--schedule-policy" in action.option_strings and choices is not None and POLICY_NAME not in choices:
            action.choices = [*choices, POLICY_NAME]  # a patched SGLang has it already
    group = parser.add_argument_group("feather", "used with --schedule-policy feather (feather-sglang)")
    group.add_argument(flag_of(_FILE), metavar="FILE.yaml", help="YAML file with any of the settings below")
    for spec in dataclasses.fields(Settings):
        help_ = f"{spec.metadata['help']} (default: {shown(spec.name, spec.default)})"
        if isinstance(spec.default, bool):
            group.add_argument(flag_of(spec.name), nargs="?", const="true", metavar="true|false", help=help_)
        else:
            metavar = "N" if isinstance(spec.default, int) else spec.name.rsplit("_", 1)[-1].upper()
            group.add_argument(flag_of(spec.name), metavar=metavar, help=help_)


def refuse_misspelt_flags(parser: argparse.ArgumentParser) -> None:
    """One line about an unknown flag of ours, where SGLang's parser would print hundreds before it."""
    plain, prefix = parser.error, flag_of("")

    def error(message: str) -> NoReturn:
        words = message.split() if message.startswith("unrecognized arguments:") else []
        ours = [word for word in words if word.startswith(prefix)]
        if ours:
            refuse(unknown_flag(ours[0], [flag for flag in parser._option_string_actions if flag.startswith(prefix)]))
        plain(message)

    parser.error = error  # type: ignore[method-assign]


def unknown_flag(word: str, valid: Iterable[str]) -> str:
    """A line about an argument that begins with none of the valid flags."""
    flag = word.partition("=")[0]
    names = {each.lstrip("-"): each for each in valid}
    near = nearest(flag.lstrip("-"), names)
    return f"{flag}: unknown flag; " + (
        f"did you mean {names[near]}?" if near else f"valid: {', '.join(names.values())}"
    )


def export_arguments(args: argparse.Namespace, environ: MutableMapping[str, str] = os.environ) -> set[str]:
    """Put the flags that were given into the environment, for this process and those it spawns; returns their names."""
    given = {
        name.removeprefix("feather_"): str(value)
        for name, value in vars(args).items()
        if name.startswith("feather_") and value is not None
    }
    environ.update({variable_of(name): value for name, value in given.items()})
    return set(given)


def load_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """The settings in force.

    Raises:
        SettingsError: in one line, what is wrong, where, and what is valid.
    """
    return effective(environ).settings


def effective(environ: Mapping[str, str] = os.environ, flags: Collection[str] = ()) -> Effective:
    """The settings in force, with where each came from.

    Args:
        environ: the environment, flags included.
        flags: names of those whose variables flags set, as :func:`export_arguments` returns them.

    Raises:
        SettingsError: in one line, what is wrong, where, and what is valid.
    """
    names = [spec.name for spec in dataclasses.fields(Settings)]
    _refuse_misspelt(environ, [*names, _FILE])
    values: dict[str, Any] = {}
    path = environ.get(variable_of(_FILE))
    if path:
        values.update(_read_yaml(path))
        Settings.parse(values, path)  # so that a mistake names the file
    origins = {name: Origin("file", str(path)) if name in values else Origin("default") for name in names}
    for name in names:
        flag, variable = flag_of(name), variable_of(name)
        if variable in environ:
            values[name] = environ[variable]
            Settings.parse({name: values[name]}, f"{flag} or {variable}")
            origins[name] = Origin("flag", flag) if name in flags else Origin("environment", variable)
    return Effective(Settings.parse(values, path or "the environment"), origins)


def _refuse_misspelt(environ: Mapping[str, str], names: Collection[str]) -> None:
    """A variable that is nearly a setting's. Others with our prefix may be anybody's, and are left alone."""
    for variable in sorted(environ):
        name = variable.removeprefix(_PREFIX).lower()
        near = nearest(name, names) if variable.startswith(_PREFIX) and name not in names else None
        if near:
            raise SettingsError(f"{variable}: unknown variable; did you mean {variable_of(near)}? Else unset it")


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
