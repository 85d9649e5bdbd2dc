"""Every place of SGLang that Feather touches, as data, and how it is applied and verified."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from feather_sglang.engines.sglang import admission, startup

#: SGLang releases whose source the table below was checked against.
SUPPORTED_SGLANG = ("0.5.23",)


class Hook(NamedTuple):
    """One place that Feather touches."""

    target: str
    #: A member of SGLang's ``HookType``: before, after or around.
    kind: str
    function: Callable[..., Any]
    #: Parameters of the target that the function relies on.
    parameters: tuple[str, ...]
    why: str


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "after",
        startup.after_add_cli_args,
        ("parser",),
        "adds 'feather' to --schedule-policy, and Feather's flags",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "before",
        startup.before_from_cli_args,
        ("args",),
        "checks the arguments and hands Feather's to the spawned processes",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.init_schedule_policy",
        "around",
        startup.around_init_schedule_policy,
        ("self",),
        "builds Feather's scheduler where 'feather' is chosen",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "around",
        admission.around_get_new_batch_prefill,
        ("self", "running_batch"),
        "opens and closes a scheduling pass; skips one in which nothing changed",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
        "around",
        admission.around_calc_priority,
        ("self", "waiting_queue", "running_batch"),
        "puts Feather's plan at the head of the waiting queue",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        "around",
        admission.around_add_one_req,
        ("self", "req"),
        "stops admission where the plan ends",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.request_receiver.broadcast_pyobj",
        "around",
        admission.around_broadcast,
        ("data", "rank", "src"),
        "carries rank 0's time and rewards to the other tensor parallel ranks",
    ),
)


def register() -> None:
    """Hand the table to SGLang's registry; on an unknown release only what is needed to refuse ``feather``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = HOOKS if unknown_release() is None else HOOKS[:2]
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def unknown_release() -> str | None:
    """Why the installed SGLang is not supported, or ``None``."""
    version = importlib.metadata.version("sglang")
    if version in SUPPORTED_SGLANG:
        return None
    return (
        f"SGLang {version} is not supported by this feather-sglang (supported: {', '.join(SUPPORTED_SGLANG)}); "
        f"install sglang=={SUPPORTED_SGLANG[-1]}, or start without --schedule-policy feather"
    )


def problems() -> list[str]:
    """What keeps Feather from running in this process, one line each; empty if all hooks are in place."""
    unknown = unknown_release()
    if unknown is not None:
        return [unknown]
    from sglang.srt.plugins.hook_registry import HookRegistry

    found = []
    for hook in HOOKS:
        problem = _problem(hook, HookRegistry)
        if problem is not None:
            found.append(f"{hook.target}: {problem}")
    return found


def _problem(hook: Hook, registry: Any) -> str | None:
    try:
        target = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        return f"not found in the installed SGLang ({error}); reinstall sglang, or start without feather"
    missing = [name for name in hook.parameters if name not in inspect.signature(inspect.unwrap(target)).parameters]
    if missing:
        return f"has no parameter '{missing[0]}' in the installed SGLang; reinstall sglang, or start without feather"
    registered = registry._hooks.get(hook.target, [])
    if not any(function is hook.function for _, function, _ in registered):
        return (
            "Feather's hook is not registered; is feather-sglang installed, and does SGLANG_PLUGINS "
            "(if it is set) name 'feather'?"
        )
    if hook.target not in registry._patched:
        return "SGLang could not apply Feather's hook; its log says why"
    for kind, _, source in registered:
        if kind.value == "replace":
            name = source.plugin_name if source is not None else "another plugin"
            return f"replaced by plugin '{name}'; leave it out with SGLANG_PLUGINS=feather, or start without feather"
    return None
