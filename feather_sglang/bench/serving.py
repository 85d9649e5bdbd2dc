"""Traffic against a real server, with SGLang's own ``bench_serving`` as the client."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from feather_sglang.bench.progress import ticking
from feather_sglang.bench.server import Server
from feather_sglang.bench.tiny_model import TINY, Shape
from feather_sglang.scheduling import settings

POLICIES = ("fcfs", "lpm", "dfs-weight", "feather")
#: Feather with a batching policy that is not what the server's settings say.
_BATCHING = "feather-"
KNOWN_POLICIES = (*POLICIES, *(_BATCHING + name for name in settings.POLICIES))

#: A tiny model's server without a GPU.
CPU = ("--device=cpu", "--dtype=float32", "--mem-fraction-static=0.3")
#: The demo's: small enough for two cores, and its KV holds less than a quarter of what its prompts have to compute.
KV_PRESSURE = ("--max-total-tokens=20000", "--max-running-requests=16")
TORCH_NATIVE = (*CPU, "--attention-backend=torch_native")
CPU_FLAGS = (*TORCH_NATIVE, *KV_PRESSURE)

#: Seconds in which a server that took the client with it is found dead.
_DYING_S = 5


class Traffic(Protocol):
    """What a client sends."""

    @property
    def requests(self) -> int:
        """How many."""

    @property
    def arrivals(self) -> str:
        """When they arrive, for a table."""

    @property
    def most_cached(self) -> float:
        """The largest possible share of prompt tokens from cache: nothing is computed twice."""

    def client(self, folder: Path) -> list[str]:
        """The client's module and its arguments for this traffic; what it reads is put into the folder."""

    def as_dict(self) -> dict[str, Any]:
        """What it is, for machines."""


@dataclass(frozen=True)
class Workload:
    """SGLang's ``generated-shared-prefix`` data set, shuffled; lengths in tokens."""

    groups: int = 32
    per_group: int = 10
    prefix_tokens: int = 2048
    suffix_tokens: int = 64
    output_tokens: int = 16
    seed: int = 1
    #: A Poisson stream of so many requests per second; ``None``: all are sent at once.
    rate: float | None = None

    @property
    def requests(self) -> int:
        """Of all groups together."""
        return self.groups * self.per_group

    @property
    def arrivals(self) -> str:
        """The rate."""
        return "at once" if self.rate is None else f"{self.rate:g}/s"

    @property
    def most_cached(self) -> float:
        """The largest possible share of prompt tokens from cache: every prefix is computed once."""
        shared = (self.per_group - 1) * self.prefix_tokens
        return shared / (self.per_group * (self.prefix_tokens + self.suffix_tokens))

    def client(self, folder: Path) -> list[str]:
        """SGLang's client as it is."""
        return [
            *("sglang.bench_serving", "--dataset-name=generated-shared-prefix", f"--seed={self.seed}"),
            *(f"--gsp-num-groups={self.groups}", f"--gsp-prompts-per-group={self.per_group}"),
            *(f"--gsp-system-prompt-len={self.prefix_tokens}", f"--gsp-question-len={self.suffix_tokens}"),
            *(f"--gsp-output-len={self.output_tokens}", "--tokenize-prompt"),
            f"--request-rate={'inf' if self.rate is None else self.rate}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """A server, and what it is driven with: one traffic after the other."""

    name: str
    traffic: tuple[Traffic, ...]
    #: What belongs to the workload, whatever the model.
    flags: tuple[str, ...] = ()
    #: With the tiny model only, whose shape this is.
    cpu_flags: tuple[str, ...] = TORCH_NATIVE
    shape: Shape = TINY

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        traffic = [each.as_dict() for each in self.traffic]
        shape = asdict(self.shape)
        return {"name": self.name, "flags": self.flags, "cpu_flags": self.cpu_flags, "shape": shape, "traffic": traffic}


@dataclass(frozen=True)
class Result:
    """What the client measured; times in milliseconds, ``cached_share`` of prompt tokens between 0 and 1."""

    policy: str
    completed: int
    failed: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    cached_share: float
    #: The generated texts, in the order of the data set.
    texts: tuple[str, ...] = field(default=(), repr=False)


def batching_policy(policy: str) -> str | None:
    """The batching policy that one of ``KNOWN_POLICIES`` names, if it does."""
    return policy.removeprefix(_BATCHING) if policy.startswith(_BATCHING) else None


def policy_flags(policy: str) -> list[str]:
    """A server's flags for one of ``KNOWN_POLICIES``."""
    batching = batching_policy(policy)
    if batching is None:
        return [f"--schedule-policy={policy}"]
    return ["--schedule-policy=feather", f"--feather-policy={batching}"]


#: Sends traffic to a server and measures.
Drive = Callable[[Traffic], Result]
#: Serves a setting with a policy for as long as the context lasts.
Serve = Callable[[Setting, str], contextlib.AbstractContextManager[Drive]]


class Endpoint(Protocol):
    """A server that answers."""

    @property
    def url(self) -> str:
        """Without a slash at its end."""

    def check(self) -> None:
        """Raises ``ServerError`` if it is known to be dead."""


@contextlib.contextmanager
def served(policy: str, server: Server) -> Iterator[Server]:
    """A server from its start to its end, with progress. Raises ``ServerError``."""
    with ticking(f"{policy}: starting the server (log: {server.log})"):
        server.start()
    try:
        yield server
    finally:
        server.stop()


def run_policy(policy: str, model: Path, flags: Sequence[str], workload: Workload, *, log: Path) -> Result:
    """Start a server with this policy, drive it, stop it. Raises as :func:`drive`."""
    with served(policy, Server([f"--model-path={model}", *policy_flags(policy), *flags], log)) as server:
        return drive(policy, server, workload, str(model))


def drive(policy: str, server: Endpoint, traffic: Traffic, model: str | None = None) -> Result:
    """Send traffic to a running server, whose prefix cache is emptied first.

    Args:
        policy: for the result, and for what is said meanwhile.
        server: the one to drive.
        traffic: what to send.
        model: whose tokenizer the client takes; default: the one that the server names.

    Raises:
        ServerError: the server died.
        RuntimeError: the client failed; with its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="feather-client-") as name:
        folder = Path(name)
        output = folder / "result.jsonl"
        command = [
            *(sys.executable, "-m", *traffic.client(folder), "--backend=sglang", f"--base-url={server.url}"),
            *("--output-details", f"--output-file={output}", "--flush-cache", "--cache-report"),
            *([f"--model={model}", f"--tokenizer={model}"] if model else []),
        ]
        with ticking(f"{policy}: serving {traffic.requests} requests, {traffic.arrivals}"):
            _run_client(command, folder, server, hub(model))
        return _parse(policy, traffic.requests, json.loads(output.read_text().splitlines()[-1]))


def hub(model: str | None) -> dict[str, str]:
    """The environment for a model: nothing is looked up on the network for one that lies on this machine."""
    return {"HF_HUB_OFFLINE": "1" if model and Path(model).is_dir() else os.environ.get("HF_HUB_OFFLINE", "0")}


def _run_client(command: Sequence[str], folder: Path, server: Endpoint, environment: dict[str, str]) -> None:
    cache = os.environ.get("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
    log = folder / "client.log"
    with log.open("w") as output:
        client = subprocess.Popen(
            command,
            cwd=folder,
            # The client keeps generated data sets in the home folder, and does not tell tokenizers apart.
            env={**os.environ, **environment, "HF_HOME": cache, "HOME": str(folder)},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while client.poll() is None:
            server.check()
            with contextlib.suppress(subprocess.TimeoutExpired):
                client.wait(1)
    finally:
        if client.poll() is None:
            os.killpg(client.pid, signal.SIGKILL)
            client.wait()
    if client.returncode == 0:
        return
    for _ in range(_DYING_S):
        server.check()
        time.sleep(1)
    raise RuntimeError(f"bench_serving failed with code {client.returncode}:\n{log.read_text()[-3000:]}")


def _parse(policy: str, requests: int, measured: dict[str, Any]) -> Result:
    return Result(
        policy=policy,
        completed=measured["completed"],
        failed=requests - measured["completed"],
        requests_per_s=measured["request_throughput"],
        output_tokens_per_s=measured["output_throughput"],
        ttft_p50_ms=measured["median_ttft_ms"],
        ttft_p99_ms=measured["p99_ttft_ms"],
        tpot_p50_ms=measured["median_tpot_ms"],
        tpot_p99_ms=measured["p99_tpot_ms"],
        cached_share=measured["cache_report"]["total_cached_tokens"] / measured["total_input_tokens"],
        texts=tuple(measured["generated_texts"]),
    )


def figures(result: Result) -> dict[str, Any]:
    """A result without the generated texts."""
    return {name: value for name, value in asdict(result).items() if name != "texts"}
