"""The HTTP side: bodies, keys and answers. SGLang's own middleware and real requests, but no server behind it."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from feather_sglang.engines.sglang import endpoints, patched, startup


@pytest.fixture
def asked(monkeypatch):
    """What reaches the schedulers, of which there are two."""
    seen = []
    answers = [(200, {"policy": "ucb"}), (200, {"policy": "ucb"})]

    async def ask(do, given=None):
        seen.append((do, given))
        return [{"status": status, "body": body} for status, body in answers]

    monkeypatch.setattr(endpoints, "_ask", ask)
    return SimpleNamespace(seen=seen, answers=answers)


def client(api_key=None, admin_api_key=None):
    app = FastAPI()
    patched.add_endpoints(app)
    endpoints.add_to(app)
    assert [route.path for route in app.routes if route.path.startswith("/feather/")] == [
        "/feather/state",
        "/feather/policy",
        "/feather/config",
    ]
    if api_key or admin_api_key:
        add_api_key_middleware(app, api_key=api_key, admin_api_key=admin_api_key)
    return TestClient(app)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_bodies_go_to_the_schedulers_and_their_answers_come_back(asked):
    http = client()
    assert http.post("/feather/policy", json={"policy": "ucb"}).json() == {"policy": "ucb"}
    assert http.post("/feather/config", content='{"min_batch": 3}').status_code == 200
    assert http.get("/feather/state").json() == {"schedulers": [{"policy": "ucb"}, {"policy": "ucb"}]}
    assert asked.seen == [("policy", {"policy": "ucb"}), ("config", {"min_batch": 3}), ("state", None)]
    assert http.get("/feather/policy").status_code == 405


@pytest.mark.parametrize("body", ["", "{", "{'a': 1}", '{"max_wait_s": Infinity}', b"\xff\xfe{", "[" * 100_000])
def test_what_is_not_json_reaches_nobody(asked, body):
    for path in ("/feather/policy", "/feather/config"):
        response = client().post(path, content=body)
        assert response.status_code == 400 and response.json() == {"error": "the body is not JSON"}
    assert not asked.seen


@pytest.mark.parametrize("status", [400, 404, 500])
def test_one_scheduler_that_refuses_is_the_answer(asked, status):
    asked.answers[1] = (status, {"error": "no"})
    for response in (client().post("/feather/policy", json={}), client().get("/feather/state")):
        assert response.status_code == status and response.json() == {"error": "no"}


def test_changes_need_the_admin_key_and_looking_needs_the_key(asked):
    http = client(api_key="reader", admin_api_key="admin")
    for key, state, change in ((None, 401, 401), ("reader", 200, 401), ("admin", 401, 200)):
        headers = bearer(key) if key else {}
        assert http.get("/feather/state", headers=headers).status_code == state
        for path in ("/feather/policy", "/feather/config"):
            assert http.post(path, json={}, headers=headers).status_code == change
    http = client(api_key="reader")
    assert http.post("/feather/policy", json={}).status_code == 401
    assert http.post("/feather/policy", json={}, headers=bearer("reader")).status_code == 200
    http = client(admin_api_key="admin")
    assert http.get("/feather/state").status_code == 200 and http.post("/feather/config", json={}).status_code == 401


def test_a_process_without_an_http_server_gets_none(monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.entrypoints.http_server", raising=False)
    assert endpoints.after_init_communicators(None, object()) is None
    app = FastAPI()
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", SimpleNamespace(app=app))
    endpoints.after_init_communicators(None, object(), "server_args")
    assert "/feather/state" in [route.path for route in app.routes]


def test_a_server_serves_without_them_if_they_cannot_be_added(caplog):
    endpoints.add_to(SimpleNamespace(routes=[]))
    assert "/feather/state, /feather/policy and /feather/config are not served" in caplog.text


@pytest.mark.parametrize(("workers", "lines"), [(1, 0), (2, 1)])
def test_several_tokenizer_workers_have_no_endpoints_and_the_log_says_so(monkeypatch, caplog, workers, lines):
    monkeypatch.setattr(startup, "_first_problem", lambda args: None)
    args = argparse.Namespace(schedule_policy="feather", tokenizer_worker_num=workers)
    startup.before_from_cli_args(object, args)
    assert caplog.text.count("the server has no /feather endpoints") == lines
