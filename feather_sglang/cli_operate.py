"""The subcommands for who runs a server: ``config`` and ``top``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
from typing import Any

from feather_sglang.cli_shared import bad_use, positive, positive_number, refused_outputs, report
from feather_sglang.engines.sglang import arguments
from feather_sglang.scheduling import SettingsError
from feather_sglang.scheduling.policy import default_min_batch
from feather_sglang.scheduling.settings import shown

#: What a server makes of the 0 of these.
_RULES = {
    "min_batch": "a quarter of the running slots, at least 8, and more where the weights outweigh what is shared",
    "weight_tokens": "found out when the model is loaded",
}


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both."""
    config = commands.add_parser(
        "config",
        help="the settings that a server would run with, and where each comes from",
        description="Print the settings in force with these flags, this environment and the file, as a server started "
        "with them would read them. A flag beats the environment, which beats the file, which beats the default. "
        "Exit codes: 0 a server would take them, 2 it would refuse them. Needs no sglang.",
    )
    arguments.add_arguments(config)
    config.add_argument(
        "--max-running-requests", type=positive, metavar="N", help="the server's, to show what min_batch comes to"
    )
    config.add_argument("--json", metavar="FILE", help="write them as JSON; - for standard output")
    config.set_defaults(run=_config)
    top = commands.add_parser(
        "top",
        help="watch a running server: its batch, the waiting groups, decisions and throughput",
        description="Show what a server's schedulers do, in place, until q or Ctrl-C; a frame after the other where "
        "standard output is no terminal. Exit codes: 0 done, 1 nothing to show, 2 bad use. Needs no sglang.",
    )
    top.add_argument("--url", default="http://127.0.0.1:30000", help="of the server (default: %(default)s)")
    top.add_argument("--interval", type=positive_number, default=1.0, metavar="S", help="seconds (default: 1)")
    top.add_argument("--once", action="store_true", help="one frame, after two looks, an interval apart; then end")
    top.add_argument("--json", action="store_true", help="a line of JSON instead of each frame")
    top.add_argument("--api-key", metavar="KEY", help="the server's, if it was started with one")
    top.set_defaults(run=_top)


def _config(args: argparse.Namespace) -> int:
    refusal = refused_outputs(args.json)
    if refusal:
        return bad_use(refusal)
    environ = dict(os.environ)
    flags = arguments.export_arguments(args, environ)
    try:
        found = arguments.effective(environ, flags)
        problem = arguments.unsupported_policy(found.settings)
    except SettingsError as error:
        return bad_use(str(error))
    if problem is not None:
        return bad_use(problem)
    slots = args.max_running_requests
    return report(_table(found, slots), _as_json(found, slots), args.json)


def _table(found: arguments.Effective, slots: int | None) -> str:
    rows = [("setting", "value", "from")]
    for name, value in dataclasses.asdict(found.settings).items():
        origin, derived = found.origins[name], _derived(name, value, slots)
        text, note = shown(name, value), origin.name or origin.kind
        if derived is not None:
            text, note = str(derived["value"] or text), f"{note}; derived: {derived['rule']}"
        rows.append((name, text, note))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {note}" for name, value, note in rows)


def _as_json(found: arguments.Effective, slots: int | None) -> str:
    settings = {
        name: {"value": value, "from": origin.kind, "name": origin.name, "derived": _derived(name, value, slots)}
        for name, value in dataclasses.asdict(found.settings).items()
        for origin in (found.origins[name],)
    }
    return json.dumps({"settings": settings}, indent=2)


def _derived(name: str, value: Any, slots: int | None) -> dict[str, Any] | None:
    """What a server makes of a value that leaves the choice to it."""
    if value != 0 or name not in _RULES:
        return None
    slots = slots if name == "min_batch" else None
    return {"value": default_min_batch(slots) if slots else None, "rule": _RULES[name]}


def _top(args: argparse.Namespace) -> int:
    from feather_sglang.top import client, live  # rich is slow to import, and of use here alone

    problem = client.bad_url(args.url)
    if problem is not None:
        return bad_use(problem)
    views = client.watch(functools.partial(client.ask, args.url, args.api_key), args.interval)
    return live.run(views, args.url, once=args.once, as_json=args.json)
