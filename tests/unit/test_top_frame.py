"""What a frame of ``feather-sglang top`` shows, whatever the server's state and the terminal's size."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from state_server import answer

from feather_sglang.top.client import View
from feather_sglang.top.frame import frame
from feather_sglang.top.state import parse, rates

URL = "http://h:1"


def view_of(*contents, known=None, **more):
    schedulers = [parse(content)[0] for content in contents]
    return View(tuple((scheduler, known) for scheduler in schedulers), **more)


def lines_of(view, width=200, height=None):
    return [line.plain for line in frame(view, URL, width, height)]


def text_of(*args, **more):
    return "\n".join(lines_of(*args, **more))


def changes():
    """Two answers, 2 s apart."""
    later = {"added": 1131, "stopped": 232, "passed_over": 334, "forced": 44, "fallback_passes": 5, "state_saves": 6}
    later |= {"decode_steps": 720, "homogeneous_decode_steps": 615, "output_tokens": 80500}
    later |= {"pass_s_sum": 1.6, "pass_count": 4025}
    return parse(answer())[0], parse(answer(time_s=1002.0, passes=5030, counts=later))[0]


def test_a_frame_shows_every_field():
    before, after = changes()
    text = text_of(View(((after, rates(before, after)),)))
    for part in (
        URL,
        "feather 9.8.7, policy ucb",
        "12 of 32 slots [########............], 8,192 tokens shared by all, 3 held",
        "2,400",
        "250.0 tokens/s, 10.0 steps/s, 75.0% of them homogeneous",
        "15.0 a second, 4.00 ms of Feather's each, 5.0% of the time",
        "added 1,131 (10.0/s), stopped 232 (5.0/s), passed over 334 (0.5/s)",
        "last stop   policy",
        "not added: 4,096 tokens shared with the batch, 4,032 lost, 18 waiting share the rest, request-77",
        "why         adding it would cost the batch 4032 of 8192 shared tokens (at most 256 are given up)",
        "last reward 1,234.6 tokens/s, 12.5% of the decode time on trials, state saved 6 times",
        "2 of 10, 5 passes by lpm, 44 served by age",
        "     8,192     1,290         4  ##############################",
        "        64        17         0",
    ):
        assert part in text, part
    assert "data parallel rank" not in text and "no answer" not in text


def test_without_a_second_answer_there_are_no_rates():
    text = text_of(view_of(answer()))
    assert "- tokens/s, - steps/s, - of them homogeneous" in text and "added 1,111 (-/s)" in text
    assert "- a second, - ms of Feather's each, - of the time" in text


def test_several_schedulers_are_told_apart():
    text = text_of(view_of(answer(waiting=1), answer(waiting=2)))
    assert text.index("data parallel rank 0") < text.index("waiting     1\n")
    assert text.index("waiting     1\n") < text.index("data parallel rank 1") < text.index("waiting     2\n")


def test_nothing_running_and_nobody_waiting():
    text = text_of(
        view_of(answer(batch={"requests": 0, "shared_tokens": 0, "held": 0}, waiting=0, groups=[], best=None))
    )
    assert "0 of 32 slots [....................], 0 tokens shared by all" in text
    assert "waiting     0\n" in text and "next        nobody waits" in text
    assert "groups" not in text and "why" not in text
    assert "waiting     3, no prefix shared by two\n" in text_of(view_of(answer(waiting=3, groups=[])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduling": "lpm", "why": "switched"}, "SGLang's lpm: switched over by POST /feather/policy"),
        ({"scheduling": "fcfs", "why": "failures"}, "SGLang's fcfs: Feather is off after too many failures"),
        ({"scheduling": "fcfs", "why": "the moon"}, "SGLang's fcfs: the moon"),
    ],
)
def test_who_plans_instead_of_feather_and_why(changes, message):
    text = text_of(view_of(answer(**changes)))
    assert message in text and "policy ucb" not in text


def test_what_is_wrong_stands_above_what_was_known():
    lines = lines_of(view_of(answer(), error="refused", silent_s=12.3))
    assert lines[1] == "no answer for 12 s, trying again: refused" and "12 of 32 slots" in "\n".join(lines)
    assert lines_of(View(error="refused"))[1:] == ["no answer, trying again: refused"]
    assert lines_of(View())[1:] == ["no scheduler of this server answered"]


def groups(number):
    return [{"tokens": 64 * (number - i), "waiting": number - i, "active": 0} for i in range(number)]


def test_groups_give_way_first_and_are_counted():
    view = view_of(answer(groups=groups(20)), answer(groups=groups(20)))
    full = lines_of(view)
    assert sum(" 1,280 " in line for line in full) == 2 and not any("more" in line for line in full)
    for left_out in range(2, 30):
        lines = lines_of(view, height=len(full) - left_out)
        shown = sum(line.startswith(" " * 12) and line.split()[2:3] == ["0"] for line in lines)
        more = [int(line.split()[1]) for line in lines if line.strip().startswith("and ")]
        assert len(lines) <= len(full) - left_out and len(more) == 2 and shown + sum(more) == 40
        assert shown >= 40 - left_out - 3, "two lines say what is left out, and one may be left over"
        assert sum("failures" in line for line in lines) == 2, "all the rest is there"


def test_a_long_reason_is_wrapped_and_then_cut():
    lines = lines_of(view_of(answer(best={"why": "word " * 60})), width=60)
    first = next(i for i, line in enumerate(lines) if line.startswith("why"))
    assert [line[:12].strip() for line in lines[first : first + 4]] == ["why", "", "", "learning"]
    assert lines[first + 2].endswith(" ...")


texts = st.text(max_size=60)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(1, 150),
    st.integers(1, 70),
    st.lists(st.tuples(st.integers(0, 20), texts), max_size=3),
    texts,
    st.booleans(),
)
def test_a_frame_fits_and_moves_no_cursor(width, height, schedulers, error, live):
    contents = [answer(groups=groups(number), best={"rid": text, "why": text}) for number, text in schedulers]
    lines = lines_of(view_of(*contents, error=error), width, height if live else None)
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)
    assert not live or len(lines) <= height


def test_rates_are_of_differences():
    before, after = changes()
    found = rates(before, after)
    assert found.per_s["output_tokens"] == 250 and found.per_s["passes"] == 15 and found.per_s["forced"] == 0
    assert found.pass_ms == pytest.approx(4) and found.homogeneous == 0.75
    idle = rates(before, parse(answer(time_s=1002.0))[0])
    assert idle.per_s["added"] == 0 and idle.pass_ms is None and idle.homogeneous is None
    assert rates(after, before) is None, "the clock of another process"
    assert rates(before, before) is None
    for new in ({"passes": 3}, {"counts": {"added": 1}}):
        assert rates(before, parse(answer(time_s=1002.0, **new))[0]) is None, "counts began anew"


def test_other_releases_answers():
    newer = answer(more=1, batch={"more": 2}, best={"more": 3}, counts={"more": 4})
    assert parse(newer) == parse(answer())
    older = copy.deepcopy(answer())
    del older["schedulers"][0]["counts"]["forced"]
    assert parse(older)[0].counts["forced"] == 0
    del older["schedulers"][0]["slots"]
    with pytest.raises(KeyError, match="slots"):
        parse(older)
