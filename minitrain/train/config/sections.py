"""The options of a run, in sections. A dataclass field is the only definition of an option.

Standard library only, so that `--help` is quick.
"""
# ruff: noqa: RUF009  (_option is dataclasses.field with less to write)

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from minitrain.train.config.option import (
    Count,
    FourTimes,
    Fraction,
    Held,
    Instructions,
    Natural,
    NotNegative,
    Numbers,
    Option,
    Positive,
    Size,
    Text,
    options_of,
)


def _option(default: Any, help: str, flag: str | None = None) -> Any:
    """A field with its default and help; `flag` where the flag is not called as the field is."""
    metadata = {"help": help} if flag is None else {"help": help, "flag": flag}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelSection:
    """The shape of the model; its vocabulary comes from the tokenizer."""

    family: Literal["gpt", "llama"] = _option("gpt", "GPT-2 or Llama")
    layers: Size = _option(4, "transformer blocks")
    heads: Size = _option(4, "attention heads of a block")
    kv_heads: Size | None = _option(None, "key/value heads of a Llama's block; none: as heads")
    width: Size = _option(128, "features of a position, a multiple of heads")
    context: Size = _option(64, "tokens that the model sees at once")
    dropout: Fraction = _option(0.0, "share of activations dropped while training")


@dataclass(frozen=True)
class MixtureSection:
    """Experts in place of MLPs, of which each token meets a few; see nn.MixtureConfig.

    What is added to the loss for balance is trained on, but is no part of a step's `loss`: a
    record has `router_balance`, which is 1 where experts are chosen alike.
    """

    experts: Size | None = _option(None, "experts of a block, in place of its MLP; none: an MLP")
    top_k: Size = _option(2, "experts that each token chooses")
    every: Size = _option(
        1, "experts in every so many-th block, the last of each", flag="expert_every"
    )
    hidden: Size | None = _option(
        None, "features inside an expert; none: as in an MLP", flag="expert_hidden"
    )
    shared: Size | None = _option(
        None, "experts that all tokens meet beside those they choose", flag="shared_experts"
    )
    scores: Literal["softmax", "sigmoid"] = _option(
        "softmax", "how a router scores experts", flag="router_scores"
    )
    gates: Literal["normalised", "raw"] = _option(
        "normalised", "whether a token's gates are divided by their sum"
    )
    capacity: Positive | None = _option(
        None, "an expert takes so many times its even share in training; none: all"
    )
    scope: Literal["batch", "sequence"] = _option(
        "batch", "what load and capacity are counted over", flag="router_scope"
    )
    balance: NotNegative = _option(0.01, "weight of the loss that keeps experts' load even")
    z_loss: NotNegative = _option(
        0.0, "weight of the router's squared log of softmax's sum", flag="router_z_loss"
    )
    bias_rate: NotNegative = _option(
        0.0, "step of a bias that evens load without a loss", flag="router_bias_rate"
    )


@dataclass(frozen=True)
class DataSection:
    """The text, and how much of it a step takes, whatever the layout."""

    path: Text | None = _option(
        None,
        "text file, folder of them, or .jsonl, all joined; none: Python's own documentation",
        flag="data",
    )
    tokenizer: Text = _option(
        "byte",
        "byte; bpe:SIZE, to train one; ids:SIZE, for a .bin file; or a tokenizer.json",
    )
    documents: Literal["joined", "apart"] = _option(
        "joined", "apart: nothing is predicted across the end of a file or a line of a .jsonl"
    )
    batch: Size = _option(12, "sequences of a step, over all ranks, drawn with replacement")
    micro_batches: Size = _option(1, "parts of the batch, computed one after the other")
    val_path: Text | None = _option(
        None, "text to hold out, as --data is given; none: the last tenth of that", flag="val_data"
    )


@dataclass(frozen=True)
class LossSection:
    """What is added to the cross-entropy that is trained on, and so to a step's `loss`.

    Held-out figures are the plain cross-entropy: they compare with those of any other run.
    """

    smoothing: Fraction = _option(0.0, "share of a label spread over all tokens, in training only")
    z_loss: NotNegative = _option(
        0.0, "weight of the squared log of softmax's sum, in training only"
    )


@dataclass(frozen=True)
class OptimizerSection:
    """How weights are stepped: a warm-up to lr, then a fall to min_lr at the last step."""

    name: Literal["adamw", "sgd"] = _option("adamw", "which optimizer", flag="optimizer")
    lr: Positive = _option(1e-3, "peak learning rate")
    min_lr: NotNegative | None = _option(
        None, "learning rate at the last step; none: a tenth of lr; a constant one stays at lr"
    )
    warmup: Natural = _option(100, "steps over which the learning rate rises to its peak")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = _option(
        "cosine", "how it falls from there; constant: not at all; wsd: in the last fifth only"
    )
    beta1: Fraction = _option(0.9, "AdamW's decay of the mean of gradients")
    beta2: Fraction = _option(0.99, "AdamW's decay of the mean of squared gradients")
    epsilon: Positive = _option(1e-8, "AdamW's term that keeps the division finite")
    momentum: Fraction = _option(0.9, "SGD's decay of the sum of gradients")
    weight_decay: NotNegative = _option(0.1, "decay of weights, not of norms and biases")
    clip: Positive | None = _option(1.0, "largest global norm of the gradient; none: no limit")
    frozen: Text | None = _option(
        None, "parameters that are not trained, such as embedding.*,blocks.0.*", flag="freeze"
    )

    @property
    def last_lr(self) -> float:
        """The learning rate at the last step of a schedule that falls."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    @property
    def frozen_patterns(self) -> tuple[str, ...]:
        """The patterns of `frozen`."""
        return tuple(pattern.strip() for pattern in self.frozen.split(",")) if self.frozen else ()


@dataclass(frozen=True)
class RunSection:
    """How long a run is, how exact, and what it writes when."""

    steps: Count = _option(2000, "optimizer steps")
    seed: Natural = _option(0, "seed of initial weights, samples and dropout")
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = _option(
        "float32", "type of weights and activations; in 16 bits, weights stay float32 beside"
    )
    recompute: Literal["none", "selective", "full"] = _option(
        "none", "what runs again in the backward; full: blocks; none, selective: attention weights"
    )
    stages: Numbers | None = _option(
        None, "blocks of each stage of a pipeline, such as 3,4,4,3; none: by their cost"
    )
    times: FourTimes | None = _option(
        None, "what zb-auto is searched for: F,B,W,T, see schedule; none: measured in steps 2, 3"
    )
    memory: Held | None = _option(
        None, "micro-batches that a stage may hold under zb-auto; none: as many as stages"
    )
    instructions: Instructions | None = _option(
        None, "what zb-auto's stages do, as F0 F1 B0 B1 / F0 B0 F1 B1; none: found, and kept here"
    )
    eval_every: Count = _option(250, "steps between evaluations on the held-out text")
    save_every: Count = _option(500, "steps between checkpoints; the last step has one too")
    sample_every: Count | None = _option(
        None, "steps between texts that the model writes, which need a checkpoint; none: at the end"
    )

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after a step."""
        return step % self.save_every == 0 or self.samples_at(step)

    def samples_at(self, step: int) -> bool:
        """Whether a text is."""
        return self.sample_every is not None and step % self.sample_every == 0

    @property
    def stage_sizes(self) -> tuple[int, ...] | None:
        """The numbers of `stages`."""
        return None if self.stages is None else tuple(map(int, self.stages.split(",")))


@dataclass(frozen=True)
class SyncSection:
    """How data-parallel ranks come to one model: by sums in each step, or with less waiting."""

    mode: Literal["sync", "async", "local"] = _option(
        "sync", "sync: gradients are summed in each step; async: a server applies each rank's as "
        "it comes; local: ranks train by themselves and average weights now and then", flag="sync"
    )  # fmt: skip
    staleness: Natural | None = _option(
        1, "async: steps that a rank may be ahead of the slowest; 0: as sync; none: any number"
    )
    pull: Literal["whole", "partial"] = _option(
        "whole", "async: weights come at once, or layer by layer, of different versions"
    )
    rate: Literal["plain", "aware"] = _option(
        "plain", "async: aware divides the rate by a gradient's staleness", flag="staleness_rate"
    )
    times: Numbers | None = _option(
        None, "async: what a step takes on each rank, such as 1,1,3, on a virtual clock that makes "
        "the order of events an input; none: whoever comes first", flag="worker_times"
    )  # fmt: skip
    jitter: Fraction = _option(
        0.0, "async: share by which these times vary, drawn from the seed", flag="worker_jitter"
    )
    every: Count = _option(10, "local: steps between averages", flag="sync_every")
    outer_lr: Positive = _option(1.0, "local: how far to go to the average; DiLoCo: 0.7")
    outer_momentum: Fraction = _option(0.0, "local: Nesterov momentum of that; DiLoCo: 0.9")

    @property
    def worker_times(self) -> tuple[int, ...] | None:
        """The numbers of `times`."""
        return None if self.times is None else tuple(map(int, self.times.split(",")))


@dataclass(frozen=True)
class RunConfig:
    """All options of a run, in sections. The defaults are the preset `small`."""

    model: ModelSection = ModelSection()
    mixture: MixtureSection = MixtureSection()
    data: DataSection = DataSection()
    loss: LossSection = LossSection()
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection = RunSection()
    sync: SyncSection = SyncSection()

    def value(self, option: Option) -> Any:
        """The value of one option."""
        return getattr(getattr(self, option.section), option.name)


OPTIONS = options_of(RunConfig)
