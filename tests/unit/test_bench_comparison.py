"""Comparisons of policies on real servers; here with servers and clients that only pretend."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import re
import threading
from pathlib import Path

import pytest

from feather_sglang import cli
from feather_sglang.bench import compare, hosts, locality, serving, workloads
from feather_sglang.bench.compare import Comparison, Row, Spread
from feather_sglang.bench.figure import figure
from feather_sglang.bench.hosts import OwnServers, RunningServer
from feather_sglang.bench.server import ServerError
from feather_sglang.bench.serving import Result, Setting, Workload

ROOT = Path(__file__).parents[2]
WORKLOAD = Workload(groups=2, per_group=3)
ONCE = Setting("w", (WORKLOAD,))


def result(policy, rate=100.0, texts=("a", "b", "c"), completed=6):
    return Result(policy, completed, 6 - completed, rate / 16, rate, 50.0, 90.0, 5.0, 9.0, 0.5, texts)


class Pretended:
    """Servers and their client: notes what happens, and answers each measurement with the next result."""

    def __init__(self, results=None):
        self.events = []
        self._results = results

    @contextlib.contextmanager
    def serve(self, setting, policy):
        self.events.append(f"start {policy}")
        try:
            yield lambda traffic: self._drive(policy, traffic)
        finally:
            self.events.append(f"stop {policy}")

    def _drive(self, policy, traffic):
        self.events.append(f"{policy} {traffic.arrivals}")
        if self._results is None:
            return result(policy)
        found = next(self._results)
        if isinstance(found, BaseException):
            raise found
        return found


def compared(policies, runs, results=None, setting=ONCE):
    host = Pretended(results and iter(results))
    comparison = Comparison(policies, runs, host.serve, lambda text: None)
    comparison.run(setting)
    return comparison.rows(), host.events


def test_every_second_run_has_the_opposite_order():
    _, events = compared(["fcfs", "lpm", "feather"], 3)
    starts = [event.split()[1] for event in events if event.startswith("start")]
    assert starts == ["fcfs", "lpm", "feather", "feather", "lpm", "fcfs", "fcfs", "lpm", "feather"]


def test_a_server_is_driven_with_all_of_a_settings_traffic_and_stopped():
    setting = Setting("w", (WORKLOAD, dataclasses.replace(WORKLOAD, rate=2)))
    rows, events = compared(["fcfs"], 1, setting=setting)
    assert events == ["start fcfs", "fcfs at once", "fcfs 2/s", "stop fcfs"]
    assert [(row.workload, row.arrivals) for row in rows] == [("w", "at once"), ("w", "2/s")]


def test_medians_and_spread_over_the_runs():
    rates = iter((10.0, 400.0, 300.0, 30.0, 20.0, 100.0))  # fcfs feather, feather fcfs, fcfs feather
    order = ("fcfs", "feather", "feather", "fcfs", "fcfs", "feather")
    rows, _ = compared(["fcfs", "feather"], 3, [result(policy, next(rates)) for policy in order])
    assert [row.policy for row in rows] == ["fcfs", "feather"]
    assert rows[0].output_tokens_per_s == Spread(20.0, 10.0, 30.0)
    assert rows[1].output_tokens_per_s == Spread(300.0, 100.0, 400.0)
    assert rows[0].runs == 3 and rows[0].requests == 6 and rows[0].most_cached == WORKLOAD.most_cached
    assert [Row.from_dict(json.loads(json.dumps(dataclasses.asdict(row)))) for row in rows] == rows


def test_answers_are_counted_over_the_runs_and_compared_with_the_first_policys_first():
    results = [
        result("fcfs", texts=("a", "b", "c")),
        result("feather", texts=("a", "x", "y"), completed=4),
        result("feather", texts=("a", "b", "z")),
        result("fcfs", texts=("q", "b", "c"), completed=5),
    ]
    fcfs, feather = compared(["fcfs", "feather"], 2, results)[0]
    assert (fcfs.completed, fcfs.failed, fcfs.differing) == (11, 1, 1)
    assert (feather.completed, feather.failed, feather.differing) == (10, 2, 3)


def test_the_table_has_medians_spread_and_ratios():
    results = [result("fcfs", 100.0), result("feather", 240.0), result("feather", 260.0), result("fcfs", 120.0)]
    results[1] = dataclasses.replace(results[1], ttft_p50_ms=20.0)
    rows, _ = compared(["fcfs", "feather"], 2, results)
    head, columns, fcfs, spread, feather, _ = compare.table(rows).splitlines()
    assert head.startswith("w, at once: 6 requests, 2 runs; at most 64.6% of the prompt tokens")
    assert columns.split()[:3] == ["policy", "requests/s", "output"]
    assert " ".join(fcfs.split()) == "fcfs 6.88 110 0.05 0.09 5.00 9.00 50.0 2.27 x 0.70 x 12 0 0"
    assert spread.split()[1] == "100-120"
    assert feather.split()[8] == "1.00"
    alone = compare.table(compared(["fcfs"], 1)[0])
    assert alone.count("\n") == 2 and "1 run;" in alone and " x" not in alone


def test_the_figure_has_a_bar_for_each_policy_and_batch():
    pytest.importorskip("matplotlib")
    from feather_sglang.bench.batches import BatchRow

    setting = Setting("w", (WORKLOAD, dataclasses.replace(WORKLOAD, rate=2)))
    rows, _ = compared(["fcfs", "feather"], 1, setting=setting)
    drawing = figure(rows, [BatchRow(8, 1, 500.0, (400.0, 600.0)), BatchRow(8, 8, 300.0, (300.0, 300.0))])
    names = [[label.get_text() for label in axes.get_yticklabels()] for axes in drawing.axes]
    assert names == [["8 of 1 prefix"], ["8 of 8 prefixes"], *[["fcfs", "feather"]] * 4]
    assert [axes.get_xlabel().split(",")[0] for axes in drawing.axes[2:4]] == ["output tokens/s", "time to first token"]
    assert drawing.axes[2].patches[0].get_width() == 100


# ---------------------------------------------------------------- the command


@pytest.fixture
def pretended(monkeypatch):
    def use(results=None):
        host = Pretended(results and iter(results))
        monkeypatch.setattr(OwnServers, "serve", lambda self, setting, policy: host.serve(setting, policy))
        return host

    pytest.importorskip("sglang")
    return use


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (
            ServerError("the server ended with code 9; its log x.log ends with:\nlast words"),
            1,
            "x.log ends with:\nlast",
        ),
    ],
    ids=["Ctrl-C", "a dead server"],
)
def test_what_is_complete_is_reported_when_it_ends_early(end, code, message, pretended, tmp_path, capsys):
    host = pretended([result("fcfs"), result("feather"), result("feather"), end])
    target = tmp_path / "x.json"
    arguments = ["bench", "serving", "--workload", "kv-pressure", "--policies", "fcfs,feather", "--json", str(target)]
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert host.events[-1] == "stop fcfs" and message in err
    assert "kv-pressure, run 2 of 3: fcfs" in err
    assert "kv-pressure, at once: 320 requests, 1 to 2 runs" in out and "feather" in out
    report = json.loads(target.read_text())
    assert [(row["policy"], row["runs"]) for row in report["rows"]] == [("fcfs", 1), ("feather", 2)]


def test_nothing_is_reported_when_nothing_is_complete(pretended, tmp_path, capsys):
    pretended([KeyboardInterrupt()])
    target = tmp_path / "x.json"
    assert cli.main(["bench", "serving", "--workload", "mixed", "--json", str(target)]) == 130
    assert not capsys.readouterr().out and not target.exists()


def test_the_demo_is_one_run_under_kv_pressure(pretended, capsys):
    host = pretended()
    assert cli.main(["demo", "--groups", "2", "--per-group", "3", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["command"] == "demo" and len(host.events) == 12
    assert [row["policy"] for row in report["rows"]] == ["fcfs", "lpm", "dfs-weight", "feather"]
    assert {(row["workload"], row["requests"], row["runs"]) for row in report["rows"]} == {("kv-pressure", 6, 1)}
    assert report["settings"][0]["flags"] == ["--max-total-tokens=20000", "--max-running-requests=16"]


def test_locality_measures_its_settings_and_draws_them(pretended, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    pretended()
    arguments = ["bench", "locality", "--part", "workloads", "--settings", "many-groups,main", "--runs", "1"]
    drawing = tmp_path / "x.png"
    assert cli.main([*arguments, "--policies", "fcfs,feather", "--json", "-", "--plot", str(drawing)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["workload"], row["arrivals"]) for row in report["rows"][::2]] == [
        ("many-groups", "at once"), ("many-groups", "16/s"), ("main", "at once"), ("main", "16/s"),
    ]  # fmt: skip
    assert report["batches"] == [] and drawing.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "x"], "unknown workload 'x'; valid: locality, kv-pressure, no-sharing, mixed, trace:FILE"),
        (["--workload", "mixed", "--policies", "fcfs,x"], "unknown policy 'x'; valid: fcfs, lpm, dfs-weight, feather"),
        (["--workload", "trace:/nowhere"], "can't read '/nowhere'"),
        (["--workload", "trace:/nowhere", "--per-group", "3"], "--per-group is not for --workload trace:/nowhere"),
        (["--workload", "mixed", "--block-tokens", "3"], "--block-tokens is not for --workload mixed"),
        (["--workload", "mixed", "x"], "'x': flags after '--' are for servers that this command starts"),
        (["--workload", "mixed", "--url", "http://x", "--", "--tp=2"], "'--tp=2': flags after '--' are for servers"),
        (["--workload", "mixed", "--url", "localhost:1"], "--url must begin with http:// or https://, got 'localhost"),
        (["--workload", "mixed", "--json", "/nowhere/x"], "can't write '/nowhere/x'"),
        (["--workload", "mixed", "--plot", "/nowhere/x"], "can't write '/nowhere/x'"),
    ],
)
def test_bad_use_of_bench_serving_is_one_line(arguments, message, capsys):
    pytest.importorskip("sglang")
    assert cli.main(["bench", "serving", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and message in err and err.count("\n") == 1


def test_bench_lists_everything(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    out = capsys.readouterr().out
    assert all(
        re.search(rf"^ +{name} ", out, re.M) for name in ("serving", "locality", "overhead", "decode", "policies")
    )


# ---------------------------------------------------------------- hosts


@pytest.fixture
def started(monkeypatch):
    """Servers that would be started: their flags, environment and patience."""
    found = []

    class Fake:
        url = "http://fake"

        def __init__(self, flags, log, environment, patience_s):
            self.flags, self.log, self.environment, self.patience_s = flags, log, environment, patience_s

        def start(self):
            found.append(self)

        def stop(self):
            found.append("stopped")

    monkeypatch.setattr(hosts, "Server", Fake)
    monkeypatch.setattr(hosts, "model_in", lambda folder, shape: folder / "tiny")
    return found


def test_a_tiny_server_gets_the_cpus_flags(started, tmp_path):
    setting = workloads.make("locality")
    with OwnServers(tmp_path / "new", flags=["--max-total-tokens=9"]).serve(setting, "lpm"):
        [server] = started
    assert server.flags[:2] == [f"--model-path={tmp_path}/new/tiny", "--schedule-policy=lpm"]
    assert {"--device=cpu", "--max-total-tokens=300000", "--max-running-requests=32"} <= set(server.flags)
    assert server.flags[-1] == "--max-total-tokens=9", "the user's is stronger"
    assert server.log == tmp_path / "new" / "server-locality-lpm.log" and started[-1] == "stopped"


def test_feathers_batching_policies_are_policies_to_compare(started, tmp_path, feather_server):
    with OwnServers(tmp_path).serve(workloads.make("locality"), "feather-ucb"):
        pass
    assert started[0].flags[1:3] == ["--schedule-policy=feather", "--feather-policy=ucb"]
    host = RunningServer(f"http://127.0.0.1:{feather_server.server_port}", switch=True)
    with host.serve(workloads.make("mixed"), "feather-static"):
        assert feather_server.asked == [("/feather/policy", {"policy": "static"})]
    rows, _ = compared(["fcfs", "feather-ucb"], 1, [result("fcfs", 100.0), result("feather-ucb", 150.0)])
    assert "1.50 x" in compare.table(rows).splitlines()[2]


def test_a_real_models_server_gets_the_workloads_flags_and_then_the_users(started, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    host = OwnServers(tmp_path, "some/model", ["--tp-size=2"])
    with contextlib.suppress(ZeroDivisionError), host.serve(workloads.make("kv-pressure"), "feather"):
        raise ZeroDivisionError
    server, stopped = started
    assert server.flags == [
        *("--model-path=some/model", "--schedule-policy=feather"),
        *("--max-total-tokens=20000", "--max-running-requests=16", "--tp-size=2"),
    ]
    assert stopped == "stopped" and server.patience_s > 1000
    assert server.environment == {"HF_HUB_OFFLINE": "0"}, "a name is looked up, a folder is not"
    assert serving.hub(str(tmp_path)) == {"HF_HUB_OFFLINE": "1"}


@pytest.fixture
def feather_server():
    """A server with Feather's two endpoints, and what it was asked to do."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer({"schedulers": [{"policy": "ucb", "scheduling": self.server.scheduling}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.asked.append((self.path, body))
            self._answer(body)

        def _answer(self, body):
            self.send_response(200 if self.path.startswith("/feather/") else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.scheduling = [], "feather"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_running_server_is_switched_and_switched_back(feather_server):
    host = RunningServer(f"http://127.0.0.1:{feather_server.server_port}", switch=True)
    setting = workloads.make("mixed")
    with host.serve(setting, "dfs-weight"):
        assert feather_server.asked == [("/feather/policy", {"policy": "dfs-weight"})]
    with host.serve(setting, "feather"):
        pass
    feather_server.scheduling = "lpm"
    with contextlib.suppress(KeyboardInterrupt), host.serve(setting, "feather"):
        raise KeyboardInterrupt
    sent = [body["policy"] for _, body in feather_server.asked]
    assert sent == ["dfs-weight", "ucb", "ucb", "ucb", "ucb", "lpm"]


def test_a_running_server_is_left_alone_for_one_policy(feather_server):
    with RunningServer(f"http://127.0.0.1:{feather_server.server_port}", switch=False).serve(Setting("w", ()), "lpm"):
        pass
    assert feather_server.asked == []


def test_a_server_that_cannot_switch_is_one_line(feather_server):
    host = RunningServer(f"http://127.0.0.1:{feather_server.server_port}/other", switch=True)
    with pytest.raises(RuntimeError, match=r"can't switch policies at http://.*/feather/state: HTTP Error 404"):
        host.serve(Setting("w", ()), "lpm").__enter__()


def test_the_command_switches_only_between_policies(monkeypatch):
    pytest.importorskip("sglang")
    seen = []

    def serve(self, setting, policy):
        seen.append((self.url, self.switch, self.model, policy))
        return contextlib.nullcontext(lambda traffic: result(policy))

    monkeypatch.setattr(RunningServer, "serve", serve)
    arguments = ["bench", "serving", "--workload", "mixed", "--url", "http://h:1/", "--runs", "1", "--policies"]
    assert cli.main([*arguments, "feather"]) == cli.main([*arguments, "lpm,feather", "--model-path", "m"]) == 0
    assert seen == [
        ("http://h:1", False, None, "feather"), ("http://h:1", True, "m", "lpm"), ("http://h:1", True, "m", "feather"),
    ]  # fmt: skip


# ---------------------------------------------------------------- the client


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Traffic whose client is a script."""

    script: str
    requests = 6
    arrivals = "at once"
    most_cached = 0.5

    def client(self, folder):
        (folder / "scripted.py").write_text(self.script)
        return ["scripted"]


class Alive:
    url = "http://server"

    def __init__(self, dead_after=10**9):
        self._left = dead_after

    def check(self):
        self._left -= 1
        if self._left < 0:
            raise ServerError("the server ended")


MEASURED = {
    "completed": 4, "request_throughput": 1.0, "output_throughput": 16.0, "median_ttft_ms": 10.0, "p99_ttft_ms": 20.0,
    "median_tpot_ms": 1.0, "p99_tpot_ms": 2.0, "total_input_tokens": 200, "generated_texts": ["a", "b"],
    "cache_report": {"total_cached_tokens": 50},
}  # fmt: skip

WRITES = f"""
import json, os, sys
[target] = [a.partition("=")[2] for a in sys.argv if a.startswith("--output-file=")]
measured = json.loads({json.dumps(json.dumps(MEASURED))})
measured["generated_texts"] = [" ".join(sys.argv[1:]), os.environ["HOME"], os.environ["HF_HOME"]]
open(target, "w").write(json.dumps(measured))
"""


def test_the_clients_result(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    found = serving.drive("lpm", Alive(), Scripted(WRITES), "some/model")
    assert dataclasses.replace(found, texts=()) == Result("lpm", 4, 2, 1.0, 16.0, 10.0, 20.0, 1.0, 2.0, 0.25)
    arguments, home, cache = found.texts
    assert {"--base-url=http://server", "--flush-cache", "--model=some/model"} <= set(arguments.split())
    assert home != str(tmp_path) and cache == f"{tmp_path}/.cache/huggingface"


def test_a_failing_client_is_quoted(monkeypatch):
    monkeypatch.setattr(serving, "_DYING_S", 0)
    with pytest.raises(RuntimeError, match=r"failed with code 3:\nwhat it said"):
        serving.drive("lpm", Alive(), Scripted("print('what it said'); raise SystemExit(3)"))


def test_a_dead_server_is_noticed_while_the_client_waits_for_it():
    with pytest.raises(ServerError, match="the server ended"):
        serving.drive("lpm", Alive(dead_after=1), Scripted("import time; time.sleep(600)"))


def test_a_dead_server_is_blamed_for_what_its_client_says(monkeypatch):
    monkeypatch.setattr(serving.time, "sleep", lambda seconds: None)
    server = Alive()
    script = Scripted("raise SystemExit(1)")
    real = serving.subprocess.Popen

    def popen(*args, **more):
        client = real(*args, **more)
        client.wait()
        server._left = 2  # dies a moment after the client
        return client

    monkeypatch.setattr(serving.subprocess, "Popen", popen)
    with pytest.raises(ServerError):
        serving.drive("lpm", server, script)


# ---------------------------------------------------------------- workloads and pages


def test_sizes_are_the_workloads_unless_given():
    assert workloads.make("no-sharing").traffic == (Workload(groups=320, per_group=1),)
    [pressed] = workloads.make("kv-pressure", per_group=4, rate=5.0).traffic
    assert pressed == Workload(per_group=4, rate=5.0) and pressed.arrivals == "5/s"
    at_once, stream = workloads.make("locality", groups=2, rate=3.0).traffic
    assert (at_once.rate, stream.rate, stream.groups, stream.per_group) == (None, 3.0, 2, 30)
    assert workloads.make("locality").traffic == locality.SETTINGS[0].traffic


def test_every_workload_has_a_place_on_the_page():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in (*workloads.NAMES, "trace"):
        assert f"<!-- {name} -->" in page and f"<!-- /{name} -->" in page
