from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from feather_sglang.scheduling.state_file import StateFile

IDENTITY = {"model": "m", "hardware": "h"}


def save(path, state, identity=IDENTITY):
    file = StateFile(path, 10, identity)
    file.maybe_save(0, lambda: state)
    file.close()


def test_it_saves_once_a_period_and_at_the_end(tmp_path):
    path = tmp_path / "state.json"
    file = StateFile(path, 10, IDENTITY)
    state = {"n": 0}
    file.maybe_save(100, lambda: state)
    file.maybe_save(109, lambda: state)
    assert not path.exists()
    file.maybe_save(110, lambda: state)
    file._writer.join()
    assert json.loads(path.read_text()) == {"version": 1, "identity": IDENTITY, "state": {"n": 0}}
    state = {"n": 1}
    file.maybe_save(119, lambda: state)
    assert json.loads(path.read_text())["state"] == {"n": 0}
    file.close()
    assert json.loads(path.read_text())["state"] == {"n": 1}
    state = {"n": 2}
    file.close()
    assert json.loads(path.read_text())["state"] == {"n": 1}
    assert os.listdir(tmp_path) == ["state.json"]


def test_what_was_saved_is_loaded(tmp_path):
    got = []
    assert not StateFile(tmp_path / "s", 10, IDENTITY).load(got.append)
    save(tmp_path / "s", {"n": 7})
    assert StateFile(tmp_path / "s", 10, IDENTITY).load(got.append) and got == [{"n": 7}]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "damaged"),
        (b"\x00\xff\xfe", "damaged"),
        (b"[1]", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"version": 1, "identity": {}}', "damaged"),
        (b'{"version": 2, "identity": {}, "state": {}}', "it has version 2, not 1"),
        (b'{"version": 1, "identity": {"model": "x"}, "state": {}}', "it was learned with {'model': 'x'}, not with"),
        (b'{"version": 1, "identity": {"model": "m", "hardware": "h"}, "state": 3}', "damaged"),
        (b'{"version": 1, "identity": {"model": "m", "hardware": "h"}, "state": {"bins": 1}}', "other bins"),
    ],
)
def test_what_does_not_fit_is_kept_aside_with_one_warning(tmp_path, caplog, content, why):
    def refuse(state):
        raise ValueError("other bins")

    path = tmp_path / "s"
    path.write_bytes(content)
    (tmp_path / "s.bad").write_text("an older one")
    with caplog.at_level(logging.WARNING):
        assert not StateFile(path, 10, IDENTITY).load(refuse)
    (record,) = caplog.records
    assert why in record.getMessage() and f"{path}.bad" in record.getMessage() and "\n" not in record.getMessage()
    assert not path.exists() and (tmp_path / "s.bad").read_bytes() == content


def test_where_it_cannot_be_saved_is_refused_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="the state cannot be saved there"):
        StateFile(tmp_path / "no" / "s", 10, IDENTITY)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        StateFile(tmp_path, 10, IDENTITY)


def test_a_full_disk_is_said_once_and_serving_goes_on(tmp_path, monkeypatch, caplog):
    path = tmp_path / "s"
    save(path, {"n": 1})
    file = StateFile(path, 1, IDENTITY)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for now in range(4):
        file.maybe_save(now, lambda: {"n": 2})
        if file._writer:
            file._writer.join()
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]
    assert json.loads(path.read_text())["state"] == {"n": 1} and os.listdir(tmp_path) == ["s"]
    monkeypatch.undo()
    file.close()
    assert json.loads(path.read_text())["state"] == {"n": 2}


_WRITER = """
import sys, time
from feather_sglang.scheduling.state_file import StateFile
file = StateFile(sys.argv[1], 0.005, {})
start = time.monotonic()
n = 0
while True:
    n += 1
    now = time.monotonic()
    file.maybe_save(now, lambda: {"at": now, "n": n, "fill": [n] * 20000})
    if n == 1:
        print("up", flush=True)
    time.sleep(0.001)
"""


def test_killed_at_any_moment_the_file_is_whole_and_new(tmp_path):
    path = tmp_path / "s"
    rng = random.Random(1)
    found = 0
    for _ in range(25):
        writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"up\n"
        time.sleep(rng.uniform(0, 0.15))
        writer.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        writer.wait()
        writer.stdout.close()
        if path.exists():
            found += 1
            state = json.loads(path.read_text())["state"]
            assert state["fill"] == [state["n"]] * 20000
            age = killed - state["at"]
            assert age < 5 or found == 1, age
    assert found > 15
    StateFile(path, 1, {})
    assert os.listdir(tmp_path) == ["s"], "what the killed left behind is cleared away"


def test_an_exit_saves(tmp_path):
    code = (
        "import sys; from feather_sglang.scheduling.state_file import StateFile\n"
        "StateFile(sys.argv[1], 1000, {}).maybe_save(0, lambda: {'n': 5})"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=True)
    assert json.loads((tmp_path / "s").read_text())["state"] == {"n": 5}


def test_maybe_save_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    slow = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.3), slow(descriptor)))
    file = StateFile(tmp_path / "s", 1, IDENTITY)
    file.maybe_save(0, dict)
    start = time.perf_counter()
    file.maybe_save(1, dict)
    file.maybe_save(2, dict)  # the first is still being written: skipped, not queued
    assert time.perf_counter() - start < 0.1
    file.close()
