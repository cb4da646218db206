"""The plain models and their layers: they know nothing of ranks."""

from minitrain.nn.attention import Attention, AttentionCore, GroupedAttention
from minitrain.nn.gpt import GPT, MLP, Block, GPTConfig
from minitrain.nn.layers import (
    CrossEntropy,
    Dropout,
    Embedding,
    Head,
    LayerNorm,
    Linear,
    RMSNorm,
    Table,
)
from minitrain.nn.llama import GatedMLP, Llama, LlamaBlock, LlamaConfig, TokenEmbedding
from minitrain.nn.module import Module, Parameter, UnfilledError, constant, normal
from minitrain.nn.transformer import Transformer
from minitrain.nn.window import Window, current, window

__all__ = [
    "GPT", "MLP", "Attention", "AttentionCore", "Block", "CrossEntropy", "Dropout", "Embedding",
    "GPTConfig", "GatedMLP", "GroupedAttention", "Head", "LayerNorm", "Linear", "Llama",
    "LlamaBlock", "LlamaConfig", "Module", "Parameter", "RMSNorm", "Table", "TokenEmbedding",
    "Transformer", "UnfilledError", "Window", "constant", "current", "normal", "window",
]  # fmt: skip
