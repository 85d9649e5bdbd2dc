"""``feather-sglang simulate`` and ``replay``: formats, bad input, reports."""

from __future__ import annotations

import array
import json
import pickle
import random
import sys
import types

import pytest
import yaml

from feather_sglang.cli import main
from feather_sglang.simulation.names import POLICIES
from feather_sglang.simulation.profiles import (
    ProfileError,
    hardware_names,
    load_hardware,
    load_model,
    load_pass_cost,
    model_names,
)
from feather_sglang.simulation.scenarios import SCENARIOS, make_scenario
from feather_sglang.simulation.traces import TraceError, read_trace


def line(number=0, **changes):
    record = {"timestamp": 100 * number, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 10 + number]}
    return json.dumps({**record, **changes})


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace <b>.jsonl"
    path.write_text("\n".join(line(number) for number in range(12)) + "\n")
    return path


def lines_of(capsys):
    out, err = capsys.readouterr()
    return out, err.splitlines()


def test_simulate_reports_every_policy(tmp_path, capsys):
    plot = tmp_path / "plot.png"
    arguments = ["simulate", "--scenario", "bursty", "--hardware", "A100-80G", "--plot", str(plot)]
    assert main([*arguments, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["simulated"] is True and report["workload"]["requests"] == 2000
    assert [row["policy"] for row in report["rows"]] == list(POLICIES)
    for row in report["rows"]:
        assert row["completed"] == 2000 and row["output_tokens_per_s"] > 0
        assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["ttft_p99_s"]
        assert 0 <= row["cached_share"] <= report["workload"]["shared_tokens"] / report["workload"]["prompt_tokens"]
        assert 0 < row["scheduling_share"] < 1 and row["mean_batch"] >= 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main([*arguments[:5], "--policies", "fcfs", "--json", str(tmp_path / "out.json")]) == 0
    out, _ = lines_of(capsys)
    assert out.startswith("simulated: bursty: ") and "datasheet" in out and "\nfcfs " in out
    again = json.loads((tmp_path / "out.json").read_text())
    assert again["rows"] == report["rows"][:1], "the same again, in another process"


def test_a_pool_too_small_for_anybody_is_one_line(capsys):
    assert main(["simulate", "--scenario", "bursty", "--kv-tokens", "100", "--policies", "fcfs"]) == 2
    out, err = lines_of(capsys)
    assert not out
    assert err[-1] == "feather-sglang: error: none of the 2000 requests fits into 100 tokens of KV"


def test_settings_reach_the_scheduler(capsys):
    def batch(*more):
        assert (
            main(["simulate", "--scenario", "paper-800x8", "--policies", "feather-static", "--json", "-", *more]) == 0
        )
        return json.loads(capsys.readouterr().out)["rows"][0]["mean_batch"]

    light = ("--set", "weight_tokens=1")
    assert batch(*light) == 100, "one group a batch: a quarter of 400 slots is worth protecting"
    assert batch("--set", "min_batch=350") > 350
    assert batch() == 400, "an 8B model's weights outweigh what 100 requests share of 4,096 tokens"
    assert batch("--max-running", "40", *light) == pytest.approx(100 / 3), "40, 40 and 20 of each group"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--scenario", "x"], "unknown scenario 'x'; valid: paper-800x8, "),
        (["simulate", "--scenario", "bursty", "--hardware", "x"], "unknown hardware 'x'; valid: RTX-6000-Ada, "),
        (["simulate", "--scenario", "bursty", "--model", "x"], "unknown model 'x'; valid: Llama-3-8B, "),
        (["simulate", "--scenario", "bursty", "--policies", "fcfs,x"], "unknown policy 'x'; valid: fcfs, lpm, "),
        (["simulate", "--scenario", "bursty", "--set", "min_bach=3"], "--set: unknown setting 'min_bach'"),
        (["simulate", "--scenario", "bursty", "--json", "/nowhere/x.json"], "can't write '/nowhere/x.json'"),
        (["simulate", "--scenario", "bursty", "--memory-share", "0.1"], "does not fit into 10% of 80 GB"),
        (["simulate", "--scenario", "bursty", "--hardware", "/nowhere.yaml"], "can't read '/nowhere.yaml'"),
        (["replay", "/nowhere.jsonl"], "can't read '/nowhere.jsonl'"),
    ],
)
def test_bad_use_is_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = lines_of(capsys)
    assert not out and len(err) == 1 and message in err[0]


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "x"])
def test_numbers_must_be_positive_and_finite(value, trace, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["replay", str(trace), "--speedup", value])
    assert stop.value.code == 2 and f"must be a positive, finite number, got '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no request in '{}': it is empty"),
        ("\n  \n", "no request in '{}': it is empty"),
        ("{\n", "no request in '{}': malformed lines: 1, the first 1: not valid JSON: "),
        (line(hash_ids=[1]), "the first 1: 1 hash_ids don't fit an input_length of 1100: blocks of 512 tokens make 3"),
        (line(input_length=-5), "input_length must be a positive integer, got -5"),
        (line(output_length=0), "output_length must be a positive integer, got 0"),
        (line(timestamp=-1), "timestamp must be a finite number of at least 0, got -1"),
        (line(timestamp=float("nan")), "timestamp must be a finite number of at least 0, got nan"),
        (line(timestamp=True), "timestamp must be a finite number of at least 0, got True"),
        (line(hash_ids="no"), "hash_ids must be a list of integers"),
        ("[1]", "must be a JSON object, got a list"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_trace_of_nothing_usable_is_one_line(content, message, tmp_path, capsys):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    assert main(["replay", str(path)]) == 2
    out, err = lines_of(capsys)
    assert not out and err[-1].startswith("feather-sglang: error: ") and message.format(path) in err[-1]
    assert len(err) == 1


def test_malformed_lines_are_counted_and_named(trace, capsys):
    good = trace.read_text().splitlines()
    trace.write_text("\n".join([*good[:3], "rubbish", *good[3:], line(input_length=5)]))
    assert main(["replay", str(trace), "--policies", "fcfs", "--json", "-"]) == 0
    out, err = lines_of(capsys)
    assert json.loads(out)["workload"]["requests"] == 12
    assert f"{trace}:4: not valid JSON: Expecting value; left out" in err
    assert "malformed lines left out: 2 (lines 4, 14)" in err
    assert main(["replay", str(trace), "--policies", "fcfs", "--strict"]) == 2
    out, err = lines_of(capsys)
    assert not out and err == [f"feather-sglang: error: {trace}:4: not valid JSON: Expecting value"]


def test_mooncake_blocks_times_and_limits(trace):
    workload = read_trace(trace, requests=5, speedup=2.0).workload
    assert len(workload.requests) == 5
    assert [request.arrival_s for request in workload.requests] == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert workload.prompt_tokens == 5 * 1100 and workload.shared_tokens == 4 * 1024
    assert workload.requests[0].output_tokens == 5


def test_bailian_is_told_apart_by_its_chats(tmp_path):
    path = tmp_path / "t.jsonl"
    records = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, "output_length": 7,
         "hash_ids": [4, 5, 6]},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 60.0, "input_length": 33, "output_length": 7,
         "hash_ids": [4, 5, 9]},
        # an id of a block's content alone: under another prefix it is not shared
        {"chat_id": 3, "parent_chat_id": -1, "timestamp": 62.0, "input_length": 32, "output_length": 7,
         "hash_ids": [8, 5]},
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, records)))
    workload = read_trace(path).workload
    assert [request.arrival_s for request in workload.requests] == pytest.approx([0, 1.5, 2.0])
    assert [request.prompt_tokens for request in workload.requests] == [33, 40, 32]
    assert workload.shared_tokens == 32


class Asked:
    def __init__(self, input_ids=None, text=None):
        self.input_ids, self.text = input_ids, text


class Evil:
    def __reduce__(self):
        return (print, ("the pickle was run",))


def dump(path, records, **more):
    path.write_bytes(pickle.dumps({"server_args": Evil(), "requests": records, **more}))


def test_sglangs_dumps_are_read_without_running_them(tmp_path, capsys, monkeypatch):
    """Classes need not be importable, and nothing that a pickle names is called."""
    module = types.ModuleType("gone_later")
    module.Asked = Asked
    monkeypatch.setattr(Asked, "__module__", "gone_later")
    monkeypatch.setitem(sys.modules, "gone_later", module)
    rng = random.Random(0)
    prefix = [rng.randrange(1000) for _ in range(128)]
    ids = [prefix + [number] * 30 for number in range(4)]

    def meta(prompt, output=9):
        return {"meta_info": {"prompt_tokens": prompt, "completion_tokens": output}}

    records = [(Asked(each), meta(158), 1000.0 + number, 1010.0) for number, each in enumerate(ids)]
    records.append((Asked(array.array("q", ids[0])), meta(158), 1004.0, 1010.0))
    records.append((Asked(text="w" * 640), meta(170), 1005.0, 1010.0))
    records.append((Asked(ids[0]), meta(77), 1006.0, 1010.0))  # lengths that do not fit
    records.append((Asked(ids[0]), meta(158, 0), 1007.0, 1010.0))  # no output
    dump(tmp_path / "a.pkl", records)
    dump(tmp_path / "b.pkl", [(Asked(ids[1]), meta(158), 1000.5, 1010.0)])
    monkeypatch.delitem(sys.modules, "gone_later")
    trace = read_trace(tmp_path)
    assert capsys.readouterr().out == ""
    assert [number for number, _ in trace.bad_lines] == [7, 8]
    assert [r.arrival_s for r in trace.workload.requests] == pytest.approx([0, 0.5, 1, 2, 3, 4, 5])
    assert [r.prompt_tokens for r in trace.workload.requests] == [158] * 6 + [170]
    assert trace.workload.shared_tokens == 3 * 128 + 2 * 158
    (tmp_path / "a.pkl").write_bytes(b"rubbish")
    with pytest.raises(TraceError, match=r"a\.pkl is no request dump of SGLang"):
        read_trace(tmp_path)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios_are_what_they_say(name):
    workload = make_scenario(name, 1)
    assert workload.name == name and 500 <= len(workload.requests) <= 4000
    times = [request.arrival_s for request in workload.requests]
    assert times == sorted(times)
    again = make_scenario(name, 1)
    assert [r.output_tokens for r in again.requests] == [r.output_tokens for r in workload.requests]
    assert (workload.shared_tokens == 0) == (name == "no-sharing")


def test_profiles_are_marked():
    for name in hardware_names():
        assert "datasheet" in load_hardware(name).source and "assumed" in load_hardware(name).source
    for name in model_names():
        assert load_model(name).source.startswith("published configuration")
    assert all(load_pass_cost(policy).source == "measured" for policy in POLICIES)
    assert hardware_names() == ["RTX-6000-Ada", "A100-80G", "H100", "H200"]
    assert model_names() == ["Llama-3-8B", "Qwen-2.5-7B", "LongChat-13B"]


def test_a_profile_of_calibrate_supplies_what_it_measured(tmp_path):
    path = tmp_path / "profile.json"
    derived = {"memory_gb_s": 16.0, "cache_gb_s": 42.3, "cache_bytes": 147_000_000, "divergence": []}
    path.write_text(json.dumps({"machine": {"name": "a Xeon"}, "derived": derived}))
    with pytest.raises(ProfileError, match=r"name hardware that has, with --like; valid: RTX-6000-Ada, "):
        load_hardware(str(path))
    hardware = load_hardware(str(path), "H100")
    assert (hardware.memory_gb_s, hardware.cache_gb_s, hardware.cache_mb) == (16.0, 42.3, 147.0)
    assert hardware.bf16_tflops == load_hardware("H100").bf16_tflops
    assert hardware.source == "calibrate on a Xeon; memory size, FLOPs and overhead of H100"
    path.write_text(json.dumps({"machine": {"name": "a Xeon"}, "derived": {}}))
    with pytest.raises(ProfileError, match="is no profile of feather-sglang calibrate"):
        load_hardware(str(path), "H100")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb": -1}, "memory_gb must be a positive, finite number, got -1"),
        ({"memory_gb": float("inf")}, "memory_gb must be a positive, finite number, got inf"),
        ({"memory_gb": "much"}, "memory_gb must be a positive, finite number, got 'much'"),
        ({"more": 1}, "must hold exactly source, memory_gb, "),
    ],
)
def test_own_hardware_is_checked(change, message, tmp_path):
    good = {"source": "mine", "memory_gb": 24, "memory_gb_s": 900, "bf16_tflops": 100, "cache_mb": 70}
    good |= {"cache_gb_s": 4000, "step_overhead_ms": 0}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(good))
    assert load_hardware(str(path)).memory_gb == 24
    path.write_text(yaml.safe_dump({**good, **change}))
    with pytest.raises(ProfileError, match=message):
        load_hardware(str(path))
