"""The ``feather-sglang`` command."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import feather_sglang
from feather_sglang import cli_bench, cli_compat, cli_operate, cli_serving, cli_simulate, compiling
from feather_sglang.bench.server import ServerError
from feather_sglang.cli_parser import Parser
from feather_sglang.cli_shared import bad_use, complain, refused_outputs, report, say

_DEVICES = ("cpu", "cuda")


def make_parser() -> argparse.ArgumentParser:
    """All subcommands; the arguments' ``run`` is the function to call with them."""
    parser: argparse.ArgumentParser = Parser(
        prog="feather-sglang", description="Prefix-homogeneous batch scheduling for SGLang."
    )
    parser.add_argument("--version", action="version", version=f"feather-sglang {feather_sglang.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    cli_serving.add_demo(commands)
    cli_bench.add_commands(commands)
    _add_calibrate(commands)
    cli_simulate.add_commands(commands)
    _add_compile(commands)
    cli_compat.add_commands(commands)
    cli_operate.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0 done, 1 failed, 2 bad use, 130 interrupted."""
    args = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever stops the command stops its servers, too
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ServerError, RuntimeError, OSError) as error:
        complain(str(error))
        return 1


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure what this machine's caches do for decode, and write a profile",
        description="Time one layer's decode attention over batch size x distinct prefixes x prefix length with the "
        "kernel that the engine uses; print the table and write the machine's profile. Minutes.",
    )
    calibrate.add_argument("--device", default="cpu", help=f"{' or '.join(_DEVICES)} (default: %(default)s)")
    calibrate.add_argument("--dtype", default="bfloat16", help="of the KV on a GPU: bfloat16 (default) or float16")
    calibrate.add_argument(
        "--from",
        dest="measured",
        metavar="FILE",
        type=Path,
        help="what cuda_decode.py measured elsewhere, or a profile",
    )
    calibrate.add_argument("--out", type=Path, default=Path("profile.json"), help="(default: %(default)s)")
    calibrate.add_argument("--json", metavar="FILE", help="write the profile there too; - for standard output")
    calibrate.add_argument("--plot", metavar="FILE.png", help="draw tokens/s against batch size")
    calibrate.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    refusal = _calibrate_refusal(args)
    if refusal:
        return bad_use(refusal)
    from feather_sglang.bench import calibrate

    try:
        if args.measured:
            profile = calibrate.from_json(args.measured.read_text())
        elif args.device == "cpu":
            profile = calibrate.measure_cpu(say)
        else:
            profile = calibrate.measure_cuda(args.dtype, say)
    except (OSError, ValueError) as error:
        if args.measured:
            return bad_use(f"can't read '{args.measured}': {error}")
        raise RuntimeError(error) from error
    as_json = calibrate.as_json(profile)
    args.out.write_text(as_json + "\n")
    if args.plot:
        calibrate.plot(profile, args.plot)
    return report(calibrate.table(profile), as_json, args.json)


def _calibrate_refusal(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, before minutes are spent on them."""
    if args.device not in _DEVICES:
        return f"unknown device '{args.device}'; valid: {', '.join(_DEVICES)}"
    if args.dtype not in ("bfloat16", "float16"):
        return f"unknown --dtype '{args.dtype}'; valid: bfloat16, float16"
    refusal = refused_outputs(args.out, args.json, plots=[args.plot])
    if refusal:
        return refusal
    for module in () if args.measured else ("torch", "numba" if args.device == "cpu" else "triton"):
        if importlib.util.find_spec(module) is None:
            return f"--device {args.device} needs {module}; it comes with sglang: pip install 'feather-sglang[sglang]'"
    return None


def _add_compile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "compile",
        help="compile the scheduling pass to machine code, in place (optional)",
        description="Compile the modules of the scheduling pass with mypyc, in the installed package. Needs a C "
        "compiler and the extra 'compile'. Without it the same source runs as plain Python.",
    )
    command.add_argument("--remove", action="store_true", help="take the compiled modules out again")
    command.set_defaults(run=_compile)


def _compile(args: argparse.Namespace) -> int:
    if args.remove:
        print(f"removed {compiling.remove()} compiled files")
        return 0
    say("compiling, about a minute")
    compiling.compile_modules()
    print("the scheduling pass is compiled; 'feather-sglang compile --remove' takes it out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
