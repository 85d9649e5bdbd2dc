"""Simulate what docs/paper.md shows and put the results into it (minutes): python scripts/paper_tables.py TRACE

TRACE is Mooncake's conversation trace.
"""

from __future__ import annotations

import functools
import subprocess
import sys

from markers import ROOT, fill

from feather_sglang.scheduling import Settings
from feather_sglang.simulation.cost import kv_tokens
from feather_sglang.simulation.engine import EngineConfig
from feather_sglang.simulation.metrics import Result
from feather_sglang.simulation.names import POLICIES
from feather_sglang.simulation.profiles import load_hardware, load_model
from feather_sglang.simulation.run import Setup, run_all
from feather_sglang.simulation.scenarios import make_scenario

_HARDWARE = ("RTX-6000-Ada", "A100-80G", "H100", "H200")
_TABLES = {
    "prefixes": tuple(f"prefix-{thousands}k" for thousands in (1, 2, 4, 8, 10)),
    "groups": ("paper-800x8",),
    "divergent": ("one-divergent",),
    "documents": ("leval-like", "longbench-like"),
    "nothing-shared": ("no-sharing",),
}
_PEERS = ("fcfs", "lpm", "dfs-weight")


def main() -> int:
    """Fill every table of the page."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    tables = {"trace": _replay(sys.argv[1])}
    busiest: list[tuple[float, float, str]] = []
    for name, scenarios in _TABLES.items():
        lines = [_line("scenario", "hardware", *POLICIES, "/ fcfs", "/ best peer")]
        for scenario in scenarios:
            for hardware in _HARDWARE:
                print(f"{scenario} on {hardware}", file=sys.stderr)
                results = _simulate(scenario, hardware)
                lines.append(_row(scenario, hardware, results))
                shares = [results[policy].scheduling_share for policy in ("dfs-weight", "feather-static")]
                busiest.append((shares[0], shares[1], f"{scenario:<16}{hardware:<14}"))
        tables[name] = "\n".join(lines)
    tables["scheduling"] = "\n".join(
        [
            f"{'scenario':<16}{'hardware':<14}{'dfs-weight':>12}{'feather-static':>16}",
            *(f"{place}{dfs:>12.2%}{feather:>16.2%}" for dfs, feather, place in sorted(busiest, reverse=True)[:10]),
        ]
    )
    return fill(ROOT / "docs" / "paper.md", tables)


def _simulate(scenario: str, hardware: str) -> dict[str, Result]:
    """As ``feather-sglang simulate`` with its defaults."""
    device, model = load_hardware(hardware), load_model("Llama-3-8B")
    slots = make_scenario(scenario).max_running or EngineConfig.max_running
    setup = Setup(device, model, EngineConfig(kv_tokens(device, model, 0.88), slots))
    runs = [(policy, Settings()) for policy in POLICIES]
    results = run_all(functools.partial(make_scenario, scenario), setup, runs, lambda finished: None)
    return {result.policy: result for result in results}


def _replay(trace: str) -> str:
    """As the command prints it, without its heading."""
    command = [sys.executable, "-m", "feather_sglang.cli", "replay", trace]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return "\n".join(done.stdout.splitlines()[2:])


def _row(scenario: str, hardware: str, results: dict[str, Result]) -> str:
    rates = {policy: result.output_tokens_per_s for policy, result in results.items()}
    feather = rates["feather-static"]
    peer = max(rates[policy] for policy in _PEERS)
    figures = [f"{rates[policy]:,.0f}" for policy in POLICIES]
    return _line(scenario, hardware, *figures, f"{feather / rates['fcfs']:.2f}", f"{feather / peer:.2f}")


def _line(scenario: str, hardware: str, *cells: str) -> str:
    widths = [max(10, len(policy) + 2) for policy in POLICIES] + [8, 13]
    return f"{scenario:<16}{hardware:<14}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
