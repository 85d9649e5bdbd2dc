"""A workload under several policies, a process each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from feather_sglang.scheduling import Settings
from feather_sglang.simulation.cost import StepCost
from feather_sglang.simulation.engine import Engine, EngineConfig
from feather_sglang.simulation.metrics import Result
from feather_sglang.simulation.profiles import Hardware, Model, load_pass_cost
from feather_sglang.simulation.workload import Workload

_POLL_S = 0.5
_finished: Any = None  # in a worker: finished requests of each run, shared with the parent


@dataclass(frozen=True)
class Setup:
    """What all policies have in common."""

    hardware: Hardware
    model: Model
    engine: EngineConfig
    settings: Settings = field(default_factory=Settings)


def run_one(
    workload: Workload, setup: Setup, policy: str, settings: Settings, progress: Callable[[int], None] | None = None
) -> Result:
    """One policy in this process."""
    if not settings.weight_tokens:
        settings = dataclasses.replace(settings, weight_tokens=setup.model.weight_tokens)
    steps = StepCost(setup.hardware, setup.model)
    engine = Engine(workload, setup.engine, steps, load_pass_cost(policy), policy, settings, progress)
    return engine.run().result(policy)


def run_all(
    make: Callable[[], Workload],
    setup: Setup,
    runs: Sequence[tuple[str, Settings]],
    progress: Callable[[Sequence[int]], None],
) -> list[Result]:
    """Several policies and settings side by side, results in the order asked for.

    Args:
        make: builds the workload; called in each process, so it must be picklable and give the same each time.
        setup: hardware, model and engine.
        runs: policies and their settings.
        progress: told twice a second how many requests each run has finished.
    """
    # Forking would copy whatever threads the caller has; spawned workers import this module and nothing else.
    context = get_context("spawn")
    finished = context.Array("q", len(runs), lock=False)
    workers = min(len(runs), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, context, initializer=_share, initargs=(finished,)) as pool:
        futures: list[Future[Result]] = [
            pool.submit(_work, make, setup, policy, settings, number) for number, (policy, settings) in enumerate(runs)
        ]
        try:
            while wait(futures, timeout=_POLL_S).not_done:
                progress(list(finished))
            results = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress([result.completed + result.refused for result in results])
    return results


def _share(finished: Any) -> None:
    global _finished  # noqa: PLW0603  # the only way to hand a worker shared memory
    _finished = finished


def _work(make: Callable[[], Workload], setup: Setup, policy: str, settings: Settings, number: int) -> Result:
    def progress(completed: int) -> None:
        _finished[number] = completed

    return run_one(make(), setup, policy, settings, progress)
