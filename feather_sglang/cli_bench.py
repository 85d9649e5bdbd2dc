"""``feather-sglang bench``: what it measures in this process; what needs servers is in ``cli_serving``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from pathlib import Path

from feather_sglang import cli_serving
from feather_sglang.bench.serving import POLICIES
from feather_sglang.bench.tiny_model import TINY, model_in
from feather_sglang.cli_shared import (
    NEEDS_SGLANG,
    Commands,
    bad_use,
    positive,
    report,
    say,
    unknown_name,
    use_cpu_platform,
)
from feather_sglang.engines.sglang import releases


def add_commands(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add ``bench`` with everything below it."""
    bench = commands.add_parser("bench", help="measure Feather on this machine").add_subparsers(
        dest="bench", required=True
    )
    cli_serving.add_bench(bench)
    _add_overhead(bench)
    _add_decode(bench)
    _add_policies(bench)


def _add_overhead(bench: Commands[argparse.ArgumentParser]) -> None:
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
    overhead.add_argument("--policies", default=",".join(POLICIES), help="comma-separated (default: %(default)s)")
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


def _overhead(args: argparse.Namespace) -> int:
    policies = tuple(args.policies.split(","))
    unknown = unknown_name("policy", policies, POLICIES)
    if unknown:
        return bad_use(unknown)
    if args.plot and not args.sweep:
        return bad_use("--plot needs --sweep")
    if importlib.util.find_spec("sglang") is None:
        return bad_use(NEEDS_SGLANG)
    if not releases.is_newest():
        return bad_use(releases.NEEDS_NEWEST)
    if args.server:
        from feather_sglang.bench import server_share

        share = server_share.measure(model_in(args.folder.resolve(), TINY))
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


def _add_decode(bench: Commands[argparse.ArgumentParser]) -> None:
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


def _decode(args: argparse.Namespace) -> int:
    dtypes = args.dtypes.split(",")
    if not set(dtypes) <= {"float32", "bfloat16"}:
        return bad_use(f"--dtypes must be of float32 and bfloat16, got '{args.dtypes}'")
    if args.query_heads % args.kv_heads:
        return bad_use("--query-heads must be a multiple of --kv-heads")
    if importlib.util.find_spec("sglang") is None:
        return bad_use(NEEDS_SGLANG)
    if not releases.is_newest():
        return bad_use(releases.NEEDS_NEWEST)
    use_cpu_platform()
    from feather_sglang.bench import decode

    shape = decode.Shape(args.query_heads, args.kv_heads, args.head_dim)
    rows = decode.run(args.sizes or decode.SIZES, dtypes, args.page_sizes, shape, say)
    return report(decode.table(rows), decode.as_json(shape, rows), args.json)


def _add_policies(bench: Commands[argparse.ArgumentParser]) -> None:
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
