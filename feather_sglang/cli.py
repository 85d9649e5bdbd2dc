"""The ``feather-sglang`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import feather_sglang
from feather_sglang.bench import serving
from feather_sglang.bench.server import ServerError
from feather_sglang.bench.tiny_model import make_tiny_model

_DEMO_POLICIES = ("fcfs", "lpm", "dfs-weight", "feather")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0 done, 1 failed, 2 bad use, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="feather-sglang", description="Prefix-homogeneous batch scheduling for SGLang."
    )
    parser.add_argument("--version", action="version", version=f"feather-sglang {feather_sglang.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ServerError, RuntimeError, OSError) as error:
        print(f"feather-sglang: error: {error}", file=sys.stderr)
        return 1


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    demo = commands.add_parser(
        "demo",
        help="serve a tiny model on the CPU with several policies and compare them",
        description="Serve a tiny random-weight model on the CPU with each policy in turn, drive each server with the "
        "same shared-prefix workload, and print one table.",
    )
    standard = serving.Workload()
    demo.add_argument("--policies", default=",".join(_DEMO_POLICIES), help="comma-separated (default: %(default)s)")
    demo.add_argument("--groups", type=_positive, default=standard.groups, help="prefix groups (default: %(default)s)")
    demo.add_argument("--per-group", type=_positive, default=standard.per_group, help="requests in each (default: 10)")
    demo.add_argument("--folder", type=Path, default=Path(".demo"), help="for model and logs (default: %(default)s)")
    demo.add_argument("--json", metavar="FILE", help="also write the results as JSON; - for standard output")
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    policies = args.policies.split(",")
    unknown = [policy for policy in policies if policy not in _DEMO_POLICIES]
    if unknown:
        print(
            f"feather-sglang: error: unknown policy '{unknown[0]}'; valid: {', '.join(_DEMO_POLICIES)}", file=sys.stderr
        )
        return 2

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    folder = args.folder.resolve()
    model = make_tiny_model(folder / "model")
    workload = serving.Workload(groups=args.groups, per_group=args.per_group)
    results: list[serving.Result] = []
    try:
        for number, policy in enumerate(policies, 1):
            say(f"[{number}/{len(policies)}]")
            log = folder / f"server-{policy}.log"
            results.append(serving.run_policy(policy, model, serving.CPU_FLAGS, workload, log=log, say=say))
    finally:
        if results and args.json != "-":
            print(serving.table(results))
            print(f"At most {workload.most_cached:.1%} can come from cache: every prefix is computed once.")
    if args.json == "-":
        print(serving.as_json(workload, results))
    elif args.json:
        Path(args.json).write_text(serving.as_json(workload, results) + "\n")
    return 0


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
