"""The ways to start, and the ways to be refused."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from conftest import ask_all, fake_plugin, prompts

pytestmark = pytest.mark.server


def launch(*arguments, module="feather_sglang.launch_server", environment=None):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd="/",
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
    )


def refused(*arguments, **kwargs):
    done = launch("--model-path=nowhere", *arguments, **kwargs)
    lines = [line for line in done.stderr.splitlines() if line.startswith("feather-sglang: error: ")]
    assert done.returncode == 2 and len(lines) == 1, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return lines[0].removeprefix("feather-sglang: error: ")


def test_help_lists_both_kinds_of_flags():
    done = launch("--help")
    assert done.returncode == 0
    assert "--tensor-parallel-size" in done.stdout and "feather:" in done.stdout
    for flag in ("--feather-config", "--feather-policy", "--feather-chunk-size", "--feather-max-passes"):
        assert flag in done.stdout


FEATHER = ("--device=cpu", "--schedule-policy=feather")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--enable-priority-scheduling",), "--enable-priority-scheduling does not go with --schedule-policy feather"),
        (("--pp-size=2",), "--pp-size above 1 is not supported"),
        (("--enable-dp-attention", "--tp-size=2"), "--enable-dp-attention is not supported"),
        (("--disaggregation-mode=prefill",), "--disaggregation-mode is not supported"),
        (("--feather-max-wait-s=-1",), "max_wait_s must be a number of at least 0, got '-1'"),
        (("--feather-polcy=ucb",), "--feather-polcy: unknown flag; did you mean --feather-policy?"),
        (("--feather-chunk-size=0",), "chunk_size must be an integer of at least 1, got '0'"),
        (
            ("--feather-policy=magic",),
            "policy must be one of static, ucb, qlearning or package.module:Class",
        ),
        (("--feather-policy=no_such.module:Policy",), "policy: no_such.module:Policy cannot be imported"),
        (("--feather-state=/nowhere/state.json",), "nothing can be written in /nowhere"),
        (("--feather-config=/nowhere.yaml",), "/nowhere.yaml: cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(arguments, message):
    assert message in refused(*FEATHER, *arguments)


def test_a_bad_config_file_is_named(tmp_path):
    path = tmp_path / "feather.yaml"
    path.write_text("min_bach: 3\n")
    line = refused(*FEATHER, f"--feather-config={path}")
    assert line == f"{path}: unknown setting 'min_bach'; did you mean 'min_batch'?"


def test_a_plugin_list_without_feather_is_refused():
    assert "leaves Feather out" in refused(*FEATHER, environment={"SGLANG_PLUGINS": "other"})


def test_another_plugin_in_the_way_is_named(tmp_path):
    environment = fake_plugin(
        tmp_path,
        "def register():\n"
        "    from sglang.srt.plugins.hook_registry import HookRegistry, HookType\n"
        "    HookRegistry.register('sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority',\n"
        "                          lambda *a, **k: None, HookType.REPLACE)\n",
    )
    line = refused(*FEATHER, environment=environment)
    assert "SchedulePolicy.calc_priority: replaced by plugin 'other'" in line


def test_an_unknown_sglang_is_refused(tmp_path):
    environment = fake_plugin(
        tmp_path,
        "def register():\n"
        "    from feather_sglang.engines.sglang import hooks\n"
        "    hooks.unknown_release = lambda: 'SGLang 9.9 is not supported by this feather-sglang'\n",
    )
    assert refused(*FEATHER, environment=environment) == "SGLang 9.9 is not supported by this feather-sglang"


SGLANGS_OWN = {
    "python -m sglang.launch_server": (sys.executable, "-m", "sglang.launch_server"),
    "sglang serve": (str(Path(sys.executable).parent / "sglang"), "serve"),
}


@pytest.mark.parametrize("launcher", SGLANGS_OWN.values(), ids=SGLANGS_OWN)
def test_sglangs_own_launchers_know_feather(serve, launcher):
    server = serve(environment={"SGLANG_PLATFORM": "feather_cpu"}, launcher=launcher)
    assert len(ask_all(server, prompts(2, 3, 80, 8), tokens=4)) == 6
    assert "Feather is scheduling" in server.log.read_text()


def test_the_engine_api(model, tmp_path):
    script = tmp_path / "engine.py"
    script.write_text(
        "import sglang\n"
        "if __name__ == '__main__':\n"
        f"    engine = sglang.Engine(model_path={str(model)!r}, schedule_policy='feather', device='cpu',\n"
        "        dtype='float32', attention_backend='torch_native', mem_fraction_static=0.3, max_total_tokens=8000,\n"
        "        log_level='info')\n"
        "    prompt = list(range(3, 200))\n"
        "    answers = engine.generate(input_ids=[prompt + [i] for i in range(9, 17)],\n"
        "        sampling_params={'max_new_tokens': 4, 'temperature': 0})\n"
        "    print('ANSWERS', len(answers), sum(a['meta_info']['cached_tokens'] for a in answers))\n"
        "    engine.shutdown()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_PLATFORM": "feather_cpu"},
    )
    out = done.stdout + done.stderr
    assert "Feather is scheduling" in out, out[-3000:]
    (answers, cached) = next(line.split()[1:] for line in out.splitlines() if line.startswith("ANSWERS"))
    assert int(answers) == 8 and int(cached) >= 7 * 192, "one leader computed the prefix"


def test_the_platform_stays_silent_unless_asked_for():
    from feather_sglang.engines.sglang import platform

    names = [entry.value for entry in metadata.entry_points(group="sglang.srt.platforms")]
    assert "feather_sglang.engines.sglang.platform:activate" in names
    before = os.environ.pop("SGLANG_PLATFORM", None)
    try:
        assert platform.activate() is None
        os.environ["SGLANG_PLATFORM"] = "feather_cpu"
        assert platform.activate() == "feather_sglang.engines.sglang.cpu:CpuPlatform"
    finally:
        os.environ.pop("SGLANG_PLATFORM", None)
        if before is not None:
            os.environ["SGLANG_PLATFORM"] = before
