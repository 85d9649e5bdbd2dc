"""Inspection and changes at run time on the real server: under load, with keys, on two ranks, and after failures."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request

import aiohttp
import pytest
from conftest import ask_all, fake_plugin, generate, prompts
from test_fails_open import FAULTY
from test_ranks import BIND, SKEWED, decided

pytestmark = pytest.mark.server

ALL = ("ucb", "fcfs", "qlearning", "lpm", "dfs-weight", "static")
SLOTS = ("--max-total-tokens=8000", "--max-running-requests=12", "--feather-min-batch=2")


def call(server, path, body=None, key=None):
    """Status and answer; ``body`` as an object, or as bytes to send as they are."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{server.url}/feather/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def state(server, key=None):
    status, answer = call(server, "state", key=key)
    assert status == 200, answer
    (scheduler,) = answer["schedulers"]
    return scheduler


def served_with(server, requests, meanwhile, tokens, key=None):
    """Send all; while they are served, run ``meanwhile(post, look)``. Returns rid -> output ids."""

    async def main():
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=600)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
            jobs = [asyncio.create_task(generate(session, server.url, r, ids, tokens(r))) for r, ids in requests]

            async def post(path, body):
                async with session.post(f"{server.url}/feather/{path}", json=body) as response:
                    return response.status, await response.json()

            async def look():
                async with session.get(f"{server.url}/feather/state") as response:
                    return (await response.json())["schedulers"][0]

            await meanwhile(post, look, lambda: all(job.done() for job in jobs))
            answers = await asyncio.gather(*jobs)
        assert all(status == 200 for _, status, _ in answers)
        outputs = {rid: answer["output_ids"] for rid, _, answer in answers}
        assert len(outputs) == len(requests)
        return outputs

    return asyncio.run(main())


def lengths(rid):
    """Of unequal lengths, so that slots come free one by one and there is always something to decide."""
    return 6 + 5 * (int(rid.split("-")[1]) % 5)


def through_all(seen, states):
    async def switching(post, look, over):
        while not over():
            for name in ALL:
                status, answer = await post("policy", {"policy": name})
                assert status == 200, answer
                seen.append(answer)
                await asyncio.sleep(0.4)
                states.append(await look())

    return switching


def test_state_switches_and_settings_under_load_and_what_is_refused(serve):
    server = serve(*SLOTS)
    quiet = state(server)
    assert (quiet["scheduling"], quiet["policy"], quiet["waiting"], quiet["best"]) == ("feather", "static", 0, None)
    assert quiet["settings"]["min_batch"] == 2 and quiet["slots"] == 12

    requests = prompts(groups=6, per_group=40, prefix=256, suffix=20)
    looked = []

    async def look_on(post, look, over):
        while not over():
            looked.append(await look())
            await asyncio.sleep(0.2)

    wanted = served_with(server, requests, look_on, lengths)
    busy = [each for each in looked if each["waiting"] > 50 and each["batch"]["requests"]]
    assert busy and all(each["groups"] and each["best"]["why"] for each in busy)
    assert any(each["batch"]["shared_tokens"] >= 256 for each in busy)
    assert max(group["waiting"] for each in busy for group in each["groups"]) > 20
    assert any(not each["best"]["admitted"] and "shared tokens" in each["best"]["why"] for each in busy)
    assert looked[-1]["passes"] > looked[0]["passes"] > quiet["passes"] - 1

    seen, states = [], []
    outputs = served_with(server, requests, through_all(seen, states), lengths)
    assert outputs == wanted, "greedy outputs do not depend on who is served when"
    assert {each["scheduling"] for each in seen} == {"feather", "fcfs", "lpm", "dfs-weight"}
    assert {each["policy"] for each in seen if each["scheduling"] == "feather"} == {"static", "ucb", "qlearning"}
    assert {each["why"] for each in states} == {"", "switched"}
    assert call(server, "policy", {"policy": "static"})[0] == 200

    status, answer = call(server, "config", {"min_batch": 12, "max_wait_s": 30, "fallback_policy": "lpm"})
    assert status == 200 and answer["settings"]["min_batch"] == 12 and answer["settings"]["max_wait_s"] == 30
    refused = [
        ("policy", {"policy": "magic"}, "must be one of static, ucb, qlearning or package.module:Class"),
        ("policy", {"policy": "no.such:Policy"}, "cannot be imported"),
        ("policy", {}, 'must be {"policy": NAME}'),
        ("policy", b"{", "not JSON"),
        ("config", {"min_batch": -1}, "min_batch must be an integer of at least 0, got -1"),
        ("config", {"min_batch": 3, "chunk_size": 32}, "chunk_size cannot be changed by /feather/config"),
        ("config", b'{"\\ud800": 1}', "unknown setting '\\ud800'"),
    ]
    for path, body, message in refused:
        status, answer = call(server, path, body)
        assert status == 400 and message in answer["error"] and "\n" not in answer["error"], answer
    settled = state(server)
    assert settled["settings"] == {**quiet["settings"], "min_batch": 12, "max_wait_s": 30.0, "fallback_policy": "lpm"}

    assert len(ask_all(server, prompts(3, 8, 256, 20, seed=5), tokens=4)) == 24
    log = server.log.read_text()
    assert "Traceback" not in log and settled["failures"] == 0


def test_two_ranks_switch_between_the_same_two_passes(serve, tmp_path):
    server = serve(
        "--tp=2",
        *SLOTS,
        f"--feather-state={tmp_path / 'state.json'}",
        "--feather-state-period-s=1",
        environment={**BIND, **fake_plugin(tmp_path / "site", SKEWED)},
    )
    seen, states = [], []

    async def meanwhile(post, look, over):
        assert (await post("config", {"max_wait_s": 20}))[0] == 200
        await through_all(seen, states)(post, look, over)

    served_with(server, prompts(groups=6, per_group=50, prefix=256, suffix=20), meanwhile, lengths)
    assert len(seen) >= len(ALL) and server.running()
    assert call(server, "policy", {"policy": "ucb"})[0] == 200
    assert len(ask_all(server, prompts(4, 20, 256, 20, seed=3), tokens=lengths)) == 80
    log = server.log.read_text()
    assert log.count("CLOCKS ARE SKEWED") == 1 and "Feather failed" not in log
    first, second = decided(server.trace), decided(f"{server.trace}.rank1")
    assert first == second and len(first) > 10
    assert json.loads((tmp_path / "state.json").read_text())["state"]["policy"] == "ucb", "it was the first to learn"


def test_keys_failures_and_being_on_again(serve, tmp_path):
    where = tmp_path / "where"
    where.write_text("")
    server = serve(
        "--max-total-tokens=8000",
        "--max-running-requests=12",
        "--feather-max-failures=4",
        "--api-key=reader",
        "--admin-api-key=admin",
        environment=fake_plugin(tmp_path / "site", FAULTY.format(where=str(where))),
    )
    for key, look, change in ((None, 401, 401), ("reader", 200, 401), ("admin", 401, 200)):
        assert call(server, "state", key=key)[0] == look
        assert call(server, "policy", {"policy": "static"}, key)[0] == change
        assert call(server, "config", {"max_passes": 2048}, key)[0] == change

    async def nothing(post, look, over):
        pass

    def serve_some(seed):
        requests = prompts(groups=4, per_group=15, prefix=128, suffix=16, seed=seed)
        return served_with(server, requests, nothing, lengths, key="reader")

    where.write_text("plan")
    serve_some(1)
    said = state(server, "reader")
    assert (said["scheduling"], said["why"], said["failures"]) == ("fcfs", "failures", 4)
    where.write_text("")
    assert call(server, "policy", {"policy": "static"}, "admin") == (200, {"policy": "static", "scheduling": "feather"})
    before = len(decided(server.trace))
    serve_some(2)
    said = state(server, "reader")
    assert (said["scheduling"], said["why"], said["failures"]) == ("feather", "", 0)
    assert len(decided(server.trace)) > before, "it plans again"

    where.write_text("build")
    status, answer = call(server, "policy", {"policy": "ucb"}, "admin")
    assert status == 500 and answer["error"].startswith("ZeroDivisionError: injected: build")
    where.write_text("")
    serve_some(3)
    said = state(server, "reader")
    assert (said["policy"], said["scheduling"], said["failures"]) == ("static", "feather", 0)
