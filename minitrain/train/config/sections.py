"""The options of a run, in sections. A dataclass field is the only definition of an option.

Standard library only, so that `--help` is quick.
"""
# ruff: noqa: RUF009  (setting is dataclasses.field with less to write)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from minitrain.train.config.option import (
    Fraction,
    Natural,
    NotNegative,
    Option,
    Positive,
    Size,
    Text,
    options_of,
    setting,
)
from minitrain.train.config.running import RunSection, SyncSection


@dataclass(frozen=True)
class ModelSection:
    """The shape of the model; its vocabulary comes from the tokenizer."""

    family: Literal["gpt", "llama"] = setting("gpt", "GPT-2 or Llama")
    layers: Size = setting(4, "transformer blocks")
    heads: Size = setting(4, "attention heads of a block")
    kv_heads: Size | None = setting(None, "key/value heads of a Llama's block; none: as heads")
    width: Size = setting(128, "features of a position, a multiple of heads")
    context: Size = setting(64, "tokens that the model sees at once")
    dropout: Fraction = setting(0.0, "share of activations dropped while training")


@dataclass(frozen=True)
class MixtureSection:
    """Experts in place of MLPs, of which each token meets a few; see nn.MixtureConfig.

    What is added to the loss for balance is trained on, but is no part of a step's `loss`: a
    record has `router_balance`, which is 1 where experts are chosen alike.
    """

    experts: Size | None = setting(None, "experts of a block, in place of its MLP; none: an MLP")
    top_k: Size = setting(2, "experts that each token chooses")
    every: Size = setting(
        1, "experts in every so many-th block, the last of each", flag="expert_every"
    )
    hidden: Size | None = setting(
        None, "features inside an expert; none: as in an MLP", flag="expert_hidden"
    )
    shared: Size | None = setting(
        None, "experts that all tokens meet beside those they choose", flag="shared_experts"
    )
    scores: Literal["softmax", "sigmoid"] = setting(
        "softmax", "how a router scores experts", flag="router_scores"
    )
    gates: Literal["normalised", "raw"] = setting(
        "normalised", "whether a token's gates are divided by their sum"
    )
    capacity: Positive | None = setting(
        None, "an expert takes so many times its even share in training; none: all"
    )
    scope: Literal["batch", "sequence"] = setting(
        "batch", "what load and capacity are counted over", flag="router_scope"
    )
    balance: NotNegative = setting(0.01, "weight of the loss that keeps experts' load even")
    z_loss: NotNegative = setting(
        0.0, "weight of the router's squared log of softmax's sum", flag="router_z_loss"
    )
    bias_rate: NotNegative = setting(
        0.0, "step of a bias that evens load without a loss", flag="router_bias_rate"
    )


@dataclass(frozen=True)
class DataSection:
    """The text, and how much of it a step takes, whatever the layout."""

    path: Text | None = setting(
        None,
        "text file, folder of them, or .jsonl, all joined; none: Python's own documentation",
        flag="data",
    )
    tokenizer: Text = setting(
        "byte",
        "byte; bpe:SIZE, to train one; ids:SIZE, for a .bin file; or a tokenizer.json",
    )
    documents: Literal["joined", "apart"] = setting(
        "joined", "apart: nothing is predicted across the end of a file or a line of a .jsonl"
    )
    batch: Size = setting(12, "sequences of a step, over all ranks, drawn with replacement")
    micro_batches: Size = setting(1, "parts of the batch, computed one after the other")
    val_path: Text | None = setting(
        None, "text to hold out, as --data is given; none: the last tenth of that", flag="val_data"
    )


@dataclass(frozen=True)
class LossSection:
    """What is added to the cross-entropy that is trained on, and so to a step's `loss`.

    Held-out figures are the plain cross-entropy: they compare with those of any other run.
    """

    smoothing: Fraction = setting(0.0, "share of a label spread over all tokens, in training only")
    z_loss: NotNegative = setting(
        0.0, "weight of the squared log of softmax's sum, in training only"
    )


@dataclass(frozen=True)
class OptimizerSection:
    """How weights are stepped: a warm-up to lr, then a fall to min_lr at the last step."""

    name: Literal["adamw", "sgd"] = setting("adamw", "which optimizer", flag="optimizer")
    lr: Positive = setting(1e-3, "peak learning rate")
    min_lr: NotNegative | None = setting(
        None, "learning rate at the last step; none: a tenth of lr; a constant one stays at lr"
    )
    warmup: Natural = setting(100, "steps over which the learning rate rises to its peak")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = setting(
        "cosine", "how it falls from there; constant: not at all; wsd: in the last fifth only"
    )
    beta1: Fraction = setting(0.9, "AdamW's decay of the mean of gradients")
    beta2: Fraction = setting(0.99, "AdamW's decay of the mean of squared gradients")
    epsilon: Positive = setting(1e-8, "AdamW's term that keeps the division finite")
    momentum: Fraction = setting(0.9, "SGD's decay of the sum of gradients")
    weight_decay: NotNegative = setting(0.1, "decay of weights, not of norms and biases")
    clip: Positive | None = setting(1.0, "largest global norm of the gradient; none: no limit")
    frozen: Text | None = setting(
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
