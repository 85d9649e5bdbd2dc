"""``feather-sglang top`` on a terminal: in place, with keys, and leaving the terminal as it was."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import time

import pytest
from state_server import StateServer, answer

_ENTER, _LEAVE, _CLEAR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[2J"
_HANGS = (
    "import time\n"
    "from feather_sglang.top import live\n"
    "from feather_sglang.top.client import View\n"
    "def views():\n"
    "    yield View(error='first')\n"
    "    time.sleep(10**6)\n"
    "    yield View()\n"
    "raise SystemExit(live.run(views(), 'url', once=False, as_json=False))\n"
)
_FAILS = _HANGS.replace("    time.sleep(10**6)\n", "    raise RuntimeError('a mistake of ours')\n")


@pytest.fixture
def server():
    server = StateServer()
    yield server
    server.stop()


class Terminal:
    """A pseudo-terminal with a program on it."""

    def __init__(self, command, columns=130, lines=40):
        self.master, self.slave = os.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self.slave)
        self.seen = ""
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self.process = subprocess.Popen(
            command,
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            env={**environment, "TERM": "xterm-256color"},
            start_new_session=True,
            preexec_fn=self._own,
        )

    def _own(self):
        """In the child: this is its controlling terminal, whose Ctrl-C reaches it."""
        fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def resize(self, columns, lines):
        termios.tcsetwinsize(self.slave, (lines, columns))

    def read(self):
        ready = select.select([self.master], [], [], 0.05)[0]
        if ready:
            self.seen += os.read(self.master, 1 << 16).decode(errors="replace")
        return ready

    def wait_for(self, text, since=0):
        end = time.monotonic() + 60
        while text not in self.seen[since:]:
            assert time.monotonic() < end and self.process.poll() is None, self.seen
            self.read()

    def press(self, key):
        os.write(self.master, key)

    def wait(self):
        end = time.monotonic() + 60
        while self.process.poll() is None and time.monotonic() < end:
            self.read()  # a full terminal would hold the program up
        while self.read():
            pass
        return self.process.poll()

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal():
    opened = []

    def run(command, **size):
        opened.append(Terminal(command, **size))
        return opened[-1]

    yield run
    for each in opened:
        each.close()


@pytest.fixture
def top(terminal, server):
    def run(**size):
        command = [sys.executable, "-m", "feather_sglang.cli", "top", "--url", server.url, "--interval", "0.02"]
        return terminal(command, **size)

    return run


@pytest.mark.parametrize("leave", [b"q", b"Q", b"\x03", signal.SIGTERM])
def test_leaving_restores_the_terminal(leave, top):
    terminal = top()
    terminal.wait_for("12 of 32 slots")
    assert not termios.tcgetattr(terminal.slave)[3] & (termios.ICANON | termios.ECHO), "keys come without Enter"
    if isinstance(leave, bytes):
        terminal.press(leave)
    else:
        terminal.process.send_signal(leave)
    assert terminal.wait() == 0, terminal.seen
    assert termios.tcgetattr(terminal.slave) == terminal.before
    assert terminal.seen.count(_ENTER) == 1 and terminal.seen.count(_LEAVE) == 1
    assert "\x1b[?25h" in terminal.seen[terminal.seen.rindex("\x1b[?25l") :], "the cursor is shown again"
    assert "Traceback" not in terminal.seen and "interrupted" not in terminal.seen
    assert _CLEAR not in terminal.seen, "clearing flickers"


def test_it_follows_the_server_and_the_terminals_size(server, top):
    terminal = top()
    terminal.wait_for("12 of 32 slots")
    server.content = answer(batch={"requests": 31})
    terminal.wait_for("31 of 32 slots")
    assert "…" not in terminal.seen
    terminal.resize(30, 10)
    terminal.wait_for("…")
    server.stop()
    terminal.resize(130, 40)
    terminal.wait_for(f"trying again: {server.url}: Connection refused")
    server.content, seen = answer(batch={"requests": 7}), len(terminal.seen)
    server.start()
    terminal.wait_for("7 of 32 slots", seen)
    terminal.press(b"xq")
    assert terminal.wait() == 0 and termios.tcgetattr(terminal.slave) == terminal.before


def test_a_server_that_hangs_does_not_hold_up_the_keys(terminal):
    shown = terminal([sys.executable, "-c", _HANGS])
    shown.wait_for("trying again: first")
    shown.press(b"q")
    assert shown.wait() == 0


def test_a_failure_restores_the_terminal(terminal):
    shown = terminal([sys.executable, "-c", _FAILS])
    assert shown.wait() == 1
    assert termios.tcgetattr(shown.slave) == shown.before
    assert "a mistake of ours" in shown.seen[shown.seen.rindex(_LEAVE) :]


def test_without_keys_it_still_shows(server, terminal):
    command = f"exec {sys.executable} -m feather_sglang.cli top --url {server.url} --interval 0.02 < /dev/null"
    shown = terminal(["sh", "-c", command])
    shown.wait_for("12 of 32 slots")
    shown.process.send_signal(signal.SIGINT)
    assert shown.wait() == 0


def test_a_dumb_terminal_gets_lines(server, terminal):
    command = f"TERM=dumb exec {sys.executable} -m feather_sglang.cli top --url {server.url} --interval 0.02"
    shown = terminal(["sh", "-c", command])
    shown.wait_for("12 of 32 slots")
    assert "\x1b" not in shown.seen
    shown.process.send_signal(signal.SIGINT)
    assert shown.wait() == 0
