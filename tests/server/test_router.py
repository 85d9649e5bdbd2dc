"""Two servers behind SGLang's router: groups stay together, and every request gets one answer, come what may."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import urllib.request

import aiohttp
import pytest
from conftest import BASE, admissions, ask_all, generate, prompts

from feather_sglang.bench import router as bench
from feather_sglang.bench.router import Router
from feather_sglang.bench.server import Server, side_by_side
from feather_sglang.bench.serving import Workload

pytestmark = pytest.mark.server
pytest.importorskip("sglang_router.sglang_router_rs", reason="needs sglang-router; run: pip install '.[router]'")

FLAGS = ("--max-total-tokens=8000", "--max-running-requests=12", "--sleep-on-idle")
TOKENS = 24
#: No client waits longer for its answer.
PATIENCE_S = 120


@pytest.fixture(scope="module")
def pair(model, tmp_path_factory):
    """Two Feather servers, side by side; the last test kills one."""
    folder = tmp_path_factory.mktemp("router")
    servers = []
    for number in range(2):
        trace = folder / f"trace{number}.jsonl"
        flags = (*BASE, *FLAGS, "--enable-metrics", "--schedule-policy=feather", f"--feather-trace={trace}")
        servers.append(Server([f"--model-path={model}", *flags], folder / f"server{number}.log"))
        servers[-1].trace = trace
    with side_by_side(servers):
        yield servers


def test_cache_aware_routing_keeps_groups_together(pair, model, tmp_path):
    """With round robin each server computes nearly every prefix; this is also what scripts/router.sh shows."""
    workload = Workload(groups=8, per_group=6, prefix_tokens=256, suffix_tokens=32, output_tokens=8)
    apart, together = bench.compare(pair, model, workload, tmp_path)
    assert [apart.policy, together.policy] == ["round_robin", "cache_aware"]
    for row in (apart, together):
        # One request more, the client's warm-up.
        assert row.result.completed == 48 and sum(each.requests for each in row.servers) == 49
        assert all(each.requests >= 12 for each in row.servers), "both servers work"
    # Two members of a new group that arrive in one moment can be sent apart; else every prefix is computed once.
    assert workload.most_cached >= together.result.cached_share > 0.8 * workload.most_cached
    assert apart.result.cached_share < 0.9 * together.result.cached_share


class Clients:
    """Every second one streams. What breaks off after it began is asked again, as a client must."""

    def __init__(self, router, requests):
        self.url = router.url
        self.requests = requests
        self.answers = {rid: [] for rid, _ in requests}
        self.broken = []

    def answered(self):
        return {rid for rid, answers in self.answers.items() if answers}

    async def one(self, session, rid, ids):
        ask = streamed if int(rid.split("-")[1]) % 2 else whole
        try:
            answer = await ask(session, self.url, rid, ids)
        except aiohttp.ClientPayloadError:
            self.broken.append(rid)
            answer = await ask(session, self.url, rid, ids)
        self.answers[rid].append(answer)

    async def all(self, *events):
        """Send everything at once. ``events``: answers to wait for, and what then happens to the clients' tasks."""
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            jobs = {rid: asyncio.create_task(self.one(session, rid, ids)) for rid, ids in self.requests}
            for answers, happens in events:
                async with asyncio.timeout(PATIENCE_S):
                    while len(self.answered()) < answers:
                        await asyncio.sleep(0.02)
                happens(jobs)
            return dict(zip(jobs, await asyncio.gather(*jobs.values(), return_exceptions=True), strict=True))


async def whole(session, url, rid, ids):
    _, status, answer = await generate(session, url, rid, ids, TOKENS)
    assert status == 200, answer
    return answer["text"]


async def streamed(session, url, rid, ids):
    body = {
        "rid": rid,
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "stream": True,
    }
    async with session.post(url + "/generate", json=body) as response:
        assert response.status == 200, await response.text()
        lines = [line.removeprefix(b"data: ").strip() async for line in response.content if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(chunks)), "nothing is streamed twice"
    assert chunks[-1]["meta_info"]["completion_tokens"] == TOKENS
    return chunks[-1]["text"]


def ask_one(router, rid, ids):
    """Its answer, as a request of its own with nothing else under way."""
    clients = Clients(router, [(rid, ids)])
    assert asyncio.run(clients.all()) == {rid: None}
    return clients.answers[rid][0]


def admitted(server):
    return [rid for record in admissions(server) for rid in record["admitted"]]


def in_flight(server):
    with urllib.request.urlopen(server.url + "/v1/loads", timeout=30) as answer:
        return [load["num_running_reqs"] + load["num_waiting_reqs"] for load in json.load(answer)["loads"]]


async def at_rest(server):
    """SGLang looks every 4 seconds whether a client that waits is still there."""
    async with asyncio.timeout(PATIENCE_S):
        while any(in_flight(server)):
            await asyncio.sleep(0.2)


def test_every_request_gets_one_answer_through_aborts_and_a_killed_server(pair, serve, tmp_path):
    # SGLang aborts every request whose id begins with the one given: g1-2 would take g1-20 along.
    requests = [(f"{rid}-", ids) for rid, ids in prompts(groups=10, per_group=24, prefix=256, suffix=24)]
    doomed = {rid for rid, _ in requests[::6]}
    rng = random.Random(3)
    lone = [rng.randrange(3, 2000) for _ in range(280)]
    answered_before = set()
    with (
        Router(pair, "cache_aware", tmp_path / "router.log") as router,
        Router(pair, "cache_aware", tmp_path / "second.log") as second,
    ):
        # The second router knows one prefix, and learns of the killed server only when it is asked for it again.
        for number in (0, 2):
            ask_one(second, f"g_lone-{number}", [*lone, number + 5])
        (victim,) = (server for server in pair if "g_lone-0" in admitted(server))
        (survivor,) = (server for server in pair if server is not victim)
        assert "g_lone-2" in admitted(victim)

        def abort(jobs):
            for rid in doomed:
                jobs[rid].cancel()

        def kill(jobs):
            answered_before.update(clients.answered())
            os.killpg(victim.pid, signal.SIGKILL)

        clients = Clients(router, requests)
        ends = asyncio.run(clients.all((20, abort), (60, kill)))

        kept = {rid for rid, _ in requests} - doomed
        assert {rid: ends[rid] for rid in kept} == dict.fromkeys(kept), "nobody is left without an answer"
        assert all(len(answers) == (rid in kept) or rid in answered_before for rid, answers in clients.answers.items())
        # The router repeats what it has not begun to answer, and nothing else; of a stream it has sent the head.
        twice = set(admitted(victim)) & set(admitted(survivor))
        assert twice and not twice & answered_before
        assert twice - set(clients.broken), "the router itself asked the other server"
        assert clients.broken and len(set(clients.broken)) == len(clients.broken)
        assert all(int(rid.split("-")[1]) % 2 for rid in clients.broken)
        for server in pair:
            assert len(set(admitted(server))) == len(admitted(server))
        assert doomed - set(admitted(victim)) - set(admitted(survivor)), "a client that left leaves the queue, too"

        # The prefix leads to a server that is gone: the router tries it until its circuit opens.
        ask_one(second, "g_lone-4", [*lone, 9])
        assert "g_lone-4" in admitted(survivor)
        later = Clients(router, prompts(groups=4, per_group=10, prefix=256, suffix=24, seed=1))
        assert set(asyncio.run(later.all()).values()) == {None} and not later.broken
        asyncio.run(at_rest(survivor))
        ask_one(router, "g_last-0", [*lone, 11])
        last = admissions(survivor)[-1]
        assert (last["active"], last["waiting"]) == (1, 0), "nobody is left over in Feather's tree"
        assert "Feather failed" not in survivor.log.read_text()
    for server in pair:
        server.stop()
    reference = ask_all(serve(*FLAGS, policy="fcfs"), requests, tokens=TOKENS)
    for rid in kept:
        assert clients.answers[rid] == [reference[rid][0][1]["text"]]
