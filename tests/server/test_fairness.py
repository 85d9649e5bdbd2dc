"""A hot group never stops arriving; a cold request must be served within the bound that the operator set."""

from __future__ import annotations

import asyncio
import random
import time

import aiohttp
import pytest
from conftest import generate

pytestmark = pytest.mark.server

HOT_S = 20


def hot_requests_before_the_cold_one(server):
    """Keeps forty hot requests waiting or running; how many were answered when the cold one was, and after how long."""
    rng = random.Random(5)
    prefix = [rng.randrange(3, 2000) for _ in range(512)]
    cold = [rng.randrange(3, 2000) for _ in range(530)]
    answered = []

    async def hot(session, number, until):
        while not until.is_set():
            ids = prefix + [rng.randrange(3, 2000) for _ in range(16)]
            # Of unequal lengths: a batch that empties begins with whoever has waited longest.
            rid, tokens = f"hot-{number}-{len(answered)}", rng.randrange(8, 32)
            _, status, _ = await generate(session, server.url, rid, ids, tokens)
            assert status == 200
            answered.append(number)

    async def main():
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            until = asyncio.Event()
            clients = [asyncio.create_task(hot(session, number, until)) for number in range(40)]
            while len(answered) < 80:
                await asyncio.sleep(0.1)
            started_s, before = time.monotonic(), len(answered)
            one = asyncio.create_task(generate(session, server.url, "cold", cold, 2))
            await asyncio.wait([one], timeout=HOT_S)
            waited_s, meanwhile = time.monotonic() - started_s, len(answered) - before
            until.set()
            await asyncio.gather(*clients)
            _, status, _ = await one
            assert status == 200
            return waited_s, meanwhile

    return asyncio.run(main())


FLAGS = ("--max-running-requests=8", "--max-total-tokens=8000")


def test_a_cold_request_is_served_within_the_bound_in_seconds(serve):
    server = serve(*FLAGS, "--feather-max-wait-s=3", "--feather-max-passes=1000000", "--feather-min-batch=1")
    waited_s, meanwhile = hot_requests_before_the_cold_one(server)
    assert 2.5 < waited_s < HOT_S / 2 and meanwhile > 8, "the bound served it, and nothing else did"


def test_under_lpm_it_waits_as_long_as_the_group_comes(serve):
    """Without this the test above would show nothing."""
    waited_s, _ = hot_requests_before_the_cold_one(serve(*FLAGS, policy="lpm"))
    assert waited_s >= HOT_S
