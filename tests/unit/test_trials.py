"""Trials of thresholds, and the table that a learned policy falls back to."""

from __future__ import annotations

import pytest

from feather_sglang.scheduling import trials as module
from feather_sglang.scheduling.champion import _WINDOW, Champion
from feather_sglang.scheduling.trials import Rate, Trials


class World:
    """Intervals go by; what they bring depends on the threshold in force."""

    def __init__(self, brings, exploration=0.5, slots=64):
        self.brings = brings  # threshold, or None for the static rule -> tokens/s
        self.trials = Trials(exploration, slots, 0.1)
        self.interval = 0
        self.tried = []

    def go(self, intervals):
        for _ in range(intervals):
            trials, self.interval = self.trials, self.interval + 1
            trials.begin(False, self.interval)
            trial = trials.running
            arm = trials._arms[trial.arm] if trial else trials.rule[False]
            if trial and (not self.tried or self.tried[-1] != arm):
                self.tried.append(arm)
            trials.heard(self.interval + 1, self.brings(arm), 0.1)
            trials.interval_over({(self.interval % 3, 0): True}.keys())
        return self


def test_a_rate_weighs_intervals_by_their_time():
    rate = Rate()
    rate.add(100.0, 3.0)
    rate.add(500.0, 1.0)
    assert rate.mean() == 200.0 and Rate().mean() == 0.0


def test_the_best_threshold_becomes_the_rule_and_stays():
    world = World(lambda arm: {4.0: 1000.0, 8.0: 800.0}.get(arm, 500.0)).go(3000)
    assert world.trials.rule == [4.0, None], "for strangers; nothing was tried with relatives"
    assert {2.0, 4.0, 8.0, 16.0, 32.0, 65.0, None} == set(world.tried), "a ladder, everybody, and the static rule"


def test_what_brings_a_little_more_is_not_worth_a_change():
    world = World(lambda arm: 500.0 * (1.03 if arm == 8.0 else 1)).go(3000)
    assert world.trials.rule == [None, None]


def test_one_good_round_is_not_enough():
    def brings(arm):
        world.seen += arm == 8.0
        return (800.0 if world.seen % 80 < 12 else 400.0) if arm == 8.0 else 500.0

    world = World(brings)
    world.seen = 0
    world.go(3000)
    assert world.trials.rule == [None, None] and world.seen > 12


@pytest.mark.parametrize(("brings", "lasts"), [(100.0, 1), (400.0, module._REWARDS), (500.0, module._CHANGES)])
def test_the_worse_a_trial_the_earlier_it_ends(brings, lasts):
    world = World(lambda arm: 500.0 if arm is None else brings).go(module._WARM_UP + 1)
    assert world.trials.running
    world.go(module._SETTLING + lasts - 2)
    assert world.trials.running
    world.go(1)
    assert not world.trials.running and world.trials.rule == [None, None]


def test_the_batch_from_before_is_no_part_of_a_trial():
    since = {"trial": 0}

    def brings(arm):
        since["trial"] = 0 if arm is None else since["trial"] + 1
        return 500.0 if arm is None else 1.0 if since["trial"] < module._SETTLING else 900.0

    assert World(brings).go(200).trials.rule == [2.0, None]


def test_a_reward_that_comes_late_is_no_part_of_a_trial():
    trials = World(lambda arm: 500.0).go(module._WARM_UP).trials
    trials.begin(False, 100)
    for n in range(module._SETTLING):
        trials.interval_over({(n, 0): True}.keys())
    trials.heard(100, 500.0, 0.1)
    assert trials._settled and trials._rewards == 0
    trials.heard(101, 500.0, 0.1)
    assert trials._rewards == 1


def test_a_trial_without_any_reward_ends():
    trials = World(lambda arm: 500.0).go(module._WARM_UP).trials
    trials.begin(False, 100)
    for _ in range(2 * module._INTERVALS - 1):
        trials.interval_over({}.keys())
    assert trials.running
    trials.interval_over({}.keys())
    assert not trials.running


def test_what_a_new_rule_brings_is_the_usual_throughput_at_once():
    world = World(lambda arm: 1000.0 if arm == 2.0 else 500.0)
    while world.trials.rule == [None, None]:
        world.go(1)
    assert world.trials._usual.mean() == world.trials._past.mean() == pytest.approx(1000.0)


def test_what_is_known_to_be_bad_is_left_alone_for_long_but_not_for_ever():
    world = World(lambda arm: 500.0 if arm is None else 100.0, exploration=0.2).go(400)
    assert world.trials.begun == 6, "each threshold of the ladder once"
    assert world.go(200000).trials.begun > 6


def test_a_change_of_traffic_ends_the_patience():
    trials = World(lambda arm: 1000.0, exploration=0).go(1000).trials
    trials._patience, trials._rest_s, trials._in_vain = 64, 6400.0, 20
    assert not any(trials.heard(1, 1000.0, 0.1) for _ in range(10)) and trials._patience == 64
    surprises = [trials.heard(1, 500.0, 0.1) for _ in range(200)]
    assert surprises.count(True) == 1
    assert trials._patience == 1 and 0 < trials._rest_s < 100 and trials._in_vain == 0


def test_the_pause_is_a_multiple_of_the_time_of_the_trial_before_it():
    world = World(lambda arm: 500.0 if arm is None else 100.0, exploration=0.2)
    pauses = []
    for _ in range(3000):
        was_running, spent_s = world.trials.running, world.trials._spent_s
        world.go(1)
        if was_running and not world.trials.running:
            pauses.append(world.trials._rest_s / (spent_s + 0.1))
    assert pauses[:6] == pytest.approx([4.0] * 6), "a fifth of the time"
    assert world.trials._patience > 1, "more once the whole ladder brought nothing"


def test_another_load_makes_it_try_again():
    level = {"all": 500.0, "good": None}
    world = World(lambda arm: level["all"] * (2 if arm == level["good"] else 1), exploration=0.2).go(20000)
    assert world.trials._patience >= 16
    before = world.trials.begun
    level.update(all=250.0, good=16.0)
    world.go(1500)
    assert world.trials.rule == [16.0, None] and world.trials.begun > before


def test_it_tries_again_soon_when_told_to():
    world = World(lambda arm: 500.0, exploration=0.2).go(20000)
    assert world.trials._patience >= 16
    begun = world.trials.begun
    world.trials.be_eager()
    world.go(400)
    assert world.trials.begun > begun + 1


def test_a_restored_rule_of_another_server_is_the_nearest_of_this_one():
    trials = Trials(0.2, 16, 0.1)
    trials.go_back([64.0, None])
    assert trials.rule == [17.0, None]


@pytest.fixture
def champion():
    return Champion(dict, {})


def window(champion, table, reward, seconds=1.0):
    """A window in which this table is in force."""
    champion.put_in_force(table)
    backs = [champion.hear(reward, seconds, {"learned": 1}) for _ in range(_WINDOW)]
    assert not any(backs[:-1])
    return backs[-1]


def test_a_much_worse_table_gives_way_to_the_best_one(champion):
    good, fair, bad = {"good": 1}, {"fair": 1}, {"bad": 1}
    window(champion, {}, 700.0)
    assert window(champion, fair, 800.0) is None and champion.table == fair
    assert window(champion, good, 1000.0) is None and champion.table == good
    assert window(champion, fair, 960.0) is None and champion.table == good, "not that much worse"
    back = window(champion, bad, 700.0)
    assert back == good and back is not champion.table, "a copy, for learning to go on with"
    assert champion.in_force == good


def test_the_best_tables_figure_follows_slow_changes(champion):
    window(champion, {}, 900.0)
    window(champion, {"good": 1}, 1000.0)
    for _ in range(30):
        assert window(champion, {"good": 1}, 960.0) is None
    assert window(champion, {"fair": 1}, 900.0) is None, "93 % of 960, not of 1,000"


def test_after_going_back_the_best_table_is_measured_anew(champion):
    """Or a better time in the past would bring every other table down for ever."""
    window(champion, {}, 900.0)
    window(champion, {"good": 1}, 1000.0)
    assert window(champion, {"bad": 1}, 500.0) == {"good": 1}
    assert window(champion, {"good": 1}, 400.0) is None
    assert window(champion, {"bad": 1}, 500.0) is None and champion.table == {"bad": 1}


def test_where_the_best_table_brings_much_less_than_before_the_traffic_has_changed(champion):
    for again, changed in ((650.0, True), (750.0, False)):
        champion.forget()
        window(champion, {}, 900.0)
        window(champion, {"good": 1}, 1000.0)
        window(champion, {"bad": 1}, 500.0)
        heard = []
        for _ in range(2 * _WINDOW):
            champion.hear(again, 1.0, {})
            heard.append(champion.changed)
        assert heard == [False] * (_WINDOW - 1) + [changed] + [False] * _WINDOW, "once"


def test_what_is_learned_comes_into_force_with_the_next_window_and_is_judged_as_it_was_then(champion):
    learned = {"n": 0}
    for n in range(3 * _WINDOW):
        learned["n"] = n
        assert champion.in_force == ({} if n < _WINDOW else {"n": n // _WINDOW * _WINDOW - 1})
        champion.hear(100.0, 1.0, learned)
    assert champion.table == {"n": 2 * _WINDOW - 1}


def test_with_nothing_to_compare_with_the_best_is_what_was_learned(champion):
    window(champion, {}, 100.0)
    assert champion.table == champion.in_force == {"learned": 1}


def test_a_change_of_traffic_forgets_the_best_table_and_leaves_the_present_one_in_force(champion):
    window(champion, {}, 900.0)
    window(champion, {"good": 1}, 1000.0)
    champion.put_in_force({"good": 1})
    champion.hear(1000.0, 1.0, {})
    champion.forget()
    assert champion.table is None and champion.in_force == {"good": 1} and champion._count == 0
    assert window(champion, {"bad": 1}, 100.0) is None
