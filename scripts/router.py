"""Two Feather servers on the CPU behind SGLang's router. Called by scripts/router.sh.

The same shared-prefix workload goes through the router with each routing policy. Then a cache-aware router serves,
until Ctrl-C ends all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import sys
from pathlib import Path

from feather_sglang.bench import router, serving
from feather_sglang.bench.progress import ticking
from feather_sglang.bench.server import Server, ServerError, side_by_side
from feather_sglang.bench.tiny_model import make_tiny_model
from feather_sglang.cli_parser import Parser
from feather_sglang.cli_shared import bad_use, complain, positive, report, say

_NEEDS = "this needs sglang and sglang-router; run: pip install 'feather-sglang[sglang,router]'"
_FLAGS = ("--schedule-policy=feather", "--enable-metrics", "--sleep-on-idle", *serving.CPU_FLAGS)
# Two servers hold its prefixes if each gets half of the groups, and not if each gets all of them.
_WORKLOAD = serving.Workload(groups=32, per_group=6, prefix_tokens=1024)


def main() -> int:
    """Compare, print, serve; returns the exit code: 0 done, 1 failed, 2 bad use, 130 interrupted."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=positive, default=2, help="behind the router (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="for model and logs (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the results as JSON; - for standard output")
    parser.add_argument("--once", action="store_true", help="end after the comparison")
    args = parser.parse_args()
    if any(importlib.util.find_spec(name) is None for name in ("sglang", "sglang_router")):
        return bad_use(_NEEDS)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever stops the script stops the servers
    try:
        return _run(args)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (ServerError, RuntimeError, OSError) as error:
        complain(str(error))
        return 1


def _run(args: argparse.Namespace) -> int:
    folder = args.folder.resolve()
    model = make_tiny_model(folder / "model")
    flags = [f"--model-path={model}", *_FLAGS]
    servers = [Server(flags, folder / f"server-{number}.log") for number in range(1, args.servers + 1)]
    with contextlib.ExitStack() as stack:
        with ticking(f"starting {args.servers} servers (logs: {folder}/server-*.log)"):
            stack.enter_context(side_by_side(servers))
        rows = router.compare(servers, model, _WORKLOAD, folder)
        report(router.table(rows), router.as_json(_WORKLOAD, rows), args.json)
        if not args.once:
            _serve(servers, folder / "router.log")
    return 0


def _serve(servers: list[Server], log: Path) -> None:
    with router.Router(servers, "cache_aware", log) as front, contextlib.suppress(KeyboardInterrupt):
        say(f"Send requests to {front.url} (/generate, /v1/completions, ...); Ctrl-C stops everything.")
        for number, server in enumerate(servers, 1):
            say(f"Server {number} behind it: {server.url}, metrics at {server.url}/metrics, log {server.log}")
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
