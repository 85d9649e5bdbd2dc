"""Feather's metrics on a real server's ``/metrics``, against its trace, its log and the dashboard's queries."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import ask_all, prompts
from prometheus_client.parser import text_string_to_metric_families

from feather_sglang.engines.sglang.metrics import METRICS

pytestmark = pytest.mark.server

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
TOKENS = 16


def scrape(server):
    """Feather's samples: name to a list of labels and value."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("feather_"):
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_metrics_agree_with_the_trace_the_log_and_the_dashboard(serve, tmp_path):
    server = serve(
        "--enable-metrics",
        "--max-total-tokens=40000",
        "--max-running-requests=12",
        "--feather-policy=ucb",
        "--feather-min-batch=4",
        "--feather-log-interval-s=1",
        f"--feather-state={tmp_path / 'state.json'}",
        "--feather-state-period-s=1",
    )
    requests = prompts(groups=8, per_group=12, prefix=512, suffix=20)
    # Of unequal lengths, so that some leave while others decode, and there is something to decide.
    answers = ask_all(server, requests, tokens=lambda rid: TOKENS + int(rid.split("-")[1]) % 4)
    assert all(len(each) == 1 and each[0][0] == 200 for each in answers.values())
    time.sleep(4)  # counts are exported within a second, and the line is written in the one after it
    found = scrape(server)
    records = [json.loads(line) for line in server.trace.read_text().splitlines()]

    def value(name, **labels):
        [matching] = [number for own, number in found[name] if labels.items() <= own.items()]
        return matching

    for metric in METRICS:
        name = metric.name + ("_count" if metric.kind == "histogram" else "")
        for labels, _ in found[name]:
            assert labels["tp_rank"] == "0" and labels["model_name"] and set(metric.labels) <= set(labels), name
    added = value("feather_decisions_total", action="add", policy="ucb")
    assert added == sum(len(record["admitted"]) for record in records) >= len(requests)
    stops = value("feather_decisions_total", action="stop", policy="ucb")
    assert stops == value("feather_batch_size_at_stop_count") >= sum(record["stop"] == "policy" for record in records)
    assert value("feather_in_charge") == 1
    assert value("feather_waiting_requests") == value("feather_shared_prefix_tokens") == 0, "nobody is there"
    assert value("feather_failures_total") == value("feather_fallback_passes_total") == 0
    tokens = sum(len(each[0][1]["output_ids"]) for each in answers.values())
    assert 0.9 * tokens <= value("feather_output_tokens_total") <= 1.2 * tokens
    steps = value("feather_decode_steps_total")
    assert 0.5 * steps < value("feather_homogeneous_decode_steps_total") <= steps
    assert steps <= value("feather_output_tokens_total") <= 12 * steps
    assert value("feather_pass_duration_seconds_count") >= len(records)
    assert value("feather_pass_duration_seconds_sum") >= records[-1]["hook_s"] - 1e-5
    assert value("feather_passed_over_passes_total") > 0 and value("feather_reward_tokens_per_second") > 0
    assert value("feather_state_saves_total") >= 1

    queried = set(re.findall(r"feather_\w+", DASHBOARD.read_text()))
    assert queried <= set(found), queried - set(found)

    lines = re.findall(r"Feather: (\d+) added, .*, (\d+) decode steps, .* policy ucb", server.log.read_text())
    assert sum(int(number) for number, _ in lines) == added and sum(int(number) for _, number in lines) == steps
    assert "it goes on without" not in server.log.read_text()
