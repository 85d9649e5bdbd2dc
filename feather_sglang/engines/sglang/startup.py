"""Hooks that run once, at start: arguments in the launching process, the scheduler in each scheduler process."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import logging
import platform
from collections.abc import Callable
from typing import Any

import feather_sglang
from feather_sglang import compiling
from feather_sglang.engines.sglang import arguments, metrics, releases
from feather_sglang.engines.sglang.controller import Controller
from feather_sglang.engines.sglang.log_line import LogLine
from feather_sglang.engines.sglang.timed import TimedController
from feather_sglang.engines.sglang.weights import weight_tokens
from feather_sglang.scheduling import Settings, SettingsError
from feather_sglang.scheduling.state_file import StateFile

logger = logging.getLogger(__name__)


def after_add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    """``ServerArgs.add_cli_args``: our flags come after SGLang's own."""
    arguments.add_arguments(parser)
    arguments.refuse_misspelt_flags(parser)


def before_from_cli_args(_cls: type, args: argparse.Namespace, *_: Any, **__: Any) -> None:
    """``ServerArgs.from_cli_args``: refuse what cannot work before any process is spawned."""
    arguments.export_arguments(args)
    if args.schedule_policy != arguments.POLICY_NAME:
        return
    problem = _first_problem(args)
    if problem is not None:
        arguments.refuse(problem)
    if getattr(args, "tokenizer_worker_num", 1) > 1:
        logger.warning(
            "Feather: with --tokenizer-worker-num above 1 the server has no /feather endpoints, since SGLang loads no "
            "plugins in the workers that serve HTTP."
        )


def around_init_schedule_policy(original: Callable[..., Any], scheduler: Any) -> Any:
    """``Scheduler.init_schedule_policy``: SGLang builds its own policy, as the fallback, and Feather is attached."""
    if scheduler.schedule_policy != arguments.POLICY_NAME:
        return original(scheduler)
    problem = _first_problem(scheduler.server_args)
    if problem is not None:
        raise RuntimeError(f"feather-sglang: {problem}")
    parallel = releases.parallel(scheduler)
    rank = parallel.tp_rank
    settings = _own_files(arguments.load_settings(), parallel.dp_rank)
    scheduler.schedule_policy = settings.fallback_policy
    result = original(scheduler)
    if getattr(scheduler.tree_cache, "disable", True):
        logger.warning(
            "Feather: the radix cache is disabled, so there is no prefix to share: requests are served first come, "
            "first served."
        )
        return result
    if not settings.weight_tokens:  # on every rank alike
        settings = dataclasses.replace(settings, weight_tokens=weight_tokens(scheduler))
    try:
        state = _state_file(scheduler, settings) if rank == 0 else None
        controller = (TimedController if settings.trace else Controller)(
            scheduler, settings, rank, state, parallel.tp_size
        )
    except (OSError, SettingsError) as error:
        raise RuntimeError(f"feather-sglang: {error}") from error
    controller.attach()
    if rank == 0:
        _report(controller, scheduler, settings)
    logger.info(
        "Feather is scheduling: feather-sglang %s (%s), sglang %s, slots %d, fallback %s, %s",
        feather_sglang.__version__,
        "compiled" if compiling.is_compiled() else "plain Python",
        importlib.metadata.version("sglang"),
        scheduler.max_running_requests,
        settings.fallback_policy,
        settings,
    )
    return result


def _report(controller: Controller, scheduler: Any, settings: Settings) -> None:
    """To SGLang's metrics, where they are on, and to the log."""
    exporter = metrics.exporter(scheduler)
    if exporter is not None:
        controller.report_to(exporter)
    if settings.log_interval_s:
        controller.report_to(LogLine(settings.log_interval_s))


def _own_files(settings: Settings, dp_rank: int | None) -> Settings:
    """With data parallelism each rank has a scheduler, and files, of its own."""
    if not dp_rank:
        return settings
    own: dict[str, Any] = {
        name: f"{path}.dp{dp_rank}" for name in ("state", "trace") if (path := getattr(settings, name))
    }
    return dataclasses.replace(settings, **own)


def _state_file(scheduler: Any, settings: Settings) -> StateFile | None:
    if not settings.state:
        return None
    import torch

    gpu = torch.cuda.is_available()
    identity = {
        "model": str(scheduler.server_args.model_path),
        "hardware": torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU",
    }
    return StateFile(settings.state, settings.state_period_s, identity)


def _first_problem(args: Any) -> str | None:
    from feather_sglang.engines.sglang import hooks  # the table names this module

    unsupported = arguments.unsupported(args)
    if unsupported is not None:
        return unsupported
    try:
        settings = arguments.load_settings()
        unsupported = arguments.unsupported_policy(settings)
    except SettingsError as error:
        return str(error)
    if unsupported is not None:
        return unsupported
    found = hooks.problems()
    return found[0] if found else None
