from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from feather_sglang.cli import main, make_parser


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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["demo", "--polices=fcfs"], "feather-sglang demo: error: --polices: unknown flag; did you mean --policies?"),
        (["--json=x", "demo"], "feather-sglang: error: --json: unknown flag; valid: -h, --help, --version"),
        (["top", "--xyz"], "feather-sglang top: error: --xyz: unknown flag; valid: -h, --help, --url, --interval, "),
        (["config", "--feather-polcy=ucb"], "config: error: --feather-polcy: unknown flag; did you mean --feather-pol"),
        (["bench", "decode", "now"], "feather-sglang bench decode: error: unknown argument 'now'"),
        (["bench", "serving"], "error: the following arguments are required: --workload"),
        (["serve"], "invalid choice: 'serve' (choose from 'demo', "),
    ],
)
def test_what_the_parser_refuses_is_one_line_and_exit_code_2(arguments, line, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out and line in err and err.count("\n") == 1


def test_flags_for_servers_are_not_looked_at():
    args = make_parser().parse_args(["bench", "serving", "--workload=mixed", "--", "--polices=fcfs", "-x"])
    assert args.flags == ["--polices=fcfs", "-x"]


def test_being_stopped_is_like_ctrl_c(monkeypatch, capsys):
    def stopped(_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("feather_sglang.cli._compile", stopped)
    try:
        assert main(["compile"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "interrupted\n"


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


def test_an_idle_pass_is_measured_with_the_whole_hook(monkeypatch):
    pytest.importorskip("sglang")
    from feather_sglang.bench import overhead

    passes = []
    whole = overhead.admission.around_get_new_batch_prefill

    def counted(*given, **named):
        passes.append(whole(*given, **named))
        return passes[-1]

    monkeypatch.setattr(overhead.admission, "around_get_new_batch_prefill", counted)
    assert overhead._idle_us(overhead.Config(waiting=40, groups=2, prefix_tokens=256, admit=4)) > 0
    assert len(passes) > 100 and not any(admitted for admitted, _ in passes[-100:])


def test_long_work_says_what_it_is_doing(capsys):
    from feather_sglang.bench.progress import ticking

    with ticking("feather: serving 6 requests"):
        pass
    assert capsys.readouterr().err == "feather: serving 6 requests\n"
