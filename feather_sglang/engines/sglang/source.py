"""The hooks' targets looked up in SGLang's source, which is parsed and never imported: any release, on any machine."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

from feather_sglang.engines.sglang.hooks import Hook, Reads, hooks_of, reads_of

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def problems(package: Path, release: str) -> list[str]:
    """What of the table for a release does not hold in a source tree, one line each.

    Args:
        package: the folder ``sglang``.
        release: one of ``RELEASES``.
    """
    found = [_hook_problem(package, hook) for hook in hooks_of(release)]
    return [problem for problem in found if problem is not None] + reads_problems(package, release)


def reads_problems(package: Path, release: str) -> list[str]:
    """The part of it that is not about hooks: what Feather reads."""
    found = [_reads_problem(package, reads) for reads in reads_of(release)]
    return [problem for problem in found if problem is not None]


def _hook_problem(package: Path, hook: Hook) -> str | None:
    node = _resolve(package, hook.target)
    if not isinstance(node, _Function):
        return f"{hook.target}: not found"
    every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    missing = [name for name in hook.parameters if name not in [each.arg for each in every]]
    return f"{hook.target}: has no parameter '{missing[0]}'" if missing else None


def _reads_problem(package: Path, reads: Reads) -> str | None:
    node = _resolve(package, reads.owner)
    if node is None:
        return f"{reads.owner}: not found"
    known = {each.attr for each in ast.walk(node) if _is_set_on_self(each)}
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            known.add(each.target.id)
        elif isinstance(each, ast.Assign):
            known.update(target.id for target in each.targets if isinstance(target, ast.Name))
        elif isinstance(each, _Function):
            known.add(each.name)
    missing = [name for name in reads.names if name not in known]
    return f"{reads.owner}: has no '{missing[0]}'" if missing else None


def _is_set_on_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _resolve(package: Path, target: str) -> ast.Module | ast.ClassDef | _Function | None:
    """The definition behind a dotted name, imported names followed; ``None`` if there is none."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        module = _module(package, ".".join(parts[:length]))
        if module is None:
            continue
        node: ast.Module | ast.ClassDef | _Function | None = module
        for number, name in enumerate(parts[length:]):
            imported = _imported(package, module, name) if number == 0 else None
            node = _defined(node, name) or imported
        return node
    return None


def _defined(node: ast.AST | None, name: str) -> ast.ClassDef | _Function | None:
    body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
    found = [each for each in body if isinstance(each, ast.ClassDef | _Function) and each.name == name]
    return found[-1] if found else None


def _imported(package: Path, module: ast.Module, name: str) -> ast.Module | ast.ClassDef | _Function | None:
    for each in module.body:
        if isinstance(each, ast.ImportFrom) and each.module is not None and each.level == 0:
            for alias in each.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    node = _resolve(package, f"{each.module}.{name if alias.name == '*' else alias.name}")
                    if node is not None:
                        return node
    return None


@lru_cache(maxsize=32)
def _module(package: Path, name: str) -> ast.Module | None:
    top, *below = name.split(".")
    if top != package.name:
        return None
    path = package.joinpath(*below)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text())
    return None
