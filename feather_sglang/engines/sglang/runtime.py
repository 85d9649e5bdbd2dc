"""Inspection and changes at run time, on the scheduler's side: what ``endpoints`` asks for, on every rank.

The questions travel as SGLang's own ``GetInternalStateReq``, whose ``rid`` nobody else uses: SGLang sends it to every
data parallel scheduler, broadcasts it to their tensor parallel ranks with the requests, handles it between two passes
and brings the answer of each rank 0 back. So a change takes effect on all ranks before the same pass.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import feather_sglang
from feather_sglang.engines.sglang.controller import Controller, attached_to
from feather_sglang.scheduling import Settings, SettingsError
from feather_sglang.scheduling.describe import describe
from feather_sglang.scheduling.policy import default_min_batch
from feather_sglang.scheduling.settings import FALLBACKS, POLICIES

logger = logging.getLogger(__name__)

#: What the answer's ``internal_state`` has: an HTTP status and a body for JSON.
KEY = "feather"
_PREFIX = "feather:"

# Read by the engine-neutral scheduler or by this layer; everything else that may change is the policy's.
_NOT_THE_POLICYS = ("max_passes", "max_wait_s", "fallback_policy", "max_failures")
# What may change while requests wait. Not chunk_size, of which all that wait have hashes; not the bins, which what was
# learned is sorted into; not the files, which are open; not the policy, which has an endpoint of its own.
CHANGEABLE = (
    *("depth_tolerance", "crowd", "crowd_tolerance", "min_batch", *_NOT_THE_POLICYS),
    *("freeze", "exploration", "min_gain", "discount", "memory", "confidence_width", "learning_rate"),
)


def question(do: str, given: Any = None) -> str:
    """For ``GetInternalStateReq.rid``.

    Args:
        do: ``state``, ``policy`` or ``config``.
        given: the body of the HTTP request, as JSON has it.
    """
    return _PREFIX + json.dumps({"do": do, "given": given})


def around_get_internal_state(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """``Scheduler.get_internal_state``: answer Feather's questions, and leave all others to SGLang."""
    asked = recv_req.rid
    if not (isinstance(asked, str) and asked.startswith(_PREFIX)):
        return original(scheduler, recv_req)
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    status, body = answer(scheduler, asked)
    return GetInternalStateReqOutput(internal_state={KEY: {"status": status, "body": body}})


def answer(scheduler: Any, asked: str) -> tuple[int, dict[str, Any]]:
    """HTTP status and body, for what :func:`question` made. Never raises."""
    controller = attached_to(scheduler)
    if controller is None:
        return 404, {
            "error": "Feather is not here; start the server with --schedule-policy feather and with the radix cache on"
        }
    try:
        parsed = json.loads(asked.removeprefix(_PREFIX))
        return 200, _ANSWERS[parsed["do"]](scheduler, controller, parsed["given"])
    except SettingsError as error:
        return 400, {"error": _line(error)}
    except Exception as error:
        logger.exception("Feather failed while answering what was asked at run time; scheduling goes on.")
        return 500, {"error": f"{type(error).__name__}: {_line(error)}; the server's log has more"}


def _line(error: Exception) -> str:
    """One line that SGLang can send: JSON may name what UTF-8 cannot."""
    return " ".join(str(error).split()).encode(errors="backslashreplace").decode()


def _state(scheduler: Any, controller: Controller, _given: Any) -> dict[str, Any]:
    controller.look()
    if controller.rank:
        return {}  # rank 0's answer counts
    running, slots = scheduler.running_batch, scheduler.max_running_requests
    told = describe(controller.core, controller.settings, slots, running.batch_is_full)
    if controller.disabled:  # then nobody follows what happens to the requests
        told["batch"]["requests"] = len(running.reqs)
    if told["best"] is not None:
        told["best"]["rid"] = str(told["best"]["rid"].rid)
    return {
        "version": feather_sglang.__version__,
        "scheduling": _scheduling(scheduler, controller),
        "why": controller.why,
        "policy": controller.settings.policy,
        "failures": controller.failures,
        "fallback_policy": controller.settings.fallback_policy,
        "time_s": time.monotonic(),
        "passes": controller.passes,
        "slots": slots,
        "waiting": len(scheduler.waiting_queue),
        **told,
        "counts": controller.counts(),
        "settings": _effective(controller, slots),
    }


def _policy(scheduler: Any, controller: Controller, given: Any) -> dict[str, Any]:
    name = given.get("policy") if isinstance(given, dict) and len(given) == 1 else None
    if not isinstance(name, str):
        valid = f"{', '.join(POLICIES)}, package.module:Class, {', '.join(FALLBACKS)}"
        raise SettingsError(f'the body must be {{"policy": NAME}}, with one of {valid}')
    if name in FALLBACKS:
        sglangs = _sglangs(scheduler, name)
        controller.hand_over()
    else:
        settings = _changed(controller.settings, {"policy": name})
        sglangs = _sglangs(scheduler, settings.fallback_policy)
        controller.take_over(settings)
    scheduler.policy.policy = sglangs
    scheduling = _scheduling(scheduler, controller)
    if not controller.rank:
        who = f"feather, with {name}," if scheduling == "feather" else f"SGLang's {name}"
        logger.info("Feather: %s plans from now on (POST /feather/policy).", who)
    return {"policy": controller.settings.policy, "scheduling": scheduling}


def _config(scheduler: Any, controller: Controller, given: Any) -> dict[str, Any]:
    if not (isinstance(given, dict) and given):
        raise SettingsError('the body must be settings and their values, as in {"min_batch": 16}')
    settings = _changed(controller.settings, given)
    fixed = [name for name in given if name not in CHANGEABLE]
    if fixed:
        raise SettingsError(f"{fixed[0]} cannot be changed by /feather/config; valid: {', '.join(CHANGEABLE)}")
    sglangs = _sglangs(scheduler, settings.fallback_policy)
    controller.configure(settings, rebuild=any(name not in _NOT_THE_POLICYS for name in given))
    if controller.why != "switched":
        scheduler.policy.policy = sglangs
    if not controller.rank:
        logger.info("Feather: %s from now on (POST /feather/config).", given)
    return {"settings": _effective(controller, scheduler.max_running_requests)}


_ANSWERS: dict[str, Callable[[Any, Controller, Any], dict[str, Any]]] = {
    "state": _state,
    "policy": _policy,
    "config": _config,
}


def _changed(settings: Settings, given: Mapping[str, Any]) -> Settings:
    """Raises ``SettingsError`` as at start."""
    parsed = Settings.parse(given, "the body")
    values: dict[str, Any] = {name: getattr(parsed, name) for name in given}
    return dataclasses.replace(settings, **values)


def _sglangs(scheduler: Any, name: str) -> Any:
    """A policy as SGLang names it, for ``scheduler.policy.policy``: the one that orders the passes left to SGLang."""
    return scheduler.policy._validate_and_adjust_policy(name, scheduler.policy.tree_cache)


def _scheduling(scheduler: Any, controller: Controller) -> str:
    return str(scheduler.policy.policy.value) if controller.disabled else "feather"


def _effective(controller: Controller, slots: int) -> dict[str, Any]:
    settings = dataclasses.asdict(controller.settings)
    settings["min_batch"] = settings["min_batch"] or default_min_batch(slots)
    return settings
