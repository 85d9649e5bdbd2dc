"""``/feather/state``, ``/feather/policy`` and ``/feather/config``, beside the endpoints of SGLang's own HTTP server.

Plain Starlette routes, so that nothing of SGLang or FastAPI is imported where no HTTP server runs. SGLang's middleware
asks for keys: it looks at the endpoint's level, which is normal unless it says otherwise.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, NoReturn

from feather_sglang.engines.sglang import runtime

logger = logging.getLogger(__name__)

_STATE, _POLICY, _CONFIG = "/feather/state", "/feather/policy", "/feather/config"


def after_init_communicators(_result: Any, _manager: Any, *_: Any, **__: Any) -> None:
    """``TokenizerControlMixin.init_communicators``: an HTTP server is about to start, if its module is there.

    Hooking a function of that module would import it in every scheduler process, too.
    """
    module = sys.modules.get("sglang.srt.entrypoints.http_server")
    if module is not None:
        add_to(module.app)


def add_to(app: Any) -> None:
    """Add the endpoints to SGLang's app, once. Never raises: a server without them still serves."""
    try:
        from sglang.srt.utils.auth import AuthLevel, auth_level

        if any(getattr(route, "path", None) == _STATE for route in app.routes):
            return
        app.add_route(_STATE, get_state, methods=["GET"])
        admin = auth_level(AuthLevel.ADMIN_OPTIONAL)
        app.add_route(_POLICY, admin(post_policy), methods=["POST"])
        app.add_route(_CONFIG, admin(post_config), methods=["POST"])
    except Exception:
        logger.exception("Feather: %s, %s and %s are not served.", _STATE, _POLICY, _CONFIG)


async def get_state(_request: Any) -> Any:
    """What every data parallel scheduler does, and why."""
    replies = await _ask("state")
    status, body = _worst(replies)
    return _respond(status, body if status != 200 else {"schedulers": [reply["body"] for reply in replies]})


async def post_policy(request: Any) -> Any:
    """Another policy, on all schedulers."""
    return await _change("policy", request)


async def post_config(request: Any) -> Any:
    """Other settings, on all schedulers."""
    return await _change("config", request)


async def _change(do: str, request: Any) -> Any:
    try:
        given = json.loads(await request.body(), parse_constant=_not_json)
    except (ValueError, RecursionError):
        return _respond(400, {"error": "the body is not JSON"})
    return _respond(*_worst(await _ask(do, given)))


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


async def _ask(do: str, given: Any = None) -> list[dict[str, Any]]:
    """The answers of all data parallel schedulers, each with ``status`` and ``body``."""
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=runtime.question(do, given)))
    return [answer.internal_state[runtime.KEY] for answer in answers]


def _worst(replies: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    reply = max(replies, key=lambda each: int(each["status"]))
    return reply["status"], reply["body"]


def _respond(status: int, body: dict[str, Any]) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(body, status)
