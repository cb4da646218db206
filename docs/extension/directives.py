"""Directives of the pages: a strategy's card, a picture, a command with its output, faults."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from click.testing import CliRunner
from docutils import nodes
from docutils.parsers.rst import Directive

from extension.holding import holding
from minitrain.oracle.faults import FAULTS, shows_on
from minitrain.schedules.svg import svg
from minitrain_cli.main import main

LINE = re.compile(r"^([A-Z][A-Za-z ]+): +(.*)$")


class Card(Directive):
    """`{card} zero`: the six lines that open a strategy's file, and what else it says."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The title, a list of the lines, the rest as paragraphs."""
        name = self.arguments[0]
        module = importlib.import_module(f"minitrain.parallel.{name}")
        title, card, *rest = (inspect.getdoc(module) or "").split("\n\n")
        listed = nodes.field_list()
        for word, text in lines_of(card):
            body = nodes.field_body("", nodes.paragraph("", text))
            listed += nodes.field("", nodes.field_name("", word), body)
        return [_paragraph(title), listed, *(_paragraph(text) for text in rest),
                _source(f"minitrain/parallel/{name}.py")]  # fmt: skip


def lines_of(card: str) -> Sequence[tuple[str, str]]:
    """The lines of a card, each a word and a text that may go on below it."""
    found: list[tuple[str, str]] = []
    for line in card.splitlines():
        if match := LINE.match(line):
            found.append((match[1], match[2]))
        else:
            word, text = found.pop()
            found.append((word, f"{text} {line.strip()}"))
    return found


class Run(Directive):
    """`{run} minitrain show dp2`: a command, and what it prints when the page is built."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Both as one block."""
        printed = output_of(self.arguments[0])
        return [nodes.literal_block("", f"$ {self.arguments[0]}\n{printed}", language="text")]


def output_of(command: str, status: Sequence[int] = (0, 1)) -> str:
    """What a command prints on stdout, run here. Status 1 is an answer too: layouts differ."""
    words = shlex.split(command)[1:]
    done = CliRunner(env={"COLUMNS": "100"}).invoke(main, words)
    if done.exit_code not in status:
        raise RuntimeError(f"{command} ends with {done.exit_code}: {done.output}")
    return done.stdout


class Drawing(Directive):
    """`{drawing} 1f1b zb-h1 --pp 4`: a figure of schedules."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """The SVG, in the page itself."""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "figure.svg"
            output_of(f"minitrain schedule {self.arguments[0]} --svg {path}")
            return [_picture(path.read_text("utf-8"), f"schedules: {self.arguments[0]}")]


class Holding(Directive):
    """`{holding} shard4,zero2`: a picture of what each rank has."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The SVG, in the page itself."""
        [layout] = self.arguments
        return [_picture(svg(holding(layout)), f"what each rank of {layout} computes and holds")]


class Faults(Directive):
    """`{faults} zero`: what others got wrong, by strategy; without an argument, of all."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A definition for each."""
        listed = nodes.definition_list()
        for name, fault in FAULTS.items():
            if self.arguments and fault.module != self.arguments[0]:
                continue
            layout, family = shows_on(name)
            where = layout or "float16 alone"
            if family != "gpt":
                where += {"llama": ", Llama", "mixture": ", a mixture of experts"}[family]
            told = nodes.paragraph("", f"{fault.story(name)} Acts on ")
            told += [nodes.literal("", where), nodes.Text(".")]
            term = nodes.term("", "", nodes.literal("", name))
            listed += nodes.definition_list_item("", term, nodes.definition("", told))
        return [listed]


def _paragraph(text: str) -> nodes.Node:
    """A paragraph of a docstring; indented lines as they stand; `names` as code."""
    if text.startswith("    "):
        return nodes.literal_block("", inspect.cleandoc(text), language="text")
    made = nodes.paragraph()
    for index, part in enumerate(" ".join(text.split()).split("`")):
        made += nodes.literal("", part) if index % 2 else nodes.Text(part)
    return made


def _picture(drawn: str, label: str) -> nodes.Node:
    opened = drawn.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    return nodes.raw("", f'<div class="picture">{opened}</div>', format="html")


def _source(path: str) -> nodes.Node:
    return nodes.paragraph(
        "", "", nodes.Text("The file: "), nodes.literal("", path), nodes.Text(".")
    )
