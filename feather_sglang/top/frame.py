"""From what is known of a server to the lines of a frame."""

from __future__ import annotations

import textwrap

from rich.text import Text

from feather_sglang.top.client import View
from feather_sglang.top.state import Candidate, Group, Rates, Scheduler

_LABEL = 12
_BAR = 20
_GROUP_BAR = 30
_UNKNOWN = "-"
_NO_RATES = Rates({}, None, None)
_ALONE = ", no prefix shared by two"
_WHY = {"switched": "switched over by POST /feather/policy", "failures": "Feather is off after too many failures"}


def frame(view: View, url: str, width: int, height: int | None = None) -> list[Text]:
    """At most ``height`` lines of at most ``width`` cells.

    Where there is too little room, the smaller groups are left out first, then what stands below.
    """
    lines = [_line("", "feather-sglang top", f"  {url}" + ("" if height is None else "  (q quits)"), style="bold")]
    if view.error:
        since = f" for {view.silent_s:.0f} s" if view.silent_s >= 1 else ""
        lines.append(_line("", f"no answer{since}, trying again: {view.error}", style="bold red"))
    elif not view.schedulers:
        lines.append(_line("", "no scheduler of this server answered", style="yellow"))
    heads = [_head(number, view, width) for number in range(len(view.schedulers))]
    used = len(lines) + sum(map(len, heads))
    room = 1 + max(len(scheduler.groups) for scheduler, _ in view.schedulers) if view.schedulers else 0
    if height is not None and heads:
        room = min(room, (height - used) // len(heads))
    for head, (scheduler, _) in zip(heads, view.schedulers, strict=True):
        lines += head + _groups(scheduler.groups, room)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def _head(number: int, view: View, width: int) -> list[Text]:
    """All of a scheduler but its groups."""
    scheduler, known = view.schedulers[number]
    rates = known or _NO_RATES
    batch, counts = scheduler.batch, scheduler.counts
    lines = [Text()]
    if len(view.schedulers) > 1:
        lines.append(_line("", f"data parallel rank {number}", style="bold"))
    lines += [
        _planner(scheduler),
        _line(
            "batch",
            f"{batch.requests} of {scheduler.slots} slots [{_bar(batch.requests, scheduler.slots, _BAR)}], "
            f"{batch.shared_tokens:,} tokens shared by all, {batch.held} held",
        ),
        _line("waiting", f"{scheduler.waiting:,}" + ("" if scheduler.groups or not scheduler.waiting else _ALONE)),
        _line(
            "decode",
            f"{_per_s(rates, 'output_tokens', 'tokens/s')}, {_per_s(rates, 'decode_steps', 'steps/s')}, "
            f"{_share(rates.homogeneous)} of them homogeneous",
        ),
        _line(
            "passes",
            f"{_per_s(rates, 'passes', 'a second')}, {_number(rates.pass_ms, '.2f')} ms of Feather's each, "
            f"{_share(rates.per_s.get('pass_s_sum'))} of the time",
        ),
        _line("decisions", ", ".join(_count(scheduler, rates, name) for name in ("added", "stopped", "passed_over"))),
        _line("last stop", scheduler.last_stop),
        *_candidate(scheduler.best, width),
        _line(
            "learning",
            f"last reward {counts['reward']:,.1f} tokens/s, {counts['exploration_share']:.1%} of the decode time "
            f"on trials, state saved {counts['state_saves']:,} times",
        ),
        _line(
            "failures",
            f"{scheduler.failures} of {scheduler.settings.get('max_failures', _UNKNOWN)}, "
            f"{counts['fallback_passes']:,} passes by {scheduler.fallback_policy}, {counts['forced']:,} served by age",
        ),
    ]
    return lines


def _planner(scheduler: Scheduler) -> Text:
    if scheduler.scheduling == "feather":
        return _line("planned by", f"feather {scheduler.version}, policy {scheduler.policy}", style="green")
    why = _WHY.get(scheduler.why, scheduler.why)
    return _line("planned by", f"SGLang's {scheduler.scheduling}: {why}", style="yellow")


def _candidate(best: Candidate | None, width: int) -> list[Text]:
    if best is None:
        return [_line("next", "nobody waits")]
    verdict = "added" if best.admitted else "not added"
    lines = [
        _line(
            "next",
            f"{verdict}: {best.shared_tokens:,} tokens shared with the batch, {best.loses_tokens:,} lost, "
            f"{best.sharing} waiting share the rest, {best.rid}",
        )
    ]
    why = textwrap.wrap(best.why, max(width - _LABEL, 20), max_lines=3, placeholder=" ...")
    return lines + [_line(" " if number else "why", part) for number, part in enumerate(why)]


def _groups(groups: tuple[Group, ...], room: int) -> list[Text]:
    """A table of at most ``room`` lines."""
    if not groups or room < min(len(groups) + 1, 3):
        return []
    lines = [_line("groups", f"{'tokens':>10}{'waiting':>10}{'active':>10}")]
    most = max(group.waiting for group in groups)
    cut = len(groups) if len(groups) < room else room - 2
    for group in groups[:cut]:
        bar = _bar(group.waiting, most, _GROUP_BAR).rstrip(".")
        lines.append(_line(" ", f"{group.tokens:>10,}{group.waiting:>10,}{group.active:>10,}  {bar}"))
    if cut < len(groups):
        lines.append(_line(" ", f"{f'and {len(groups) - cut} more':>10}"))
    return lines


def _line(label: str, *parts: str, style: str = "") -> Text:
    """A label in its column, if there is one, and the text; the first part has the style."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if label:
        text.append(f"{label:<{_LABEL}}", "bold cyan")
    for number, part in enumerate(parts):
        text.append(_printable(part), "" if number else style)
    return text


def _printable(text: str) -> str:
    """Clients choose request ids, which must not move the cursor of who watches."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _bar(part: float, whole: float, length: int) -> str:
    full = min(length, round(length * part / whole)) if whole else 0
    return "#" * full + "." * (length - full)


def _number(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else f"{value:{form}}"


def _share(value: float | None) -> str:
    return _number(value, ".1%")


def _per_s(rates: Rates, name: str, unit: str) -> str:
    return f"{_number(rates.per_s.get(name), ',.1f')} {unit}"


def _count(scheduler: Scheduler, rates: Rates, name: str) -> str:
    return f"{name.replace('_', ' ')} {scheduler.counts[name]:,} ({_per_s(rates, name, '/s').replace(' ', '')})"
