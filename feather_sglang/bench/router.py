"""SGLang's own router (``sglang-router``) in front of several servers, and what each of them got to do."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from feather_sglang.bench import serving
from feather_sglang.bench.progress import ticking
from feather_sglang.bench.server import Server, free_port

LAUNCHER = (sys.executable, "-m", "sglang_router.launch_router")
POLICIES = ("round_robin", "cache_aware")

#: Where the router's defaults do not do; docs/router.md says why.
FLAGS = (
    "--retry-max-retries=12",
    "--retry-backoff-multiplier=1",
    "--cb-timeout-duration-secs=10",
    "--health-check-interval-secs=10",
    "--health-check-timeout-secs=20",
)


class Router(Server):
    """``sglang-router`` before servers that are running; ready once all of them have joined.

    Args:
        servers: it needs their URLs alone, and does not stop them.
        policy: one of the router's, ``cache_aware`` for example.
        log: file that gets its output.
        flags: the router's, without host, ports, servers and policy.
    """

    def __init__(self, servers: Sequence[Server], policy: str, log: Path, flags: Sequence[str] = FLAGS) -> None:
        self._servers = len(servers)
        metrics = ("--prometheus-host=127.0.0.1", f"--prometheus-port={free_port()}")
        arguments = [f"--policy={policy}", *metrics, *flags, "--worker-urls", *(server.url for server in servers)]
        super().__init__(arguments, log, launcher=LAUNCHER)

    def _ready(self) -> bool:
        with urllib.request.urlopen(self.url + "/readiness", timeout=5) as answer:
            return bool(json.load(answer)["healthy_workers"] == self._servers)


@dataclass(frozen=True)
class Served:
    """What a server has answered, by its own metrics."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: Served) -> Served:
        return Served(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Served) -> Served:
        return Served(*(ours - theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


def served(server: Server) -> Served:
    """Read a server's metrics, for which it needs ``--enable-metrics``."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        return parse_metrics(answer.read().decode())


def parse_metrics(text: str) -> Served:
    """Sums over all labels of the counters in Prometheus' text format. Needs prometheus_client, which SGLang brings."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return Served(*(int(sums[f"sglang:{name}_total"]) for name in ("num_requests", "prompt_tokens", "cached_tokens")))


@dataclass(frozen=True)
class Row:
    """One routing policy: what each server answered, and what the client measured."""

    policy: str
    servers: tuple[Served, ...]
    result: serving.Result


def compare(
    servers: Sequence[Server], model: Path, workload: serving.Workload, folder: Path, policies: Sequence[str] = POLICIES
) -> list[Row]:
    """Send the workload to running servers through a router of each policy; the routers' logs go to ``folder``.

    Raises ``ServerError`` or ``RuntimeError``, with the last lines of who failed.
    """
    return [_measure(policy, servers, model, workload, folder / f"router-{policy}.log") for policy in policies]


def _measure(policy: str, servers: Sequence[Server], model: Path, workload: serving.Workload, log: Path) -> Row:
    what = f"{policy}: {workload.requests} requests through the router (log: {log})"
    with ticking(what), Router(servers, policy, log) as router:
        for server in servers:  # the router hands the client's request on, but without time to come to rest
            request = urllib.request.Request(server.url + "/flush_cache?timeout=60", method="POST")
            urllib.request.urlopen(request, timeout=90).close()
        before = [served(server) for server in servers]
        result = serving.drive(policy, router, workload, str(model))
        gained = (served(server) - reading for server, reading in zip(servers, before, strict=True))
        return Row(policy, tuple(gained), result)


def table(rows: Sequence[Row]) -> str:
    """A line for each server under each policy, and one for all of them, for reading."""
    lines = [f"{'routing':<14}{'server':>6}{'requests':>10}{'prompt tokens':>15}{'from cache':>12}"]
    for row in rows:
        everything = sum(row.servers, start=Served())
        for name, each in [*enumerate(row.servers, 1), ("all", everything)]:
            share = each.cached_tokens / max(each.prompt_tokens, 1)
            lines.append(f"{row.policy:<14}{name:>6}{each.requests:>10}{each.prompt_tokens:>15,}{share:>12.1%}")
    return "\n".join(lines)


def as_json(workload: serving.Workload, rows: Sequence[Row]) -> str:
    """The rows for machines."""
    found = [
        {
            "policy": row.policy,
            "servers": [asdict(each) for each in row.servers],
            "client": serving.figures(row.result),
        }
        for row in rows
    ]
    return json.dumps({"workload": asdict(workload), "rows": found}, indent=2)
