"""`feather-sglang bench serving` with real servers and SGLang's client, at very small sizes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from feather_sglang.cli import main

pytestmark = pytest.mark.server

# So that whoever comes third finds a prefix computed.
TWO_AT_A_TIME = "--max-running-requests=2"
SIZES = ("--groups=2", "--per-group=4", "--prefix-tokens=256", "--output-tokens=8")


def test_two_policies_two_runs_and_ctrl_c_in_the_last(model, tmp_path, request):
    said, report = tmp_path / "stderr", tmp_path / "report.json"
    command = [
        *(sys.executable, "-m", "feather_sglang.cli", "bench", "serving", "--workload=mixed", *SIZES, "--rate=40"),
        *("--policies=fcfs,feather", "--runs=2", f"--json={report}", f"--folder={model.parent}"),
        *("--", TWO_AT_A_TIME),
    ]
    with said.open("w") as stderr:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
            # Whoever is run in a shell's background inherits that Ctrl-C is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    request.addfinalizer(lambda: process.poll() is None and process.send_signal(signal.SIGINT))
    # Twice, as the order of the second run is reversed; a slow machine also says how long it has been.
    while said.read_text().splitlines().count("fcfs: serving 16 requests, 40/s") < 2:
        assert process.poll() is None, said.read_text()
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3, "a server, its scheduler, and the client"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 130 and said.read_text().endswith("interrupted\n")
    left = psutil.wait_procs(family, timeout=5)[1]
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in left), "nothing stays behind"
    assert "mixed, 40/s: 16 requests, 1 to 2 runs" in out
    rows = json.loads(report.read_text())["rows"]
    assert [(row["policy"], row["runs"], row["completed"], row["failed"]) for row in rows] == [
        ("fcfs", 1, 16, 0), ("feather", 2, 32, 0),
    ]  # fmt: skip
    assert [row["differing"] for row in rows] == [0, 0]
    for row in rows:
        assert 0 < row["cached_share"]["lowest"] <= row["cached_share"]["highest"] <= row["most_cached"]
        assert 0 < row["output_tokens_per_s"]["lowest"] <= row["output_tokens_per_s"]["median"]
        assert 0 < row["ttft_p50_ms"]["median"] <= row["ttft_p99_ms"]["highest"] and row["tpot_p50_ms"]["median"] > 0


def test_a_server_that_runs_already(serve, tmp_path):
    server = serve("--max-total-tokens=20000", TWO_AT_A_TIME, policy="lpm")
    report = tmp_path / "report.json"
    arguments = ["bench", "serving", "--workload=kv-pressure", *SIZES, "--policies=lpm", "--runs=1"]
    assert main([*arguments, f"--url={server.url}/", f"--json={report}"]) == 0
    [row] = json.loads(report.read_text())["rows"]
    assert (row["policy"], row["completed"], row["failed"]) == ("lpm", 8, 0)
    assert 0 < row["cached_share"]["median"] <= row["most_cached"]
    assert server.running()


def test_a_server_that_does_not_start(model, tmp_path, capfd):
    arguments = ["bench", "serving", "--workload=kv-pressure", "--policies=fcfs", f"--model-path={model}"]
    assert main([*arguments, f"--folder={tmp_path}", "--", "--no-such-flag"]) == 1
    out, err = capfd.readouterr()
    log = tmp_path / "server-kv-pressure-fcfs.log"
    assert not out and f"error: the server ended with code 2; its log {log} ends with:" in err
    assert "unrecognized arguments: --no-such-flag" in err
