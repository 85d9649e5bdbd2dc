"""The ``feather-sglang`` command."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import feather_sglang
from feather_sglang import cli_compat, cli_operate, cli_simulate, compiling
from feather_sglang.bench import serving
from feather_sglang.bench.server import ServerError
from feather_sglang.bench.tiny_model import make_tiny_model
from feather_sglang.cli_shared import bad_use, complain, positive, report, say, unknown_name, use_cpu_platform, writable
from feather_sglang.engines.sglang import releases

_NEEDS_SGLANG = "this needs sglang; run: pip install 'feather-sglang[sglang]'"
_DEVICES = ("cpu", "cuda")
_DEMO_POLICIES = ("fcfs", "lpm", "dfs-weight", "feather")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0 done, 1 failed, 2 bad use, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="feather-sglang", description="Prefix-homogeneous batch scheduling for SGLang."
    )
    parser.add_argument("--version", action="version", version=f"feather-sglang {feather_sglang.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_bench(commands)
    _add_calibrate(commands)
    cli_simulate.add_commands(commands)
    _add_compile(commands)
    cli_compat.add_commands(commands)
    cli_operate.add_commands(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ServerError, RuntimeError, OSError) as error:
        complain(str(error))
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
    demo.add_argument("--groups", type=positive, default=standard.groups, help="prefix groups (default: %(default)s)")
    demo.add_argument("--per-group", type=positive, default=standard.per_group, help="requests in each (default: 10)")
    demo.add_argument("--folder", type=Path, default=Path(".demo"), help="for model and logs (default: %(default)s)")
    demo.add_argument("--json", metavar="FILE", help="also write the results as JSON; - for standard output")
    demo.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    policies = args.policies.split(",")
    unknown = unknown_name("policy", policies, _DEMO_POLICIES)
    if unknown:
        return bad_use(unknown)
    folder = args.folder.resolve()
    model = make_tiny_model(folder / "model")
    workload = serving.Workload(groups=args.groups, per_group=args.per_group)
    results: list[serving.Result] = []
    try:
        for number, policy in enumerate(policies, 1):
            say(f"[{number}/{len(policies)}] {policy}")
            log = folder / f"server-{policy}.log"
            results.append(serving.run_policy(policy, model, serving.CPU_FLAGS, workload, log=log))
    finally:
        if results:
            most = f"At most {workload.most_cached:.1%} can come from cache: every prefix is computed once."
            text = f"{serving.table(results)}\n{most}"
            report(text, serving.as_json(workload, results), args.json)
    return 0


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure Feather on this machine").add_subparsers(
        dest="bench", required=True
    )
    overhead = bench.add_parser(
        "overhead",
        help="what a scheduling pass costs, beside SGLang's own policies",
        description="Time a scheduling pass of SGLang's own policies and of Feather, through the hooks that the server "
        "installs, on identical queues in one process. Needs sglang, no GPU.",
    )
    for name, default, text in (
        ("--waiting", 1400, "requests in the queue"),
        ("--groups", 8, "prefix groups"),
        ("--prefix-tokens", 4096, "shared prefix of each group"),
        ("--suffix-tokens", 64, "what each request has of its own"),
        ("--admit", 16, "requests admitted in a pass"),
        ("--repeat", 20, "measurements; the median counts"),
    ):
        overhead.add_argument(name, type=positive, default=default, help=f"{text} (default: {default})")
    overhead.add_argument(
        "--policies", default="fcfs,lpm,dfs-weight,feather", help="comma-separated (default: %(default)s)"
    )
    kind = overhead.add_mutually_exclusive_group()
    kind.add_argument(
        "--sweep", action="store_true", help="Feather alone, 100 to 64,000 waiting and 512 to 100,000 tokens"
    )
    kind.add_argument("--server", action="store_true", help="Feather's share of a running CPU server's scheduler time")
    overhead.add_argument(
        "--cold",
        action="store_true",
        help="empty the processor's caches before each measurement of Feather, as a decode step between passes does",
    )
    overhead.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    overhead.add_argument("--plot", metavar="FILE.png", help="with --sweep: draw it")
    overhead.add_argument(
        "--folder", type=Path, default=Path(".demo"), help="for --server's model (default: %(default)s)"
    )
    overhead.set_defaults(run=_overhead)
    decode = bench.add_parser(
        "decode",
        help="the CPU platform's decode attention, beside SGLang's torch_native",
        description="Time one layer's decode attention of both backends, in one run, on scattered pages: requests with "
        "nothing in common, and requests with one prefix. Needs sglang, no GPU.",
    )
    decode.add_argument("--sizes", type=_sizes, metavar="REQUESTSxTOKENS,...", help="(default: 1x128 to 64x8192)")
    decode.add_argument("--dtypes", default="float32,bfloat16", help="of the KV cache (default: %(default)s)")
    decode.add_argument("--page-sizes", type=_positives, default="1,16", help="(default: %(default)s)")
    for name, default in (("--query-heads", 2), ("--kv-heads", 2), ("--head-dim", 128)):
        decode.add_argument(name, type=positive, default=default, help=f"(default: {default})")
    decode.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    decode.set_defaults(run=_decode)
    locality = bench.add_parser(
        "locality",
        help="homogeneous decode batches against mixed ones, and whole workloads, on real servers",
        description="Measure what homogeneous batches bring to decode on the CPU platform: batches of one prefix "
        "and of eight on one server, then whole workloads on a server per policy. Half an hour with the defaults.",
    )
    locality.add_argument("--part", choices=("batches", "workloads", "all"), default="all")
    locality.add_argument("--settings", default="main,longer-prefix,many-groups", help="(default: %(default)s)")
    locality.add_argument("--policies", default="fcfs,lpm,dfs-weight,feather", help="(default: %(default)s)")
    locality.add_argument("--runs", type=positive, default=3, help="the median counts (default: 3)")
    locality.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    locality.add_argument("--folder", type=Path, default=Path(".demo"), help="model and logs (default: %(default)s)")
    locality.set_defaults(run=_locality)
    policies = bench.add_parser(
        "policies",
        help="whether the learned batching policies learn, on simulated throughput surfaces",
        description="Drive the scheduler and its learned policies on a simulated engine whose throughput is known, and "
        "compare them with the best fixed decision table. Simulated; needs neither sglang nor a GPU.",
    )
    policies.add_argument("--seeds", type=positive, default=20, help="seeds for each row (default: %(default)s)")
    policies.add_argument(
        "--requests", type=positive, default=36000, help="requests to learn from (default: %(default)s)"
    )
    policies.add_argument(
        "--cases", help="comma-separated surfaces, and changes such as 'ridge after flat' (default: all)"
    )
    policies.add_argument("--search", action="store_true", help="search the best fixed tables anew, and print them")
    policies.add_argument("--json", metavar="FILE", help="write the results as JSON; - for standard output")
    policies.set_defaults(run=_policies)


def _overhead(args: argparse.Namespace) -> int:
    policies = tuple(args.policies.split(","))
    unknown = unknown_name("policy", policies, _DEMO_POLICIES)
    if unknown:
        return bad_use(unknown)
    if args.plot and not args.sweep:
        return bad_use("--plot needs --sweep")
    if importlib.util.find_spec("sglang") is None:
        return bad_use(_NEEDS_SGLANG)
    if not releases.is_newest():
        return bad_use(releases.NEEDS_NEWEST)
    if args.server:
        from feather_sglang.bench import server_share

        share = server_share.measure(make_tiny_model(args.folder.resolve() / "model"))
        text = (
            f"{share['waiting'][1]} to {share['waiting'][0]} waiting, {share['passes']} passes: "
            f"{share['hook_s'] * 1e3:.1f} ms in Feather's hooks of {share['time_s']:.2f} s: {share['share']:.2%}"
        )
        return report(text, json.dumps(share, indent=2), args.json)
    use_cpu_platform()
    from feather_sglang.bench import overhead

    config = overhead.Config(
        args.waiting, args.groups, args.prefix_tokens, args.suffix_tokens, args.admit, args.repeat, args.cold
    )
    rows = overhead.sweep(args.repeat, say, args.cold) if args.sweep else overhead.run(config, policies, say)
    if args.plot:
        overhead.plot(rows, args.plot)
    text = overhead.table(rows)
    times = overhead.ratio(rows)
    if times is not None:
        text += f"\ndfs-weight / feather: {times:.0f} for the whole pass"
    return report(text, json.dumps(overhead.as_dict(config, rows), indent=2), args.json)


def _decode(args: argparse.Namespace) -> int:
    dtypes = args.dtypes.split(",")
    if not set(dtypes) <= {"float32", "bfloat16"}:
        return bad_use(f"--dtypes must be of float32 and bfloat16, got '{args.dtypes}'")
    if args.query_heads % args.kv_heads:
        return bad_use("--query-heads must be a multiple of --kv-heads")
    if importlib.util.find_spec("sglang") is None:
        return bad_use(_NEEDS_SGLANG)
    if not releases.is_newest():
        return bad_use(releases.NEEDS_NEWEST)
    use_cpu_platform()
    from feather_sglang.bench import decode

    shape = decode.Shape(args.query_heads, args.kv_heads, args.head_dim)
    rows = decode.run(args.sizes or decode.SIZES, dtypes, args.page_sizes, shape, say)
    return report(decode.table(rows), decode.as_json(shape, rows), args.json)


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
    for path in (args.out, args.plot, args.json if args.json != "-" else None):
        if path is not None and not writable(Path(path)):
            return f"can't write '{path}'"
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib; run: pip install 'feather-sglang[plots]'"
    for module in () if args.measured else ("torch", "numba" if args.device == "cpu" else "triton"):
        if importlib.util.find_spec(module) is None:
            return f"--device {args.device} needs {module}; it comes with sglang: pip install 'feather-sglang[sglang]'"
    return None


def _locality(args: argparse.Namespace) -> int:
    from feather_sglang.bench import batches, locality

    policies, names = args.policies.split(","), args.settings.split(",")
    settings = {setting.name: setting for setting in locality.SETTINGS}
    unknown = unknown_name("policy", policies, _DEMO_POLICIES) or unknown_name("setting", names, settings)
    if unknown:
        return bad_use(unknown)
    folder = args.folder.resolve()
    batch_rows: list[batches.BatchRow] = []
    rows: list[locality.Row] = []
    texts = []
    try:
        if args.part != "workloads":
            batch_rows = locality.measure_batches(folder, args.runs, say)
            texts.append(batches.table(batch_rows))
        if args.part != "batches":
            for name in names:
                rows += locality.measure_workload(settings[name], policies, folder, args.runs, say)
    finally:  # what is done is worth having when a later server fails, or on Ctrl-C
        texts += [locality.table(rows)] if rows else []
        report("\n\n".join(texts), json.dumps(locality.as_dict(batch_rows, rows), indent=2), args.json)
    return 0


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


def _policies(args: argparse.Namespace) -> int:
    from feather_sglang.bench import surface

    if args.search:
        best = {}
        for name in surface.SURFACES:
            say(f"searching on {name}")
            best[name] = surface.search(name)
        text = "\n".join(f"{name}: strangers below {a}, costing depth below {b}" for name, (a, b) in best.items())
        return report(text, json.dumps(best, indent=2), args.json)
    cases = args.cases.split(",") if args.cases else list(surface.CASES)
    unknown = unknown_name("case", cases, surface.CASES)
    if unknown:
        return bad_use(unknown)
    rows = list(surface.rows(cases, args.seeds, args.requests, say))
    return report(surface.table(rows), json.dumps([dataclasses.asdict(row) for row in rows], indent=2), args.json)


def _positives(text: str) -> list[int]:
    return [positive(each) for each in text.split(",")]


def _sizes(text: str) -> list[tuple[int, int]]:
    found = []
    for each in text.split(","):
        requests, _, tokens = each.partition("x")
        found.append((positive(requests), positive(tokens)))
    return found


if __name__ == "__main__":
    sys.exit(main())
