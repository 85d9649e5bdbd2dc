"""Comparisons on real servers: ``demo``, ``bench serving`` and ``bench locality``."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from feather_sglang.bench import batches, compare, locality, workloads
from feather_sglang.bench.figure import figure
from feather_sglang.bench.hosts import OwnServers, RunningServer
from feather_sglang.bench.serving import KNOWN_POLICIES, POLICIES, Setting
from feather_sglang.cli_shared import (
    NEEDS_SGLANG,
    Commands,
    bad_use,
    positive,
    positive_number,
    refused_outputs,
    report,
    say,
    unknown_name,
)
from feather_sglang.cli_simulate import tell_left_out
from feather_sglang.simulation.traces import MOONCAKE_BLOCK, TraceError, read_trace

_TRACE = "trace:"
#: What a tiny model on two cores gets of a trace: prompts of hundreds of tokens instead of thousands.
_TINY_BLOCK, _LIMIT = 16, 320

_SIZES = {
    "groups": "prefix groups",
    "per_group": "requests in each group",
    "prefix_tokens": "shared by a group",
    "suffix_tokens": "a request's own",
    "output_tokens": "of each answer",
}
_OF_TRACES = ("limit", "block_tokens", "speedup")


def add_demo(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``demo``."""
    demo = commands.add_parser(
        "demo",
        help="serve a tiny model on the CPU with several policies and compare them",
        description="Serve a tiny random-weight model on the CPU with each policy in turn, drive each server with the "
        "same shared-prefix workload, and print one table: bench serving --workload kv-pressure --runs 1.",
    )
    for name in ("groups", "per_group"):
        demo.add_argument(_flag(name), type=positive, help=f"{_SIZES[name]} (default: the workload's)")
    _add_common(demo)
    demo.set_defaults(run=_demo)


def add_bench(bench: Commands[argparse.ArgumentParser]) -> None:
    """Add what needs servers to ``bench``."""
    _add_serving(bench)
    _add_locality(bench)


def _add_serving(bench: Commands[argparse.ArgumentParser]) -> None:
    serving = bench.add_parser(
        "serving",
        help="policies under a workload on real servers: throughput, latency, cache hits",
        description="Drive a real server for each policy with SGLang's bench_serving, in alternating order; medians, "
        "with the lowest and the highest run. Without --model-path and --url: a tiny model on the CPU. "
        "Flags of SGLang and Feather for the servers go last, after '--'.",
    )
    names = (*workloads.NAMES, f"{_TRACE}FILE")
    serving.add_argument("--workload", required=True, help=f"one of {', '.join(names)} (a trace in Mooncake's format)")
    serving.add_argument("--runs", type=positive, default=3, help="the median counts (default: %(default)s)")
    serving.add_argument("--model-path", help="a real model, path or name, with SGLang's own choice of device")
    serving.add_argument("--url", help="a server that runs already; Feather's is told to switch between policies")
    for name, text in _SIZES.items():
        serving.add_argument(_flag(name), type=positive, help=f"{text} (default: the workload's)")
    serving.add_argument("--rate", type=positive_number, help="requests/s of the stream (default: the workload's)")
    serving.add_argument("--limit", type=positive, help=f"requests of a trace (default: the first {_LIMIT})")
    serving.add_argument(
        "--block-tokens",
        type=positive,
        help=f"what a trace's blocks of {MOONCAKE_BLOCK} tokens shrink to, and outputs in proportion (default: "
        f"{MOONCAKE_BLOCK} with --model-path or --url, otherwise {_TINY_BLOCK})",
    )
    serving.add_argument("--speedup", type=positive_number, help="of a trace's arrivals (default: 1)")
    _add_common(serving)
    serving.add_argument("flags", nargs="*", metavar="-- FLAGS", help="for the servers, stronger than the workload's")
    serving.set_defaults(run=_serving)


def _add_locality(bench: Commands[argparse.ArgumentParser]) -> None:
    parser = bench.add_parser(
        "locality",
        help="homogeneous decode batches against mixed ones, and whole workloads, on real servers",
        description="Measure what homogeneous batches bring to decode on the CPU platform: batches of one prefix "
        "and of eight on one server, then whole workloads on a server per policy. Half an hour with the defaults.",
    )
    parser.add_argument("--part", choices=("batches", "workloads", "all"), default="all")
    names = ",".join(setting.name for setting in locality.SETTINGS)
    parser.add_argument("--settings", default=names, help="(default: %(default)s)")
    parser.add_argument("--runs", type=positive, default=3, help="the median counts (default: %(default)s)")
    _add_common(parser)
    parser.set_defaults(run=_locality)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help=f"of {', '.join(KNOWN_POLICIES)} (default: %(default)s)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw throughput and time to first token")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="for model and logs (default: %(default)s)")


def _demo(args: argparse.Namespace) -> int:
    policies = args.policies.split(",")
    refusal = _refusal(args, policies, None)
    if refusal:
        return bad_use(refusal)
    setting = workloads.make("kv-pressure", **_given(args, ("groups", "per_group")))
    comparison = compare.Comparison(policies, 1, OwnServers(args.folder.resolve()).serve, say)
    return _measure("demo", [setting], comparison, args)


def _serving(args: argparse.Namespace) -> int:
    policies = args.policies.split(",")
    refusal = _refusal(args, policies, _serving_refusal(args))
    if refusal:
        return bad_use(refusal)
    try:
        setting = _setting(args)
    except TraceError as error:
        return bad_use(str(error))
    if args.url:
        serve = RunningServer(args.url.rstrip("/"), len(policies) > 1, args.model_path).serve
    else:
        serve = OwnServers(args.folder.resolve(), args.model_path, args.flags).serve
    return _measure("bench serving", [setting], compare.Comparison(policies, args.runs, serve, say), args)


def _locality(args: argparse.Namespace) -> int:
    policies, names = args.policies.split(","), args.settings.split(",")
    settings = {setting.name: setting for setting in locality.SETTINGS}
    refusal = _refusal(args, policies, unknown_name("setting", names, settings))
    if refusal:
        return bad_use(refusal)
    folder = args.folder.resolve()
    comparison = compare.Comparison(policies, args.runs, OwnServers(folder).serve, say)
    batch_rows = [] if args.part == "workloads" else locality.measure_batches(folder, args.runs, say)
    chosen = [] if args.part == "batches" else [settings[name] for name in names]
    return _measure("bench locality", chosen, comparison, args, batch_rows)


def _measure(
    command: str,
    settings: Sequence[Setting],
    comparison: compare.Comparison,
    args: argparse.Namespace,
    batch_rows: Sequence[batches.BatchRow] = (),
) -> int:
    try:
        for setting in settings:
            comparison.run(setting)
    finally:  # what is complete is worth having when a later server fails, or on Ctrl-C
        _report(command, settings, comparison.rows(), batch_rows, args)
    return 0


def _report(
    command: str,
    settings: Sequence[Setting],
    rows: Sequence[compare.Row],
    batch_rows: Sequence[batches.BatchRow],
    args: argparse.Namespace,
) -> None:
    texts = [batches.table(batch_rows)] if batch_rows else []
    texts += [compare.table(rows)] if rows else []
    if not texts:
        return
    found = compare.as_dict(command, settings, rows) | {"batches": [asdict(row) for row in batch_rows]}
    report("\n\n".join(texts), json.dumps(found, indent=2), args.json)
    if args.plot:
        figure(rows, batch_rows).savefig(args.plot, dpi=110)


def _refusal(args: argparse.Namespace, policies: Sequence[str], own: str | None) -> str | None:
    """What is wrong with the arguments, the command's own included, before minutes are spent on them."""
    refusal = unknown_name("policy", policies, KNOWN_POLICIES) or own or refused_outputs(args.json, plots=[args.plot])
    if refusal is None and importlib.util.find_spec("sglang") is None:
        return NEEDS_SGLANG
    return refusal


def _serving_refusal(args: argparse.Namespace) -> str | None:
    traced = args.workload.startswith(_TRACE)
    foreign = _given(args, (*_SIZES, "rate") if traced else _OF_TRACES)
    if not traced and args.workload not in workloads.NAMES:
        return unknown_name("workload", [args.workload], (*workloads.NAMES, f"{_TRACE}FILE"))
    if foreign:
        return f"{_flag(next(iter(foreign)))} is not for --workload {args.workload}"
    if args.flags and (args.url or not args.flags[0].startswith("-")):
        return f"'{args.flags[0]}': flags after '--' are for servers that this command starts"
    if args.url and not args.url.startswith(("http://", "https://")):
        return f"--url must begin with http:// or https://, got '{args.url}'"
    return None


def _setting(args: argparse.Namespace) -> Setting:
    """Raises ``TraceError``."""
    if not args.workload.startswith(_TRACE):
        return workloads.make(args.workload, **_given(args, (*_SIZES, "rate")))
    path = Path(args.workload.removeprefix(_TRACE))
    speedup = args.speedup or 1.0
    trace = read_trace(path, requests=args.limit or _LIMIT, speedup=speedup)
    tell_left_out(path, trace)
    block = args.block_tokens or (MOONCAKE_BLOCK if args.model_path or args.url else _TINY_BLOCK)
    return workloads.traced(trace.workload, block, speedup)


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, float]:
    """The arguments that were given, of these."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
