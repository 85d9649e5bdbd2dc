"""The simulated engine: its cache, its steps, and that jumping is the same as stepping."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feather_sglang.scheduling import Settings
from feather_sglang.simulation import engine as engine_module
from feather_sglang.simulation.cache import PrefixCache
from feather_sglang.simulation.cost import Batch, StepCost, kv_tokens
from feather_sglang.simulation.engine import Engine, EngineConfig, _steps_until
from feather_sglang.simulation.job import Job
from feather_sglang.simulation.names import POLICIES
from feather_sglang.simulation.peers import MATCH_MAX, DfsWeight, Fcfs, Lpm
from feather_sglang.simulation.profiles import PassCost, load_hardware, load_model, load_pass_cost
from feather_sglang.simulation.scenarios import make_scenario
from feather_sglang.simulation.workload import Ask, build

HARDWARE, MODEL = load_hardware("A100-80G"), load_model("Llama-3-8B")


COSTS = [field.name for field in dataclasses.fields(PassCost) if field.name != "source"]


def make_engine(workload, policy, config, passes=None, **kwargs):
    return Engine(workload, config, StepCost(HARDWARE, MODEL), passes or load_pass_cost(policy), policy, **kwargs)


def run(workload, policy, config, **kwargs):
    engine = make_engine(workload, policy, config, **kwargs)
    return engine.run().result(policy), engine


@st.composite
def workloads(draw):
    """A few dozen requests: groups, chains of a conversation, equal prompts; at once or spread out."""
    asks = []
    for _ in range(draw(st.integers(1, 30))):
        depth = draw(st.integers(1, 3))
        blocks = [(draw(st.integers(0, 2)), draw(st.sampled_from([40, 64, 130]))) for _ in range(depth)]
        if draw(st.booleans()):
            blocks.append((1000 + len(asks), draw(st.integers(1, 80))))
        arrival = draw(st.sampled_from([0.0, 0.0, 0.01, 0.1, 2.0]))
        asks.append(Ask(arrival, blocks, draw(st.integers(1, 60))))
    return build("drawn", "", asks, fixed_output=draw(st.booleans()))


configs = st.builds(
    EngineConfig,
    kv_tokens=st.sampled_from([550, 900, 5000]),
    max_running=st.sampled_from([1, 3, 12]),
    max_prefill_tokens=st.sampled_from([100, 1000]),
    chunked_prefill_tokens=st.sampled_from([None, 32, 200]),
)


@settings(max_examples=60, deadline=None)
@given(workloads(), configs, st.sampled_from(POLICIES))
def test_everybody_is_served_and_no_token_is_lost(workload, config, policy):
    """Whatever the pool's size: the books of the KV pool balance at every pass, and are empty at the end."""
    engine = make_engine(workload, policy, config)
    after = type(engine)._pass

    def checked(self):
        chosen = after(self)
        jobs = [*self._running, *(job for job, _ in chosen), *([self._chunked] if self._chunked else [])]
        for job in self._running:
            job.own += self._step - job.joined_step  # brought up to date only when it leaves
        self.cache._check(list(dict.fromkeys(jobs)), workload.nodes)
        for job in self._running:
            job.own -= self._step - job.joined_step
        assert self.batch.requests == len(self._running) <= config.max_running
        depth = sum(job.prompt + job.output_at(self._step) for job in self._running)
        assert self.batch.read == depth
        return chosen

    with mock.patch.object(type(engine), "_pass", checked):
        recorder = engine.run()
    fits = [r for r in workload.requests if r.prompt_tokens + r.output_tokens + 2 <= config.kv_tokens]
    assert recorder.completed == len(fits) and recorder.refused == len(workload.requests) - len(fits)
    assert sorted(recorder.order) == [r.number for r in fits]
    assert engine.cache.available == config.kv_tokens, "all is free or can be evicted"
    assert engine.batch == Batch() and all(node.running == node.locks == 0 for node in workload.nodes)
    assert recorder._outputs == sum(r.output_tokens for r in fits)


@settings(max_examples=40, deadline=None)
@given(workloads(), configs, st.sampled_from(["fcfs", "dfs-weight", "feather-static", "feather-ucb"]))
def test_jumping_is_stepping(workload, config, policy):
    """Decode steps taken one by one give the same admissions, and the same times but for rounding."""
    # Passes that find nothing would cost time when they are gone through one by one.
    free = dataclasses.replace(load_pass_cost(policy), **dict.fromkeys(COSTS, 0.0))
    jumped, engine = run(workload, policy, config, settings=Settings(max_passes=20), passes=free)
    with mock.patch.object(engine_module, "_LONGEST_JUMP", 1):
        stepped, slow = run(workload, policy, config, settings=Settings(max_passes=20), passes=free)
    assert engine.recorder.order == slow.recorder.order
    left, right = (dataclasses.asdict(each) for each in (jumped, stepped))
    assert left.pop("policy") == right.pop("policy")
    assert left == pytest.approx(right, rel=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_runs_are_equal(policy):
    config = EngineConfig(60_000, max_running=48)
    first, _ = run(make_scenario("bursty", seed=3), policy, config)
    workload = make_scenario("bursty", seed=3)
    again, _ = run(workload, policy, config)
    assert first == again and first.completed == 2000
    assert run(workload, policy, config)[0] == first, "the workload can be used again"
    assert run(make_scenario("bursty", seed=4), policy, config)[0] != first


def test_retraction_happens_and_ends():
    """Outputs longer than was reserved fill the pool: somebody is retracted and still gets all of the output."""
    rng = random.Random(1)
    asks = [Ask(number * 0.05, [(number, 50)], rng.randint(300, 500)) for number in range(100)]
    workload = build("long outputs", "", asks, fixed_output=False)
    result, engine = run(workload, "fcfs", EngineConfig(6000, 64))
    assert result.retracted == 7 and result.completed == 100
    assert engine.recorder._outputs == sum(ask.output_tokens for ask in asks)
    fixed = build("long outputs", "", asks)
    assert run(fixed, "fcfs", EngineConfig(6000, 64))[0].retracted == 0, "all of it is reserved"


def jobs_of(*prompts):
    workload = build("by hand", "", [Ask(0.0, blocks, 4) for blocks in prompts])
    return [Job(request) for request in workload.requests]


def serve(cache, job):
    """Prefill a prompt and be done with it."""
    matched = cache.match(job)
    cache.lock(job)
    cache.allocate(job.prompt - matched)
    job.stored, job.own = matched, job.prompt - matched
    cache.store(job, job.prompt)
    cache.finish(job)
    return matched


def test_the_cache_evicts_leaves_by_least_recent_use():
    a, b, c, again = jobs_of([(1, 100), (2, 50)], [(1, 100), (3, 50)], [(4, 80)], [(1, 100), (5, 10)])
    cache = PrefixCache(290)
    assert serve(cache, a) == 0
    assert serve(cache, b) == 100
    assert cache.free == 90
    assert serve(cache, c) == 0
    assert cache.free == 10
    cache.match(a)  # used again: b's own part is the oldest leaf now
    cache.allocate(40)
    assert cache.free == 60 - 40 and b.nodes[1].have == 0 and a.nodes[1].have == 50 and a.nodes[0].have == 100
    assert cache.match(again) == 100
    cache.lock(again)
    with pytest.raises(MemoryError):
        cache.allocate(200)  # the shared part is held
    assert a.nodes[0].have == 100 and c.nodes[0].have == 0


def test_a_prefix_computed_twice_is_kept_once():
    a, b = jobs_of([(1, 100), (2, 10)], [(1, 100), (3, 10)])
    cache = PrefixCache(500)
    for job in (a, b):  # side by side
        cache.match(job)
        cache.lock(job)
        cache.allocate(110)
        job.own = 110
    for job in (a, b):
        cache.store(job, 110)
        assert job.own == 0
    assert cache.free == 500 - 120


def test_chunks_of_a_prompt_are_evicted_piece_by_piece():
    (a,) = jobs_of([(1, 300)])
    cache = PrefixCache(1000)
    for depth in (100, 200, 300):
        cache.allocate(100)
        job = a
        job.own += 100
        cache.store(job, depth)
    cache.finish(a)
    cache.allocate(700)
    assert a.nodes[0].have == 300
    cache.allocate(1)
    assert a.nodes[0].have == 200 and cache.free == 99


def test_the_tree_of_prefixes():
    """Nodes end where requests branch off or end; chunk hashes are equal exactly for equal prefixes."""
    workload = build(
        "tree",
        "",
        [
            Ask(0.0, [(1, 100), (2, 60), (3, 40)], 1),
            Ask(0.0, [(1, 100), (2, 60), (4, 40)], 1),
            Ask(0.0, [(1, 100), (2, 60)], 1),
            Ask(0.0, [(5, 100), (2, 60)], 1),  # the same block after another prefix is not the same
        ],
    )
    assert [node.length for node in workload.nodes] == [160, 40, 40, 160]
    assert workload.prompt_tokens == 200 + 200 + 160 + 160 and workload.shared_tokens == 160 + 160
    a, b, c, d = (request.chunk_hashes(64) for request in workload.requests)
    assert len(a) == len(b) == 3 and len(c) == len(d) == 2
    assert a[:2] == b[:2] == c and a[2] != b[2] and not set(c) & set(d)
    assert len({*a, *b, *d}) == 2 + 1 + 1 + 2


@given(st.floats(1e-4, 1e3), st.floats(1e-4, 1.0), st.floats(0, 0.1))
def test_steps_until(seconds, first, more):
    steps = _steps_until(seconds, first, more)

    def takes(n):
        return n * first + more * n * (n - 1) / 2

    assert steps >= 1 and takes(steps) >= seconds * (1 - 1e-6)
    assert steps == 1 or takes(steps - 1) < seconds * (1 + 1e-6)


def test_one_prefix_is_read_from_memory_once():
    """100 requests of one prefix that fits the cache cost its bytes once from memory, and 99 times from the cache."""
    cost = StepCost(HARDWARE, MODEL)
    token = MODEL.kv_bytes_per_token
    assert token == 131072
    first, more = cost.decode(Batch(requests=100, read=100 * 4096, distinct=4096, shared=4096))
    expected = 1e-3 + 16.06e9 / 2039e9 + 4096 * token / 2039e9 + 99 * 4096 * token / 7219e9
    assert first == pytest.approx(expected, rel=1e-3) and more == pytest.approx(100 * token / 2039e9)
    alone, _ = cost.decode(Batch(requests=100, read=100 * 4096, distinct=100 * 4096))
    assert alone == pytest.approx(1e-3 + 16.06e9 / 2039e9 + 100 * 4096 * token / 2039e9, rel=1e-3)
    mixed, _ = cost.decode(Batch(requests=100, read=100 * 4096, distinct=8 * 4096, shared=8 * 4096))
    hits = 40e6 / (8 * 4096 * 4096)
    again = hits / 7219e9 + (1 - hits) / 2039e9
    expected = 1e-3 + 16.06e9 / 2039e9 + (8 * 4096 / 2039e9 + 92 * 4096 * again) * token
    assert mixed == pytest.approx(expected, rel=1e-3)


def test_prefill_is_bound_by_arithmetic_or_by_memory():
    cost = StepCost(HARDWARE, MODEL)
    assert cost.prefill(8192, 0, 0) == pytest.approx(1e-3 + 8192 * 2 * 8.03e9 / 312e12, rel=1e-3)
    assert cost.prefill(1, 0, 0) == pytest.approx(1e-3 + 16.06e9 / 2039e9, rel=1e-3)


def test_kv_tokens():
    assert kv_tokens(HARDWARE, MODEL, 0.88) == int((80e9 * 0.88 - 16.06e9) / 131072)


def test_a_node_ends_where_a_request_ends():
    workload = build("tree", "", [Ask(0.0, [(7, 10), (8, 10)], 1), Ask(0.0, [(7, 10)], 1)])
    assert [node.length for node in workload.nodes] == [10, 10]
    assert [request.prompt_tokens for request in workload.requests] == [20, 10]


def test_rewards_are_the_decode_rate_without_the_first_step():
    """Two waves of equal requests: what the first decoded is the reward when the second is admitted."""
    workload = build("waves", "", [Ask(0.0, [(0, 640), (n + 1, 64)], 50) for n in range(24)])
    engine = make_engine(workload, "feather-ucb", EngineConfig(50_000, 12))
    heard = []
    engine.queue.core.policy.learn = lambda interval, reward, seconds: heard.append(reward)
    recorder = engine.run()
    assert len(heard) == 1
    rate = recorder.result("x").decode_tokens_per_s
    assert heard[-1] == pytest.approx(rate, rel=0.15)


def test_the_bound_in_seconds_goes_by_simulated_time():
    engine = make_engine(build("one", "", [Ask(7.0, [(0, 640)], 50)]), "feather-static", EngineConfig(50_000, 12))
    recorder = engine.run()
    assert recorder.completed == 1 and 7.0 <= engine.queue.core.now_s <= engine.now_s


def test_passes_are_counted_through_a_jump():
    """A stranger who is passed over is served after ``max_passes`` decode steps, in the middle of a long jump."""
    asks = [Ask(0.0, [(0, 6400), (n + 1, 64)], 400) for n in range(10)] + [Ask(0.0, [(99, 6400)], 400)]
    workload = build("stranger", "", asks)
    config = EngineConfig(50_000, 12)
    done = {}
    for passes in (20, 10_000):
        _, engine = run(workload, "feather-static", config, settings=Settings(max_passes=passes))
        assert engine.recorder.order[-1] == 10
        done[passes] = engine.recorder._longest_wait_s
    assert done[20] < done[10_000] / 4


def test_what_is_left_of_a_group_follows_it():
    """Two at a time end together; the stranger has waited longer than the other two of the group."""
    group = [Ask(0.0, [(0, 640), (n, 64)], 4) for n in range(1, 5)]
    workload = build("left", "", [group[0], Ask(0.0, [(9, 704)], 4), *group[1:]])
    _, engine = run(workload, "feather-static", EngineConfig(50_000, 2), settings=Settings(min_batch=2))
    assert engine.recorder.order == [0, 2, 3, 4, 1]
    assert engine.queue.core._warm._computed == 2 * 704 + 3 * 64 + 5 * 4, "prompts without what is cached, and outputs"


def queue_of(kind, prompts, capacity=100_000):
    cache = PrefixCache(capacity)
    queue, jobs = kind(cache), jobs_of(*prompts)
    for job in jobs:
        queue.add(job)
    return cache, queue, jobs


def fill(cache, job):
    """Cache a prompt and hold nothing."""
    cache.match(job)
    cache.lock(job)
    cache.allocate(job.prompt)
    job.own = job.prompt
    cache.store(job, job.prompt)
    cache.unlock(job)


def test_lpm_is_fcfs_above_its_cut_off():
    prompts = [[(n, 100), (1000 + n, 20)] for n in range(MATCH_MAX + 1)]
    cache, queue, jobs = queue_of(Lpm, prompts)
    fill(cache, jobs[-1])
    assert list(queue.candidates(1)) == jobs
    assert queue.work.matched == 0
    queue.admitted(jobs[:1])
    assert queue.candidates(1)[0] is jobs[-1], "128 are sorted"
    assert queue.work.matched == MATCH_MAX


def test_lpm_puts_followers_of_an_uncached_prefix_last():
    _, queue, (a, b, c, short) = queue_of(Lpm, [[(1, 100), (2, 9)], [(1, 100), (3, 9)], [(4, 50)], [(5, 31), (6, 9)]])
    assert list(queue.candidates(4)) == [a, c, short, b]


def test_dfs_weight_takes_the_heaviest_branch_then_the_one_cached_first():
    prompts = [[(1, 64), (10, 8)], [(2, 64), (11, 8)], [(3, 64), (12, 8)], [(3, 64), (13, 8)], [(4, 64)]]
    cache, queue, (one, two, three, also_three, uncached) = queue_of(DfsWeight, prompts)
    for job in (two, one, three):
        fill(cache, job)
    # Those that end below a node come before those that are matched no deeper than it.
    assert list(queue.candidates(5)) == [three, also_three, two, one, uncached]


def test_fcfs_keeps_the_heads_prefixes_fresh():
    cache, queue, (waiting, other) = queue_of(Fcfs, [[(1, 100), (2, 9)], [(3, 100)]], capacity=250)
    fill(cache, waiting)
    fill(cache, other)
    queue.candidates(1)
    cache.allocate(100)
    assert waiting.nodes[0].have == 109 and other.nodes[0].have == 0
