"""README's hour of reading is an hour, and closes: nothing on it needs what isn't above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
HOUR = (ROOT / "README.md").read_text("utf-8").split("## Where to read")[1].split("The rooms")[0]
LIMIT = 1000


class Reading(NamedTuple):
    """The first lines of a file; all of them where there is no number."""

    path: str
    lines: int
    text: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".")


def readings(table: str) -> list[Reading]:
    """The rows of the list."""
    rows = re.findall(r"^\| `(\S+\.py)` \| (?:all|first (\d+)) \| .+ \|$", table, re.M)
    assert len(rows) == table.count(".py`")  # none is written in another way
    found = []
    for path, first in rows:
        text = (ROOT / path).read_text("utf-8")
        found.append(Reading(path, int(first or len(text.splitlines())), text))
    return found


def trusted(table: str) -> dict[str, str]:
    """Name → the row of the second table that has it."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.+) \|$", table, re.M)
    return {name: meaning for names, meaning in rows for name in re.findall(r"\w+", names)}


def statements(reading: Reading) -> list[ast.stmt]:
    """The statements that are read."""
    body = ast.parse(reading.text).body
    for node in body:
        inside = begin(node) <= reading.lines, (node.end_lineno or 0) <= reading.lines
        assert inside[0] == inside[1], f"{reading.path} is cut in the middle of line {node.lineno}"
    return [node for node in body if node.lineno <= reading.lines]


def begin(node: ast.stmt) -> int:
    """The first line of a statement, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def defined(nodes: list[ast.stmt]) -> set[str]:
    """The names that some statements of a module define; not those that they import."""
    names = set()
    for node in nodes:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        parts = [x for target in targets if target is not None for x in ast.walk(target)]
        names |= {x.id for x in parts if isinstance(x, ast.Name)}
    return names


def imported(nodes: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """(module, name) of what is taken from minitrain, wherever; `mt.X` is X of minitrain."""
    for node in (inner for statement in nodes for inner in ast.walk(statement)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minitrain"):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert not alias.name.startswith("minitrain."), "import names, not modules"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("mt", "minitrain"):
            yield "minitrain", node.attr


def missing(table: str) -> list[str]:
    """What is needed, and is neither read before nor taken on trust."""
    known = {("", name) for name in trusted(table)}
    found = []
    for reading in readings(table):
        nodes = statements(reading)
        for module, name in imported(nodes):
            if not {("", name), (module, name)} & known:
                found.append(f"{reading.path} needs {name} of {module}")
        known |= {(reading.module, name) for name in defined(nodes)}
        # Of the rest of the file only helpers, whose names say enough.
        later = defined(ast.parse(reading.text).body) - defined(nodes)
        names = [x for node in nodes for x in ast.walk(node) if isinstance(x, ast.Name)]
        used = {x.id for x in names if isinstance(x.ctx, ast.Load)}
        found += [
            f"{reading.path} needs {name}, which comes after what is read"
            for name in sorted(used & later)
            if not name.startswith("_")
        ]
    return found


def test_the_hour_is_an_hour() -> None:
    """With a line for each row of what is taken on trust."""
    rows = set(trusted(HOUR).values())
    assert len(rows) <= 15
    lines = sum(reading.lines for reading in readings(HOUR)) + len(rows)
    assert 800 < lines <= LIMIT, f"{lines} lines"
    for reading in readings(HOUR):
        assert 0 < reading.lines <= len(reading.text.splitlines()), reading.path


def test_the_hour_closes() -> None:
    assert missing(HOUR) == []


def test_send_and_receive_come_first_and_nothing_is_left_out() -> None:
    paths = [reading.path for reading in readings(HOUR)]
    assert paths[0] == "examples/ring.py"
    assert len(set(paths)) == len(paths)
    for name in ("engine", "ring", "data", "regions", "tensor", "compare"):
        assert any(path.endswith(f"/{name}.py") for path in paths), name


def test_what_is_taken_on_trust_is_needed_and_is_there() -> None:
    needed = {name for reading in readings(HOUR) for _, name in imported(statements(reading))}
    assert trusted(HOUR).keys() <= needed


@pytest.mark.parametrize("name", sorted(trusted(HOUR)))
def test_a_table_without_a_trusted_name_does_not_close(name: str) -> None:
    table = re.sub(rf"^(\| .*)`{name}`", r"\1`other`", HOUR, flags=re.M)
    assert any(f"needs {name} of" in line for line in missing(table))


def test_a_list_in_another_order_or_with_less_of_a_file_does_not_close() -> None:
    rows = [line for line in HOUR.splitlines() if ".py`" in line]
    for row in rows:
        if "function.py" in row or "cuts.py" in row or "regions.py" in row:
            table = HOUR.replace(row, "").replace(rows[-1], f"{rows[-1]}\n{row}")
            assert missing(table), row
    shorter = re.sub(r"(engine.py` \| first) \d+", r"\1 94", HOUR)
    assert "minitrain/autograd/engine.py needs accumulate, which comes after what is read" in (
        missing(shorter)
    )
    with pytest.raises(AssertionError, match="in the middle"):
        missing(re.sub(r"(engine.py` \| first) \d+", r"\1 60", HOUR))
