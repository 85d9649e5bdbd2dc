"""Between one SGLang scheduler and Feather's: tells what happened, asks for the plan, and never raises.

Nothing is asked of SGLang's radix tree, and no hook sits where requests come, finish or are aborted: at each pass the
controller compares what SGLang holds with what it knows. While nothing changed that is two comparisons of lengths.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

from mypy_extensions import mypyc_attr

from feather_sglang.cht import chunk_hashes
from feather_sglang.engines.sglang.ranks import News, Speaker
from feather_sglang.engines.sglang.releases import prefix_len
from feather_sglang.scheduling import BatchingPolicy, FeatherScheduler, Plan, Settings
from feather_sglang.scheduling.decode_meter import DecodeMeter
from feather_sglang.scheduling.memory import Memory
from feather_sglang.scheduling.policies import make_policy
from feather_sglang.scheduling.scheduler import Stop
from feather_sglang.scheduling.state_file import StateFile

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_feather_controller"
_MATCHED = "waiting_queue_prefix_matched"
# Different failures whose traceback is logged. Each is logged once, but their texts may differ without end.
_MAX_LOGGED = 20
# Counts are reported so often at most.
_REPORT_S = 1.0

Reporter = Callable[["Controller"], None]


def controller_of(owner: Any) -> Controller | None:
    """The controller attached to an SGLang scheduler or policy, unless Feather is not chosen or not in charge."""
    controller: Controller | None = owner.__dict__.get(_ATTRIBUTE)
    return None if controller is None or controller.disabled else controller


def attached_to(owner: Any) -> Controller | None:
    """The same, in charge or not."""
    return owner.__dict__.get(_ATTRIBUTE)  # type: ignore[no-any-return]


def fell_back(policy: Any) -> None:
    """SGLang's own policy plans this pass: count it, if there is a controller, whether or not it has given up."""
    controller = attached_to(policy)
    if controller is not None:
        controller.fell_back()


@mypyc_attr(allow_interpreted_subclasses=True)
class Controller:
    """Feather's side of one SGLang ``Scheduler``; requests are known by their ``Req`` object.

    Args:
        scheduler: SGLang's ``Scheduler``, its policy and memory pools built.
        settings: Feather's settings.
        rank: tensor parallel rank. What rank 0 measures and loads, all ranks learn.
        ranks: how many there are.
        state: where a learned policy keeps what it has learned; for rank 0, loaded here.
    """

    #: The controller whose plan is being followed in this process right now.
    in_pass: ClassVar[Controller | None] = None
    #: The controller that speaks to other ranks, or hears rank 0, where there are several.
    of_rank: ClassVar[Controller | None] = None

    def __init__(
        self, scheduler: Any, settings: Settings, rank: int, state: StateFile | None = None, ranks: int = 1
    ) -> None:
        from sglang.srt.managers.schedule_policy import AddReqResult

        self.refusal = AddReqResult.OTHER
        self.failures = 0
        self.disabled = False
        self.why = ""  # it is disabled: "switched" or "failures"
        self.rank = rank
        self._scheduler = scheduler
        self._settings = settings
        self._core = self._new_core()
        self.counters = self._core.counters
        self._cached: dict[Any, tuple[int, int]] = {}  # prefilling request -> (outputs at admission, tokens cached)
        self._planned: set[Any] = set()
        self._admitted: list[Any] = []
        self.hook_s = 0.0  # seconds in Feather's part of all passes so far
        self._counted_s = 0.0  # of these, what the counters have
        self._began_s = 0.0
        self.passes = 0
        self._reporters: list[Reporter] = []
        self._report_at_s = math.inf
        self._next_place = 0
        self._places = array("q")  # of SGLang's queue, but for those in front
        self._in_front = 0  # requests at the head of SGLang's queue that a plan put there and SGLang left
        self._trace = _Trace(settings.trace, rank) if settings.trace else None
        self._logged: set[str] = set()
        self._alone = ranks == 1
        self._meter: DecodeMeter | None = None
        self._speaker: Speaker | None = None
        self._state: StateFile | None = None
        self._memory = Memory(state)
        policy = self._core.policy
        loaded = self._memory.begin(settings.policy, policy)
        self._equip(policy.snapshot() if loaded and ranks > 1 else None)

    def _equip(self, learned: Mapping[str, Any] | None) -> None:
        """What rank 0 does for the others, with these settings and this policy: it measures, tells and saves."""
        settings, learns = self._settings, self._core.policy.learns
        self._meter = self._speaker = self._state = None
        if self.rank or self.disabled:
            return
        self._state = self._memory.file_of(settings.policy)
        if learns or settings.max_wait_s:
            self._speaker = Speaker(bool(settings.max_wait_s), learned, self._core.now_s)
        if learns:
            # A step more where SGLang processes a batch's result while the next batch runs.
            self._meter = DecodeMeter(settle=1 + bool(getattr(self._scheduler, "enable_overlap", False)))

    def attach(self) -> None:
        """Let the hooks find this controller."""
        for owner in (self._scheduler, self._scheduler.policy):
            setattr(owner, _ATTRIBUTE, self)
        if not self._alone:
            Controller.of_rank = self
        self._hide_matches()

    def _hide_matches(self) -> None:
        # SGLang would take the waiting requests' match lengths for known, and its load metrics would count no hits.
        setattr(self._scheduler.policy, _MATCHED, lambda waiting_queue: False)

    # ------------------------------------------------------- changes at run time

    @property
    def core(self) -> FeatherScheduler:
        """The engine-neutral scheduler. Another one after a failure, or when Feather hands over."""
        return self._core

    @property
    def settings(self) -> Settings:
        """The settings in force."""
        return self._settings

    def look(self) -> None:
        """Take note of who waits by now. Between two passes, and on every rank, since all must know the same."""
        try:
            if not self.disabled:
                self._observe_waiting()
        except Exception:
            self._failed("looking for changes")

    def hand_over(self) -> None:
        """From the next pass on SGLang's own policy decides. Between two passes, on every rank."""
        self._keep()
        self._start_afresh()
        self.disabled, self.why = True, "switched"
        self._equip(None)
        self._scheduler.policy.__dict__.pop(_MATCHED, None)
        self.report()

    def take_over(self, settings: Settings) -> None:
        """From the next pass on Feather decides, with this policy, whether or not it did before. On every rank.

        What runs and waits then is found by comparing, as ever; those that wait keep SGLang's order.

        Raises:
            SettingsError: the policy cannot be built; nothing has changed.
        """
        policy, learned = self._core.policy, None
        if settings.policy != self._settings.policy:
            policy = self._build(settings)
            if not self._memory.resume(settings.policy, policy):
                learned = self._stored(settings)
            self._keep()
        elif self._speaker is not None:
            learned = self._speaker.untold
        self.failures, self.disabled, self.why = 0, False, ""
        self._change(settings, policy, learned)
        self._hide_matches()
        self.report()

    def configure(self, settings: Settings, *, rebuild: bool) -> None:
        """Go on with these settings, which name the same policy. Between two passes, on every rank.

        Args:
            settings: the new ones.
            rebuild: whether the policy depends on what changed. What it has learned stays, and trials begin anew.

        Raises:
            ValueError: the policy cannot be built with them; nothing has changed.
        """
        policy = self._core.policy
        if rebuild:
            learned, policy = policy.snapshot(), self._build(settings)
            policy.restore(learned)
        self._change(settings, policy, self._speaker.untold if self._speaker is not None else None)

    def _change(self, settings: Settings, policy: BatchingPolicy, learned: Mapping[str, Any] | None) -> None:
        self._core.reconfigure(settings, policy)
        self._settings = settings
        self._equip(learned)

    def _build(self, settings: Settings) -> BatchingPolicy:
        return make_policy(settings, self._scheduler.max_running_requests)

    def _stored(self, settings: Settings) -> Mapping[str, Any] | None:
        """What the state file has of a policy. Rank 0 alone has the file, and tells the others."""
        try:
            return self._memory.load(settings.policy, lambda: self._build(settings))
        except Exception:
            self._lost("loading what was learned")
            return None

    def _keep(self) -> None:
        """What the policy has learned, since it is not in charge for a while."""
        with suppress(Exception):  # one that cannot say what it has learned must be left, too
            self._memory.keep(self._settings.policy, self._core.policy, time.monotonic())

    # --------------------------------------------------------------- the pass

    def begin_pass(self) -> None:
        """A scheduling pass begins; whatever ran before it is over."""
        self.passes += 1
        self._began_s = time.perf_counter()
        try:
            if self._meter is not None:
                self._meter.begin(self._began_s)
        except Exception:
            self._lost("measuring")
            self._meter = None
        if self._alone and self._speaker is not None:
            news = self.tell()
            if news is not None:
                self.hear(news)

    def tell(self) -> News | None:
        """What rank 0 has to tell all ranks, itself included; ``None`` on the others, or if there is nothing."""
        try:
            return self._speaker.news() if self._speaker is not None else None
        except Exception:
            self._lost("telling the other ranks")
            self._speaker = None
            return None

    def hear(self, news: News) -> None:
        """Rank 0 has told this; every rank hears it between the same two passes."""
        core = self._core
        try:
            core.tick(news.now_s)
            if news.learned is not None:
                core.policy.restore(news.learned)
            for interval, reward, seconds in news.rewards:
                core.policy.learn(interval, reward, seconds)
        except Exception:
            self._failed("learning")
        try:
            if self._state is not None and news.rewards:
                self._state.maybe_save(time.monotonic(), self._snapshot)
        except Exception:
            self._lost("saving what was learned")
            self._state = None

    def nothing_to_do(self, running_batch: Any) -> bool:
        """Whether the plan is still "admit nobody". O(1) if nothing changed, whatever waits."""
        scheduler = self._scheduler
        if (
            running_batch.batch_is_full
            or not running_batch.reqs
            or not scheduler.waiting_queue
            or scheduler.chunked_req is not None
        ):
            if not scheduler.waiting_queue:
                self._note_leavers(running_batch)
            return False
        try:
            self._observe(running_batch)
            return self._core.unchanged()
        except Exception:
            self._failed("looking for changes")
            return False
        finally:
            self.hook_s += time.perf_counter() - self._began_s

    def order(self, waiting_queue: list[Any], running_batch: Any = None, *_: Any, **__: Any) -> bool:
        """Plan this pass and put the plan first in the queue; ``False`` to leave the pass to SGLang."""
        scheduler = self._scheduler
        running_batch = scheduler.running_batch if running_batch is None else running_batch
        started = time.perf_counter()
        try:
            self._observe(running_batch)
            slots = scheduler.max_running_requests - len(running_batch.reqs) - (scheduler.chunked_req is not None)
            plan = self._core.plan(slots, self._token_budget())
            self._planned = set(plan.order)
            if self._trace is not None:
                self._trace.planned(plan)
            if waiting_queue[: len(plan.order)] != plan.order:
                self._put_first(plan.order, waiting_queue)
                self._in_front = len(plan.order)
            elif len(plan.order) > self._in_front:  # they stand there already
                del self._places[: len(plan.order) - self._in_front]
                self._in_front = len(plan.order)
        except Exception:
            self._failed("planning")
            return False
        finally:
            self.hook_s += time.perf_counter() - started
        Controller.in_pass = self
        return True

    def offer(self, add_one_req: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang offers a request: refuse it unless the plan names it, and note whether it was admitted.

        On an empty batch anybody may start, whatever the plan.
        """
        try:
            chosen = adder.can_run_list
            refused = req not in self._planned and bool(chosen or adder.running_batch.reqs)
        except Exception:
            self._failed("answering an offer")
            return add_one_req(adder, req, *args, **kwargs)
        if refused:
            return self.refusal
        result = add_one_req(adder, req, *args, **kwargs)
        if chosen and chosen[-1] is req:
            self._admitted.append(req)
        return result

    def end_pass(self, prefill: bool, running: int) -> None:
        """Tell Feather what SGLang really admitted, if a plan was asked for, and count.

        Args:
            prefill: whether SGLang prefills next, instead of decoding.
            running: requests in the running batch.
        """
        if self._meter is not None:
            self._measure(self._meter, prefill, running)
        if Controller.in_pass is self:
            Controller.in_pass = None
            started = time.perf_counter()
            self._close_plan()
            self.hook_s += time.perf_counter() - started
        try:
            self._count(prefill, running)
        except Exception:
            self._lost("counting")

    def _close_plan(self) -> None:
        core = self._core
        admitted, self._admitted = self._admitted, []
        try:
            core.confirm(admitted)
            for req in admitted:
                if req in self._planned:
                    self._in_front -= 1
                else:
                    core.admit(req)  # on an empty batch, outside the plan
                self._cached[req] = (len(req.output_ids), -1)
            stopped = core.last_stop is Stop.POLICY
            self.counters.decided(self._settings.policy, len(admitted), stopped, core.tree.num_active)
        except Exception:
            self._failed("closing a pass")
            return
        if self._trace is not None and admitted:
            try:
                self._trace.write(admitted, self)
            except Exception:
                self._lost("writing the trace")
                self._trace = None

    def _measure(self, meter: DecodeMeter, prefill: bool, running: int) -> None:
        """Where the batch is about to change, what it decoded is the reward of the decisions that formed it."""
        try:
            measured = meter.take() if self._admitted else None
            if measured is not None and self._speaker is not None:
                self._speaker.reward(self._core.interval, *measured)
                self.counters.reward = measured[0]
            meter.end(prefill, running)
        except Exception:
            self._lost("measuring")
            self._meter = None

    def _snapshot(self) -> Mapping[str, Any]:
        return self._memory.owned(self._settings.policy, self._core.policy)

    def _put_first(self, order: list[Any], queue: list[Any]) -> None:
        """Move the planned requests to the head; the others keep their order. O(log W) a request, and moving pointers.

        A walk over the queue would touch every request, which costs more than all the rest of a pass. SGLang only ever
        appends, so each request gets an ascending number at the end of the queue, and the numbers of the queue, but
        for what an earlier plan put first and SGLang left there, stand in an array of their own.
        """
        back = queue[: self._in_front]
        try:
            self._move(order, back, queue)
        except Exception:
            # Whatever went wrong, nobody may be missing from SGLang's queue.
            there = set(queue)
            queue[:0] = [req for req in dict.fromkeys((*back, *order)) if req not in there]
            raise

    def _move(self, order: list[Any], back: list[Any], queue: list[Any]) -> None:
        places = self._places
        del queue[: len(back)]
        self._in_front = 0
        for req in back:
            at = bisect_left(places, req._feather_place)
            queue.insert(at, req)
            places.insert(at, req._feather_place)
        found = [bisect_left(places, req._feather_place) for req in order]
        if len(places) != len(queue) or any(
            at >= len(queue) or queue[at] is not req for at, req in zip(found, order, strict=True)
        ):
            planned = set(order)  # somebody else has reordered the queue
            queue[:] = [req for req in queue if req not in planned]
            self._number_anew(queue)
        else:
            for at in sorted(found, reverse=True):
                del queue[at], places[at]
        queue[:0] = order

    def _number(self, requests: list[Any]) -> None:
        """Give numbers to requests at the end of the queue."""
        for req in requests:
            req._feather_place = self._next_place
            self._places.append(self._next_place)
            self._next_place += 1

    def _number_anew(self, queue: list[Any]) -> None:
        self._places = array("q")
        self._in_front = 0
        self._number(queue)

    def _check_order(self, queue: list[Any]) -> None:
        """Assert that the numbers are those of the queue behind what was put in front. O(W); for tests."""
        places = [req._feather_place for req in queue[self._in_front :]]
        assert places == sorted(places) == list(self._places) and self._in_front >= 0

    # --------------------------------------------------------------- counting

    def _count(self, prefill: bool, running: int) -> None:
        """What this pass took, and the decode step that follows it. O(1), whatever waits."""
        if self.hook_s != self._counted_s:
            self.counters.pass_s.add(self.hook_s - self._counted_s)
            self._counted_s = self.hook_s
        if running and not prefill:
            self.counters.decodes(running, self._core.tree.common_depth)
        if self._began_s >= self._report_at_s:
            self.report()

    def counts(self) -> dict[str, int | float]:
        """What was counted since the start, whether or not anybody reports it. O(1)."""
        if self._state is not None:
            self.counters.state_saves = self._state.saves
        return {**self.counters.totals(), "exploration_share": self._core.policy.exploration_share}

    @property
    def policy(self) -> str:
        """Name of the batching policy that decides now."""
        return self._settings.policy

    @property
    def waiting(self) -> int:
        """Requests in SGLang's waiting queue."""
        return len(self._scheduler.waiting_queue)

    @property
    def shared_tokens(self) -> int:
        """Tokens that all running requests share, in whole chunks; 0 with fewer than two."""
        tree = self._core.tree
        return tree.common_depth * self._settings.chunk_size if tree.num_active > 1 else 0

    def report_to(self, reporter: Reporter) -> None:
        """Call it about once a second while passes go on, and when Feather gives up. It is dropped if it raises."""
        self._reporters.append(reporter)
        self._report_at_s = 0.0

    def report(self) -> None:
        """Report now."""
        self._report_at_s = time.perf_counter() + _REPORT_S if self._reporters else math.inf
        for reporter in list(self._reporters):
            try:
                reporter(self)
            except Exception:
                self._lost("reporting what it counted")
                self._reporters.remove(reporter)

    def fell_back(self) -> None:
        """SGLang's own policy plans this pass."""
        self.counters.fallback_passes += 1
        if self.disabled and time.perf_counter() >= self._report_at_s:  # no pass of Feather's ends any more
            self.report()

    # ------------------------------------------------------- what has changed

    def _note_leavers(self, running_batch: Any) -> None:
        """With nobody waiting no plan looks for changes, and those who left would still count. O(1) if none did."""
        chunked = self._scheduler.chunked_req is not None
        if self._core.tree.num_active != len(running_batch.reqs) + chunked:
            try:
                self._observe(running_batch)
            except Exception:
                self._failed("looking for changes")

    def _observe(self, running_batch: Any) -> None:
        self._observe_waiting()
        core = self._core
        chunked = self._scheduler.chunked_req
        if core.tree.num_active != len(running_batch.reqs) + (chunked is not None):
            running = dict.fromkeys(running_batch.reqs)
            if chunked is not None:
                running[chunked] = None
            for req in [req for req in core.active if req not in running]:
                if req in self._cached:  # it finished with its first output: its prompt is cached all the same
                    self._note_progress(req)
                self._leaves(req)
            for req in running:
                self._is_running(req)
        for req in list(core.computing):
            self._note_progress(req)

    def _observe_waiting(self) -> None:
        core, waiting = self._core, self._scheduler.waiting_queue
        # New and retracted requests are at the end of SGLang's queue: it only ever appends.
        at = len(waiting)
        while at and not (waiting[at - 1] in core and not core.tree.is_active(waiting[at - 1])):
            at -= 1
        for req in waiting[at:]:
            self._starts_to_wait(req)
        self._number(waiting[at:])
        if core.tree.num_waiting != len(waiting):
            still = set(waiting)
            for req in [req for req in core.waiting if req not in still]:
                self._leaves(req)
            for req in waiting:
                self._starts_to_wait(req)
            self._number_anew(waiting)

    def _starts_to_wait(self, req: Any) -> None:
        core = self._core
        if req not in core:
            # Embeddings given by the client have placeholder ids, equal for all: they share nothing that is known.
            tokens = () if getattr(req, "input_embeds", None) is not None else req.origin_input_ids
            hashes = chunk_hashes(tokens, self._settings.chunk_size, namespace=namespace_of(req))
            core.arrive(req, hashes, len(req.origin_input_ids))
        elif core.tree.is_active(req):
            core.retract(req)
            self._cached.pop(req, None)

    def _is_running(self, req: Any) -> None:
        """Adopt what was admitted while Feather was not in charge."""
        if req not in self._core:
            self._starts_to_wait(req)
        if not self._core.tree.is_active(req):
            self._core.admit(req)
            self._cached[req] = (len(req.output_ids), -1)

    def _leaves(self, req: Any) -> None:
        self._core.leave(req, len(req.output_ids))
        self._cached.pop(req, None)

    def _note_progress(self, req: Any) -> None:
        outputs, cached = self._cached[req]
        if len(req.output_ids) > outputs:  # SGLang caches a prompt together with its first output
            self._core.progress(req, None)
            del self._cached[req]
        elif (length := prefix_len(req)) > cached:  # matched at admission, or a chunk of its prefill was cached
            self._cached[req] = (outputs, length)
            self._core.progress(req, length)

    def _token_budget(self) -> int:
        budget: int = self._scheduler.max_prefill_tokens
        chunk = self._scheduler.chunked_prefill_size
        return min(budget, chunk) if chunk is not None and chunk > 0 else budget

    # ---------------------------------------------------------------- failing

    def _new_core(self) -> FeatherScheduler:
        scheduler = self._scheduler
        return FeatherScheduler(
            self._settings, scheduler.max_running_requests, kv_tokens=scheduler.max_total_num_tokens
        )

    def _failed(self, doing: str) -> None:
        """Called in an ``except`` clause: Feather starts afresh, and what it has left undone is SGLang's policy's.

        That is this pass, unless it failed before it was asked for a plan, or after the plan was followed. All ranks
        come here together: what they do is a function of the same events.
        """
        Controller.in_pass = None
        self.failures += 1
        self.counters.failures += 1
        self._log(f"Feather failed while {doing}; it starts afresh, and what it left undone SGLang's own policy does.")
        if self.failures >= self._settings.max_failures and not self.disabled:
            self.disabled, self.why = True, "failures"
            logger.error(
                "Feather failed %d times and is off until the server is restarted, or POST /feather/policy names one "
                "of its policies.",
                self.failures,
            )
        self._start_afresh()

    def _start_afresh(self) -> None:
        """Forget every request: the next pass finds them anew."""
        learned, now_s = self._core.policy, self._core.now_s
        self._core = self._new_core()
        self._core.counters = self.counters
        self._core.tick(now_s)
        with suppress(Exception):  # a policy that cannot say what it has learned starts afresh
            self._core.policy.restore(learned.snapshot())
        self._cached = {}
        self._planned = set()
        self._admitted = []
        self._places = array("q")
        self._in_front = 0
        if self.disabled:
            self.report()

    def _lost(self, doing: str) -> None:
        """Called in an ``except`` clause, for what only this rank does; decisions go on unchanged."""
        self._log(f"Feather failed while {doing}; it goes on without.")

    def _log(self, message: str) -> None:
        """Called in an ``except`` clause: with the traceback, the first time that this fails in this way."""
        failure = f"{message} {sys.exception()!r}"
        if failure not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(failure)
            logger.exception(message)


def namespace_of(req: Any) -> str:
    """What keeps KV apart besides the tokens: LoRA, ``extra_key`` and ``cache_salt`` (SGLang's radix keys)."""
    key = (getattr(req, "lora_id", None), getattr(req, "extra_key", None), getattr(req, "cache_salt", None))
    return "" if key == (None, None, None) else repr(key)


class _Trace:
    """One line of JSON for each pass that admitted somebody. For debugging and tests."""

    def __init__(self, path: str, rank: int) -> None:
        name = path if rank == 0 else f"{path}.rank{rank}"
        self._file = Path(name).open("a", buffering=1)  # noqa: SIM115  # open as long as the server runs
        self._digest = 0  # of all plans so far, those that admit nobody included

    def planned(self, plan: Plan) -> None:
        decided = " ".join([plan.stop.name, *[str(req.rid) for req in plan.order]])  # type: ignore[attr-defined]
        self._digest = crc32(decided.encode(), self._digest)

    def write(self, admitted: list[Any], controller: Controller) -> None:
        core = controller._core
        record = {
            "pass": controller.passes,
            "hook_s": round(controller.hook_s, 6),
            "time_s": round(time.perf_counter(), 6),
            "admitted": [req.rid for req in admitted],
            "active": core.tree.num_active,
            "waiting": core.tree.num_waiting,
            "common_depth": core.tree.common_depth,
            "stop": core.last_stop.name.lower(),
            "digest": self._digest,
        }
        self._file.write(json.dumps(record) + "\n")
