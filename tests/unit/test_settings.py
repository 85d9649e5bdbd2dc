from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from feather_sglang.scheduling import Settings, SettingsError

ROOT = Path(__file__).parents[2]


def test_values_come_as_strings_or_as_yaml_types():
    assert Settings.parse({"chunk_size": "32", "min_batch": 3}, "x") == Settings(chunk_size=32, min_batch=3)


def test_learning_settings_come_as_strings_too():
    text = {"freeze": "true", "exploration": "0.1", "learning_rate": 1, "batch_bins": "1, 2", "policy": "a.b:C"}
    parsed = Settings.parse(text, "x")
    assert (
        parsed.freeze is True and parsed.exploration == 0.1 and parsed.batch_bins == "1,2" and parsed.policy == "a.b:C"
    )
    assert not Settings.parse({"freeze": "0"}, "x").freeze


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"chunk_sise": 3}, "file.yaml: unknown setting 'chunk_sise'; did you mean 'chunk_size'?"),
        ({"zzz": 3}, "valid: policy, chunk_size"),
        ({"chunk_size": 0}, "file.yaml: chunk_size must be an integer of at least 1, got 0"),
        ({"chunk_size": "many"}, "must be an integer of at least 1, got 'many'"),
        ({"chunk_size": True}, "got True"),
        ({"chunk_size": 1.5}, "got 1.5"),
        ({"policy": "magic"}, "policy must be one of static"),
        ({"trace": 3}, "trace must be a string"),
        ({"policy": "a.b:"}, "policy must be one of static, ucb, qlearning or package.module:Class, got 'a.b:'"),
        ({"policy": 3}, "or package.module:Class, got 3"),
        ({"freeze": "maybe"}, "freeze must be true or false, got 'maybe'"),
        ({"exploration": 0.6}, "exploration must be a number from 0 to 0.5, got 0.6"),
        ({"exploration": "nan"}, "exploration must be a number from 0 to 0.5, got 'nan'"),
        ({"discount": True}, "discount must be a number from 0 to 0.99, got True"),
        ({"batch_bins": "1,1,3"}, "batch_bins must be ascending integers of at least 0, as in 1,3,7, got '1,1,3'"),
        ({"delta_bins": "-1,3"}, "delta_bins must be ascending"),
        ({"sharing_bins": ""}, "sharing_bins must be ascending"),
    ],
)
def test_one_clear_line_for_a_bad_setting(values, message):
    with pytest.raises(SettingsError) as error:
        Settings.parse(values, "file.yaml")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_settings_page_is_what_the_script_prints(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import settings_table

    table = settings_table.table()
    assert table in (ROOT / "docs" / "settings.md").read_text(), "run: python scripts/settings_table.py"
    assert all(f"| `{field.name}` |" in table for field in dataclasses.fields(Settings))
