"""What a transformer is made of, as numbers: parameters, FLOPs and activations by formula.

The shapes are those of published models, so more kinds are known here than nn can build. FLOPs have
two conventions, and every figure says which it is in:

- *model* FLOPs: the forward and a backward of twice its size, however they are computed. MFU.
- *hardware* FLOPs: what is really computed, a forward that recomputation repeats included. HFU.

Sources: Narayanan et al. 2021 (SC21, 2104.04473), Korthikanti et al. 2022 (2205.05198), Chowdhery
et al. 2022 (PaLM, 2204.02311, appendix B).
"""

from __future__ import annotations

from dataclasses import dataclass

FORWARDS = {"none": 3, "selective": 3, "full": 4}  # a backward is two forwards; full repeats one


@dataclass(frozen=True)
class Architecture:
    """The shape of a transformer.

    Attributes:
        layers: of the stack; of an encoder-decoder, of the encoder.
        decoder_layers: of the decoder, each with a second attention; 0 where there is none.
        width, hidden: of the residual stream, and of an MLP (of one expert's, in a mixture).
        head_width: features of a head.
        tied: the head is the token table again.
        gated: an MLP has three weights (SwiGLU, GeGLU), not two.
        biased: linears have biases and norms have shifts.
        biased_heads: queries, keys and values have biases where other linears have none (Qwen2).
        positions: rows of a learned position table; 0 where positions are rotary or relative.
        segments: rows of other learned tables of the width: token types, patch pixels, classes.
        experts, active, shared: routed experts of a mixture's layer, how many a token visits, and
            experts that all visit; 0 experts is a dense model.
        dense_layers, dense_hidden: first layers of a mixture that have a plain MLP, and its size.
        attention: parameters of a layer's attention where 4 linears are not the whole story
            (latent attention); None counts the 4 linears.
    """

    vocab: int
    context: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    head_width: int
    decoder_layers: int = 0
    tied: bool = True
    gated: bool = False
    biased: bool = True
    biased_heads: bool = False
    positions: int = 0
    segments: int = 0
    experts: int = 0
    active: int = 0
    shared: int = 0
    dense_layers: int = 0
    dense_hidden: int = 0
    attention: int | None = None

    @classmethod
    def gpt(cls, layers: int, width: int, heads: int, vocab: int, context: int) -> Architecture:
        """GPT-2's shape."""
        return cls(
            vocab, context, layers, heads, heads, width, 4 * width, width // heads,
            positions=context,
        )  # fmt: skip

    @property
    def linear(self) -> int:
        """Weights of a layer that every token is multiplied with, without biases."""
        return self.attention_weights + self.mlp_weights(self.hidden) * self._visited

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's attention."""
        heads = 2 * (self.heads + self.kv_heads)
        return heads * self.head_width * self.width if self.attention is None else self.attention

    def mlp_weights(self, hidden: int) -> int:
        """Weights of an MLP with so many hidden features."""
        return (3 if self.gated else 2) * self.width * hidden

    @property
    def _visited(self) -> int:
        """MLPs that a token goes through in a layer."""
        return self.active + self.shared if self.experts else 1

    @property
    def parameters(self) -> int:
        """All of them."""
        return self._count(self.experts + self.shared if self.experts else 1)

    @property
    def active_parameters(self) -> int:
        """Those that take part in the computation of a token; all, in a dense model."""
        return self._count(self._visited)

    def _count(self, mlps: int) -> int:
        tables = (1 if self.tied else 2) * self.vocab + self.positions + self.segments
        plain = self.layers + self.decoder_layers if not self.experts else self.dense_layers
        mixed = (self.layers + self.decoder_layers) - plain
        dense = self.mlp_weights(self.dense_hidden or self.hidden) + self._mlp_biases()
        mixture = mlps * self.mlp_weights(self.hidden) + self.experts * self.width
        return (
            (tables * self.width + self._norm())
            + (self.layers + 2 * self.decoder_layers) * (self._attention() + self._norm())
            + plain * (dense + self._norm())
            + mixed * (mixture + self._norm())
        )

    def _norm(self) -> int:
        return (2 if self.biased else 1) * self.width

    def _attention(self) -> int:
        heads = (self.heads + 2 * self.kv_heads) * self.head_width
        biases = heads if self.biased_heads else heads + self.width if self.biased else 0
        return self.attention_weights + biases

    def _mlp_biases(self) -> int:
        wide = (2 if self.gated else 1) * self.hidden
        return wide + self.width if self.biased else 0

    def forward_flops(self, length: int | None = None, *, causal: bool = False) -> Flops:
        """FLOPs of a token's forward: of the layers' linears, of attention, and of the head.

        Attention is counted over all positions, as SC21 and PaLM do; `causal` counts the half that
        a causal model needs (DeepSeek reports both).
        """
        positions = (length or self.context) / (2 if causal else 1)
        plain = self.dense_layers if self.experts else 0
        swapped = self.mlp_weights(self.dense_hidden) - self.mlp_weights(self.hidden) * (
            self._visited
        )
        linears = self.layers * self.linear + (plain * swapped if plain else 0)
        attention = 4 * self.layers * positions * self.heads * self.head_width
        return Flops(2.0 * linears, attention, 2.0 * self.width * self.vocab)

    def model_flops(self, length: int | None = None, *, causal: bool = False) -> float:
        """FLOPs that a token's forward and backward need: three forwards."""
        return 3 * sum(self.forward_flops(length, causal=causal).parts)

    def hardware_flops(self, length: int | None = None, *, recompute: str = "full") -> float:
        """FLOPs computed for a token, recomputation counted.

        "full" repeats the layers' forward (SC21: 96·s·l·h²(1 + s/6h + V/16lh) a sequence),
        "selective" attention's alone. The head is never repeated.
        """
        forward = self.forward_flops(length)
        again = forward.attention if recompute == "selective" else 0.0
        return FORWARDS[recompute] * (forward.linear + forward.attention) + 3 * forward.head + again


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token's forward."""

    linear: float
    attention: float
    head: float

    @property
    def parts(self) -> tuple[float, float, float]:
        """The three of them."""
        return self.linear, self.attention, self.head


def six_n_d(parameters: float, tokens: float) -> float:
    """Model FLOPs of a training: 6 for each parameter and token (forward 2, backward 4)."""
    return 6 * parameters * tokens


def eight_n_d(parameters: float, tokens: float) -> float:
    """Hardware FLOPs of a training with full recomputation: 8 for each parameter and token."""
    return 8 * parameters * tokens


def palm_flops(model: Architecture) -> float:
    """Model FLOPs of a token as PaLM's appendix B counts them: 6N + 12·L·H·Q·T."""
    heads = model.heads * model.head_width
    return 6 * model.active_parameters + 12 * model.layers * heads * model.context


def sc21_parameters(layers: int, width: int, vocab: int, context: int) -> float:
    """Parameters by SC21's equation 2, which leaves out the last norm."""
    l, h = layers, width  # noqa: E741
    return 12 * l * h**2 * (1 + 13 / (12 * h) + (vocab + context) / (12 * l * h))


def sc21_flops(batch: int, layers: int, width: int, vocab: int, context: int) -> float:
    """Hardware FLOPs of a step with full recomputation, by SC21's equation 3."""
    l, h, s = layers, width, context  # noqa: E741
    return 96 * batch * s * l * h**2 * (1 + s / (6 * h) + vocab / (16 * l * h))


def korthikanti_flops(
    batch: int, layers: int, width: int, vocab: int, context: int, *, hardware: bool = False
) -> float:
    """FLOPs of a step in the closed form of Korthikanti et al., appendix A.

    With `hardware`, theirs with selective recomputation. It counts attention's products twice, so
    the overhead is s/6h (2.7 % for GPT-3); counting only the repeated forward, as `hardware_flops`
    does, it is a third of that.
    """
    l, h, s = layers, width, context  # noqa: E741
    attention = s / (3 * h) if hardware else s / (6 * h)
    return 72 * batch * l * s * h**2 * (1 + attention + vocab / (12 * h * l))


def activation_bytes(
    model: Architecture, batch: int, tp: int = 1, *, sp: bool = False, recompute: str = "none"
) -> float:
    """Bytes of a layer's activations in fp16, by the formulas of Korthikanti et al., table 2.

    They are of F = 4h with dropout; "full" is 2sbh with the whole input kept on every rank.
    """
    sbh = model.context * batch * model.width
    if recompute == "full":
        return 2 * sbh / (tp if sp else 1)
    scores = 5 * model.heads * model.context / model.width if recompute == "none" else 0.0
    return sbh * ((34 / tp if sp else 10 + 24 / tp) + scores / tp)
