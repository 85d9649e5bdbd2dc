"""Every place of SGLang that Feather touches, as data, and how it is applied and verified."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from feather_sglang import compiling
from feather_sglang.engines.sglang import admission, endpoints, runtime, startup
from feather_sglang.engines.sglang.releases import NEWEST, OLDEST, RELEASES, SUPPORTED, installed, within


class Hook(NamedTuple):
    """One place that Feather touches, in the releases from ``since`` to ``until``."""

    target: str
    #: A member of SGLang's ``HookType``: before, after or around.
    kind: str
    function: Callable[..., Any]
    #: Parameters of the target that the function relies on.
    parameters: tuple[str, ...]
    why: str
    since: str = OLDEST
    until: str = NEWEST


class Reads(NamedTuple):
    """Attributes of a class of SGLang's that Feather reads, in the releases from ``since`` to ``until``."""

    owner: str
    names: tuple[str, ...]
    since: str = OLDEST
    until: str = NEWEST


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
        since="0.5.16",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        "around",
        admission.around_get_new_batch_prefill_alone,
        ("self",),
        "opens and closes a scheduling pass; skips one in which nothing changed",
        until="0.5.15.post1",
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
        since="0.5.13",
    ),
    Hook(
        "sglang.srt.managers.scheduler.broadcast_pyobj",
        "around",
        admission.around_broadcast,
        ("data", "rank", "src"),
        "carries rank 0's time and rewards to the other tensor parallel ranks",
        until="0.5.12.post1",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "around",
        runtime.around_get_internal_state,
        ("self", "recv_req"),
        "answers /feather/state, and changes policy and settings on every rank before the same pass",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
        "after",
        endpoints.after_init_communicators,
        ("self",),
        "serves /feather/... beside SGLang's own endpoints",
    ),
)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_REQ = "sglang.srt.managers.schedule_batch.Req"
_POLICY = "sglang.srt.managers.schedule_policy.SchedulePolicy"

#: What the functions above read. No process has these objects before it serves, so they are looked for in the source.
READS: tuple[Reads, ...] = (
    Reads(_SCHEDULER, ("waiting_queue", "running_batch", "chunked_req", "policy", "schedule_policy", "tree_cache")),
    Reads(_SCHEDULER, ("metrics_collector",), since="0.5.13"),
    Reads(
        "sglang.srt.observability.scheduler_metrics_mixin.SchedulerMetricsMixin",
        ("metrics_collector",),
        until="0.5.12.post1",
    ),
    Reads("sglang.srt.observability.metrics_collector.SchedulerMetricsCollector", ("labels",)),
    Reads(_SCHEDULER, ("max_running_requests", "max_prefill_tokens", "chunked_prefill_size", "server_args")),
    Reads(_SCHEDULER, ("tp_worker", "token_to_kv_pool_allocator", "max_total_num_tokens", "tp_group", "tp_cpu_group")),
    Reads(_SCHEDULER, ("tp_rank", "tp_size", "dp_rank"), until="0.5.12.post1"),
    Reads(_SCHEDULER, ("ps",), since="0.5.13", until="0.5.20"),
    Reads("sglang.srt.runtime_context", ("get_parallel",), since="0.5.21"),
    Reads(_REQ, ("rid", "origin_input_ids", "output_ids", "lora_id", "extra_key")),
    Reads(_REQ, ("cache_salt",), since="0.5.18"),  # part of extra_key before
    Reads(_REQ, ("prefix_indices",), until="0.5.21"),
    Reads(_REQ, ("prefix_len",), since="0.5.22"),
    Reads("sglang.srt.managers.schedule_batch.ScheduleBatch", ("reqs", "batch_is_full")),
    Reads("sglang.srt.managers.schedule_policy.PrefillAdder", ("can_run_list", "running_batch")),
    Reads("sglang.srt.managers.schedule_policy.AddReqResult", ("OTHER",)),
    Reads(_POLICY, ("policy", "tree_cache", "_validate_and_adjust_policy")),
    Reads(_POLICY, ("waiting_queue_prefix_matched",), since="0.5.19"),
    Reads("sglang.srt.managers.io_struct.GetInternalStateReq", ()),
    Reads("sglang.srt.managers.io_struct.BaseReq", ("rid",)),
    Reads("sglang.srt.managers.io_struct.GetInternalStateReqOutput", ("internal_state",)),
    Reads("sglang.srt.managers.tokenizer_control_mixin", ("_COMMUNICATOR_SPECS",)),  # get_internal_state_communicator
    Reads("sglang.srt.managers.tokenizer_manager.TokenizerManager", ("auto_create_handle_loop",)),
    Reads("sglang.srt.entrypoints.http_server", ("app", "get_global_state")),
    Reads("sglang.srt.entrypoints.http_server._GlobalState", ("tokenizer_manager",)),
    Reads("sglang.srt.utils.auth", ("auth_level",)),
    Reads("sglang.srt.utils.auth.AuthLevel", ("ADMIN_OPTIONAL",)),
)

#: Without these nobody would refuse "feather" on an unknown release.
_REFUSING = HOOKS[:2]


def hooks_of(release: str) -> tuple[Hook, ...]:
    """The table's rows for one of ``RELEASES``."""
    return tuple(hook for hook in HOOKS if within(release, hook.since, hook.until))


def reads_of(release: str) -> tuple[Reads, ...]:
    """What is read in one of ``RELEASES``."""
    return tuple(reads for reads in READS if within(release, reads.since, reads.until))


def register() -> None:
    """Hand the table to SGLang's registry; on an unknown release only what is needed to refuse ``feather``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = _REFUSING if unknown_release() is not None else hooks_of(installed())
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def apply_missing() -> None:
    """Hook, in this process, what SGLang's plugin loader was told to leave out. For a patched SGLang.

    Raises:
        RuntimeError: in one line, what keeps Feather from running here.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    unknown = unknown_release()
    if unknown is not None:
        raise RuntimeError(f"feather-sglang: {unknown}")
    for hook in hooks_of(installed()):
        if not _registered(hook, HookRegistry):
            HookRegistry.register(hook.target, hook.function, HookType(hook.kind))
            if hook.target in HookRegistry._patched:  # by another plugin: ours goes around what it made of the target
                HookRegistry._apply_target(hook.target, [(HookType(hook.kind), hook.function, None)])
    HookRegistry.apply_hooks()
    found = problems()
    if found:
        raise RuntimeError(f"feather-sglang: {found[0]}")


def unknown_release() -> str | None:
    """Why the installed SGLang is not supported, or ``None``."""
    version = installed()
    if version in RELEASES:
        return None
    return (
        f"SGLang {version} is not supported by this feather-sglang (supported: {SUPPORTED}); "
        f"install sglang=={NEWEST}, or start without --schedule-policy feather"
    )


def problems() -> list[str]:
    """What keeps Feather from running in this process, one line each; empty if all hooks are in place."""
    unknown = unknown_release()
    if unknown is not None:
        return [unknown]
    if compiling.stale():
        return ["the compiled modules are of another version of Feather's source; run: feather-sglang compile"]
    return [f"{state.hook.target}: {state.problem}" for state in states() if state.problem is not None]


class State(NamedTuple):
    """A row of the table in this process."""

    hook: Hook
    #: What is wrong with it, in one line.
    problem: str | None
    #: Other plugins that touch the same target, with the kind of their hook.
    others: tuple[str, ...]


def states() -> list[State]:
    """Every row for the installed release, which must be one of ``RELEASES``, as it is in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [State(hook, _problem(hook, HookRegistry), _others(hook, HookRegistry)) for hook in hooks_of(installed())]


def _problem(hook: Hook, registry: Any) -> str | None:
    try:
        target = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError) as error:
        cause = _import_error(hook.target) or error
        return f"not found in the installed SGLang ({cause}); reinstall sglang, or start without feather"
    missing = [name for name in hook.parameters if name not in inspect.signature(inspect.unwrap(target)).parameters]
    if missing:
        return f"has no parameter '{missing[0]}' in the installed SGLang; reinstall sglang, or start without feather"
    if not _registered(hook, registry):
        return (
            "Feather's hook is not registered; is feather-sglang installed, and does SGLANG_PLUGINS "
            "(if it is set) name 'feather'?"
        )
    if hook.target not in registry._patched:
        return "SGLang could not apply Feather's hook; its log says why"
    for kind, _, source in registry._hooks[hook.target]:
        if kind.value == "replace":
            return (
                f"replaced by plugin '{_plugin(source)}'; leave it out with SGLANG_PLUGINS=feather, "
                "or start without feather"
            )
    return None


def _import_error(target: str) -> Exception | None:
    """Why a module on the way to a target cannot be imported, which ``resolve_name`` does not tell."""
    parts = target.split(".")
    for length in range(1, len(parts)):
        name = ".".join(parts[:length])
        try:
            importlib.import_module(name)
        except Exception as error:
            return None if isinstance(error, ModuleNotFoundError) and error.name == name else error
    return None


def _registered(hook: Hook, registry: Any) -> bool:
    return any(function is hook.function for _, function, _ in registry._hooks.get(hook.target, []))


def _others(hook: Hook, registry: Any) -> tuple[str, ...]:
    """Also those that replace the class that the target is a method of."""
    return tuple(
        f"plugin '{_plugin(source)}' ({kind.value}{'' if target == hook.target else ' ' + target.rsplit('.', 1)[-1]})"
        for target, registered in registry._hooks.items()
        if target == hook.target or hook.target.startswith(target + ".")
        for kind, function, source in registered
        if function is not hook.function
    )


def _plugin(source: Any) -> str:
    return source.plugin_name if source is not None else "another plugin"
