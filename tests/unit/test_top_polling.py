"""``feather-sglang top`` against a server that answers, answers nonsense, goes away and comes back."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from state_server import StateServer, answer

from feather_sglang.bench.server import free_port
from feather_sglang.cli import main
from feather_sglang.top.client import NoAnswerError, ask, bad_url, watch


@pytest.fixture
def server():
    server = StateServer()
    yield server
    server.stop()


def growing(server):
    """Each answer is 2 s and 10 added requests after the last."""
    number = 0

    def content():
        nonlocal number
        number += 1
        return answer(time_s=1000.0 + 2 * number, counts={"added": 1000 + 10 * number})

    server.content = content


def test_an_answer_and_the_key(server):
    assert ask(server.url)[0].batch.requests == 12
    assert "Authorization" not in server.headers[-1]
    assert ask(server.url + "/", "secret")[0].slots == 32
    assert server.headers[-1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("content", "message", "final"),
    [
        (404, "there is no Feather on this server; start it with --schedule-policy feather", True),
        (401, "the server wants an API key; name it with --api-key", True),
        (403, "the server wants another API key", True),
        (503, "the server answered 503 Service Unavailable", False),
        (b"<html>", "answered something else than Feather's state (JSONDecodeError: ", False),
        (b"\xff\xfe\xfa", "answered something else than Feather's state (Unicode", False),
        ([1], "answered something else than Feather's state (TypeError: ", False),
        ({"schedulers": [{}]}, "answered something else than Feather's state (KeyError: 'version')", False),
    ],
)
def test_other_answers_are_one_line(content, message, final, server):
    server.content = content
    with pytest.raises(NoAnswerError) as error:
        ask(server.url)
    assert message in str(error.value) and error.value.final is final and "\n" not in str(error.value)
    assert str(error.value).startswith(server.url)


def test_a_server_that_goes_away_and_comes_back(server):
    growing(server)
    views = watch(lambda: ask(server.url), 0.001)
    assert next(views).schedulers[0][1] is None, "one answer makes no rate"
    ((scheduler, rates),) = next(views).schedulers
    assert scheduler.counts["added"] == 1020 and rates.per_s["added"] == 5
    server.stop()
    lost, still_lost = next(views), next(views)
    for view in (lost, still_lost):
        assert view.error == f"{server.url}: Connection refused" and not view.final
        assert view.schedulers == ((scheduler, None),), "what was known, without rates"
    assert 0 < lost.silent_s < still_lost.silent_s
    server.start()
    back = next(views)
    assert not back.error and back.schedulers[0][0].counts["added"] == 1030
    assert back.schedulers[0][1] is None, "it may be another server"
    assert next(views).schedulers[0][1].per_s["added"] == 5


def test_another_number_of_schedulers_is_not_compared(server):
    views = watch(lambda: ask(server.url), 0.001)
    next(views)
    server.content = {"schedulers": answer()["schedulers"] * 2}
    assert [rates for _, rates in next(views).schedulers] == [None, None]


def test_once_is_one_frame_with_rates(server, capsys):
    growing(server)
    assert main(["top", "--url", server.url, "--once", "--interval", "0.01"]) == 0
    out, err = capsys.readouterr()
    assert not err and out.count("feather-sglang top") == 1 and "added 1,020 (5.0/s)" in out and "\x1b" not in out
    assert main(["top", "--url", server.url, "--once", "--interval", "0.01", "--json", "--api-key", "k"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["error"] is None and said["schedulers"][0]["batch"] == {
        "requests": 12,
        "shared_tokens": 8192,
        "held": 3,
    }
    assert said["schedulers"][0]["rates"]["per_s"]["added"] == 5
    assert server.headers[-1]["Authorization"] == "Bearer k"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "localhost:30000",
        "ftp://h:1",
        "http://",
        "http://h:99999",
        "http://[h",
        "http://h:x/",
        "http://h /",
    ],
)
def test_an_address_that_is_none(url, capsys):
    assert main(["top", "--url", url]) == 2
    out, err = capsys.readouterr()
    assert (
        not out and err == f"feather-sglang: error: --url must be http://HOST:PORT or https://HOST:PORT, got '{url}'\n"
    )


def test_addresses_that_are_fine():
    assert not any(map(bad_url, ("http://h", "https://h.example:1/", "http://[::1]:30000", "http://h/behind/a/proxy")))


@pytest.mark.parametrize("value", ["0", "-1", "x", "inf"])
def test_the_interval_is_checked(value, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["top", "--interval", value])
    assert stop.value.code == 2 and "must be a positive, finite number" in capsys.readouterr().err


def test_nothing_to_show_is_one_line(server, capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["top", "--url", url, "--once"]) == 1
    assert capsys.readouterr() == ("", f"feather-sglang: error: {url}: Connection refused\n")
    server.content = 404
    for more in ([], ["--once"]):  # waiting would not help
        assert main(["top", "--url", server.url, *more]) == 1
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1 and "there is no Feather on this server" in err


@pytest.fixture
def piped(server):
    growing(server)
    command = [sys.executable, "-m", "feather_sglang.cli", "top", "--url", server.url, "--interval", "0.01"]
    started = []

    def run(*more):
        process = subprocess.Popen(
            [*command, *more],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A test run in the background of a shell ignores it, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_without_a_terminal_frames_follow_each_other(server, piped):
    process = piped("--json")
    first, second = (json.loads(process.stdout.readline()) for _ in range(2))
    assert first["schedulers"][0]["rates"] is None and second["schedulers"][0]["rates"]["per_s"]["added"] == 5
    server.stop()
    while (said := json.loads(process.stdout.readline()))["error"] is None:
        pass
    assert said == {"error": f"{server.url}: Connection refused", "schedulers": []}
    server.start()
    while json.loads(process.stdout.readline())["error"]:
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and not err


def test_a_reader_that_has_seen_enough(piped):
    process = piped()
    assert process.stdout.readline().startswith("feather-sglang top")
    process.stdout.close()
    assert process.wait(60) == 0 and not process.stderr.read()
