from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from pathlib import Path

import aiohttp
import psutil
import pytest

from feather_sglang.bench.server import LAUNCHER, Server
from feather_sglang.bench.tiny_model import make_tiny_model

BASE = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--mem-fraction-static=0.3",
    "--random-seed=7",
)

#: Set by scripts/compat_live.sh: the installed SGLang is patched, and its plugin loader is to leave Feather out.
PATCHED = os.environ.get("FEATHER_TEST_PATCHED") == "1"
PATCHED_ENVIRONMENT = {"SGLANG_PLATFORM": "feather_cpu", "SGLANG_PLUGINS": "none"}


@pytest.fixture(scope="session")
def model() -> Path:
    return make_tiny_model(Path(__file__).parents[2] / ".demo" / "model")


@pytest.fixture
def serve(model, tmp_path):
    """Start servers that end with the test; ``serve.log`` has the last one's log."""
    started = []

    def start(*flags, policy="feather", environment=None, launcher=LAUNCHER):
        trace = tmp_path / f"trace{len(started)}.jsonl"
        arguments = [f"--model-path={model}", f"--schedule-policy={policy}", *BASE, *flags]
        if policy == "feather":
            environment = {"FEATHER_TRACE": str(trace), **(environment or {})}
        if PATCHED:
            environment = {**PATCHED_ENVIRONMENT, **(environment or {})}
            launcher = (sys.executable, "-m", "sglang.launch_server")
        server = Server(arguments, tmp_path / f"server{len(started)}.log", environment, launcher)
        server.trace = trace
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


def prompts(groups, per_group, prefix, suffix, seed=0, vocabulary=2000):
    """Interleaved: a member of each group, then the next of each. Returns (rid, input ids)."""
    rng = random.Random(seed)

    def draw(n):
        return [rng.randrange(3, vocabulary) for _ in range(n)]

    prefixes = [draw(prefix) for _ in range(groups)]
    return [(f"g{g}-{i}", prefixes[g] + draw(suffix)) for i in range(per_group) for g in range(groups)]


async def generate(session, url, rid, ids, tokens, **extra):
    body = {
        "rid": rid,
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **extra},
    }
    async with session.post(url + "/generate", json=body) as response:
        return rid, response.status, await response.json()


@contextlib.contextmanager
def frozen(server):
    """Freeze the scheduler processes: what is sent meanwhile arrives within milliseconds, in order.

    Not all before the first pass: the thread that receives wakes with the scheduler and races it. For that, see
    :func:`together`.
    """
    family = psutil.Process(server.pid).children(recursive=True)
    schedulers = [each for each in family if each.name().startswith("sglang::schedul")]
    assert schedulers
    for each in schedulers:
        each.suspend()
    try:
        yield
    finally:
        for each in schedulers:
            each.resume()


def ask_all(server, requests, tokens=16, abort=(), delay=0.0, **extra):
    """Send all at once; abort the named ones ``delay`` seconds later. Returns rid -> list of (status, answer).

    ``tokens`` is the length of every answer, or a function from rid to it.
    """

    async def main():
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            with frozen(server):
                jobs = [
                    asyncio.create_task(
                        generate(session, server.url, r, ids, tokens(r) if callable(tokens) else tokens, **extra)
                    )
                    for r, ids in requests
                ]
                await asyncio.sleep(3)
            await asyncio.sleep(delay)
            for rid in abort:
                async with session.post(server.url + "/abort_request", json={"rid": rid}) as response:
                    await response.read()
            answers = {}
            for rid, status, answer in await asyncio.gather(*jobs):
                answers.setdefault(rid, []).append((status, answer))
            return answers

    return asyncio.run(main())


def fake_plugin(folder, body, name="other"):
    """A plugin of SGLang's called ``name``, whose module is ``body``; returns the environment that installs it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    (folder / f"{name}.py").write_text(body)
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


TOGETHER = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    held = []
    def pull(original, receiver, *args, **kwargs):
        passed = []
        for each in original(receiver, *args, **kwargs):
            (held if str(getattr(each, "rid", "")).startswith("g") else passed).append(each)
        if len(held) == {count}:
            passed += held
            held.clear()
        return passed
    HookRegistry.register(
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        pull, HookType.AROUND,
    )
"""


def together(folder, count):
    """A plugin that keeps the requests of :func:`prompts` from the scheduler until ``count`` are there: one pass sees
    them all, however fast the machine is. Releases that receive elsewhere leave it out. Returns the environment that
    installs it.
    """
    return fake_plugin(folder, TOGETHER.format(count=count), "together")


def admissions(server):
    """The trace: one record for each pass that admitted somebody, warm-up requests left out."""
    records = [json.loads(line) for line in server.trace.read_text().splitlines()]
    for record in records:
        record["admitted"] = [rid for rid in record["admitted"] if rid.startswith("g")]
    return [record for record in records if record["admitted"]]
