"""``feather-sglang simulate`` and ``feather-sglang replay``: arguments, checks and reports."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from feather_sglang import cli_shared
from feather_sglang.cli_shared import Commands, bad_use, positive, positive_number, refused_outputs, say, unknown_name
from feather_sglang.scheduling import Settings, SettingsError
from feather_sglang.scheduling.policy import default_min_batch
from feather_sglang.simulation import recommend, report
from feather_sglang.simulation.cost import kv_tokens
from feather_sglang.simulation.engine import EngineConfig
from feather_sglang.simulation.metrics import Result
from feather_sglang.simulation.names import POLICIES
from feather_sglang.simulation.page import page
from feather_sglang.simulation.profiles import ProfileError, hardware_names, load_hardware, load_model, model_names
from feather_sglang.simulation.run import Setup, run_all
from feather_sglang.simulation.scenarios import SCENARIOS, make_scenario
from feather_sglang.simulation.traces import Trace, TraceError, read_trace
from feather_sglang.simulation.workload import Workload

# Malformed lines that are named one by one.
_SHOWN_LINES = 5
# Whose min_batch the report page varies.
_TRIED = "feather-static"


class BadUse(ValueError):
    """What the user asked for can't be done: one line."""


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add both commands."""
    simulate = commands.add_parser(
        "simulate",
        help="what each policy gives on a named workload and a device of your choice, simulated",
        description="Drive Feather's scheduler and SGLang's policies on a simulated engine. Everything printed is "
        "simulated. Needs neither sglang nor a GPU.",
    )
    simulate.add_argument("--scenario", required=True, help=", ".join(SCENARIOS))
    simulate.add_argument("--seed", type=int, default=0, help="of the workload (default: 0)")
    _add_common(simulate)
    simulate.set_defaults(run=_checked(_simulate))
    replay = commands.add_parser(
        "replay",
        help="the same on a recorded trace",
        description="Replay a trace on a simulated engine: JSONL in Mooncake's or Alibaba Bailian's format, or a "
        "request dump of SGLang (a .pkl file, or a folder of them). Everything printed is simulated.",
    )
    replay.add_argument("trace", metavar="TRACE", type=Path)
    replay.add_argument("--speedup", type=positive_number, default=1.0, help="of the arrivals (default: 1)")
    replay.add_argument("--requests", type=positive, metavar="N", help="only the first N (default: all)")
    replay.add_argument("--strict", action="store_true", help="stop at the first malformed line")
    replay.add_argument("--html", metavar="FILE", type=Path, help="write a report page, one self-contained file")
    _add_common(replay)
    replay.set_defaults(run=_checked(_replay))


def _add_common(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(hardware_names())
    parser.add_argument("--hardware", default="H100", help=f"{names}, or a file (default: %(default)s)")
    parser.add_argument("--like", metavar="NAME", help="hardware that supplies what a profile of calibrate lacks")
    parser.add_argument("--model", default="Llama-3-8B", help=f"{', '.join(model_names())} (default: %(default)s)")
    parser.add_argument("--policies", default=",".join(POLICIES), help="comma-separated (default: all: %(default)s)")
    parser.add_argument("--max-running", type=positive, help="running slots (default: the scenario's, or 256)")
    parser.add_argument("--kv-tokens", type=positive, help="tokens of KV (default: what fits beside the weights)")
    parser.add_argument(
        "--chunked-prefill", type=_chunk, default=8192, help="tokens of a prefill chunk; -1: unsplit (default: 8192)"
    )
    parser.add_argument(
        "--memory-share", type=_share, default=0.88, help="of the memory for weights and KV (default: %(default)s)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one of Feather's settings; may be repeated"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw them")


def _checked(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Bad use is one line and exit code 2."""

    def run(args: argparse.Namespace) -> int:
        try:
            return command(args)
        except (BadUse, ProfileError, TraceError, SettingsError) as error:
            return bad_use(str(error))

    return run


def _simulate(args: argparse.Namespace) -> int:
    unknown = unknown_name("scenario", [args.scenario], SCENARIOS)
    if unknown:
        raise BadUse(unknown)
    make = functools.partial(make_scenario, args.scenario, args.seed)
    return _run(args, make(), make)


def _replay(args: argparse.Namespace) -> int:
    trace = read_trace(args.trace, requests=args.requests, speedup=args.speedup, strict=args.strict)
    tell_left_out(args.trace, trace)
    return _run(args, trace.workload, functools.partial(_workload_of, args.trace, args.requests, args.speedup))


def tell_left_out(path: Path, trace: Trace) -> None:
    """Name the malformed lines of a trace, if there are any, as progress."""
    for number, why in trace.bad_lines[:_SHOWN_LINES]:
        say(f"{path}:{number}: {why}; left out")
    if trace.bad_lines:
        numbers = [str(number) for number, _ in trace.bad_lines]
        more = ", ..." if len(numbers) > 20 else ""
        say(f"malformed lines left out: {len(numbers)} (lines {', '.join(numbers[:20])}{more})")


def _workload_of(path: Path, requests: int | None, speedup: float) -> Workload:
    return read_trace(path, requests=requests, speedup=speedup).workload


def _run(args: argparse.Namespace, workload: Workload, make: Callable[[], Workload]) -> int:
    policies = args.policies.split(",")
    unknown = unknown_name("policy", policies, POLICIES)
    if unknown:
        raise BadUse(unknown)
    html = getattr(args, "html", None)
    refusal = refused_outputs(args.json, plots=[args.plot, html])
    if refusal:
        raise BadUse(refusal)
    setup = _setup(args, workload)
    runs = [(policy, setup.settings) for policy in policies]
    trials = recommend.min_batches(setup.engine.max_running) if html and _TRIED in policies else []
    runs += [(_TRIED, dataclasses.replace(setup.settings, min_batch=number)) for number in trials]
    everything = run_all(make, setup, runs, _progress(len(runs), len(workload.requests)))
    results = everything[: len(policies)]
    refused = max(result.refused for result in results)
    if refused == len(workload.requests):
        raise BadUse(f"none of the {refused} requests fits into {setup.engine.kv_tokens:,} tokens of KV")
    if refused:
        say(f"{refused} of {len(workload.requests)} requests need more KV than there is and were refused")
    if html:
        tried = dict(zip(trials, everything[len(policies) :], strict=True))
        _write_page(html, args, workload, setup, results, tried)
    if args.plot:
        report.figure(results, f"{workload.name}, {args.model} on {args.hardware}").savefig(args.plot, dpi=110)
    text = f"{report.heading(workload, setup, args.hardware, args.model)}\n{report.table(results)}"
    return cli_shared.report(text, report.as_json(workload, setup, results), args.json)


def _write_page(
    html: Path,
    args: argparse.Namespace,
    workload: Workload,
    setup: Setup,
    results: Sequence[Result],
    tried: dict[int, Result],
) -> None:
    default = {
        setup.settings.min_batch or default_min_batch(setup.engine.max_running): result
        for result in results
        if result.policy == _TRIED
    }
    advice = recommend.recommend(
        results, default | tried if default else {}, workload.shared_tokens / workload.prompt_tokens
    )
    about = report.heading(workload, setup, args.hardware, args.model).replace("\n", "; ")
    html.write_text(page(workload, about, results, recommend.best_of(results), advice), encoding="utf-8")


def _setup(args: argparse.Namespace, workload: Workload) -> Setup:
    hardware, model = load_hardware(args.hardware, args.like), load_model(args.model)
    tokens = args.kv_tokens or kv_tokens(hardware, model, args.memory_share)
    if tokens < 1:
        raise BadUse(f"{args.model} does not fit into {args.memory_share:.0%} of {hardware.memory_gb:g} GB")
    slots = args.max_running or workload.max_running or EngineConfig.max_running
    engine = EngineConfig(tokens, slots, chunked_prefill_tokens=args.chunked_prefill)
    given = dict(pair.partition("=")[::2] for pair in args.set)
    return Setup(hardware, model, engine, Settings.parse(given, "--set"))


def _progress(runs: int, requests: int) -> Callable[[Sequence[int]], None]:
    """A bar in place on a terminal; elsewhere a line whenever another tenth is done."""
    terminal = sys.stderr.isatty()
    shown = 0

    def show(finished: Sequence[int]) -> None:
        nonlocal shown
        share = sum(finished) / (requests * runs)
        if terminal:
            bar = "#" * round(share * 30)
            end = "\n" if share >= 1 else ""
            print(f"\rsimulating, {runs} runs [{bar:<30}] {share:4.0%}", end=end, file=sys.stderr, flush=True)
        elif int(share * 10) > shown:
            shown = int(share * 10)
            say(f"simulating, {runs} runs: {share:.0%} of {requests * runs:,} requests")

    return show


def _chunk(text: str) -> int | None:
    return None if text == "-1" else positive(text)


def _share(text: str) -> float:
    value = positive_number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, got {text!r}")
    return value
