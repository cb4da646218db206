"""Faults of data parallelism and of accumulation, which show on two data ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from minitrain.autograd.tensor import Tensor
from minitrain.batch import Batch
from minitrain.nn.windows import Window
from minitrain.parallel import model as parallel_model
from minitrain.parallel.data import GradientSum
from minitrain.parallel.flat import Flat
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.model import ParallelModel
from minitrain.train.step import Stepper, StepResult


def _local_count(model: ParallelModel, parts: Any) -> int:
    """Every rank divides by its own tokens, then all average: Megatron-LM #906, transformers
    #34191."""
    return int(sum(part.valid for part in parts)) * model.mesh.data.size


def _no_count(model: ParallelModel, parts: Any) -> int:
    """The loss is never divided by the number of tokens: picotron, DeepSpeed #7773."""
    return 1


_loss = ParallelModel._loss


def _mean_of_micro_batches(model: ParallelModel, part: Any, total: int, training: bool) -> Any:
    """Every micro-batch divides by its own tokens, then all average: transformers #24725."""
    means = model.micro_batches * model.mesh.data.size
    return _loss(model, part, max(part.valid, 1) * means, training)


_start = GradientSum._start


def _one_rank_left_out(sums: GradientSum) -> None:
    """The last rank's gradients do not enter the sum."""
    if sums.group.rank == sums.group.size - 1:
        sums.flat.gradient *= 0
    _start(sums)


_finish = GradientSum.finish


def _parameter_skipped(sums: GradientSum) -> None:
    """A parameter that the reduction does not see: NuMPItron's nested ones."""
    name = next(n for n in reversed(sums.flat.spans) if n.endswith("mlp.up.weight"))
    mine = sums.flat.view(sums.flat.gradient, name).copy()
    _finish(sums)
    sums.flat.view(sums.flat.gradient, name)[...] = mine


def _result_lost(sums: GradientSum) -> None:
    """The gradient is read where the reduction did not write: DeepSpeed #6351."""
    mine = sums.flat.gradient.copy()
    _finish(sums)
    sums.flat.gradient[...] = mine


def _last_bucket_late(sums: GradientSum) -> None:
    """The last bucket is read before its reduction has finished: DeepSpeed #5059."""
    last = sums.flat.spans[sums.buckets[-1][0]].start
    mine = sums.flat.gradient[last:].copy()
    _finish(sums)
    sums.flat.gradient[last:] = mine


def _weights_reduced(sums: GradientSum) -> None:
    """The parameter is reduced where its gradient should be: picotron's hook."""
    gradient, sums.flat.gradient = sums.flat.gradient, sums.flat.weights.copy()
    _finish(sums)
    sums.flat.gradient = gradient


def _averaged(sums: GradientSum) -> None:
    """Averaged over ranks although the loss is divided already: torchtitan #2972."""
    _finish(sums)
    sums.flat.gradient /= sums.group.size


def _overwritten(flat: Flat, leaf: Tensor, grad: Any, shared: bool) -> None:
    """A micro-batch's gradient overwrites the ones before it: NeMo-Automodel #3530."""
    leaf.grad = flat.view(flat.gradient, leaf.name)  # type: ignore[attr-defined]
    leaf.grad[...] = grad


_accumulate = Flat.accumulate


def _rescaled(flat: Flat, leaf: Tensor, grad: Any, shared: bool) -> None:
    """What is accumulated is halved with every micro-batch: torchtitan #1733."""
    if leaf.grad is not None:
        leaf.grad /= 2
        grad = grad / 2
    _accumulate(flat, leaf, grad, shared)


_norm = ParallelModel.gradient_norm


def _norm_of_copies(model: ParallelModel) -> float:
    """Every replica counted in the global norm: torchtitan #2318."""
    return float(_norm(model) * np.sqrt(model.mesh.data.size))


_init = ParallelModel.__init__


def _unequal_replicas(model: ParallelModel, *parts: Any, **options: Any) -> None:
    """Replicas that do not start equal: torchtitan #166."""
    _init(model, *parts, **options)
    model.flat.weights += 1e-6 * model.mesh.world.rank


_update = Stepper._update


def _schedule_per_rank(stepper: Stepper, lr: float, scale: float) -> None:
    """Every rank moves the one learning rate on: accelerate #963."""
    moves = stepper.updates * stepper.model.mesh.data.size
    _update(stepper, stepper.schedule(moves), scale)


def _same_samples(mesh: Mesh) -> int:
    """All ranks compute the first one's part of the batch: LongLive #71."""
    return 0


_step = Stepper.step


def _empty_batch_steps(stepper: Stepper, batch: Batch) -> StepResult:
    """A batch without any label decays the weights and moves the moments: OLMo-core #657."""
    result = _step(stepper, batch)
    if result.tokens == 0:
        stepper.updates += 1
        _update(stepper, result.lr, 1.0)
    return result


def _local_samples(seed: int, step: int, samples: Any, *rest: Any) -> Window:
    """Dropout masks by the sample's place on the rank instead of in the global batch."""
    return Window(seed, step, np.arange(len(samples)), *rest)


DATA: dict[str, tuple[Any, str, Any]] = {
    "mean-of-local-means": (ParallelModel, "_count", _local_count),
    "loss-not-divided": (ParallelModel, "_count", _no_count),
    "mean-of-micro-batches": (ParallelModel, "_loss", _mean_of_micro_batches),
    "rank-not-reduced": (GradientSum, "_start", _one_rank_left_out),
    "parameter-skipped": (GradientSum, "finish", _parameter_skipped),
    "result-lost": (GradientSum, "finish", _result_lost),
    "last-bucket-late": (GradientSum, "finish", _last_bucket_late),
    "weights-reduced": (GradientSum, "finish", _weights_reduced),
    "averaged-again": (GradientSum, "finish", _averaged),
    "micro-batch-overwritten": (Flat, "accumulate", _overwritten),
    "accumulation-rescaled": (Flat, "accumulate", _rescaled),
    "norm-of-copies": (ParallelModel, "gradient_norm", _norm_of_copies),
    "unequal-replicas": (ParallelModel, "__init__", _unequal_replicas),
    "schedule-per-rank": (Stepper, "_update", _schedule_per_rank),
    "same-samples": (Mesh, "data_index", property(_same_samples)),
    "empty-batch-steps": (Stepper, "step", _empty_batch_steps),
    "local-dropout": (parallel_model, "Window", _local_samples),
}
