"""Hooks of the scheduling pass. Each hands over to SGLang at once where Feather is not attached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from feather_sglang.engines.sglang.controller import Controller, controller_of, fell_back
from feather_sglang.engines.sglang.ranks import News


def around_get_new_batch_prefill(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """``Scheduler._get_new_batch_prefill_raw``: one scheduling pass, before every prefill and every decode step."""
    controller = controller_of(scheduler)
    if controller is None:
        return original(scheduler, *args, **kwargs)
    running_batch = kwargs.get("running_batch", scheduler.running_batch)
    controller.begin_pass()
    idle = controller.nothing_to_do(running_batch)
    # SGLang's own early exit, then: it still looks after its grammar queue, and walks nothing.
    running_batch.batch_is_full = running_batch.batch_is_full or idle
    prefill = False
    try:
        result = original(scheduler, *args, **kwargs)
        prefill = result[0] is not None  # the batch to prefill, and the running batch
        return result
    finally:
        if idle:
            running_batch.batch_is_full = False
        controller.end_pass(prefill, len(running_batch.reqs))


def around_get_new_batch_prefill_alone(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """The same to 0.5.15.post1, where the batch to prefill comes back alone and the running one is the scheduler's."""

    def with_running(*given: Any, **named: Any) -> tuple[Any, Any]:
        return original(*given, **named), scheduler.running_batch

    return around_get_new_batch_prefill(with_running, scheduler, *args, **kwargs)[0]


def around_calc_priority(
    original: Callable[..., Any], policy: Any, waiting_queue: list[Any], *args: Any, **kwargs: Any
) -> None:
    """``SchedulePolicy.calc_priority``: Feather's plan goes to the head of the queue, the rest keeps its order."""
    controller = controller_of(policy)
    if controller is None or not controller.order(waiting_queue, *args, **kwargs):
        fell_back(policy)
        original(policy, waiting_queue, *args, **kwargs)


def around_add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """``PrefillAdder.add_one_req``: refuse whoever comes after the plan, as if the budget had ended."""
    controller = Controller.in_pass
    if controller is None:
        return original(adder, req, *args, **kwargs)
    return controller.offer(original, adder, req, *args, **kwargs)


def around_broadcast(original: Callable[..., Any], data: list[Any] | None, *args: Any, **kwargs: Any) -> Any:
    """``broadcast_pyobj`` of the received requests, before each pass: rank 0 adds what it has to tell, all take it out.

    SGLang's registry hooks the function wherever it was imported, on every rank, so what others broadcast passes here,
    too. O(1), but for a copy of the requests received where there is something to tell.
    """
    controller = Controller.of_rank
    if controller is None:
        return original(data, *args, **kwargs)
    news = controller.tell() if data is not None else None
    if news is not None:
        data = [*(data or ()), news]
    received = original(data, *args, **kwargs)
    if received and isinstance(received[-1], News):
        controller.hear(received[-1])
        return received[:-1]
    return received
