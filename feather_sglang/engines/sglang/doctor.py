"""Whether Feather can run in this environment: the table of hooks as it is here, versions, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feather_sglang.engines.sglang import hooks, source
from feather_sglang.engines.sglang.releases import installed

_PACKAGES = ("feather-sglang", "sglang", "torch", "flashinfer-python", "mmh3")
#: Packages without which no server starts here; flashinfer is for GPUs alone.
_NEEDED = ("feather-sglang", "sglang", "torch", "mmh3")


@dataclass(frozen=True)
class Report:
    """What was found.

    Args:
        versions: by name; ``None`` where it is not installed.
        gpu: its name, or ``none``.
        rows: the table of hooks.
        missing: what keeps Feather from running, a line each; empty if it can.
    """

    versions: dict[str, str | None]
    gpu: str
    rows: list[hooks.State]
    missing: list[str]

    def text(self) -> str:
        """For people."""
        lines = [f"{name} {version or 'not installed'}" for name, version in self.versions.items()]
        lines += [f"GPU {self.gpu}", ""]
        for state in self.rows:
            lines.append(f"{'ok' if state.problem is None else 'NOT OK':8}{state.hook.kind:8}{state.hook.target}")
            lines.append(f"{'':16}{state.hook.why}")
            lines += [f"{'':16}also hooked by {other}" for other in state.others]
        lines += ["", *([f"missing: {each}" for each in self.missing] or ["Feather can run."])]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {
                "target": state.hook.target,
                "kind": state.hook.kind,
                "why": state.hook.why,
                "ok": state.problem is None,
                "problem": state.problem,
                "also_hooked_by": list(state.others),
            }
            for state in self.rows
        ]
        return {"versions": self.versions, "gpu": self.gpu, "hooks": rows, "missing": self.missing}


def examine() -> Report:
    """Load SGLang's plugins in this process, as each of its servers' processes does, and look what came of it."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions.update({name: _version(name) for name in _PACKAGES})
    absent = [f"{name} is not installed; run: pip install {_how(name)}" for name in _NEEDED if versions[name] is None]
    gpu = _gpu() if versions["torch"] else "none"
    if absent:
        return Report(versions, gpu, [], absent)
    unknown = hooks.unknown_release()
    if unknown is not None:
        return Report(versions, gpu, [], [unknown])
    try:
        from sglang.srt.plugins import load_plugins
    except Exception as error:  # whatever SGLang's dependencies raise while they are imported
        return Report(versions, gpu, [], [f"sglang cannot be imported here: {type(error).__name__}: {error}"])
    logging.getLogger("sglang.srt.plugins.hook_registry").setLevel(logging.CRITICAL)  # the rows say it in one line
    load_plugins()
    rows = hooks.states()
    missing = [f"{state.hook.target}: {state.problem}" for state in rows if state.problem is not None]
    return Report(versions, gpu, rows, missing + _in_source())


def _in_source() -> list[str]:
    """What Feather reads of SGLang's objects, which no process has before it serves."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    return source.reads_problems(Path(next(iter(spec.submodule_search_locations))), installed())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _how(package: str) -> str:
    return "'feather-sglang[sglang]'" if package in ("sglang", "torch") else package


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
