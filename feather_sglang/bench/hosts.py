"""Where a policy is served: on a server of its own, or on one that runs already and is told to switch."""

from __future__ import annotations

import contextlib
import functools
import json
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feather_sglang.bench.server import PATIENCE_S, Server
from feather_sglang.bench.serving import Drive, Setting, batching_policy, drive, hub, policy_flags, served
from feather_sglang.bench.tiny_model import model_in

#: Real weights take their time.
_LOADING_S = 3600


@dataclass(frozen=True)
class OwnServers:
    """A new server for each measurement.

    Args:
        folder: for logs, and for the tiny model.
        model: path or name of a real one; default: the tiny model that the setting is for, on the CPU.
        flags: of SGLang or Feather, stronger than the setting's.
    """

    folder: Path
    model: str | None = None
    flags: Sequence[str] = ()

    @contextlib.contextmanager
    def serve(self, setting: Setting, policy: str) -> Iterator[Drive]:
        """A server with this policy. Raises ``ServerError``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        model = self.model or str(model_in(self.folder, setting.shape))
        flags = [f"--model-path={model}", *policy_flags(policy), *setting.flags]
        flags += [*(() if self.model else setting.cpu_flags), *self.flags]
        log = self.folder / f"server-{setting.name}-{policy}.log"
        patience_s = _LOADING_S if self.model else PATIENCE_S
        with served(policy, Server(flags, log, hub(model), patience_s=patience_s)) as server:
            yield functools.partial(drive, policy, server, model=model)


@dataclass(frozen=True)
class RunningServer:
    """A server that runs already, and that nobody else uses meanwhile.

    Args:
        url: without a slash at its end.
        switch: whether a measurement begins with the policy's name sent to Feather, and ends with the one before it.
        model: whose tokenizer the client takes; default: the one that the server names.
    """

    url: str
    switch: bool
    model: str | None = None

    def check(self) -> None:
        """Nothing is known of its process."""

    @contextlib.contextmanager
    def serve(self, setting: Setting, policy: str) -> Iterator[Drive]:
        """The server, under this policy if it switches. Raises ``RuntimeError``."""
        if not self.switch:
            yield functools.partial(drive, policy, self, model=self.model)
            return
        found = self._ask("/feather/state")["schedulers"][0]
        own, before = found["policy"], found["scheduling"]
        self._switch(own if policy == "feather" else batching_policy(policy) or policy)
        try:
            yield functools.partial(drive, policy, self, model=self.model)
        finally:
            self._switch(own if before == "feather" else before)

    def _switch(self, policy: str) -> None:
        self._ask("/feather/policy", {"policy": policy})

    def _ask(self, path: str, body: dict[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)
        except (OSError, ValueError) as error:  # refused, an HTTP status, or not JSON
            raise RuntimeError(
                f"can't switch policies at {self.url}{path}: {error}; "
                "start the server with --schedule-policy feather, or ask for one policy"
            ) from None
