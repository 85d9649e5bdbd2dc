"""Real traffic from lengths, arrivals and blocks: mixed groups, and recorded traces at another scale."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feather_sglang import cli
from feather_sglang.bench import hosts, workloads
from feather_sglang.bench.client import Line
from feather_sglang.bench.stream import Stream
from feather_sglang.simulation.traces import read_trace
from feather_sglang.simulation.workload import Ask, build

VOCABULARY = range(3, 5000)


def lines(stream, folder):
    module, *arguments = stream.client(folder)
    assert module == "feather_sglang.bench.client"
    path = dict(each.removeprefix("--").split("=") for each in arguments)["dataset-path"]
    return [Line(**json.loads(text)) for text in open(path)]


def shared(first, second):
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_prompts_share_what_their_blocks_share(tmp_path):
    asks = [Ask(0.0, [(1, 512), (2, 300)], 8), Ask(1.5, [(1, 512), (3, 200)], 9), Ask(2.0, [(4, 700)], 10)]
    first, second, third = lines(Stream(build("x", "", asks), ""), tmp_path)
    prompts = [line.prompt(VOCABULARY) for line in (first, second, third)]
    assert [len(prompt) for prompt in prompts] == [812, 712, 700]
    assert shared(prompts[0], prompts[1]) == 512 and shared(prompts[0], prompts[2]) == 0
    assert [line.arrival_s for line in (first, second, third)] == [0.0, 1.5, 2.0]
    assert [line.output_tokens for line in (first, second, third)] == [8, 9, 10]
    assert set(prompts[0]) <= set(VOCABULARY)


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=4), st.integers(1, 9)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from((1.0, 0.25)),
)
def test_the_most_that_can_come_from_cache_is_what_a_set_of_prefixes_says(tmp_path_factory, requests, scale):
    asks = [Ask(float(at), blocks, output) for at, (blocks, output) in enumerate(requests)]
    stream = Stream(build("x", "", asks), "", scale)
    found = lines(stream, tmp_path_factory.mktemp("stream"))
    computed: set[tuple[tuple[int, int], ...]] = set()
    fresh = total = 0
    for line in found:
        for end, (_, tokens) in enumerate(line.blocks, 1):
            prefix = tuple(map(tuple, line.blocks[:end]))
            total += tokens
            fresh += 0 if prefix in computed else tokens
            computed.add(prefix)
    assert stream.most_cached == pytest.approx(1 - fresh / total)


def test_mixed_is_half_groups_and_half_strangers(tmp_path):
    setting = workloads.make("mixed", groups=3, per_group=4, prefix_tokens=100, suffix_tokens=10, rate=7.0)
    [stream] = setting.traffic
    found = lines(stream, tmp_path)
    times = [line.arrival_s for line in found]
    assert len(found) == 24 and stream.arrivals == "7/s" and times == sorted(times) and times[0] < times[-1]
    assert {sum(tokens for _, tokens in line.blocks) for line in found} == {110}
    members = [sum(other.blocks[0] == line.blocks[0] for other in found) for line in found]
    assert sorted(members) == [1] * 12 + [4] * 12
    assert members != sorted(members), "together, not one after the other"
    assert stream.most_cached == pytest.approx(3 * 3 * 100 / (24 * 110))


@pytest.fixture
def trace(tmp_path):
    records = [
        {"timestamp": 0, "input_length": 1100, "output_length": 320, "hash_ids": [0, 1, 2]},
        {"timestamp": 8000, "input_length": 1536, "output_length": 8, "hash_ids": [0, 1, 3]},
        {"timestamp": 9000, "input_length": 512, "output_length": 64, "hash_ids": [9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_a_trace_shrinks_in_lengths_and_time(trace, tmp_path):
    [stream] = workloads.traced(read_trace(trace, speedup=4.0).workload, 16, 4.0).traffic
    first, second, third = lines(stream, tmp_path)
    assert [line.arrival_s for line in (first, second, third)] == [0.0, 2.0, 2.25]
    prompts = [line.prompt(VOCABULARY) for line in (first, second, third)]
    assert [len(prompt) for prompt in prompts] == [32 + 2, 48, 16], "76 of 512 tokens are 2 of 16"
    assert shared(prompts[0], prompts[1]) == 32
    assert [line.output_tokens for line in (first, second, third)] == [10, 1, 2], "none gets lost"
    assert stream.arrivals == "4 x as fast"


@pytest.mark.parametrize(
    ("more", "scale"), [([], 16 / 512), (["--block-tokens", "64"], 64 / 512), (["--model-path", "m"], 1.0)]
)
def test_the_command_scales_a_trace_to_its_server(trace, more, scale, monkeypatch, capsys):
    pytest.importorskip("sglang")
    seen = []

    def serve(self, setting, policy):
        seen.append(setting)
        raise RuntimeError("enough")

    monkeypatch.setattr(hosts.OwnServers, "serve", serve)
    arguments = ["bench", "serving", "--workload", f"trace:{trace}", "--limit", "2", "--speedup", "2", *more]
    assert cli.main(arguments) == 1 and "enough" in capsys.readouterr().err
    [stream] = seen[0].traffic
    assert stream.requests == 2 and stream.scale == scale
    assert stream.workload.requests[1].arrival_s == 4.0
