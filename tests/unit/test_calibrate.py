"""Derivations on a machine whose bandwidths and cache size are known; files; cells; a small measurement."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import asdict, replace

import pytest

from feather_sglang.bench import calibrate
from feather_sglang.bench.calibrate import CPU_LAYER, Machine, Point, Profile, SweepPoint
from feather_sglang.cli import main

MEMORY_GB_S, CACHE_GB_S, CACHE_BYTES, CALL_MS = 12.0, 48.0, 100_000_000, 0.02
MACHINE = Machine("synthetic", "cpu", "none", 2, 2, 300_000_000, 4_000_000)
TOKEN_BYTES = CPU_LAYER.kv_bytes_per_token


class Synthetic:
    """A cache that keeps what was read last, in blocks of 64 tokens, before a memory; time is bytes over bandwidth."""

    def __init__(self):
        self.held = OrderedDict()

    def read_ms(self, prefixes, tokens):
        taken = CALL_MS
        for prefix in prefixes:
            for block in range(tokens // 64):
                hit = self.held.pop((prefix, block), False)
                taken += 64 * TOKEN_BYTES / (CACHE_GB_S if hit else MEMORY_GB_S) / 1e6
                self.held[prefix, block] = True
                while len(self.held) * 64 * TOKEN_BYTES > CACHE_BYTES:
                    self.held.popitem(last=False)
        return taken


@pytest.fixture(scope="module")
def measured():
    points = []
    for cells in calibrate.grid(batches=(1, 2, 4, 8, 16), prefix_tokens=(1024, 4096)):
        for cell in cells:
            time_ms = Synthetic().read_ms(cell.prefixes(), cell.prefix_tokens)
            points.append(Point(**asdict(cell), time_ms=time_ms, repeats=1))
    sweep = []
    for footprint in calibrate.SWEEP_BYTES:
        tokens = footprint // 8 // TOKEN_BYTES // 64 * 64
        machine = Synthetic()
        machine.read_ms(range(8), tokens)
        sweep.append(SweepPoint(8 * tokens * TOKEN_BYTES, machine.read_ms(range(8), tokens)))
    derived = calibrate.derive(MACHINE, CPU_LAYER, points, sweep)
    return Profile(MACHINE, CPU_LAYER, 0.0, tuple(points), tuple(sweep), derived)


def test_bandwidths_are_recovered_within_a_hundredth(measured):
    assert measured.derived.memory_gb_s == pytest.approx(MEMORY_GB_S, rel=0.01)
    assert measured.derived.cache_gb_s == pytest.approx(CACHE_GB_S, rel=0.01)


def test_cache_size_is_recovered_within_a_step_of_the_sweep(measured):
    assert CACHE_BYTES / 2**0.25 <= measured.derived.cache_bytes <= CACHE_BYTES * 2**0.25


def test_cache_size_is_unknown_where_the_sweep_does_not_cross(measured):
    derived = measured.derived
    for half in (measured.sweep[:5], measured.sweep[-5:]):
        assert calibrate.cache_bytes(half, derived.memory_gb_s, derived.cache_gb_s) is None


def test_a_calls_fixed_cost_does_not_pass_for_the_end_of_the_cache(measured):
    slow = [replace(point, time_ms=point.time_ms + 0.3) for point in measured.sweep]
    assert slow[0].footprint_bytes / slow[0].time_ms / 1e6 < MEMORY_GB_S
    found = calibrate.cache_bytes(slow, MEMORY_GB_S, CACHE_GB_S)
    assert CACHE_BYTES / 2**0.25 <= found <= CACHE_BYTES * 2**0.25


def test_a_divergent_request_costs_what_its_prefix_takes_longer_from_memory(measured):
    assert {(d.prefix_tokens, d.batch) for d in measured.derived.divergence} == {
        (tokens, batch) for tokens in (1024, 4096) for batch in (4, 8, 16)
    }
    for each in measured.derived.divergence:
        expected = each.prefix_tokens * TOKEN_BYTES * (1 / MEMORY_GB_S - 1 / CACHE_GB_S) / 1e6
        assert each.cost_ms == pytest.approx(expected)
        assert each.cost_relative == pytest.approx(expected / each.homogeneous_ms)


def test_the_cores_own_caches_do_not_count_as_the_last_level(measured):
    """The prefix that the cache's bandwidth comes from does not fit into them: here the shorter one would."""
    fast = [replace(p, time_ms=p.time_ms / 10) if p.prefix_tokens == 1024 else p for p in measured.points]
    assert calibrate.cache_gb_s(CPU_LAYER, fast, 4_000_000) == pytest.approx(CACHE_GB_S, rel=0.01)
    assert calibrate.cache_gb_s(CPU_LAYER, fast, 0) == pytest.approx(10 * CACHE_GB_S, rel=0.01)


def test_a_grid_without_what_is_needed_is_refused(measured):
    shared = [point for point in measured.points if point.distinct_prefixes < point.batch]
    with pytest.raises(ValueError, match="no batch of distinct prefixes"):
        calibrate.memory_gb_s(CPU_LAYER, shared)
    with pytest.raises(ValueError, match="no two batches of one prefix"):
        calibrate.cache_gb_s(CPU_LAYER, [p for p in measured.points if p.batch == 1], 0)


def test_times_that_say_nothing_are_refused_in_one_line(measured, monkeypatch, tmp_path, capsys):
    def measure(say):
        return calibrate.derive(MACHINE, CPU_LAYER, [replace(p, time_ms=8.0) for p in measured.points], measured.sweep)

    monkeypatch.setattr(calibrate, "measure_cpu", measure)
    assert main(["calibrate", "--out", str(tmp_path / "profile.json")]) == 1
    err = capsys.readouterr().err
    assert "something else kept the machine busy" in err and err.count("\n") == 1


def test_a_profile_comes_back_from_its_file(measured):
    text = calibrate.as_json(measured)
    assert calibrate.from_json(text) == measured
    alone = {key: value for key, value in json.loads(text).items() if key not in ("derived", "busy_elsewhere_cores")}
    again = calibrate.from_json(json.dumps(alone))
    assert again.derived == measured.derived and again.busy_elsewhere_cores is None


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": 99}, "of version 99"), ({"layer": {}}, "not a 'feather"), ({"points": [{}]}, "not a 'feather")],
)
def test_another_file_is_refused_in_one_line(measured, change, message):
    with pytest.raises(ValueError, match=message) as refusal:
        calibrate.from_json(json.dumps(json.loads(calibrate.as_json(measured)) | change))
    assert "\n" not in str(refusal.value)


def test_cells():
    cells = [cell for cells in calibrate.grid() for cell in cells]
    assert len(set(cells)) == len(cells)
    for cell in cells:
        prefixes = cell.prefixes()
        assert len(prefixes) == cell.batch and set(prefixes) == set(range(cell.distinct_prefixes))
    by_order = {
        (c.order): c.prefixes() for c in cells if (c.batch, c.distinct_prefixes, c.prefix_tokens) == (8, 2, 1024)
    }
    assert by_order == {
        "grouped": [0, 0, 0, 0, 1, 1, 1, 1],
        "interleaved": [0, 1, 0, 1, 0, 1, 0, 1],
        "one divergent": [0, 0, 0, 0, 1, 0, 0, 0],
    }


def test_the_table_has_every_figure_and_warns_of_a_busy_machine(measured):
    text = calibrate.table(measured)
    rate = next(p for p in measured.points if (p.batch, p.distinct_prefixes, p.prefix_tokens) == (16, 16, 4096))
    assert f"{16 / rate.time_ms * 1e3:,.0f}" in text and "12.0 GB/s" in text and "48.0 GB/s" in text
    assert "cores busy" not in text
    assert "other processes kept 0.9 cores busy" in calibrate.table(replace(measured, busy_elsewhere_cores=0.9))


def test_the_cpu_is_measured(measured, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    # So few and short runs say nothing, and may be refused.
    monkeypatch.setattr(calibrate, "derive", lambda *_: measured.derived)
    monkeypatch.setattr(calibrate, "_OTHER_KV_BYTES", 1 << 20)
    monkeypatch.setattr(calibrate, "_CELL_SECONDS", 0)
    monkeypatch.setattr(calibrate, "_SWEEP_SECONDS", 0)
    monkeypatch.setattr(calibrate, "SWEEP_BYTES", (1 << 17, 1 << 18))
    groups = calibrate.grid(batches=(1, 4), distinct=(1, 2, 4), prefix_tokens=(64,))
    said = []
    profile = calibrate.measure_cpu(said.append, groups)
    assert [calibrate.Cell(p.batch, p.distinct_prefixes, p.prefix_tokens, p.order) for p in profile.points] == [
        cell for cells in groups for cell in cells
    ]
    assert all(point.time_ms > 0 and point.repeats >= 5 for point in profile.points)
    assert [point.footprint_bytes for point in profile.sweep] == [1 << 17, 1 << 18]
    assert profile.machine.device == "cpu" and profile.machine.threads >= 1 and profile.machine.name
    assert len(said) == 3


def test_no_batch_finds_the_kv_of_the_batch_before(monkeypatch):
    """Runs of different batches take turns; each must take KV of its own, or one reads what another left in a cache."""
    pytest.importorskip("torch")
    pytest.importorskip("numba")
    decode = calibrate.CpuDecode(640 * TOKEN_BYTES, threads=1)
    start = decode._keys.ctypes.data
    seen = []

    def note(query, keys, *_, **__):
        first = (keys.ctypes.data - start) // (TOKEN_BYTES // 2)
        seen.append((first, first + len(keys)))

    decode._kernel = note
    one, two = decode.prepare([0, 0], 64), decode.prepare([0, 1], 64)
    for _ in range(4):
        one()
        two()
    assert seen == [(0, 64), (64, 192), (192, 256), (256, 384), (384, 448), (448, 576), (576, 640), (0, 128)]
    still = decode.prepare([0, 1], 64, stay=True)
    still()
    still()
    assert seen[-2:] == [(0, 128), (0, 128)]


def test_the_command_derives_and_draws_what_was_measured_elsewhere(measured, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    source, out, drawing = tmp_path / "measured.json", tmp_path / "profile.json", tmp_path / "x.png"
    source.write_text(calibrate.as_json(measured))
    assert main(["calibrate", "--from", str(source), "--out", str(out), "--plot", str(drawing), "--json", "-"]) == 0
    assert calibrate.from_json(capsys.readouterr().out) == calibrate.from_json(out.read_text()) == measured
    assert drawing.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "unknown device 'tpu'; valid: cpu, cuda"),
        (["--dtype", "int8"], "unknown --dtype 'int8'; valid: bfloat16, float16"),
        (["--out", "no/such/folder/x.json"], "can't write 'no/such/folder/x.json'"),
        (["--out", "."], "can't write '.'"),
        (["--plot", "no/such/x.png"], "can't write 'no/such/x.png'"),
        (["--from", "no-such-file"], "can't read 'no-such-file': "),
    ],
)
def test_bad_use_is_refused_before_anything_is_measured(arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate, "measure_cpu", lambda say: pytest.fail("measured"))
    assert main(["calibrate", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_plot_without_matplotlib_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["calibrate", "--out", str(tmp_path / "p.json"), "--plot", str(tmp_path / "p.png")]) == 2
    err = capsys.readouterr().err
    assert "pip install 'feather-sglang[plots]'" in err and err.count("\n") == 1
