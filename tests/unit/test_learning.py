from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feather_sglang.bench import surface
from feather_sglang.cht import chunk_hashes
from feather_sglang.scheduling import (
    BatchingPolicy,
    BatchState,
    FeatherScheduler,
    Settings,
    SettingsError,
    StaticPolicy,
    champion,
    trials,
)
from feather_sglang.scheduling import learning as module
from feather_sglang.scheduling.learning import ADD, STOP, LearnedPolicy
from feather_sglang.scheduling.policies import make_policy

LEARNED = ("ucb", "qlearning")
SLOTS = 64


def make(name="ucb", **values) -> LearnedPolicy:
    values = {"policy": name, "exploration": 0, "discount": 0, **values}
    policy = make_policy(Settings.parse(values, "test"), SLOTS)
    assert isinstance(policy, LearnedPolicy)
    return policy


def lossy(batch, delta=20, sharing=5, related=False, held=0) -> BatchState:
    return BatchState(batch, delta, sharing, related, held)


def cell(policy, state) -> int:
    return policy.bins.cell(state.batch + state.held, state.delta, state.sharing)


def credit(policy, state, action, reward, interval):
    """A decision, followed, with its reward, its return complete."""
    policy._chosen = {cell(policy, state): action}
    assert policy.admit(state) == bool(action)
    policy.formed(interval, state.batch + action)
    policy.learn(interval, reward, 1.0)
    while policy._episodes:
        policy._close(0)


def end_window(policy):
    """What was learned decides from now on."""
    policy._champion.put_in_force((policy.cells, policy.trials.rule))
    policy._chosen = {}


@pytest.mark.parametrize("name", LEARNED)
@given(batch=st.integers(1, 99), delta=st.integers(0, 80), sharing=st.integers(1, 50), held=st.integers(0, 20),
       related=st.booleans())  # fmt: skip
def test_what_was_never_visited_is_decided_by_the_static_rule(name, batch, delta, sharing, held, related):
    state = BatchState(batch, delta, sharing, related, held)
    assert make(name).admit(state) == ((related and not delta) or StaticPolicy(Settings(), SLOTS).admit(state))


@pytest.mark.parametrize("name", LEARNED)
def test_it_decides_for_what_brought_more(name):
    policy = make(name)
    state = lossy(20)
    for n in range(16):
        end_window(policy)
        # As static does, until enough has been seen of the other action.
        assert policy.admit(state) == (n >= 12 if name == "ucb" else n >= 10), n
        credit(policy, state, n % 2, 500 if n % 2 == STOP else 900, n)
    assert not policy.admit(lossy(40)), "another bin knows nothing of it"


@pytest.mark.parametrize("name", LEARNED)
def test_the_static_action_stays_where_the_other_is_hardly_better(name):
    for gain, admitted in ((1.01, False), (1.03, True)):
        policy = make(name, min_gain=0.02)
        for n in range(20):
            credit(policy, lossy(20), n % 2, 1000 * gain if n % 2 == ADD else 1000, n)
        end_window(policy)
        assert policy.admit(lossy(20)) is admitted


@pytest.mark.parametrize("name", LEARNED)
def test_it_adapts_after_a_change(name):
    policy = make(name)
    for n in range(200):
        credit(policy, lossy(20), n % 2, 900 if n % 2 else 500, n)
    end_window(policy)
    assert policy.admit(lossy(20))
    for n in range(200, 260):
        credit(policy, lossy(20), n % 2, 500 if n % 2 else 900, n)
    end_window(policy)
    assert not policy.admit(lossy(20))


def test_relatives_that_cost_nothing_join_without_a_record():
    policy = make()
    assert policy.admit(BatchState(30, 0, 5, True, 4))
    assert policy.admit_run(BatchState(30, 0, 5, True, 4), [3] * 5) == 5
    assert not policy._taken and not policy.decisions


def test_the_batchs_own_followers_come_before_strangers():
    policy = make()
    for n in range(6):
        credit(policy, lossy(20), n % 2, 900 if n % 2 else 500, n)
    policy._chosen = {}
    assert not policy.admit(lossy(10, held=10)) and not policy._taken


def test_where_nothing_is_shared_strangers_join_and_nothing_is_learned():
    policy = make(exploration=0.5)
    for n in range(3000):
        assert policy.admit(BatchState(1 + n % 63, 0, 5, False, 0))
        policy.formed(n, 2 + n % 63)
        policy.learn(n, 100.0, 1.0)
    assert not policy.cells and not policy.trials.begun
    policy.admit(BatchState(5, 0, 5, True, 0))  # a relative: there is sharing
    for _ in range(module._SHARING_MEMORY):
        policy.admit(BatchState(5, 0, 5, False, 0))
    before = policy.decisions
    assert before
    policy._chosen = {}
    policy.admit(BatchState(5, 0, 5, False, 0))
    assert policy.decisions == before


def test_only_what_the_engine_followed_is_credited():
    policy = make(min_batch=64)
    for batch in range(20, 40):
        policy.admit(lossy(batch))
    policy.formed(1, 22)  # it admitted two of twenty: the adds from 22 on were not followed
    policy.learn(1, 700.0, 1.0)
    policy._close(0)
    assert list(policy.cells) == [cell(policy, lossy(20))]
    policy.admit(lossy(22))
    policy.formed(2, 22)
    policy.learn(2, 700.0, 1.0)
    assert not policy._episodes, "refused"


def test_a_stop_counts_once_an_interval_and_an_unrewarded_one_goes_with_the_next():
    policy = make()
    for _ in range(5):
        policy.admit(lossy(20))
        policy.formed(1, 20)
    policy.admit(lossy(50))
    policy.formed(2, 50)
    policy.learn(2, 800.0, 1.0)
    policy._close(0)
    arms = [policy.cells[cell(policy, lossy(batch))] for batch in (20, 50)]
    assert [each.weight[STOP] for each in arms] == [1, 1] and [each.value[STOP] for each in arms] == [800, 800]


def test_a_stop_repeated_after_its_reward_is_not_credited_again():
    policy = make()
    for _ in range(2):
        policy.admit(lossy(20))
        policy.formed(1, 20)
        policy.learn(1, 800.0, 1.0)
    assert not policy._pending and [each.intervals for each in policy._episodes] == [2]
    policy.admit(lossy(20))
    policy.formed(1, 20)
    assert not policy._pending


def test_those_held_count_as_in_the_batch():
    policy = make()
    relative = lossy(20, related=True)
    for n in range(20):
        credit(policy, relative, n % 2, 900 if n % 2 else 500, n)
    end_window(policy)
    assert policy.admit(relative._replace(batch=12, held=8)) and not policy.admit(relative._replace(held=30))


def test_a_late_reward_does_not_reach_the_decisions_taken_since():
    policy = make()
    policy.admit(lossy(20))
    policy.formed(1, 20)
    policy.admit(lossy(50))
    policy.formed(2, 50)
    policy.learn(1, 800.0, 1.0)
    assert [list(each.decisions) for each in policy._episodes] == [[(cell(policy, lossy(20)), STOP)]]
    policy.learn(1, 100.0, 1.0)
    policy.learn(0, 100.0, 1.0)
    assert len(policy._episodes) == 1


def test_the_return_looks_as_far_ahead_as_the_discount():
    for discount, expected in ((0.0, 100.0), (0.5, None)):
        policy = make(discount=discount)
        for n, reward in enumerate([100.0] + [900.0] * module._STEPS):
            policy.admit(lossy((20, 50)[n % 2]))
            policy.formed(n, (20, 50)[n % 2])
            policy.learn(n, reward, 1.0)
        value = policy.cells[cell(policy, lossy(20))].value[STOP]
        assert value == expected if expected else 450 < value < 550


def test_what_lies_beyond_is_the_best_known_for_qlearning_and_the_mean_for_ucb():
    for name, expected in (("ucb", 100.0), ("qlearning", 0.5 * 100 + 0.5 * 900)):
        policy = make(name, discount=0.5)
        policy.cells[7] = module.Arms([900.0, 300.0], [1.0, 1.0])
        policy.admit(lossy(20))
        policy.formed(1, 20)
        policy.learn(1, 100.0, 1.0)
        policy._close(7)
        assert policy.cells[cell(policy, lossy(20))].value[STOP] == expected


def test_a_trial_says_nothing_about_what_came_before_it():
    policy = make()
    for n, batch in enumerate((20, 50, 30)):
        policy.admit(lossy(batch))
        policy.formed(n, batch)
        if n == 2:
            policy._pending[-1][1][cell(policy, lossy(30)), STOP] = True  # on trial
        policy.learn(n, 500.0, 1.0)
    assert [list(each.decisions) for each in policy._episodes] == [[(cell(policy, lossy(30)), STOP)]]
    assert len(policy.cells) == 2, "those before it have their credit"


def warm(policy):
    """Some cells, some episodes, and a best table that is another one."""
    policy.cells = {3: module.Arms([500.0, 0.0], [9.0, 0.0])}
    end_window(policy)
    policy._episodes.append(module.Episode({(3, STOP): False}))
    policy._champion.table = ({7: module.Arms([900.0, 0.0], [9.0, 0.0])}, [8.0, None])
    policy._champion._value = 900.0
    return policy


def test_the_best_table_so_far_is_what_is_stored():
    stored = warm(make()).snapshot()
    assert stored["cells"] == [[7, 900.0, 0.0, 9.0, 0.0]] and stored["thresholds"] == [8.0, None]


def test_a_much_worse_table_gives_way_to_the_best_one_with_its_rule():
    policy = warm(make())
    policy.trials.rule = [2.0, None]
    for n in range(champion._WINDOW):
        assert list(policy.cells) == [3]
        policy.learn(n, 400.0, 1.0)
    assert list(policy.cells) == [7] and policy.trials.rule == [8.0, None]


def test_what_is_learned_within_a_window_decides_when_it_is_over():
    """What is judged is what has acted."""
    policy = make()
    for n in range(champion._WINDOW):
        policy._chosen = {}
        assert not policy.admit(lossy(20)), n
        credit(policy, lossy(20), n % 2, 900 if n % 2 else 500, n)
    policy._chosen = {}
    assert policy.admit(lossy(20))
    assert policy.snapshot()["cells"], "nothing to compare the first window with, so what was learned in it is kept"


def test_what_is_restored_decides_at_once():
    policy = make()
    for n in range(20):
        credit(policy, lossy(20), n % 2, 900 if n % 2 else 500, n)
    again = make(freeze=True)
    again.restore(policy.snapshot())
    assert again.admit(lossy(20)) and not make(freeze=True).admit(lossy(20))


def test_where_even_the_best_table_brings_much_less_trials_begin_anew():
    """A slow fall of the throughput is no surprise to the trials, which may have become rare by then."""
    policy = warm(make(exploration=0.2))
    policy.trials._patience = 64
    for n in range(2 * champion._WINDOW):
        assert policy.trials._patience == 64
        policy.learn(n, 700.0 if n < champion._WINDOW else 600.0, 1.0)
    assert policy.trials._patience == 1


def test_the_best_table_is_judged_without_trials_and_forgotten_with_the_traffic():
    policy = warm(make(exploration=0.2))
    for n in range(100):
        policy.learn(n, 900.0, 1.0)
    assert policy._champion._count == 100 and policy._champion.table
    policy.trials.running = trials.Trial(False, 0, 2.0, 0)
    policy.learn(100, 10.0, 1.0)
    assert policy._champion._count == 100
    policy.trials.running = None
    for n in range(101, 190):
        policy.learn(n, 50.0, 1.0)
    assert policy._champion.table is None


def test_under_a_new_rule_cells_and_the_judgement_begin_anew(monkeypatch):
    policy = warm(make(exploration=0.2))
    policy.learn(1, 900.0, 1.0)
    assert policy._champion._count == 1
    monkeypatch.setattr(policy.trials, "interval_over", lambda decisions: True)
    policy.formed(2, 20)
    assert not policy.cells and not policy._episodes and policy._champion._count == 0
    assert not policy._champion.in_force[0], "nor do the old cells decide"
    assert policy._champion.table, "to be compared with"


@pytest.mark.parametrize("reward", [0.0, -1.0, math.nan, math.inf])
def test_bad_rewards_are_counted_and_ignored(reward):
    policy = make()
    policy.admit(lossy(20))
    policy.formed(1, 20)
    policy.learn(1, reward, 1.0)
    assert policy.ignored_rewards == 1 and not policy._episodes and len(policy._pending) == 1


def test_memory_is_bounded_without_any_reward():
    policy = make()
    for n in range(5000):
        policy.admit(lossy(1 + n % 64, delta=n % 80))
        if n % 3:
            policy.formed(n, 1 + n % 64)
    assert len(policy._pending) <= module._MAX_PENDING
    assert len(policy._taken) <= 2 * len(policy.bins) and len(policy._chosen) <= len(policy.bins)


def drive(policy, seed, intervals=4000):
    """Random decisions and rewards; returns the decisions and, for each interval, whether it was on trial."""
    rng = random.Random(seed)
    decisions, trial = [], []
    for n in range(intervals):
        batch = rng.randint(1, 63)
        decisions.append(policy.admit(lossy(batch, rng.choice([0, 3, 20]), related=rng.random() < 0.2)))
        trial.append(policy.trials.running is not None)
        policy.formed(n, batch + decisions[-1])
        if rng.random() < 0.9:
            policy.learn(n - rng.randrange(2), rng.uniform(500, 1500), 1.0)
    return decisions, trial


@pytest.mark.parametrize("name", LEARNED)
def test_trials_are_bounded_in_any_window_and_become_rare(name, monkeypatch):
    monkeypatch.setattr(trials, "_GOOD", math.inf)  # those that pay are not counted
    policy = make(name, exploration=0.2)
    _, trial = drive(policy, 1, 20000)
    assert policy.trials.begun and sum(trial[:2000]) > 20
    for start in range(0, 18000, 100):
        assert sum(trial[start : start + 2000]) <= 0.2 * 2000 + trials._INTERVALS
    assert sum(trial[10000:]) < 0.05 * 10000


@pytest.mark.parametrize("name", LEARNED)
def test_frozen_it_tries_nothing_and_learns_nothing(name):
    policy = make(name, freeze=True, exploration=0.5)
    drive(policy, 3)
    assert not policy.cells and not policy.trials.begun
    assert drive(make(name, exploration=0), 3)[1].count(True) == 0
    warm = make(name, exploration=0.5)
    drive(warm, 3)
    assert warm.trials.begun
    policy.restore(warm.snapshot())
    drive(policy, 3)
    assert not policy.trials.begun and policy.snapshot() == warm.snapshot()


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("seed", range(3))
def test_equal_calls_give_equal_decisions(name, seed):
    one, two = make(name, exploration=0.3, discount=0.9), make(name, exploration=0.3, discount=0.9)
    assert drive(one, seed) == drive(two, seed)
    assert one.snapshot() == two.snapshot() and one.trials.begun


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aaafl"), st.integers(1, 40), st.integers(1, 40)), max_size=60))
def test_credit_against_a_slow_model(events):
    """The model keeps every decision for ever and looks each one up again."""
    policy = make("qlearning", learning_rate=0.001)
    log: list[tuple[int, int, int]] = []  # cell, action, batch: since the last formed
    followed: list[tuple[int, int, int]] = []  # interval, cell, action
    expected: list[list[tuple[int, int]]] = []
    interval = credited = 0
    for kind, x, y in events:
        if kind == "a":
            state = lossy(x, delta=20)
            log.append((cell(policy, state), int(policy.admit(state)), x))
        elif kind == "f":
            interval += y % 2
            firsts: dict[tuple[int, int], int] = {}
            for at, action, batch in log:
                if action == ADD:
                    firsts.setdefault((at, action), batch)
                else:
                    firsts[at, action] = batch
            for (at, action), batch in firsts.items():
                if batch < x if action == ADD else batch == x:
                    followed.append((interval, at, action))
            log = []
            policy.formed(interval, x)
        else:
            upto = interval - y % 2
            now = list(dict.fromkeys((at, action) for n, at, action in followed if credited < n + 1 <= upto + 1))
            followed = [each for each in followed if each[0] > upto]
            if now and not (expected and set(now) <= set(expected[-1])):
                expected.append(now)
            policy.learn(upto, 500.0, 1.0)
            credited = max(credited, 0)
    kept = [list(each.decisions) for each in policy._episodes]
    assert kept == expected[len(expected) - len(kept) :] and len(kept) == min(len(expected), module._STEPS)


@pytest.mark.parametrize("name", LEARNED)
def test_a_snapshot_restores_through_json(name):
    one, two = make(name, discount=0.9), make(name)
    drive(one, 5)
    two.restore(json.loads(json.dumps(one.snapshot())))
    assert two.snapshot() == one.snapshot() and one.cells


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "qlearning"}, "it is of policy 'qlearning', not 'ucb'"),
        ({"bins": {"batch": [1]}}, "it has the bins"),
        ({"cells": [[0, 1, 1, 1]]}, "where a cell was expected"),
        ({"cells": [[0, 1, math.nan, 1, 1]]}, "where a cell was expected"),
        ({"cells": [[10**6, 1, 1, 1, 1]]}, "where a cell was expected"),
        ({"cells": None}, "it holds None where a cell was expected"),
        ({"thresholds": [4]}, "where two thresholds were expected"),
        ({"thresholds": [math.nan, None]}, "where two thresholds were expected"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change, message):
    policy = make()
    with pytest.raises(ValueError, match=r"^[^\n]*$") as error:
        policy.restore({**policy.snapshot(), **change})
    assert message in str(error.value) and not policy.cells


def test_static_has_nothing_to_store():
    policy = StaticPolicy(Settings(), 8)
    assert policy.snapshot() == {}
    policy.restore({})
    with pytest.raises(ValueError):
        policy.restore({"cells": []})


class Cautious(StaticPolicy):
    pass


class Broken(StaticPolicy):
    def __init__(self, settings, max_batch):
        raise KeyError("no\nluck")


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("no_such_module:X", "no_such_module:X cannot be imported: ModuleNotFoundError"),
        ("test_learning:Nobody", "cannot be imported: AttributeError"),
        ("test_learning:make", "test_learning:make is not a subclass of BatchingPolicy"),
        ("test_learning:Broken", "test_learning:Broken(settings, 8) failed: KeyError"),
    ],
)
def test_ones_own_policy_fails_in_one_line(policy, message):
    with pytest.raises(SettingsError) as error:
        make_policy(Settings(policy=policy), 8)
    text = str(error.value)
    assert message in text and "valid: static, ucb, qlearning or package.module:Class" in text and "\n" not in text


def test_ones_own_policy_is_used():
    scheduler = FeatherScheduler(Settings(policy="test_learning:Cautious"), 8)
    assert type(scheduler.policy).__name__ == "Cautious"


def test_the_scheduler_tells_the_policy_what_was_formed():
    calls = []

    class Spy(BatchingPolicy):
        def admit(self, state):
            return True

        def formed(self, interval, batch):
            calls.append((interval, batch))

    scheduler = FeatherScheduler(Settings(chunk_size=4), 8, Spy())
    for rid in range(4):
        scheduler.arrive(rid, chunk_hashes([rid] * 4, 4), 4)
    scheduler.plan(8, 10**9)
    scheduler.confirm([0, 1])
    scheduler.plan(8, 10**9)
    scheduler.confirm([])
    assert calls == [(1, 2), (1, 2)] and scheduler.interval == 1
    scheduler.admit(2)
    assert scheduler.interval == 2


# ------------------------------------------------------------------ the proof


@pytest.mark.parametrize("seed", range(2))
def test_a_simulation_is_reproducible(seed):
    rates = [surface.Engine("ridge", make("ucb", exploration=0.2, discount=0.9), seed).run(1500) for _ in range(2)]
    assert rates[0] == rates[1]


def test_the_surfaces_are_not_trivial():
    """Static is far from the best on two of them, and stopping early costs on the two others."""
    for name, low, high in (("ridge", 0, 0.6), ("moderate", 0, 0.9), ("flat", 0.99, 1.01), ("wide", 0.99, 1.01)):
        top, static, _ = surface.yardsticks(name, 0)
        assert low <= static / top <= high, name
    for name in ("flat", "wide"):
        assert surface.fixed(name, surface.Table(4, 2), 0) < 0.6 * surface.yardsticks(name, 0)[0]


def test_the_example_in_the_docs_works(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    code = page.split("<!-- example -->\n```python\n")[1].split("```")[0]
    (tmp_path / "policy_from_the_docs.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    policy = make_policy(Settings(policy="policy_from_the_docs:Threshold"), SLOTS)
    engine = surface.Engine("ridge", policy, 0)
    engine.run(500)
    assert policy.best > 0 and len(policy.sizes) <= 3
    policy.restore(json.loads(json.dumps(policy.snapshot())))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LEARNED)
def test_where_mixing_costs_little_it_gains_on_static(name, seed):
    row = surface.run(name, "moderate", [seed], 16000, lambda text: None)
    assert row.static[0] < 0.85 and row.learned[0] >= 0.88 and row.decisions < 5000


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LEARNED)
def test_where_one_divergent_request_spoils_a_batch_it_learns_to_stop(name, seed):
    row = surface.run(name, "ridge", [seed], 12000, lambda text: None)
    assert row.static[0] < 0.55 and row.learned[0] >= 0.95


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", LEARNED)
def test_where_homogeneity_brings_nothing_it_ends_up_admitting_as_fcfs_does(name, seed):
    row = surface.run(name, "flat", [seed], 6000, lambda text: None)
    assert row.learned[0] >= 0.99 * row.fcfs[0]
