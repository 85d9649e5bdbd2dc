from __future__ import annotations

import json
import subprocess
import sys

import pytest

from feather_sglang.cli import main


def test_importing_the_package_needs_neither_sglang_nor_torch():
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('sglang', 'torch')))\n"
        "import feather_sglang, feather_sglang.cht, feather_sglang.scheduling, feather_sglang.cli\n"
        "import feather_sglang.cli_simulate\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--policies", "magic"], "unknown policy 'magic'; valid: fcfs, lpm, dfs-weight, feather"),
        (["bench", "overhead", "--policies", "x"], "unknown policy 'x'; valid: "),
        (["bench", "overhead", "--plot", "x.png"], "--plot needs --sweep"),
    ],
)
def test_bad_use_is_one_line_and_exit_code_2(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1


def test_numbers_are_checked(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "overhead", "--waiting", "-3"])
    assert stop.value.code == 2 and "must be a positive integer, got '-3'" in capsys.readouterr().err


def test_bench_overhead_reports_every_policy(capsys):
    pytest.importorskip("sglang")
    arguments = [
        "bench",
        "overhead",
        "--waiting",
        "60",
        "--groups",
        "3",
        "--prefix-tokens",
        "256",
        "--admit",
        "4",
        "--repeat",
        "3",
        "--json",
        "-",
    ]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["config"]["waiting"] == 60
    rows = {row["policy"]: row for row in report["rows"]}
    assert list(rows) == ["fcfs", "lpm", "dfs-weight", "feather"]
    assert {"policy", "waiting", "prompt_tokens", "pass_ms", "idle_pass_us", "arrival_us", "bytes_per_request"} <= set(
        rows["feather"]
    )
    assert rows["feather"]["pass_ms"] > 0 and report["ratio_dfs_over_feather"] > 0
    assert rows["feather"]["heap_entries"] <= 4 * 60


def test_long_work_says_what_it_is_doing(capsys):
    from feather_sglang.bench.progress import ticking

    with ticking("feather: serving 6 requests"):
        pass
    assert capsys.readouterr().err == "feather: serving 6 requests\n"
