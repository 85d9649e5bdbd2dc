"""A small stand-in for a server's ``GET /feather/state``, which can go away and come back."""

from __future__ import annotations

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = {
    "schedulers": [
        {
            "version": "9.8.7",
            "scheduling": "feather",
            "why": "",
            "policy": "ucb",
            "failures": 2,
            "fallback_policy": "lpm",
            "time_s": 1000.0,
            "passes": 5000,
            "slots": 32,
            "batch": {"requests": 12, "shared_tokens": 8192, "held": 3},
            "waiting": 2400,
            "groups": [
                {"tokens": 8192, "waiting": 1290, "active": 4},
                {"tokens": 64, "waiting": 17, "active": 0},
            ],
            "best": {
                "rid": "request-77",
                "shared_tokens": 4096,
                "loses_tokens": 4032,
                "sharing": 18,
                "admitted": False,
                "why": "adding it would cost the batch 4032 of 8192 shared tokens (at most 256 are given up)",
            },
            "last_stop": "policy",
            "counts": {
                "added": 1111,
                "stopped": 222,
                "passed_over": 333,
                "forced": 44,
                "fallback_passes": 5,
                "state_saves": 6,
                "decode_steps": 700,
                "homogeneous_decode_steps": 600,
                "output_tokens": 80000,
                "pass_s_sum": 1.5,
                "pass_count": 4000,
                "reward": 1234.56,
                "exploration_share": 0.125,
            },
            "settings": {"max_failures": 10, "min_batch": 8},
        }
    ]
}


def answer(**changes):
    """The answer of one scheduler, with changes; a dictionary changes what it names inside."""
    content = copy.deepcopy(ANSWER)
    scheduler = content["schedulers"][0]
    for name, value in changes.items():
        if isinstance(value, dict):
            scheduler[name].update(value)
        else:
            scheduler[name] = value
    return content


class StateServer:
    """Gives ``content``: what ``json`` can write, bytes, or a status; notes the requests' headers."""

    def __init__(self):
        self.content = answer()
        self.headers = []
        self.port = 0
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.headers.append(dict(self.headers))
                content = outer.content if self.path == "/feather/state" else 404
                if callable(content):
                    content = content()
                if isinstance(content, int):
                    self.send_error(content)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
