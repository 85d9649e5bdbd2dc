from __future__ import annotations

import random
import socket

import pytest

from feather_sglang.bench.server import ServerError, free_port


def test_ports_are_free_and_none_that_the_system_gives_away(monkeypatch):
    assert all(20000 <= free_port() < 32000 for _ in range(20)), "Linux gives away those from 32768 on"
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        taken = used.getsockname()[1]
        free = free_port()
        monkeypatch.setattr(random, "sample", lambda ports, number: [taken, free])
        assert free_port() == free
        monkeypatch.setattr(random, "sample", lambda ports, number: [taken])
        with pytest.raises(ServerError, match="no free TCP port"):
            free_port()
