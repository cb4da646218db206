"""What the links of the chain made, on a rank: recorded, and held against the reference.

A rank has the outputs of its own links, for its own sequences and, where these are cut, positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array, to_host
from minitrain.oracle.compare import Row, compare
from minitrain.oracle.reference import output_path
from minitrain.parallel import ParallelModel
from minitrain.parallel.data import Part
from minitrain.parallel.pipeline import Turn
from minitrain.parallel.sequence import own_part


class Output(NamedTuple):
    """What a link made of a micro-batch.

    Shapes: places (b,) of the sequences in the global batch; positions (t,); array (b, t, C).
    """

    places: Array
    positions: Array
    array: Array


Outputs = dict[str, list[Output]]


class Recorder:
    """Lets the links of a model's chain, but the head, keep what they make of each micro-batch.

    Args:
        chunks: the links in each chunk of this rank.
    """

    def __init__(self, model: ParallelModel, chunks: Sequence[range]):
        self.kept: Outputs = {}
        self.part: Part | None = None  # what is being computed for training
        self.layout, self.tp = model.mesh.layout, model.mesh["tp"]
        worker, last = model.worker, len(model.module.blocks) + 1
        self.forward, worker.forward = worker.forward, self._forward  # type: ignore[method-assign]
        worker.chunks = [
            [link if n == last else partial(self._run, link, output_path(n))
             for link, n in zip(links, chunk, strict=True)]
            for links, chunk in zip(worker.chunks, chunks, strict=True)
        ]  # fmt: skip

    def take(self) -> Outputs:
        """All that was kept since the last time, by path."""
        taken, self.kept = self.kept, {}
        return taken

    def _forward(self, part: Part, turn: Turn, *, training: bool) -> Any:
        self.part = part if training else None
        return self.forward(part, turn, training=training)

    def _run(self, link: Any, path: str, x: Any, positions: Array) -> Any:
        out = link(x, positions)
        if self.part is not None:
            at = own_part(positions, self.tp) if self.layout.sp else positions
            output = Output(self.part.places, at, to_host(out.array))
            self.kept.setdefault(path, []).append(output)
        return out


def compare_outputs(
    step: str, got: Outputs, expected: Mapping[str, Array], rank: int
) -> Iterator[Row]:
    """A row for each link whose output a rank has; an error is a share of the whole's largest."""
    for path, whole in expected.items():
        if path in got:
            mine, reference = stacked(got[path]), stacked(cut_like(got[path], whole))
            scale = float(np.abs(whole).max(initial=0.0))
            yield compare(f"{step} output {path}", mine, reference, scale, rank=rank)


def cut_like(outputs: list[Output], whole: Array) -> list[Output]:
    """The same parts of what the reference made, (B, T, C)."""
    return [o._replace(array=whole[np.ix_(o.places, o.positions)]) for o in outputs]


def stacked(outputs: list[Output]) -> Array:
    """All that a rank has of an output: micro-batch after micro-batch, (B/data ranks, t, C)."""
    return np.concatenate([o.array for o in outputs])
