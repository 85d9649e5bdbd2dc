"""The report page of ``replay --html``, and what it recommends."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from html.parser import HTMLParser

from feather_sglang.cli import main
from feather_sglang.simulation.metrics import Recorder
from feather_sglang.simulation.recommend import best_of, min_batches, recommend

_VOID = {"meta", "img"}


class _Checker(HTMLParser):
    """Tags that are opened are closed, and nothing is loaded from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href"):
                assert value.startswith("data:image/png;base64,"), (tag, value[:60])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_one_file_and_escapes_names(tmp_path, capsys):
    """A group of 40 with a deep prefix, one of 8 below it, and strangers."""
    trace = tmp_path / "my <script>alert(1)</script> & trace.jsonl".replace("/", "_")
    rng = random.Random(0)
    with trace.open("w") as file:
        for number in range(60):
            shared = [1, 2, 3, 4] if number < 40 else []
            shared += [5, 6] if number < 8 else []
            ids = [*shared, 1000 + number]
            record = {"timestamp": rng.randrange(1000), "input_length": 512 * len(ids) - 7, "output_length": 20}
            file.write(json.dumps({**record, "hash_ids": ids}) + "\n")
    page = tmp_path / "page.html"
    assert main(["replay", str(trace), "--html", str(page), "--policies", "fcfs,feather-static"]) == 0
    assert capsys.readouterr().out.startswith("simulated: ")
    html = page.read_text()
    checker = _Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == [] and "script" not in checker.tags and checker.tags.count("img") == 2
    assert "<script>" not in html and "my &lt;script&gt;alert(1)&lt;_script&gt; &amp; trace.jsonl" in html
    assert "http://" not in html and "https://" not in html and "url(" not in html
    text = " ".join(checker.text)
    assert "Every figure on this page is simulated" in text
    rows = re.findall(r"<tr><td>( *)([\d,]+) to ([\d,]+)</td><td>([\d,]+)</td><td>[\d,]+</td><td>([\d,]+)</td>", html)
    assert [(len(indent), start, end, count, saved) for indent, start, end, count, saved in rows] == [
        (0, "0", "2,048", "40", "79,872"),
        (4, "2,048", "3,072", "8", "7,168"),
    ]
    shared = 39 * 2048 + 7 * 1024
    prompt = 60 * 512 - 60 * 7 + 40 * 2048 + 8 * 1024
    assert f"{shared / prompt:.1%} of the prompt tokens were in an earlier request" in text
    assert "0 tokens are common to all" in text and f"{40 / 60:.1%} of the requests share more" in text


def result(policy, rate, ttft=1.0, wait=10.0):
    empty = Recorder().result(policy)
    return dataclasses.replace(empty, output_tokens_per_s=rate, ttft_p99_s=ttft, longest_wait_s=wait)


def flags(*arguments):
    return [advice.flag for advice in recommend(*arguments) if advice.flag]


def test_throughput_decides_then_the_first_token_then_the_order():
    assert best_of([result("a", 100), result("b", 103)]).policy == "b"
    assert best_of([result("a", 100), result("b", 101)]).policy == "a"
    assert best_of([result("a", 100), result("b", 99, ttft=0.5)]).policy == "b"
    assert best_of([result("a", 100), result("b", 90, ttft=0.1)]).policy == "a"


def test_recommendations_follow_the_figures():
    fcfs, static, ucb = result("fcfs", 100), result("feather-static", 150), result("feather-ucb", 170)
    assert flags([fcfs, static], {64: static}, 0.5) == ["--schedule-policy feather", "--feather-policy static"]
    assert "--feather-policy ucb" in flags([fcfs, static, ucb], {}, 0.5)
    tried = {64: static, 8: result("feather-static", 140), 256: result("feather-static", 180)}
    assert "--feather-min-batch 256" in flags([fcfs, static], tried, 0.5)
    slow = dataclasses.replace(static, longest_wait_s=16.0)
    assert "--feather-max-passes 512" in flags([fcfs, slow], {}, 0.5)
    assert flags([result("fcfs", 151), static], {64: static}, 0.5) == ["--schedule-policy fcfs"]
    unshared = recommend([fcfs, result("feather-static", 100)], {}, 0.001)
    assert [advice.flag for advice in unshared] == ["--schedule-policy fcfs", ""]
    assert "only 0.1% of the prompt tokens are shared" in unshared[1].reason


def test_min_batches_leave_the_default_out():
    assert min_batches(256) == [8, 32, 128, 256]
    assert min_batches(16) == [16]
