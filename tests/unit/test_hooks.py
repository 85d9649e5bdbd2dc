"""The table of hooks in a process: SGLang's real registry, on a pretended SGLang of one module."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("sglang")
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from test_controller import Engine, Req, agrees

from feather_sglang.cli import main
from feather_sglang.engines.sglang import doctor, hooks, patched
from feather_sglang.engines.sglang.admission import around_get_new_batch_prefill_alone
from feather_sglang.engines.sglang.hooks import Hook
from feather_sglang.engines.sglang.releases import NEWEST, parallel, prefix_len

POLICY, RUN = "pretended.Scheduler.init_schedule_policy", "pretended.Scheduler.run"


def around_init(original, scheduler):
    scheduler.calls.append("feather")
    scheduler.schedule_policy = "fcfs"
    return original(scheduler)


def around_run(original, scheduler, batch):
    return ["feather", *original(scheduler, batch)]


@pytest.fixture
def scheduler_class(monkeypatch):
    """SGLang as patched, and a registry with nothing in it."""

    class Scheduler:
        def __init__(self, schedule_policy="feather"):
            self.schedule_policy, self.calls = schedule_policy, []

        def init_schedule_policy(self):
            if self.schedule_policy == "feather":
                return patched.init_schedule_policy(self)
            self.calls.append(self.schedule_policy)

        def run(self, batch):
            return ["sglang"]

    module = ModuleType("pretended")
    module.Scheduler = Scheduler
    monkeypatch.setitem(sys.modules, "pretended", module)
    table = (
        Hook(POLICY, "around", around_init, ("self",), "builds"),
        Hook(RUN, "around", around_run, ("self", "batch"), "runs"),
    )
    monkeypatch.setattr(hooks, "hooks_of", lambda release: table)
    monkeypatch.setattr(hooks, "installed", lambda: NEWEST)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    return Scheduler


def other(target, kind, function, name="other"):
    HookRegistry.register(target, function, HookType(kind), source=HookSource(name, None))


def load():
    """What SGLang's plugin loader does."""
    hooks.register()
    HookRegistry.apply_hooks()


def test_hooked_by_the_plugin_loader(scheduler_class):
    load()
    assert hooks.problems() == []
    scheduler = scheduler_class()
    scheduler.init_schedule_policy()
    assert scheduler.calls == ["feather", "fcfs"] and scheduler.run(None) == ["feather", "sglang"]


def test_a_patched_sglang_hooks_itself_once(scheduler_class):
    assert "is not registered" in hooks.problems()[0]
    for _ in range(2):
        scheduler = scheduler_class()
        scheduler.init_schedule_policy()
        assert scheduler.calls == ["feather", "fcfs"] and scheduler.run(None) == ["feather", "sglang"]
    load()  # later, or by mistake
    assert scheduler.run(None) == ["feather", "sglang"]


def test_a_patched_sglang_with_the_plugin_is_hooked_once(scheduler_class):
    load()
    hooks.apply_missing()
    assert scheduler_class().run(None) == ["feather", "sglang"]


def test_a_patched_sglang_keeps_what_another_plugin_did(scheduler_class):
    other(RUN, "around", lambda original, *given: ["other", *original(*given)])
    HookRegistry.apply_hooks()
    scheduler = scheduler_class()
    scheduler.init_schedule_policy()
    assert scheduler.run(None) == ["feather", "other", "sglang"]


def test_a_patched_sglang_without_feather_chosen_is_left_alone(scheduler_class):
    scheduler = scheduler_class("lpm")
    scheduler.init_schedule_policy()
    assert scheduler.calls == ["lpm"] and scheduler.run(None) == ["sglang"] and not HookRegistry._hooks


def test_a_patched_sglang_of_an_unknown_release_is_refused(scheduler_class, monkeypatch):
    monkeypatch.setattr(hooks, "installed", lambda: "0.5.24.dev3")
    with pytest.raises(RuntimeError, match=r"SGLang 0\.5\.24\.dev3 is not supported"):
        scheduler_class().init_schedule_policy()


@pytest.mark.parametrize("start", [load, lambda: None], ids=["plugin", "patched"])
def test_a_target_that_moved_is_a_refusal_with_its_name(scheduler_class, start, caplog):
    scheduler_class.run_batch = scheduler_class.run
    del scheduler_class.run
    start()
    with pytest.raises(RuntimeError, match=r"pretended\.Scheduler\.run: not found in the installed SGLang"):
        hooks.apply_missing()
    assert hooks.problems()[0].startswith(RUN)


def test_a_parameter_that_went_is_a_problem(scheduler_class):
    scheduler_class.run = lambda self, plan: []
    load()
    assert hooks.problems() == [
        f"{RUN}: has no parameter 'batch' in the installed SGLang; reinstall sglang, or start without feather"
    ]


def test_a_module_that_cannot_be_imported_says_why(scheduler_class, tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("")
    (tmp_path / "broken" / "inner.py").write_text("import no_such_driver\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hooks, "hooks_of", lambda release: (Hook("broken.inner.f", "around", load, (), ""),))
    assert "No module named 'no_such_driver'" in hooks.problems()[0]


def test_compiled_modules_of_an_older_source_are_a_problem(scheduler_class, monkeypatch):
    hooks.register()
    monkeypatch.setattr(hooks.compiling, "stale", lambda: True)
    [problem] = hooks.problems()
    assert "run: feather-sglang compile" in problem


def test_other_plugins_are_named(scheduler_class):
    class Replacement(scheduler_class):
        pass

    other(RUN, "after", lambda result, *given: None, "meter")
    other("pretended.Scheduler", "replace", Replacement, "swap")
    load()
    first, second = hooks.states()
    assert first.others == ("plugin 'swap' (replace Scheduler)",) and first.problem is None
    assert set(second.others) == {"plugin 'meter' (after)", "plugin 'swap' (replace Scheduler)"}
    assert second.problem is None
    other(RUN, "replace", lambda *given: [], "taker")
    assert "replaced by plugin 'taker'" in hooks.states()[1].problem


def test_the_doctors_report_says_what_is_wrong_and_who_else_is_there(scheduler_class):
    other(RUN, "after", lambda result, *given: None, "meter")
    load()
    fine = doctor.Report({"sglang": NEWEST, "torch": None}, "none", hooks.states(), [])
    text = fine.text()
    assert "torch not installed" in text and "GPU none" in text and text.endswith("Feather can run.")
    assert f"ok      around  {RUN}\n" in text and "also hooked by plugin 'meter' (after)" in text
    assert [row["ok"] for row in fine.as_dict()["hooks"]] == [True, True]
    del scheduler_class.run
    states = hooks.states()
    broken = doctor.Report({}, "none", states, [states[1].problem])
    assert f"NOT OK  around  {RUN}\n" in broken.text() and "missing: not found" in broken.text()
    assert broken.as_dict()["hooks"][1]["problem"] == states[1].problem


def test_ranks_and_lengths_where_each_release_has_them():
    ranks = SimpleNamespace(tp_rank=1, tp_size=2, dp_rank=None)
    assert parallel(ranks) is ranks
    assert parallel(SimpleNamespace(ps=ranks)) is ranks
    assert prefix_len(SimpleNamespace(prefix_len=0, prefix_indices=[1])) == 0
    assert prefix_len(SimpleNamespace(prefix_indices=[1, 2])) == 2


def test_what_keeps_feather_from_running_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_PLATFORM", "feather_cpu")
    versions = {"sglang": "0.5.24", "torch": "2", "mmh3": None, "feather-sglang": "1"}
    monkeypatch.setattr(doctor, "_version", versions.get)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("missing: mmh3 is not installed; run: pip install mmh3\n")
    versions["mmh3"] = "5"
    monkeypatch.setattr(hooks, "installed", lambda: "0.5.24")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["missing"][0].startswith("SGLang 0.5.24 is not supported") and report["hooks"] == []


def test_releases_that_hand_over_no_running_batch_and_return_the_batch_alone():
    def one_pass():
        return around_get_new_batch_prefill_alone(lambda self: self.prefill(10**9, self.running_batch)[0], engine)

    engine = Engine(slots=8)
    first = [Req(n, [1] * 16 + [n]) for n in range(4)]
    engine.waiting_queue = [*first, *(Req(n, [n] * 16) for n in range(10, 14))]
    admitted = one_pass()
    assert admitted and set(admitted) <= set(first)
    for _ in range(3):
        engine.finish_prefills()
        one_pass()
        agrees(engine)
    assert engine.running_batch.reqs == first, "the batch is worth protecting from the others"
    assert one_pass() is None and engine.running_batch.batch_is_full is False
    assert engine.controller.failures == 0 and engine.own_passes == 0
