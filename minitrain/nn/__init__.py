"""The plain models and their layers: they know nothing of ranks."""

from minitrain.nn.attention import Attention, AttentionCore
from minitrain.nn.gpt import GPT, MLP, Block, GPTConfig
from minitrain.nn.layers import CrossEntropy, Dropout, Embedding, Head, LayerNorm, Linear, Table
from minitrain.nn.module import Module, Parameter, constant, normal
from minitrain.nn.window import Window, current, window

__all__ = [
    "GPT", "MLP", "Attention", "AttentionCore", "Block", "CrossEntropy", "Dropout", "Embedding",
    "GPTConfig", "Head", "LayerNorm", "Linear", "Module", "Parameter", "Table", "Window",
    "constant", "current", "normal", "window",
]  # fmt: skip
