"""The subcommands about the installed SGLang: ``patch`` and ``doctor``."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

from feather_sglang import patching
from feather_sglang.cli_shared import complain, use_cpu_platform

_ACTIONS = {
    "check": (patching.check, "whether the patch is in, or could be put in"),
    "apply": (patching.apply, "put the patch in"),
    "revert": (patching.revert, "take the patch out again, byte for byte"),
    "status": (patching.status, "say how the patch stands"),
}


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both."""
    patch = commands.add_parser(
        "patch",
        help="put Feather's patch into an SGLang checkout or installed package, or take it out",
        description="Patch an SGLang source tree so that it offers --schedule-policy feather without the plugin "
        "system. Exit codes: 0 done, 1 failed and nothing changed, 2 bad use, 3 unsupported release.",
    )
    actions = patch.add_subparsers(dest="action", required=True)
    for name, (_, text) in _ACTIONS.items():
        action = actions.add_parser(name, help=text)
        action.add_argument("directory", metavar="DIR", type=Path, help="checkout, unpacked tree or package folder")
        _add_json(action)
    patch.set_defaults(run=_patch)
    doctor = commands.add_parser(
        "doctor",
        help="whether Feather can run in this environment, and what it touches in the installed SGLang",
        description="Load SGLang's plugins as a server does, and print every place of SGLang that Feather touches, "
        "with versions and what is missing. Exit codes: 0 Feather can run, 1 it cannot.",
    )
    _add_json(doctor)
    doctor.set_defaults(run=_doctor)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _patch(args: argparse.Namespace) -> int:
    action, _ = _ACTIONS[args.action]
    try:
        found = action(args.directory)
    except patching.PatchError as error:
        if args.json:
            print(json.dumps({"error": str(error), "exit_code": error.code}, indent=2))
        complain(str(error))
        return error.code
    print(json.dumps(found.as_dict(), indent=2) if args.json else found.describe())
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from feather_sglang.engines.sglang import doctor

    if importlib.util.find_spec("sglang") is not None:
        use_cpu_platform()
    report = doctor.examine()
    print(json.dumps(report.as_dict(), indent=2) if args.json else report.text())
    return 1 if report.missing else 0
