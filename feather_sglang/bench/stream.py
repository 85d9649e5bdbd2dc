"""Requests of any shape as real traffic: those of a simulated workload, with tokens and at their times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feather_sglang.bench import client
from feather_sglang.simulation.workload import Node, Workload


@dataclass(frozen=True)
class Stream:
    """A simulated workload's requests, for a real server.

    Args:
        workload: lengths, arrivals and who shares what with whom.
        arrivals: when they arrive, for a table.
        scale: of all lengths, prompts and outputs; nothing gets shorter than a token.
    """

    workload: Workload
    arrivals: str
    scale: float = 1.0

    @property
    def requests(self) -> int:
        """How many."""
        return len(self.workload.requests)

    @property
    def most_cached(self) -> float:
        """Prompt tokens that an earlier request had already, as a share of all. O(nodes of all requests)."""
        prompts = sum(self._tokens(node) for request in self.workload.requests for node in request.nodes)
        return 1 - sum(self._tokens(node) for node in self.workload.nodes) / prompts

    def client(self, folder: Path) -> list[str]:
        """Our client, which is SGLang's with a data set of its own."""
        path = folder / "requests.jsonl"
        with path.open("w") as file:
            for request in self.workload.requests:
                line = client.Line(
                    arrival_s=request.arrival_s,
                    blocks=[(node.number, self._tokens(node)) for node in request.nodes],
                    output_tokens=self._scaled(request.output_tokens),
                )
                file.write(json.dumps(line._asdict()) + "\n")
        return [client.__name__, "--dataset-name=custom", f"--dataset-path={path}"]

    def as_dict(self) -> dict[str, Any]:
        """What it is."""
        workload = self.workload
        return {"name": workload.name, "about": workload.about, "requests": self.requests, "scale": self.scale}

    def _tokens(self, node: Node) -> int:
        return self._scaled(node.length)

    def _scaled(self, tokens: int) -> int:
        return max(1, round(tokens * self.scale))
