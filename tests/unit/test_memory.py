"""One state file, several policies: what one has learned is never overwritten by another."""

from __future__ import annotations

import json

import pytest

from feather_sglang.scheduling import Settings
from feather_sglang.scheduling.memory import Memory
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.state_file import StateFile

ROWS = {"ucb": [[3, 100.0, 90.0, 5.0, 6.0]], "qlearning": [[4, 70.0, 60.0, 8.0, 9.0]]}


def policy(name, rows=()):
    made = make_policy(Settings.parse({"policy": name}, "test"), 64)
    if rows:
        made.restore({**made.snapshot(), "cells": list(rows)})
    return made


def cells(path):
    return json.loads(path.read_text())["state"]["cells"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.json"


def stored(path, name):
    StateFile(path, 60, {})._write(policy(name, ROWS[name]).snapshot())


def test_a_policy_gets_back_what_it_had_learned():
    memory = Memory(None)
    memory.keep("ucb", policy("ucb", ROWS["ucb"]), 0.0)
    again, other = policy("ucb"), policy("qlearning")
    assert memory.resume("ucb", again) and again.snapshot()["cells"] == ROWS["ucb"]
    assert not memory.resume("qlearning", other) and not other.cells
    assert memory.load("qlearning", lambda: policy("qlearning")) is None
    memory.keep("static", policy("static"), 0.0)
    assert not memory.resume("static", policy("static")), "it learns nothing"


def test_the_file_belongs_to_the_policy_of_the_start(path):
    stored(path, "ucb")
    memory = Memory(StateFile(path, 60, {}))
    first = policy("ucb")
    assert memory.begin("ucb", first) and first.snapshot()["cells"] == ROWS["ucb"]
    assert memory.file_of("ucb") and memory.file_of("qlearning") is None
    assert memory.load("qlearning", lambda: policy("qlearning")) is None
    assert memory.file_of("qlearning") is None and cells(path) == ROWS["ucb"]


@pytest.mark.parametrize("start", ["static", "other"])
def test_a_policy_that_comes_later_gets_the_file_only_if_it_is_its_own(path, start, caplog):
    stored(path, "ucb")
    memory = Memory(StateFile(path, 60, {}))
    assert not memory.begin("static", policy("static"))
    if start == "other":
        assert memory.load("qlearning", lambda: policy("qlearning")) is None
        assert "is not qlearning's" in caplog.text
    found = memory.load("ucb", lambda: policy("ucb"))
    assert found["cells"] == ROWS["ucb"] and memory.file_of("ucb")
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name]


def test_the_first_that_learns_gets_a_file_that_is_not_there_yet(path):
    memory = Memory(StateFile(path, 60, {}))
    memory.begin("static", policy("static"))
    assert memory.load("static", lambda: policy("static")) is None and memory.file_of("static") is None
    assert memory.load("qlearning", lambda: policy("qlearning")) is None and memory.file_of("qlearning")
    assert memory.load("ucb", lambda: policy("ucb")) is None and memory.file_of("ucb") is None


@pytest.mark.parametrize(
    "content", ["", "{}", '{"version": 1, "identity": {"model": "x"}, "state": {"policy": "ucb"}}']
)
def test_a_file_that_does_not_say_whose_it_is_is_left_alone(path, content):
    path.write_text(content)
    memory = Memory(StateFile(path, 60, {}))
    memory.begin("static", policy("static"))
    assert memory.load("ucb", lambda: policy("ucb")) is None and memory.file_of("ucb") is None
    assert path.read_text() == content


def test_what_is_saved_is_the_owners_whoever_is_in_charge(path):
    file = StateFile(path, 60, {})
    memory = Memory(file)
    owner, other = policy("ucb"), policy("qlearning", ROWS["qlearning"])
    memory.begin("ucb", owner)
    memory.keep("ucb", owner, 0.0)
    assert not path.exists(), "nothing was learned"
    now = {"name": "ucb", "policy": owner}
    file.maybe_save(0.0, lambda: memory.owned(now["name"], now["policy"]))
    owner.restore({**owner.snapshot(), "cells": ROWS["ucb"]})
    memory.keep("ucb", owner, 1.0)
    file._writer.join()
    assert cells(path) == ROWS["ucb"], "before the period is over, since it learns no more"
    now.update(name="qlearning", policy=other)
    path.unlink()
    file.close()
    assert cells(path) == ROWS["ucb"]
