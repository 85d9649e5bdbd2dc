"""The table of metrics: how its values reach prometheus_client, and that dashboard and page name what is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from test_controller import Engine
from test_counters import group

from feather_sglang.engines.sglang.metrics import METRICS, Exporter, exporter

DOCS = Path(__file__).parents[2] / "docs"
LABELS = {"model_name": "tiny", "tp_rank": 0}


def samples(of):
    """Name and labels, but for SGLang's, to value."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(of.registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny" and sample.labels.pop("tp_rank") == "0"
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def series_names(metric):
    """As they are on ``/metrics``."""
    return {metric.name + end for end in ("_bucket", "_sum", "_count")} if metric.kind == "histogram" else {metric.name}


@pytest.fixture
def busy():
    engine = Engine()
    engine.waiting_queue += [*group("a", 3), *group("b", 1)]
    for _ in range(6):
        engine.run_pass()
    return engine


def test_values_are_those_of_the_counters_however_often_they_are_exported(busy):
    export = Exporter(LABELS)
    for number in range(3):
        export(busy.controller)
        busy.controller.counters.failures = number
        busy.run_pass()
        export(busy.controller)
        export(busy.controller)
        found, counts = samples(export), busy.controller.counts()
        assert found["feather_decisions_total", "add", "static"] == counts["added"] == 3
        assert found["feather_decisions_total", "stop", "static"] == counts["stopped"] >= 1
        assert found[("feather_batch_size_at_stop_count",)] == counts["stopped"]
        assert found[("feather_batch_size_at_stop_sum",)] == 3 * counts["stopped"]
        assert found["feather_batch_size_at_stop_bucket", "2.0"] == 0
        assert found["feather_batch_size_at_stop_bucket", "4.0"] == counts["stopped"]
        assert found[("feather_pass_duration_seconds_count",)] == counts["pass_count"]
        assert found["feather_pass_duration_seconds_bucket", "+Inf"] == counts["pass_count"]
        assert found[("feather_pass_duration_seconds_sum",)] == pytest.approx(counts["pass_s_sum"])
        for name in ("decode_steps", "homogeneous_decode_steps", "output_tokens", "fallback_passes", "state_saves"):
            assert found[(f"feather_{name}_total",)] == counts[name], name
        assert found[("feather_passed_over_passes_total",)] == counts["passed_over"] > 0
        assert found[("feather_failures_total",)] == number
        assert found[("feather_shared_prefix_tokens",)] == 40 and found[("feather_waiting_requests",)] == 1
        assert found[("feather_in_charge",)] == 1


def test_every_metric_is_there_from_the_start():
    export, engine = Exporter(LABELS), Engine()
    export(engine.controller)
    found = samples(export)
    names = {name for name, *_ in found if not name.endswith("_created")}
    assert names == {name for metric in METRICS for name in series_names(metric)}
    assert found["feather_forced_admissions_total", "max_passes"] == 0
    assert found["feather_forced_admissions_total", "max_wait_s"] == 0


def test_off_it_is_not_in_charge(busy):
    export = Exporter(LABELS)
    busy.controller.disabled = True
    export(busy.controller)
    assert samples(export)[("feather_in_charge",)] == 0


def test_names_follow_prometheus_conventions():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch("feather_[a-z_]+", metric.name) and metric.help.endswith(".")
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.bounds)
        assert list(metric.bounds) == sorted(metric.bounds)


def test_without_metrics_there_is_no_exporter_and_one_that_cannot_be_built_is_logged(caplog):
    assert exporter(SimpleNamespace()) is exporter(SimpleNamespace(metrics_collector=None)) is None
    assert not caplog.records
    assert isinstance(exporter(SimpleNamespace(metrics_collector=SimpleNamespace(labels=LABELS))), Exporter)
    assert exporter(SimpleNamespace(metrics_collector=SimpleNamespace())) is None
    assert "cannot be exported" in caplog.text


# ------------------------------------------------------------- the dashboard


def dashboard():
    return json.loads((DOCS / "grafana.json").read_text())


def expressions():
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def test_the_dashboard_queries_every_metric_and_none_that_is_not_there():
    named = {name for metric in METRICS for name in series_names(metric)}
    shown = {name for expr in expressions() for name in re.findall(r"\bfeather_\w+", expr)}
    assert shown <= named, shown - named
    assert not [metric.name for metric in METRICS if not series_names(metric) & shown]
    assert all(expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}") for expr in expressions())


def test_labels_in_queries_are_labels_of_the_metric():
    by_name = {name: metric for metric in METRICS for name in series_names(metric)}
    known = {"model_name", "dp_rank", "le"}
    for expr in expressions():
        own = {label for name in re.findall(r"\bfeather_\w+", expr) for label in by_name[name].labels}
        by = {each.strip() for labels in re.findall(r"by \(([^)]*)\)", expr) for each in labels.split(",")}
        filtered = set(re.findall(r"(\w+)\s*=~?\"", expr))
        assert (by | filtered) <= known | own, expr
        assert not re.findall(r"(?:rate|increase)\((feather_\w+(?<!_total)(?<!_bucket)(?<!_sum)(?<!_count))\{", expr)


def test_the_dashboard_is_one_that_grafana_loads():
    board = dashboard()
    assert board["title"] and board["uid"] and board["schemaVersion"] >= 36 and "id" not in board
    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    covered = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered and place["x"] + place["w"] <= 24, panel["title"]
        covered |= cells
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["title"] and panel["description"]
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    used = set(re.findall(r"\$(\w+)", json.dumps(board["panels"]))) - {"__rate_interval", "__range"}
    assert used <= set(variables), used


# ------------------------------------------------------------------ the page


def test_the_page_has_the_table_and_names_no_other_metric():
    page = (DOCS / "metrics.md").read_text()
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        row = f"| `{metric.name}` | {metric.kind} |{' ' + labels if labels else ''} | {metric.help} |"
        assert row in page.splitlines(), row
    named = {name for metric in METRICS for name in series_names(metric)} | {metric.name for metric in METRICS}
    assert set(re.findall(r"\bfeather_[a-z_]+", page)) <= named
