"""Known faults, each a bug that real projects shipped, planted to see that they are found.

A fault is one small change to the parallel code, made for as long as it is planted, at a *seam*: a
function or method that is declared here for it. What a fault does is written beside its story in
this package, as a function that takes what stands at the seam and gives what stands in its place;
its name is the fault's. Nothing is looked up before a fault is planted.

The suite must catch every one; `minitrain verify --fault NAME` shows how.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from minitrain.errors import UserError
from minitrain.layout import did_you_mean

SEAMS = {
    # The batch and the loss.
    "total": "minitrain.parallel.data:Shares.total",
    "window": "minitrain.parallel.data:Part.window",
    "forward": "minitrain.parallel.worker:Worker.forward",
    "data_index": "minitrain.parallel.mesh:Mesh.data_index",
    # Gradients and their norm.
    "accumulate": "minitrain.parallel.flat:Flat.accumulate",
    "plan": "minitrain.parallel.arrays:plan_of",
    "start": "minitrain.parallel.reduce:Bucket.start",
    "sums": "minitrain.parallel.reduce:Bucket.finish",
    "finish": "minitrain.parallel.reduce:Reducer.finish",
    "came": "minitrain.parallel.flat:Flat.put",
    "norm": "minitrain.parallel.norm:Norm.value",
    "counts": "minitrain.parallel.norm:Norm.counts",
    # Weights and steps.
    "fill": "minitrain.parallel.flat:Flat.fill",
    "model": "minitrain.parallel.worker:ParallelModel.__init__",
    "apply": "minitrain.train.step:Stepper.apply",
    "step": "minitrain.train.step:Stepper.step",
    # Sharding.
    "kept": "minitrain.parallel.gather:Gatherer._kept",
    "gather_vjp": "minitrain.parallel.gather:Gather.vjp",
    "rank_by_rank": "minitrain.parallel.reduce:Bucket._rank_by_rank",
    "put": "minitrain.parallel.zero:Shard.put",
    "segments": "minitrain.parallel.zero:Shard.segments",
    "publish": "minitrain.parallel.zero:Shard.publish",
    "verdict": "minitrain.parallel.norm:Norm.first_not_finite",
    # Tensor and sequence parallelism.
    "f": "minitrain.parallel.regions:Copy.vjp",
    "g": "minitrain.parallel.regions:reduce",
    "sp_f": "minitrain.parallel.regions:AllGather.vjp",
    "row": "minitrain.parallel.tensor:RowLinear.forward",
    "own_heads": "minitrain.parallel.tensor:own_heads",
    "table": "minitrain.parallel.cut_vocabulary:VocabularyTable.__init__",
    "vocabulary_losses": "minitrain.parallel.cut_vocabulary:VocabularyLosses.forward",
    "vocabulary_vjp": "minitrain.parallel.cut_vocabulary:VocabularyLosses.vjp",
    "vocabulary_loss": "minitrain.parallel.cut_vocabulary:VocabularyCrossEntropy.forward",
    "cut_sequence": "minitrain.parallel.compose:cut_sequence",
    "positions": "minitrain.parallel.sequence:OwnPositions.forward",
    # Context parallelism.
    "of": "minitrain.parallel.data:Shares.of",
    "rule": "minitrain.parallel.ring:RingAttention._rule",
    "merge": "minitrain.parallel.ring:merge",
    "send": "minitrain.parallel.ring:_send",
    "ring_vjp": "minitrain.parallel.ring:RingAttention.vjp",
    "weight_dropout": "minitrain.nn.transformer:AttentionCore.weight_dropout",
    "exchanged": "minitrain.parallel.context:exchanged_heads",
    # Mixtures of experts.
    "everyone": "minitrain.parallel.expert:GlobalGate.everyone",
    "dispatch_vjp": "minitrain.parallel.expert:Dispatch.vjp",
    "cut_experts": "minitrain.parallel.expert:CutExperts.forward",
    "attach": "minitrain.nn.router:attach",
    "each": "minitrain.nn.router:Router._each",
    "count": "minitrain.nn.router:Router._count",
    # Pipeline parallelism.
    "worker": "minitrain.parallel.worker:Worker.__init__",
    "turns": "minitrain.parallel.worker:turns_of",
    "run": "minitrain.parallel.worker:Worker.run",
    "begin_pass": "minitrain.parallel.reduce:Reducer.begin_pass",
    "give": "minitrain.parallel.pipeline:Boundaries.give",
    "take": "minitrain.parallel.pipeline:Boundaries.take",
    "tag": "minitrain.parallel.pipeline:Boundaries.tag",
}
"""Where faults can be planted: seam -> module:attribute."""


class Fault(NamedTuple):
    """Where a fault is planted, and which module of this package has it."""

    seam: str
    module: str

    def story(self, name: str) -> str:
        """What it does, and where that happened."""
        return " ".join(str(_function(name, self).__doc__).split())


FAULTS: dict[str, Fault] = {
    name: Fault(seam, module)
    for module, seams in {
        "data": {
            "mean-of-local-means": "total",
            "loss-not-divided": "total",
            "mean-of-micro-batches": "forward",
            "rank-not-reduced": "start",
            "parameter-skipped": "came",
            "result-lost": "came",
            "last-bucket-late": "came",
            "weights-reduced": "finish",
            "averaged-again": "finish",
            "micro-batch-overwritten": "accumulate",
            "accumulation-rescaled": "accumulate",
            "norm-of-copies": "norm",
            "unequal-replicas": "model",
            "schedule-per-rank": "apply",
            "same-samples": "data_index",
            "empty-batch-steps": "step",
            "local-dropout": "window",
        },
        "tensor": {
            "f-not-reduced": "f",
            "g-doubled": "g",
            "sp-gradient-sliced": "sp_f",
            "bias-on-every-rank": "row",
            "bias-divided": "row",
            "sp-norms-not-summed": "plan",
            "partials-averaged": "sums",
            "kv-not-summed": "plan",
            "local-smoothing": "vocabulary_losses",
            "logits-gathered": "vocabulary_loss",
            "label-rank-only": "vocabulary_vjp",
            "last-id-masked": "table",
            "tp-norm-of-copies": "counts",
            "tp-norm-of-one-rank": "counts",
            "sp-local-dropout": "cut_sequence",
            "sp-positions-restart": "positions",
            "tp-local-heads": "own_heads",
            "shards-alike": "fill",
        },
        "expert": {
            "gate-of-a-rank": "everyone",
            "order-of-ranks": "everyone",
            "term-lost": "attach",
            "term-of-a-rank": "each",
            "gates-not-entered": "cut_experts",
            "rows-not-returned": "dispatch_vjp",
            "experts-on-the-dense-group": "plan",
            "experts-averaged": "sums",
            "router-not-summed": "sums",
            "norm-of-own-experts": "counts",
            "bias-by-own-load": "count",
        },
        "pipeline": {
            "only-last-micro-batch": "begin_pass",
            "divided-on-every-stage": "give",
            "tied-not-summed": "plan",
            "tied-counted-twice": "counts",
            "norm-of-a-stage": "norm",
            "loss-of-a-stage": "run",
            "wrong-buffer": "take",
            "stale-gradient": "take",
            "boundaries-mixed": "tag",
            "stage-local-dropout": "worker",
            "reduced-too-early": "worker",
            "last-weights-forgotten": "turns",
            "sends-block": "give",
        },
        "context": {
            "cp-not-reduced": "plan",
            "cp-averaged": "sums",
            "cp-counted-often": "total",
            "cp-positions-restart": "of",
            "labels-after-the-cut": "of",
            "diagonal-mask-only": "rule",
            "merged-as-equals": "merge",
            "kv-gradients-not-sent": "send",
            "delta-of-own-block": "ring_vjp",
            "cp-local-heads": "weight_dropout",
            "kv-heads-by-rank": "exchanged",
        },
        "zero": {
            "stale-gather": "kept",
            "gradient-sliced": "gather_vjp",
            "pieces-by-name": "rank_by_rank",
            "last-backward-only": "put",
            "replicas-not-summed": "sums",
            "norm-of-one-shard": "norm",
            "norm-over-padding": "norm",
            "replicas-in-the-norm": "norm",
            "verdict-of-one-rank": "verdict",
            "decay-lost": "segments",
            "owner-not-broadcast": "publish",
        },
    }.items()
    for name, seam in seams.items()
}


_SHOWS = {
    "data": "dp2", "tensor": "tp2", "pipeline": "pp2", "zero": "shard2", "context": "cp2",
    "expert": "dp2,ep2",
    **dict.fromkeys(("sp-gradient-sliced", "sp-norms-not-summed", "sp-local-dropout",
                     "sp-positions-restart", "order-of-ranks", "router-not-summed"), "tp2,sp"),
    "gates-not-entered": "tp2",
    **dict.fromkeys(("partials-averaged", "kv-not-summed"), "tp3"),
    **dict.fromkeys(("stale-gradient", "last-weights-forgotten"), "pp3,zb-h1"),
    "boundaries-mixed": "pp2,zb-v",
    "reduced-too-early": "dp2,pp2",
    "stale-gather": "shard2,zero3,keep",
    "gradient-sliced": "shard2,zero3",
    "pieces-by-name": "shard2,zero1",
    "last-backward-only": "shard2,zero2",
    "norm-over-padding": "shard3",
    **dict.fromkeys(("replicas-not-summed", "replicas-in-the-norm"), "dp2,shard2"),
    "owner-not-broadcast": "shard2,owner",
    "cp-local-heads": "cp2,ulysses",
    "kv-heads-by-rank": "cp4,ulysses",
    "verdict-of-one-rank": "",  # shows where float16 overflows, and verify computes in float64
}  # fmt: skip


_OF_LLAMA = ("sp-gradient-sliced", "partials-averaged", "kv-not-summed",
             "kv-heads-by-rank")  # fmt: skip


def shows_on(name: str) -> tuple[str, str]:
    """A small layout on which a fault acts ("": verify does not see it), and a family of models."""
    layout = _SHOWS[name] if name in _SHOWS else _SHOWS[FAULTS[name].module]
    mixture = FAULTS[name].module == "expert"
    return layout, "llama" if name in _OF_LLAMA else "mixture" if mixture else "gpt"


def check_name(name: str | None) -> None:
    """Refuse a name that is no fault's; None is none.

    Raises:
        UserError: with the names there are.
    """
    if name is not None and name not in FAULTS:
        hint = did_you_mean(name, FAULTS) or f"; there are {', '.join(FAULTS)}"
        raise UserError(f"unknown fault {name!r}{hint}")


def at(seam: str) -> tuple[Any, str, Any]:
    """What a seam is: its owner, the attribute's name, and what stands there."""
    module, path = SEAMS[seam].split(":")
    *owners, attribute = path.split(".")
    owner = importlib.import_module(module)
    for name in owners:
        owner = getattr(owner, name)
    return owner, attribute, getattr(owner, attribute)


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Inside, the parallel code has the fault of this name; none for None."""
    check_name(name)
    with ExitStack() as stack:
        if name is not None:
            fault = FAULTS[name]
            owner, attribute, original = at(fault.seam)
            replacement = _function(name, fault)(original)
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


def _function(name: str, fault: Fault) -> Any:
    """What plants a fault."""
    module = importlib.import_module(f"{__name__}.{fault.module}")
    return getattr(module, name.replace("-", "_"))
