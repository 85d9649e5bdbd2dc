"""One workload against one real server per policy, with SGLang's own ``bench_serving`` as the client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from feather_sglang.bench.progress import ticking
from feather_sglang.bench.server import Server


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
    def most_cached(self) -> float:
        """The largest possible share of prompt tokens from cache: every prefix is computed once."""
        shared = (self.per_group - 1) * self.prefix_tokens
        return shared / (self.per_group * (self.prefix_tokens + self.suffix_tokens))


@dataclass(frozen=True)
class Result:
    """What the client measured; times in milliseconds, ``cached_share`` of prompt tokens between 0 and 1."""

    policy: str
    completed: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_median_ms: float
    ttft_p99_ms: float
    cached_share: float
    #: The generated texts, in the order of the data set.
    texts: tuple[str, ...] = field(default=(), repr=False)


#: The demo's server: small enough for two cores, and its KV holds a fifteenth of the workload's tokens.
CPU_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--dtype=float32",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=20000",
    "--max-running-requests=16",
)


def run_policy(policy: str, model: Path, flags: Sequence[str], workload: Workload, *, log: Path) -> Result:
    """Start a server with this policy, drive it, stop it. Raises ``ServerError`` or ``CalledProcessError``."""
    server = Server([f"--model-path={model}", f"--schedule-policy={policy}", *flags], log)
    with ticking(f"{policy}: starting the server (log: {log})"):
        server.start()
    try:
        with ticking(f"{policy}: serving {workload.groups * workload.per_group} requests"):
            return drive(policy, server, model, workload)
    finally:
        server.stop()


def drive(policy: str, server: Server, model: Path, workload: Workload) -> Result:
    """Send the workload to a running server, whose prefix cache is emptied first.

    Raises ``RuntimeError`` with the client's last lines if it failed.
    """
    rate = "inf" if workload.rate is None else str(workload.rate)
    with tempfile.TemporaryDirectory(prefix="feather-client-") as folder:
        output = Path(folder) / "result.jsonl"
        client = subprocess.run(
            [
                *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
                *("--host", "127.0.0.1", "--port", str(server.port), "--model", str(model)),
                *("--dataset-name", "generated-shared-prefix", "--seed", str(workload.seed)),
                *("--gsp-num-groups", str(workload.groups), "--gsp-prompts-per-group", str(workload.per_group)),
                *("--gsp-system-prompt-len", str(workload.prefix_tokens)),
                *("--gsp-question-len", str(workload.suffix_tokens), "--gsp-output-len", str(workload.output_tokens)),
                *("--request-rate", rate, "--output-details", "--output-file", str(output)),
                *("--tokenize-prompt", "--flush-cache", "--cache-report"),
            ],
            cwd=folder,
            # The client keeps generated data sets in the home folder, and does not tell tokenizers apart.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HOME": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if client.returncode != 0 or not output.exists():
            raise RuntimeError(f"bench_serving failed with code {client.returncode}:\n{client.stdout[-3000:]}")
        return _parse(policy, json.loads(output.read_text().splitlines()[-1]))


def _parse(policy: str, measured: dict[str, Any]) -> Result:
    return Result(
        policy=policy,
        completed=measured["completed"],
        requests_per_s=measured["request_throughput"],
        output_tokens_per_s=measured["output_throughput"],
        ttft_median_ms=measured["median_ttft_ms"],
        ttft_p99_ms=measured["p99_ttft_ms"],
        cached_share=measured["cache_report"]["total_cached_tokens"] / measured["total_input_tokens"],
        texts=tuple(measured["generated_texts"]),
    )


def table(results: Sequence[Result]) -> str:
    """The results, a line each, for reading."""
    lines = [
        f"{'policy':<12}{'requests/s':>12}{'output tok/s':>14}{'TTFT p50 s':>12}{'TTFT p99 s':>12}{'from cache':>12}"
    ]
    for r in results:
        lines.append(
            f"{r.policy:<12}{r.requests_per_s:>12.2f}{r.output_tokens_per_s:>14.1f}"
            f"{r.ttft_median_ms / 1000:>12.2f}{r.ttft_p99_ms / 1000:>12.2f}{r.cached_share:>12.1%}"
        )
    return "\n".join(lines)


def as_json(workload: Workload, results: Sequence[Result]) -> str:
    """The results for machines."""
    return json.dumps({"workload": asdict(workload), "rows": [figures(r) for r in results]}, indent=2)


def figures(result: Result) -> dict[str, Any]:
    """A result without the generated texts."""
    return {name: value for name, value in asdict(result).items() if name != "texts"}
