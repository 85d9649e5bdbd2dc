from __future__ import annotations

import io
import json
import urllib.request

import pytest

from feather_sglang.bench import router, server, serving
from feather_sglang.bench.router import Row, Served

METRICS = """\
# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{is_streaming="false",model_name="a"} 2.0
sglang:num_requests_total{is_streaming="true",model_name="a"} 5.0
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{is_streaming="true",model_name="a"} 700.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="a"} 300.0
sglang:cached_tokens_total{cache_source="host",model_name="a"} 50.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="a"} 3.0
"""


def test_counters_are_summed_over_their_labels():
    pytest.importorskip("prometheus_client")
    assert router.parse_metrics(METRICS) == Served(7, 700, 350)
    assert router.parse_metrics("") == Served(), "a server that has answered nothing yet"


def row():
    result = serving.Result("cache_aware", 8, 0, 1.0, 16.0, 10.0, 20.0, 1.0, 2.0, 0.5, ("text",))
    return Row("cache_aware", (Served(3, 300, 150), Served(5, 700, 350)), result)


def test_the_table_has_a_line_for_each_server_and_one_for_all():
    lines = [line.split() for line in router.table([row()]).splitlines()]
    assert lines[1:] == [
        ["cache_aware", "1", "3", "300", "50.0%"],
        ["cache_aware", "2", "5", "700", "50.0%"],
        ["cache_aware", "all", "8", "1,000", "50.0%"],
    ]
    idle = Row("cache_aware", (Served(),), row().result)
    assert router.table([idle]).count("0.0%") == 2, "a server that got nothing has no share to divide"


def test_the_json_has_what_the_table_has_and_no_texts():
    found = json.loads(router.as_json(serving.Workload(), [row()]))["rows"][0]
    assert found["policy"] == "cache_aware" and "texts" not in found["client"]
    assert found["servers"][1] == {"requests": 5, "prompt_tokens": 700, "cached_tokens": 350}


def test_servers_start_side_by_side_and_all_stop_when_one_does_not_come_up():
    events = []

    class Fake(server.Server):
        def __init__(self, name):
            self.name = name

        def launch(self):
            events.append(f"launch {self.name}")

        def wait(self):
            events.append(f"wait {self.name}")
            if self.name == "b":
                raise server.ServerError("b")

        def stop(self):
            events.append(f"stop {self.name}")

    with pytest.raises(server.ServerError), server.side_by_side([Fake("a"), Fake("b"), Fake("c")]):
        pytest.fail("not all of them are up")
    assert events == ["launch a", "launch b", "launch c", "wait a", "wait b", "stop a", "stop b", "stop c"]


def test_the_router_is_ready_once_every_server_has_joined(monkeypatch, tmp_path):
    servers = [server.Server((), tmp_path / name) for name in ("one", "two")]
    front = router.Router(servers, "cache_aware", tmp_path / "router")
    for healthy, ready in ((1, False), (2, True)):
        answer = json.dumps({"healthy_workers": healthy}).encode()
        monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout, answer=answer: io.BytesIO(answer))
        assert front._ready() is ready
