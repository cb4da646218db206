"""Faults of data parallelism and of accumulation, which show on two data ranks.

Each function takes what stands at its seam and returns what is planted there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from minitrain.autograd.tensor import Tensor
from minitrain.batch import IGNORE, Batch
from minitrain.nn.module import Window
from minitrain.parallel.data import Part
from minitrain.parallel.flat import Flat
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.norm import Norm
from minitrain.parallel.reduce import Bucket, Reducer
from minitrain.parallel.worker import ParallelModel, Worker
from minitrain.train.step import Stepper, StepResult


def mean_of_local_means(total: Any) -> Any:
    """Every rank divides by its own tokens, then all average: Megatron-LM #906, transformers
    #34191."""
    return lambda shares, valid, *batch: valid * shares.data.size


def loss_not_divided(total: Any) -> Any:
    """The loss is never divided by the number of tokens: picotron, DeepSpeed #7773."""
    return lambda shares, valid, *batch: 1


def mean_of_micro_batches(forward: Any) -> Any:
    """Every micro-batch divides by its own tokens, then all average: transformers #24725."""

    def planted(worker: Worker, part: Part, *rest: Any, **options: Any) -> Any:
        micro_batches = len({turn.micro_batch for turn in worker.turns})
        means = micro_batches * worker.reducer.mesh.data.size
        valid = int(np.count_nonzero(part.labels != IGNORE))
        return forward(worker, replace(part, total=max(valid, 1) * means), *rest, **options)

    return planted


def rank_not_reduced(start: Any) -> Any:
    """The last rank's gradients do not enter the sum."""

    def planted(bucket: Bucket) -> None:
        lives, group = bucket.reducer.lives, bucket.sums[0]
        if group.rank == group.size - 1:
            lives.complete(bucket.names)
            for name in bucket.names:
                lives.grad(name)[...] = 0
        start(bucket)

    return planted


def parameter_skipped(put: Any) -> Any:
    """A parameter that the reduction does not see: NuMPItron's nested ones."""

    def skipped(flat: Flat, names: list[str]) -> list[str]:
        one = next(name for name in reversed(flat.spans) if "mlp.up.weight" in name)
        return [name for name in names if name == one]

    return _kept(put, skipped)


def result_lost(put: Any) -> Any:
    """The gradient is read where the reduction did not write: DeepSpeed #6351."""
    return lambda *_, **__: None


def last_bucket_late(put: Any) -> Any:
    """The last bucket is read before its reduction has finished: DeepSpeed #5059."""
    return _kept(put, lambda flat, names: names if list(flat.spans)[-1] in names else [])


def _kept(put: Any, which: Callable[[Flat, list[str]], list[str]]) -> Any:
    """The sums are put where they belong, but for some, whose gradient stays this rank's own."""

    def planted(flat: Flat, names: list[str], total: Any, **options: Any) -> None:
        mine = {name: flat.grad(name).copy() for name in which(flat, names)}
        put(flat, names, total, **options)
        for name, grad in mine.items():
            flat.grad(name)[...] = grad

    return planted


def weights_reduced(finish: Any) -> Any:
    """The parameter is reduced where its gradient should be: picotron's hook."""

    def planted(reducer: Reducer) -> None:
        lives = reducer.lives
        gradient, lives.gradient = lives.gradient, lives.weights.copy()
        finish(reducer)
        lives.gradient = gradient

    return planted


def averaged_again(finish: Any) -> Any:
    """Averaged over ranks although the loss is divided already: torchtitan #2972."""

    def planted(reducer: Reducer) -> None:
        finish(reducer)
        reducer.stepped.scale(1 / reducer.mesh.data.size)

    return planted


def micro_batch_overwritten(accumulate: Any) -> Any:
    """A micro-batch's gradient overwrites the ones before it: NeMo-Automodel #3530."""

    def planted(flat: Flat, leaf: Tensor, grad: Any, shared: bool) -> None:
        leaf.grad = flat.view(flat.gradient, leaf.name)  # type: ignore[attr-defined]
        leaf.grad[...] = grad

    return planted


def accumulation_rescaled(accumulate: Any) -> Any:
    """What is accumulated is halved with every micro-batch: torchtitan #1733."""

    def planted(flat: Flat, leaf: Tensor, grad: Any, shared: bool) -> None:
        if leaf.grad is not None:
            leaf.grad /= 2
            grad = grad / 2
        accumulate(flat, leaf, grad, shared)

    return planted


def norm_of_copies(value: Any) -> Any:
    """Every replica counted in the global norm: torchtitan #2318."""

    def planted(norm: Norm) -> float:
        return float(value(norm) * np.sqrt(norm.mesh.data.size))

    return planted


def unequal_replicas(init: Any) -> Any:
    """Replicas that do not start equal: torchtitan #166."""

    def planted(model: ParallelModel, *parts: Any, **options: Any) -> None:
        init(model, *parts, **options)
        model.lives.weights += 1e-6 * model.mesh.world.rank

    return planted


def schedule_per_rank(apply: Any) -> Any:
    """Every rank moves the one learning rate on: accelerate #963."""

    def planted(stepper: Stepper, result: StepResult) -> None:
        moves = (stepper.updates + 1) * stepper.model.mesh.data.size
        apply(stepper, result._replace(lr=stepper.schedule(moves)))

    return planted


def same_samples(data_index: Any) -> Any:
    """All ranks compute the first one's part of the batch: LongLive #71."""

    def planted(mesh: Mesh) -> int:
        return 0

    return property(planted)


def empty_batch_steps(step: Any) -> Any:
    """A batch without any label decays the weights and moves the moments: OLMo-core #657."""

    def planted(stepper: Stepper, batch: Batch) -> StepResult:
        result: StepResult = step(stepper, batch)
        if result.tokens == 0:
            stepper.apply(result)
        return result

    return planted


def local_dropout(window: Any) -> Any:
    """Dropout masks by the sample's place on the rank instead of in the global batch."""

    def planted(part: Part, seed: int, training: bool) -> Window:
        found: Window = window(part, seed, training)
        return replace(found, samples=np.arange(len(part.places)))

    return planted
