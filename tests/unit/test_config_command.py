"""Where settings come from, and ``feather-sglang config``, which says so."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from feather_sglang.cli import main
from feather_sglang.engines.sglang.arguments import add_arguments, effective, export_arguments, load_settings
from feather_sglang.scheduling import Settings, SettingsError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("FEATHER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def config(capsys):
    def run(*flags):
        assert main(["config", *flags, "--json", "-"]) == 0
        return json.loads(capsys.readouterr().out)["settings"]

    return run


@pytest.fixture
def refusal(capsys):
    def run(*flags):
        assert main(["config", *flags]) == 2
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and err.startswith("feather-sglang: error: ")
        return err

    return run


@pytest.mark.parametrize("given", [set(each) for n in range(4) for each in itertools.combinations("fev", n)])
@pytest.mark.parametrize(
    ("name", "values", "default"),
    [
        ("max_passes", {"v": 11, "e": 12, "f": 13}, 2048),
        ("max_wait_s", {"v": 1.5, "e": 2.0, "f": 0.25}, 0.0),
        ("state", {"v": "a.json", "e": "b.json", "f": "c.json"}, ""),
    ],
)
def test_a_flag_beats_the_environment_which_beats_the_file(name, values, default, given, config, monkeypatch, tmp_path):
    path = tmp_path / "feather.yaml"
    flags, flag, variable = [], "--feather-" + name.replace("_", "-"), "FEATHER_" + name.upper()
    if "f" in given:
        path.write_text(f"{name}: {values['f']}\n")
        flags.append(f"--feather-config={path}")
    if "e" in given:
        monkeypatch.setenv(variable, str(values["e"]))
    if "v" in given:
        flags.append(f"{flag}={values['v']}")
    said = config(*flags)
    origins = {"v": ("flag", flag), "e": ("environment", variable), "f": ("file", str(path))}
    winner = next((each for each in "vef" if each in given), None)
    kind, where = origins[winner] if winner else ("default", "")
    value = values[winner] if winner else default
    assert said[name] == {"value": value, "from": kind, "name": where, "derived": None}
    assert {each["from"] for other, each in said.items() if other != name} == {"default"}


def test_it_says_what_a_server_would_read(config, monkeypatch, tmp_path):
    """Over the flags that the server's own parser takes, and the environment that its processes inherit."""
    path = tmp_path / "feather.yaml"
    path.write_text("crowd: 3\nfreeze: yes\ndelta_bins: 0,5\n")
    monkeypatch.setenv("FEATHER_CONFIG", str(path))
    monkeypatch.setenv("FEATHER_POLICY", "ucb")
    monkeypatch.setenv("FEATHER_MEMORY", "7")
    flags = ["--feather-memory", "9", "--feather-exploration=0.1"]
    before = dict(os.environ)
    said = config(*flags)
    assert dict(os.environ) == before, "it only looks"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    environ = dict(os.environ)
    assert export_arguments(parser.parse_args(flags), environ) == {"memory", "exploration"}
    settings = load_settings(environ)
    assert settings == Settings(policy="ucb", crowd=3, freeze=True, delta_bins="0,5", memory=9, exploration=0.1)
    assert {name: each["value"] for name, each in said.items()} == dataclasses.asdict(settings)


def test_the_file_may_be_a_flag_or_a_variable(config, monkeypatch, tmp_path):
    for number in (1, 2):
        (tmp_path / f"{number}.yaml").write_text(f"crowd: {number}\n")
    monkeypatch.setenv("FEATHER_CONFIG", str(tmp_path / "1.yaml"))
    assert config()["crowd"]["value"] == 1
    assert config("--feather-config", str(tmp_path / "2.yaml"))["crowd"]["name"] == str(tmp_path / "2.yaml")


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--feather-freeze"], True),
        (["--feather-freeze", "--feather-crowd", "3"], True),
        (["--feather-freeze", "false"], False),
        (["--feather-freeze=yes"], True),
    ],
)
def test_a_flag_of_yes_or_no_needs_no_value(flags, value, config):
    assert config(*flags)["freeze"] == {"value": value, "from": "flag", "name": "--feather-freeze", "derived": None}


def test_the_table_marks_what_is_derived(config, capsys, tmp_path):
    rule = "a quarter of the running slots, at least 8, and more where the weights outweigh what is shared"
    assert config()["min_batch"]["derived"] == {"value": None, "rule": rule}
    assert config("--max-running-requests", "256")["min_batch"]["derived"] == {"value": 64, "rule": rule}
    assert config("--max-running-requests", "256", "--feather-min-batch", "5")["min_batch"]["derived"] is None

    def row(*flags):
        assert main(["config", *flags]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["setting", "value", "from"] and len(lines) == 1 + len(dataclasses.fields(Settings))
        return re.split(r"  +", next(line for line in lines if line.startswith("min_batch")))

    assert row() == ["min_batch", "0 (auto)", f"default; derived: {rule}"]
    assert row("--max-running-requests=256") == ["min_batch", "64", f"default; derived: {rule}"]
    assert row("--feather-min-batch=0") == ["min_batch", "0 (auto)", f"--feather-min-batch; derived: {rule}"]
    assert row("--feather-min-batch=5", "--json", str(tmp_path / "x.json")) == ["min_batch", "5", "--feather-min-batch"]
    assert json.loads((tmp_path / "x.json").read_text())["settings"]["min_batch"]["value"] == 5


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("FEATHER_MIN_BACH", "FEATHER_MIN_BATCH"),
        ("FEATHER_MAX_WAIT", "FEATHER_MAX_WAIT_S"),
        ("FEATHER_FALLBACK", "FEATHER_FALLBACK_POLICY"),
        ("FEATHER_CONFIG_FILE", "FEATHER_CONFIG"),
        ("FEATHER_CHUNKSIZE", "FEATHER_CHUNK_SIZE"),
    ],
)
def test_a_misspelt_variable_is_refused(variable, near, monkeypatch, refusal):
    monkeypatch.setenv(variable, "8")
    assert f"{variable}: unknown variable; did you mean {near}?" in refusal()
    with pytest.raises(SettingsError, match=f"did you mean {near}"):
        load_settings()


def test_variables_that_are_no_settings_are_left_alone():
    """Above all the project's own."""
    sources = [*ROOT.glob("scripts/*"), *ROOT.glob("tests/server/*.py"), *ROOT.glob("feather_sglang/**/*.py")]
    text = "\n".join(path.read_text() for path in sources if path.is_file())
    settings = {"FEATHER_CONFIG", *(f"FEATHER_{field.name.upper()}" for field in dataclasses.fields(Settings))}
    own = set(re.findall(r"FEATHER_[A-Z][A-Z_]*[A-Z]", text)) - settings
    assert {"FEATHER_VENV", "FEATHER_TEST_PATCHED"} <= own
    assert (
        effective(dict.fromkeys([*own, "FEATHER_HOME", "FEATHER_", "feather_min_bach", "PATH"], "x")).settings
        == Settings()
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("min_bach: 3", "{}: unknown setting 'min_bach'; did you mean 'min_batch'?"),
        ("3: 3", "{}: unknown setting '3'; valid: policy, chunk_size, "),
        ("chunk_size: big", "{}: chunk_size must be an integer of at least 1, got 'big'"),
        ("state:", "{}: state must be a string, got None"),
        ("[1]", "{}: must hold settings as 'name: value' lines, got a list"),
        ("a: b: c", "{}: not valid YAML: "),
    ],
)
def test_what_is_wrong_in_the_file_is_one_line(content, message, tmp_path, refusal):
    path = tmp_path / "feather.yaml"
    path.write_text(content + "\n")
    line = refusal(f"--feather-config={path}", "--feather-chunk-size=32")
    assert message.format(path) in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--feather-min-batch=x"],
            "--feather-min-batch or FEATHER_MIN_BATCH: min_batch must be an integer of at least 0",
        ),
        (["--feather-exploration=2"], "exploration must be a number from 0 to 0.5, got '2'"),
        (["--feather-freeze=maybe"], "freeze must be true or false, got 'maybe'"),
        (["--feather-config=/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["--feather-state=/nowhere/state.json"], "nothing can be written in /nowhere"),
        (["--feather-policy=no_such.module:Policy"], "policy: no_such.module:Policy cannot be imported"),
        (["--json=/nowhere/x.json"], "can't write '/nowhere/x.json'"),
    ],
)
def test_what_a_server_would_refuse_is_refused(flags, message, refusal):
    assert message in refusal(*flags)


def test_no_command_for_operators_needs_sglang():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('sglang', 'torch')))\n"
        "import feather_sglang.top.live\n"
        "from feather_sglang.cli import main\n"
        "sys.exit(main(['config']))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
