"""A plain model and a mesh become this rank's part of the parallel model.

This is the only file that sees all strategies. It is also the one place where the loss is
normalised: by the number of valid tokens of the global batch, known before the first forward.
From there on everything is a sum, over micro-batches and over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from minitrain.array import Array, accumulator, from_host
from minitrain.autograd.engine import backward
from minitrain.autograd.tensor import no_grad
from minitrain.batch import Batch
from minitrain.layout import Layout, LayoutError
from minitrain.nn.module import Module, Parameter
from minitrain.nn.window import Window, window
from minitrain.parallel import regions
from minitrain.parallel.bind import Bound, Derive, cast_to
from minitrain.parallel.data import BUCKET, GradientSum
from minitrain.parallel.flat import Flat
from minitrain.parallel.gradients import first_not_finite, global_norm, sum_over_peers
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.placement import WHOLE
from minitrain.parallel.recompute import Recomputed
from minitrain.parallel.sequence import Sequence, cut_sequence
from minitrain.parallel.tensor import cut_tensors


class Loss(NamedTuple):
    """The loss of a global batch, the same on every rank.

    Attributes:
        value: nats a token; 0 if there is no valid token.
        tokens: how many valid tokens there are.
    """

    value: float
    tokens: int


class ParallelModel:
    """This rank's part of a model; made by `parallelize`.

    Attributes:
        module: the model, transformed.
        parameters: by global name, what this rank holds; views of `flat`'s arrays.
        modules: by path.
        comm_seconds: time spent waiting for other ranks, so far.
    """

    def __init__(self, module: Any, mesh: Mesh, flat: Flat, *, micro_batches: int, seed: int,
                 bucket: int):  # fmt: skip
        self.module, self.mesh, self.flat = module, mesh, flat
        self.micro_batches, self.seed, self.bucket = micro_batches, seed, bucket
        self.parameters: dict[str, Parameter] = flat.parameters
        self.modules: dict[str, Module] = dict(module.modules())
        self.comm_seconds = 0.0

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is found later, by name
    def forward_backward(self, batch: Batch, scale: float = 1.0) -> Loss:
        """The loss of a global batch; afterwards each parameter's grad is the whole gradient.

        Args:
            batch: the global batch, or at least the places in it that this rank computes.
            scale: what the loss is multiplied by for the backward, and the gradient divided by
                after it. Where float16 overflows, the gradient is not finite.
        """
        parts = [
            batch.part(m, self.micro_batches, self.mesh.data_index, self.mesh.layout.data_ranks)
            for m in range(self.micro_batches)
        ]
        total = self._count(parts)
        self.flat.clear()
        sums = GradientSum(self.flat, self.mesh.data, self.bucket)
        loss = 0.0
        for m, part in enumerate(parts):
            last = m == len(parts) - 1
            value = self._loss(part, total, training=True)
            backward(
                value,
                scale,
                sink=self.flat.accumulate,
                on_final=sums.on_final if last else None,
                after_node=sums.progress if last else None,
            )
            loss += value.item()
        with self._waiting():
            sums.finish()
            sum_over_peers(self.flat, self.mesh)
        if scale != 1:
            self.flat.gradient *= 1 / scale
        return Loss(self._sum_over_data(loss), total)

    def evaluate(self, batch: Batch) -> Loss:
        """The loss of a batch without gradients and without dropout, over all its tokens."""
        part = batch.part(0, 1, self.mesh.data_index, self.mesh.layout.data_ranks)
        total = self._count([part])
        with no_grad():
            value = self._loss(part, total, training=False).item()
        return Loss(self._sum_over_data(value), total)

    def gradient_norm(self) -> float:
        """The norm of the whole gradient, each distinct element once."""
        with self._waiting():
            return global_norm(self.flat, self.mesh)

    def first_not_finite(self) -> str | None:
        """Where the gradient began not to be finite, a parameter's name; all ranks agree."""
        with self._waiting():
            return first_not_finite(self.flat, self.mesh)

    def gradients(self) -> dict[str, Array]:
        """What this rank holds of the gradient of each parameter, by name."""
        return self.flat.views(self.flat.gradient)

    def _count(self, parts: list[Batch]) -> int:
        """The number of valid tokens over all data ranks: what the loss is divided by, once."""
        return int(self._sum_over_data(sum(part.valid for part in parts)))

    def _loss(self, part: Batch, total: int, training: bool) -> Any:
        positions = np.arange(part.tokens.shape[1])
        with window(Window(self.seed, part.step, part.places, positions, training)):
            logits = self.module(part.tokens, positions)
            return self.module.loss(logits, part.labels, total=total)

    def _sum_over_data(self, value: float) -> float:
        with self._waiting():
            return float(self.mesh.data.all_reduce(np.array([value]), purpose="scalar")[0])

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.comm_seconds += time.perf_counter() - start


def parallelize(
    model: Any,
    mesh: Mesh,
    *,
    micro_batches: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    xp: Any = np,
    bucket: int = BUCKET,
    recompute: str = "none",
) -> ParallelModel:
    """This rank's part of a plain model.

    Args:
        model: a model of nn. If it is only declared, this rank's pieces are filled with the initial
            values of `seed`; if it is filled, they are cut out of its arrays. It is taken apart.
        micro_batches: how many parts of a batch are computed one after the other.
        seed: of the run: initial values and dropout.
        dtype: of weights and activations, "float64" or "float32"; with "float16" or "bfloat16" the
            weights are float32, and units compute with copies of them in half precision.
        xp: where they go: numpy, or cupy.
        bucket: bytes of gradient that are reduced together.
        recompute: what runs again in the backward instead of being kept. "full": each block;
            "selective": attention weights, which this attention never keeps, so it equals "none".

    Raises:
        LayoutError: a layout that does not fit the model, or needs a strategy that isn't there yet.
    """
    check_layout(mesh.layout, model.config)
    parameters: dict[str, Parameter] = model.parameters()
    for parameter in parameters.values():
        parameter.placement = WHOLE
    _cut(model, mesh)
    for parameter in parameters.values():
        parameter.state = parameter.placement  # stepped where it lives
    shapes = {
        name: p.placement.shape(p.declared, mesh.coordinates) for name, p in parameters.items()
    }
    master = accumulator(dtype)
    flat = Flat(parameters, shapes, master, xp)
    for parameter in parameters.values():
        _fill(flat, parameter, mesh, seed, xp)
    if master != dtype:
        _bind(model, cast_to(dtype))
    if recompute == "full":
        for i, block in enumerate(model.blocks):
            model.replace(f"blocks.{i}", Recomputed(block))
    return ParallelModel(model, mesh, flat, micro_batches=micro_batches, seed=seed, bucket=bucket)


def _fill(flat: Flat, parameter: Parameter, mesh: Mesh, seed: int, xp: Any) -> None:
    """Give a parameter its piece. The whole is there in here only, one parameter at a time."""
    whole = parameter.array if hasattr(parameter, "array") else parameter.initial(seed)
    flat.fill(parameter.name, from_host(parameter.placement.cut(whole, mesh.coordinates), xp))


def _cut(model: Any, mesh: Mesh) -> None:
    """Transform the model, strategy by strategy; each sees what the ones before it left."""
    group = mesh["tp"]
    if mesh.layout.sp:
        sequence = Sequence(group)
        cut_tensors(model, group, sequence.enter, sequence.leave)
        cut_sequence(model, group)
    else:
        cut_tensors(
            model,
            group,
            enter=lambda x: regions.copy(x, group),
            leave=lambda x: regions.reduce(x, group),
        )


def _bind(model: Any, derive: Derive) -> None:
    """Let each unit compute with tensors that are derived from its parameters."""
    blocks = [f"blocks.{i}" for i in range(len(model.blocks))]
    modules = dict(model.modules())
    for path in ("embedding", *blocks, "norm", "head"):
        model.replace(path, Bound(modules[path], derive))


def check_layout(layout: Layout, config: Any) -> None:
    """Refuse a layout that cannot run a model of a configuration's sizes; nothing is sent for it.

    Raises:
        LayoutError: naming both numbers, or the axes that this version cannot run yet.
    """
    check_supported(layout)
    layout.check(
        heads=config.heads, layers=config.layers, vocab=config.vocab, context=config.context
    )


def check_supported(layout: Layout) -> None:
    """Refuse a layout that needs a strategy which is not there yet.

    Raises:
        LayoutError: naming the axes.
    """
    others = [axis for axis in ("pp", "shard", "cp", "ep") if getattr(layout, axis) > 1]
    if others:
        raise LayoutError(
            f"layout {layout} uses {', '.join(others)}, which this version cannot run yet; data "
            f"and tensor parallelism it can, such as dp{layout.size} or tp{layout.size}"
        )
