"""The operations as functions of tensors: `minitrain.functional`."""

from minitrain.autograd.attention import attention
from minitrain.autograd.dropout import WeightDropout, dropout
from minitrain.autograd.fused import embedding, gelu, layer_norm, linear, softmax
from minitrain.autograd.llama import rms_norm, silu, swiglu
from minitrain.autograd.losses import cross_entropy, token_losses
from minitrain.autograd.ops import (
    add,
    divide,
    exp,
    log,
    maximum,
    multiply,
    power,
    sqrt,
    subtract,
    tanh,
    where,
)
from minitrain.autograd.reduce import matmul, max, mean, norm, sum
from minitrain.autograd.rotary import rotary
from minitrain.autograd.routing import choose, combine, grouped_linear, spread
from minitrain.autograd.shapes import cast, concatenate, reshape, split, take, transpose

__all__ = [
    "WeightDropout", "add", "attention", "cast", "choose", "combine", "concatenate",
    "cross_entropy", "divide", "dropout", "embedding", "exp", "gelu", "grouped_linear",
    "layer_norm", "linear", "log", "matmul", "max", "maximum", "mean", "multiply", "norm",
    "power", "reshape", "rms_norm", "rotary", "silu", "softmax", "split", "spread", "sqrt",
    "subtract", "sum", "swiglu", "take", "tanh", "token_losses", "transpose", "where",
]  # fmt: skip
