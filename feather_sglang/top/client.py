"""Asks a server for its schedulers' state, again and again, whether it is there or not."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from feather_sglang.top import state

_PATH = "/feather/state"
# A busy server answers between two decode steps or prefill chunks.
_TIMEOUT_S = 5

_REFUSALS = {
    401: "the server wants an API key; name it with --api-key",
    403: "the server wants another API key; name it with --api-key",
    404: "there is no Feather on this server; start it with --schedule-policy feather and with the radix cache on",
}


class NoAnswerError(RuntimeError):
    """Why there is no state, in one line."""

    def __init__(self, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        #: Whether waiting changes nothing.
        self.final = final


@dataclass(frozen=True)
class View:
    """The last answer, what changed since the one before, and why there is none any more."""

    schedulers: tuple[tuple[state.Scheduler, state.Rates | None], ...] = ()
    error: str = ""
    #: Whether waiting changes nothing about the error.
    final: bool = False
    #: Since the last answer, or since the first question.
    silent_s: float = 0.0


def bad_url(url: str) -> str | None:
    """What is wrong with a server's address, in one line."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:  # of the port, or of an IPv6 address
        good = False
    if good and url.isprintable() and " " not in url and not parts.query and not parts.fragment:
        return None
    return f"--url must be http://HOST:PORT or https://HOST:PORT, got '{url}'"


def ask(url: str, api_key: str | None = None) -> tuple[state.Scheduler, ...]:
    """One answer.

    Raises:
        NoAnswerError: there is none, or not one of Feather's.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url.rstrip("/") + _PATH, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        error.close()
        why = _REFUSALS.get(error.code, f"the server answered {error.code} {error.reason}")
        raise NoAnswerError(f"{url}: {why}", final=error.code in _REFUSALS) from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        why = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise NoAnswerError(f"{url}: {why}") from error
    try:
        return state.parse(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"answered something else than Feather's state ({type(error).__name__}: {error})"
        raise NoAnswerError(f"{url}: {why}; is it the same release of feather-sglang?") from error


def watch(question: Callable[[], tuple[state.Scheduler, ...]], interval_s: float) -> Iterator[View]:
    """A view for each question, for ever; it waits between them."""
    known: tuple[state.Scheduler, ...] = ()
    fresh = False
    answered = time.monotonic()
    while True:
        try:
            now = question()
        except NoAnswerError as error:
            fresh = False  # what comes next may be another server, whose counts start anew
            old = tuple((scheduler, None) for scheduler in known)
            yield View(old, str(error), error.final, time.monotonic() - answered)
        else:
            compare = fresh and len(now) == len(known)
            yield View(tuple((after, state.rates(known[i], after) if compare else None) for i, after in enumerate(now)))
            known, fresh, answered = now, True, time.monotonic()
        time.sleep(interval_s)
