from __future__ import annotations

import pytest

from feather_sglang.scheduling import Settings, SettingsError


def test_values_come_as_strings_or_as_yaml_types():
    assert Settings.parse({"chunk_size": "32", "min_batch": 3}, "x") == Settings(chunk_size=32, min_batch=3)


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
    ],
)
def test_one_clear_line_for_a_bad_setting(values, message):
    with pytest.raises(SettingsError) as error:
        Settings.parse(values, "file.yaml")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_settings_page_names_every_setting_and_its_default():
    import dataclasses
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    for field in dataclasses.fields(Settings):
        row = next((line for line in page.splitlines() if line.startswith("|") and f"`{field.name}`" in line), None)
        assert row is not None, field.name
        if field.name not in ("min_batch", "trace"):
            assert str(field.default) in row
