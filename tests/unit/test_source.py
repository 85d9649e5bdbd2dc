"""The table of hooks against source trees: a target that moved, changed or was never there is named."""

from __future__ import annotations

import pytest

from feather_sglang.engines.sglang import hooks, source
from feather_sglang.engines.sglang.hooks import HOOKS, READS, Hook, Reads, hooks_of
from feather_sglang.engines.sglang.releases import NEWEST, OLDEST, RELEASES, within


def nothing():
    """A hook."""


TABLE = (
    Hook("sglang.scheduler.Scheduler.run", "around", nothing, ("self", "batch"), "why"),
    Hook("sglang.receiver.broadcast", "around", nothing, ("data",), "why"),
)
READ = (Reads("sglang.scheduler.Scheduler", ("queue", "slots", "limit", "run")), Reads("sglang.scheduler", ("start",)))
TREE = {
    "__init__.py": "",
    "scheduler.py": """
class Scheduler:
    limit = 3
    slots: int

    def __init__(self):
        self.queue = []

    def run(self, batch):
        batch.other = 1

def start(): pass
""",
    "receiver.py": "from sglang.utils import (\n    broadcast,\n)\n",
    "utils/__init__.py": "from sglang.utils.common import *\n",
    "utils/common.py": "def broadcast(data, rank): pass\n",
}


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """What is wrong with a tree that differs from TREE in the given files."""
    monkeypatch.setattr(source, "hooks_of", lambda release: TABLE)
    monkeypatch.setattr(source, "reads_of", lambda release: READ)
    number = iter(range(100))

    def of(**changed):
        package = tmp_path / str(next(number)) / "sglang"
        for name, text in {**TREE, **{f"{name}.py": text for name, text in changed.items()}}.items():
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(text)
        return source.problems(package, NEWEST)

    return of


def test_targets_are_found_also_through_imports(problems):
    assert problems() == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def run(self, batch)", "def run_pass(self, batch)", "sglang.scheduler.Scheduler.run: not found"),
        ("(self, batch)", "(self, plan)", "sglang.scheduler.Scheduler.run: has no parameter 'batch'"),
        ("class Scheduler", "class SchedulerBase", "sglang.scheduler.Scheduler.run: not found"),
        ("def run", "run = 3\n    def _run", "sglang.scheduler.Scheduler.run: not found"),
        ("self.queue", "self.waiting.queue", "sglang.scheduler.Scheduler: has no 'queue'"),
        ("self.queue", "batch.queue", "sglang.scheduler.Scheduler: has no 'queue'"),
        ("slots: int", "places: int", "sglang.scheduler.Scheduler: has no 'slots'"),
        ("def start", "def begin", "sglang.scheduler: has no 'start'"),
    ],
)
def test_a_layout_that_moved_is_named(problems, old, new, message):
    assert old in TREE["scheduler.py"]
    found = problems(scheduler=TREE["scheduler.py"].replace(old, new))
    assert message in found


def test_a_moved_module_is_named(problems):
    assert problems(receiver="") == ["sglang.receiver.broadcast: not found"]
    assert problems(receiver="from sglang.elsewhere import broadcast\n") == ["sglang.receiver.broadcast: not found"]


def test_every_release_has_one_row_for_each_thing_that_is_hooked():
    for release in RELEASES:
        targets = [hook.target for hook in hooks_of(release)]
        assert len(set(targets)) == len(targets) and {hook.target for hook in HOOKS[:2]} <= set(targets)
    names = {hook.target.rsplit(".", 1)[-1] for hook in HOOKS}
    for release in RELEASES:
        assert {hook.target.rsplit(".", 1)[-1] for hook in hooks_of(release)} == names
    for row in (*HOOKS, *READS):
        assert RELEASES.index(row.since) <= RELEASES.index(row.until)


def test_ranges_of_releases_include_both_ends():
    assert within("0.5.13", "0.5.13", "0.5.13") and within("0.5.12.post1", "0.5.12", "0.5.13")
    assert not within("0.5.12.post1", "0.5.13", NEWEST) and not within("0.5.16", OLDEST, "0.5.15.post1")
    with pytest.raises(ValueError):
        within("0.5.24.dev1", OLDEST, NEWEST)


@pytest.mark.parametrize("release", ["0.5.10", "0.5.24", "0.5.24.dev12+gabcdef"])
def test_an_unknown_release_is_a_problem_of_its_own(release, monkeypatch):
    monkeypatch.setattr(hooks, "installed", lambda: release)
    (problem,) = hooks.problems()
    assert problem.startswith(f"SGLang {release} is not supported") and f"{OLDEST} to {NEWEST}" in problem
