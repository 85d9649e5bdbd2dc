"""Whatever fails in Feather's own code, on the real server: every request is answered, and the log says so once."""

from __future__ import annotations

import pytest
from conftest import ask_all, fake_plugin, prompts

pytestmark = pytest.mark.server

# Everything that a hook calls, in turn: it raises while the file WHERE names it.
FAULTY = """
from pathlib import Path

WHERE = Path({where!r})

class Exploding(set):
    def __contains__(self, item):
        raise ZeroDivisionError("injected: offer")

def breakable(owner, name, point):
    real = getattr(owner, name)
    def function(*args, **kwargs):
        if WHERE.read_text() == point:
            raise ZeroDivisionError("injected: " + point)
        return real(*args, **kwargs)
    setattr(owner, name, function)

def register():
    from feather_sglang.engines.sglang import controller, ranks
    from feather_sglang.scheduling import FeatherScheduler, decode_meter, learning
    breakable(FeatherScheduler, "unchanged", "unchanged")
    breakable(FeatherScheduler, "plan", "plan")
    breakable(FeatherScheduler, "confirm", "confirm")
    breakable(FeatherScheduler, "arrive", "arrive")
    breakable(FeatherScheduler, "leave", "leave")
    breakable(learning.LearnedPolicy, "learn", "learn")
    breakable(learning.LearnedPolicy, "snapshot", "snapshot")
    breakable(decode_meter.DecodeMeter, "begin", "measure")
    breakable(ranks.Speaker, "news", "news")
    breakable(controller._Trace, "write", "trace")
    breakable(learning.LearnedPolicy, "__init__", "build")
    order = controller.Controller.order
    def exploding_order(self, *args, **kwargs):
        planned = order(self, *args, **kwargs)
        if WHERE.read_text() == "offer":
            self._planned = Exploding()
        return planned
    controller.Controller.order = exploding_order
"""

HANDED_OVER = ("unchanged", "plan", "offer", "confirm", "arrive", "leave", "learn")
ONLY_LOST = ("snapshot", "trace", "measure", "news")


def served(server, seed):
    """Sixty requests through twelve slots; of unequal lengths, so that there is always something to decide."""
    requests = prompts(groups=4, per_group=15, prefix=128, suffix=16, seed=seed)
    answers = ask_all(server, requests, tokens=lambda rid: 4 + 5 * (int(rid.split("-")[1]) % 4))
    assert len(answers) == 60 and all(len(each) == 1 and each[0][0] == 200 for each in answers.values())
    return server.log.read_text()


def test_an_exception_at_any_point_is_logged_once_and_loses_nobody(serve, tmp_path):
    where = tmp_path / "where"
    where.write_text("")
    server = serve(
        "--max-total-tokens=8000",
        "--max-running-requests=12",
        "--feather-policy=ucb",
        "--feather-min-batch=2",
        "--feather-max-failures=100000",
        f"--feather-state={tmp_path / 'state.json'}",
        "--feather-state-period-s=1",
        environment=fake_plugin(tmp_path / "site", FAULTY.format(where=str(where))),
    )
    for number, point in enumerate((*HANDED_OVER, *ONLY_LOST)):
        if point == "snapshot":
            served(server, 1000)  # sound, so that there is something to save
        where.write_text(point)
        log = served(server, number)
        where.write_text("")
        # Once for each place that it breaks: changes are looked for in two.
        assert 1 <= log.count(f"ZeroDivisionError: injected: {point}") <= 1 + (point in ("arrive", "leave")), point
        assert log.count("what it left undone SGLang's own policy does") >= min(number + 1, len(HANDED_OVER))
    assert log.count("it goes on without") == len(ONLY_LOST)
    assert "is off until" not in log and server.running()


def test_after_the_configured_number_of_failures_feather_is_off(serve, tmp_path):
    where = tmp_path / "where"
    where.write_text("plan")
    server = serve(
        "--max-total-tokens=8000",
        "--max-running-requests=12",
        "--feather-max-failures=4",
        environment=fake_plugin(tmp_path / "site", FAULTY.format(where=str(where))),
    )
    log = served(server, 1)
    assert log.count("ZeroDivisionError: injected: plan") == 1
    assert log.count("Feather failed 4 times and is off") == 1
    where.write_text("")
    before = server.trace.read_text()
    served(server, 2)
    assert server.trace.read_text() == before, "its hooks let everything pass"
