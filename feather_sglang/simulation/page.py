"""The report page of ``replay --html``: one file that needs no other."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from string import Template
from typing import Any

from feather_sglang.simulation import report
from feather_sglang.simulation.metrics import Result
from feather_sglang.simulation.recommend import Advice
from feather_sglang.simulation.workload import Node, Workload

#: Rows of the tree of prefixes.
_HEAVIEST = 24

_PAGE = Template("""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2530; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
p { margin: .4rem 0 } .note { color: #5b6673 } .scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #e2e6eb; white-space: nowrap }
th { color: #5b6673; font-weight: 600 } th:first-child, td:first-child { text-align: left }
.best { background: #eaf1f8; color: #1d2530; font-weight: 600 }
table.tree td:first-child { white-space: pre } table.tree td.bar { width: 220px; text-align: left }
.bar div { background: #3b6ea5; height: 12px; min-width: 1px }
dt { font-family: ui-monospace, monospace; font-weight: 600; margin-top: .6rem } dd { margin: 0 0 0 1.2rem }
img { max-width: 100%; height: auto }
</style></head><body>
<h1>$title</h1>
<p class="note">$about</p>
<p><strong>Every figure on this page is simulated</strong>, from the lengths, arrivals and shared prefixes of the trace
and a model of the device; none was measured on it.</p>
<h2>Recommended settings</h2>
<dl>$advice</dl>
<h2>What each policy gives</h2>
<div class="scroll"><table>$policies</table></div>
<p class="note">TTFT: time to the first token. TPOT: time for each further one. Shared depth: tokens that all requests
of a decode batch share. Scheduling: time of scheduling passes beside that of prefills and decode steps.</p>
<p><img alt="bars for each policy: throughput, TTFT, TPOT, share from cache" src="$figure"></p>
<h2>How much sharing there is</h2>
<p>$sharing</p>
<p><img alt="how deep requests share, and where the shared tokens are" src="$depths"></p>
<h2>The heaviest prefixes</h2>
<p class="note">Each row is a run of tokens at which no request branches off, below the row it is indented under; the
bar shows how many prompt tokens need not be computed again because of it.</p>
<div class="scroll"><table class="tree">$tree</table></div>
</body></html>
""")


def page(workload: Workload, about: str, results: Sequence[Result], best: Result, advice: Sequence[Advice]) -> str:
    """The page as HTML; all text is escaped. Needs matplotlib."""
    return _PAGE.substitute(
        title=escape(f"Feather on {workload.name}"),
        about=escape(about),
        advice="".join(f"<dt>{escape(flag or 'nothing to set')}</dt><dd>{escape(why)}</dd>" for flag, why in advice),
        policies=_policies(results, best),
        figure=_data_url(report.figure(results, workload.name)),
        sharing=escape(_sharing(workload)),
        depths=_data_url(_depths(workload)),
        tree=_tree(workload),
    )


def _policies(results: Sequence[Result], best: Result) -> str:
    """A column for each policy: there are more figures than policies."""
    marks = [" class=best" if result is best else "" for result in results]
    head = "".join(f"<th{mark}>{escape(result.policy)}</th>" for result, mark in zip(results, marks, strict=True))
    rows = [f"<tr><th></th>{head}</tr>"]
    for name, *figures in zip(report.headings(), *map(report.cells, results), strict=True):
        cells = "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(figures, marks, strict=True))
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return "".join(rows)


def _sharing(workload: Workload) -> str:
    requests, prompt = workload.requests, workload.prompt_tokens
    output = sum(request.output_tokens for request in requests) / len(requests)
    common = sum(node.length for node in workload.nodes if node.total == len(requests))
    sharing = sum(_shared_depth(request.nodes) > common for request in requests) / len(requests)
    return (
        f"{len(requests):,} requests in {requests[-1].arrival_s:,.0f} s, with {prompt / len(requests):,.0f} prompt and "
        f"{output:,.0f} output tokens on average. {workload.shared_tokens / prompt:.1%} of the prompt tokens were in "
        f"an earlier request too: the most that can come from cache. {common:,} tokens are common to all, which sets "
        f"nobody apart; {sharing:.1%} of the requests share more than that with another."
    )


def _shared_depth(nodes: Sequence[Node]) -> int:
    """Tokens that a request shares with any other."""
    return sum(node.length for node in nodes if node.total > 1)


def _saved(node: Node) -> int:
    return (node.total - 1) * node.length


def _heaviest(workload: Workload) -> list[Node]:
    """The nodes that save most, with all above them, in the order of a walk down the tree, heavier branches first."""
    chosen: dict[Node, None] = {}
    for node in sorted(workload.nodes, key=_saved, reverse=True):
        if len(chosen) >= _HEAVIEST or not _saved(node):
            break
        at: Node | None = node
        while at is not None and at not in chosen:
            chosen[at] = None
            at = at.parent
    order: list[Node] = []
    stack = sorted((node for node in chosen if node.parent is None), key=_saved)
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(sorted((child for child in chosen if child.parent is node), key=_saved))
    return order


def _tree(workload: Workload) -> str:
    nodes = _heaviest(workload)
    total = max(1, workload.shared_tokens)
    most = max((_saved(node) for node in nodes), default=1) or 1
    depths: dict[Node, int] = {}
    rows = ["<tr><th>tokens</th><th>requests</th><th>tokens each</th><th>saved</th><th>of all saved</th><th></th></tr>"]
    for node in nodes:
        depth = depths[node] = depths[node.parent] + 1 if node.parent is not None else 0
        place = f"{'    ' * depth}{node.start:,} to {node.start + node.length:,}"
        rows.append(
            f"<tr><td>{place}</td><td>{node.total:,}</td><td>{node.length:,}</td><td>{_saved(node):,}</td>"
            f"<td>{_saved(node) / total:.1%}</td>"
            f'<td class="bar"><div style="width:{100 * _saved(node) / most:.1f}%"></div></td></tr>'
        )
    return "".join(rows) if nodes else "<tr><td>No two requests share a prefix.</td></tr>"


def _depths(workload: Workload) -> Any:
    from matplotlib.figure import Figure

    depths = sorted(_shared_depth(request.nodes) for request in workload.requests)
    prompts = sorted(request.prompt_tokens for request in workload.requests)
    shares = [100 * (number + 1) / len(depths) for number in range(len(depths))]
    drawing = Figure(figsize=(11, 3.2), layout="constrained")
    left, right = drawing.subplots(1, 2)
    left.step([0, *prompts], [0, *shares], where="post", color="#b7cbe0", label="prompt")
    left.step([0, *depths], [0, *shares], where="post", color="#3b6ea5", label="of it shared with another request")
    left.set_xscale("symlog", linthresh=100)
    left.set_xlabel("tokens, at most")
    left.set_ylabel("requests, %")
    left.legend(frameon=False, fontsize=8, loc="upper left")
    saved = sorted((_saved(node) for node in workload.nodes if _saved(node)), reverse=True)
    running, curve = 0, [0.0]
    for each in saved:
        running += each
        curve.append(100 * running / max(1, workload.shared_tokens))
    right.plot(range(len(curve)), curve, color="#3b6ea5")
    right.set_xscale("symlog")
    right.set_xlabel("shared prefixes, heaviest first")
    right.set_ylabel("of all shared tokens, %")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0, 102)
        axis.set_xlim(left=0)
    return drawing


def _data_url(figure: Any) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
