"""A real SGLang server as a child process: start it, wait for it, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

LAUNCHER = (sys.executable, "-m", "feather_sglang.launch_server")

#: For loading a model of some megabytes, on a busy machine.
PATIENCE_S = 300
_STOP_S = 20


class ServerError(RuntimeError):
    """The server did not come up, or it died; the message names its log and ends with the tail of it."""


def free_port() -> int:
    """A TCP port that nobody uses right now; below the range from which systems give ports to whoever asks for any.

    A server takes half a minute to come to its port, in which another process could be given it.

    Raises:
        ServerError: none was found.
    """
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError("no free TCP port was found between 20000 and 32000")


class Server:
    """``python -m feather_sglang.launch_server`` with the given flags; a context manager.

    The process group is killed on exit, so no scheduler outlives it. It runs in an empty folder, since ``python -m``
    would import packages from the current one.

    Args:
        arguments: SGLang's and Feather's flags, without host and port.
        log: file that gets the server's output.
        environment: variables on top of this process's own.
        launcher: the command that takes these flags.
        patience_s: for loading the model, until it answers.

    Raises:
        ServerError: it ended, or was not healthy in time.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: dict[str, str] | None = None,
        launcher: Sequence[str] = LAUNCHER,
        patience_s: int = PATIENCE_S,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._patience_s = patience_s
        self._command = [*launcher, "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        self._environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="feather-server-")

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait until it answers."""
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Start, without waiting."""
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._folder.name,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until it answers; it is stopped if it does not."""
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        for _ in range(self._patience_s):
            self.check()
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                if self._ready():
                    return
            time.sleep(1)
        raise self._error(f"the server was not healthy after {self._patience_s} s")

    def check(self) -> None:
        """Raises ``ServerError`` if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise self._error(f"the server ended with code {self._process.returncode}")

    def _error(self, what: str) -> ServerError:
        return ServerError(f"{what}; its log {self.log} ends with:\n{self.tail()}")

    def _ready(self) -> bool:
        urllib.request.urlopen(self.url + "/health", timeout=5).close()
        return True

    def stop(self) -> None:
        """End the server and every process it spawned."""
        if self._process is not None:
            try:
                self._end(self._process, signal.SIGTERM)
            finally:  # on a second Ctrl-C as well
                self._end(self._process, signal.SIGKILL)
            self._process = None
        self._folder.cleanup()

    @staticmethod
    def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)

    @property
    def pid(self) -> int:
        """Process id of the server's first process. Raises ``RuntimeError`` if it was not started."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def running(self) -> bool:
        """Whether the server's first process is alive."""
        return self._process is not None and self._process.poll() is None

    def tail(self, lines: int = 30) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def side_by_side(servers: Sequence[Server]) -> Iterator[None]:
    """Start several servers at once, and stop all of them in the end.

    Raises:
        ServerError: one of them did not come up.
    """
    try:
        for server in servers:
            server.launch()
        for server in servers:
            server.wait()
        yield
    finally:
        for server in servers:
            server.stop()
