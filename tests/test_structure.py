"""How the package is built, where a reader or an import depends on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hops

ROOT = Path(__file__).parents[1] / "minitrain"


def modules() -> dict[str, Path]:
    """Every module of the package, by its full name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ["minitrain", *path.relative_to(ROOT).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The modules that are imported as a module loads, and the names that are taken from them.

    Not what a function imports when it runs, nor what only a type checker sees.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an import that is relative to its package"
            yield node.module or "", tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for branch in node.orelse:
                yield from imports(ast.Module([branch], []))
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node)


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module → those of our modules that it imports; of `from package import x`, x if that is one.

    A package's own names (lazy ones, or what its file has) make it an import of the package.
    """
    graph: dict[str, set[str]] = {}
    for module, text in sources.items():
        targets = set()
        for name, taken in imports(ast.parse(text)):
            inner = {f"{name}.{each}" for each in taken} & sources.keys()
            targets |= inner
            if name in sources and (len(inner) < len(taken) or not taken):
                targets.add(name)
        graph[module] = targets - {module}
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """What is left when modules that import, or are imported by, none of the rest are taken away
    again and again."""
    left = set(graph)
    while True:
        imported = {target for module in left for target in graph[module] if target in left}
        inner = {module for module in imported if graph[module] & left}
        if inner == left:
            return sorted(left)
        left = inner


def test_no_imports_go_in_a_circle() -> None:
    sources = {module: path.read_text() for module, path in modules().items()}
    graph = import_graph(sources)
    assert "minitrain.comm.algorithms.ring" in graph["minitrain.comm.algorithms.choose"]
    assert sum(map(len, graph.values())) > 300
    assert cycle(graph) == []


def test_a_circle_of_imports_is_found_and_one_of_types_is_none() -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\n"
    late = "def f():\n    import a\n"
    assert cycle(import_graph({"a": "import b", "b": "from c import x", "c": "import a"})) == [
        *"abc"
    ]
    assert cycle(import_graph({"a": "try:\n    import p.b\nexcept E: pass", "p.b": guarded})) == []
    assert cycle(import_graph({"a": "from p import b", "p": late, "p.b": "import p"})) == []
    assert cycle(import_graph({"a": "from p import b", "p": "", "p.b": "import a"})) == ["a", "p.b"]


def test_the_way_from_an_all_reduce_to_a_send_is_short() -> None:
    """7 files and 18 functions; see benchmarks/hops.py."""
    found = hops.count("an 8 KB all_reduce on 2 ranks")
    assert "ThreadTransport.send" in found["comm/threads.py"]
    assert len(found) <= 7
    assert sum(map(len, found.values())) <= 18
