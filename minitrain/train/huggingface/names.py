"""Hugging Face's names and layouts of the weights of GPT-2 and Llama, and how ours map to them.

Ours are (in, out) with heads and halves as axes; theirs are matrices, (in, out) in GPT-2's Conv1D
and (out, in) in Llama's Linear, with keys, values, gate and up apart. Every map is a reshape, a
turn and a cut, so gradients and optimizer state go the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from minitrain.nn.config import Config, GPTConfig, LlamaConfig
from minitrain.nn.families import declare
from minitrain.train.huggingface.buffers import WeightsError, check_buffers, is_buffer

Arrays: TypeAlias = Mapping[str, "np.ndarray[Any, Any]"]

_TABLES = {GPTConfig: "transformer.wte.weight", LlamaConfig: "model.embed_tokens.weight"}
_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Entry:
    """One parameter of ours, and where it lies in theirs.

    Attributes:
        ours: its global name.
        theirs: one name; or one for each index of our axis `inner` (keys and values, gate and up).
        inner: how many of our axes are summed over, which makes ours a matrix (in, out); 0 for
            vectors, which are flattened.
        turned: whether their matrix is (out, in).
    """

    ours: str
    theirs: tuple[str, ...]
    inner: int = 0
    turned: bool = False

    def cut(self, x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Their arrays, contiguous, from ours."""
        count = len(self.theirs)
        pieces = [x] if count == 1 else [x.take(i, axis=self.inner) for i in range(count)]
        matrices = [piece.reshape(self._matrix(piece.shape)) for piece in pieces]
        return {
            # safetensors would write a view that is not contiguous wrongly, and silently.
            name: np.ascontiguousarray(matrix.T if self.turned else matrix)
            for name, matrix in zip(self.theirs, matrices, strict=True)
        }

    def join(self, arrays: Arrays, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Our array of this shape and dtype, contiguous, from theirs."""
        pieces = [self._piece(name, arrays[name], shape, dtype) for name in self.theirs]
        whole = pieces[0] if len(pieces) == 1 else np.stack(pieces, axis=self.inner)
        # Not astype(copy=False) alone: a view of theirs would keep the turned order, or the file.
        return np.array(whole.reshape(shape), dtype, order="C")

    def _piece(self, name: str, x: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """One of their arrays as (in, out), refused if it is of another shape than that makes."""
        one = shape
        if len(self.theirs) > 1:
            one = shape[: self.inner] + shape[self.inner + 1 :]
        expected = self._matrix(one)[::-1] if self.turned else self._matrix(one)
        if x.shape != expected:
            raise WeightsError(f"{name} has the shape {x.shape}, but the model needs {expected}")
        turned: np.ndarray[Any, Any] = x.T if self.turned else x
        return turned.astype(dtype, copy=False)  # keys and values may be of two short types

    def _matrix(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        first, last = shape[: self.inner], shape[self.inner :]
        return (math.prod(first), math.prod(last)) if self.inner else (math.prod(last),)


def entries(config: Config) -> list[Entry]:
    """Every parameter of a model, with its place in theirs."""
    return list(_gpt(config) if isinstance(config, GPTConfig) else _llama(config))


def to_theirs(config: Config, arrays: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays by our global names, as contiguous ones by theirs. (Gradients as well as weights.)"""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for entry in entries(config):
        found |= entry.cut(arrays[entry.ours])
    return found


def from_theirs(
    config: Config, arrays: Arrays, dtype: Any = np.float32
) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays by their names, as contiguous ones of this dtype by our global names.

    Args:
        arrays: a mapping that may load an array when it is asked for, so that one of theirs at a
            time is in memory. Names without the leading "transformer." or "model." are understood.

    Raises:
        WeightsError: names that lack or that no parameter has, a shape that differs, or an array
            without a parameter that is not what the model computes instead.
    """
    prefix = "transformer." if isinstance(config, GPTConfig) else "model."
    bare = not any(name.startswith(prefix) for name in arrays)
    known = _PrefixView(arrays, prefix if bare else "")
    table = entries(config)
    _check_names({name for entry in table for name in entry.theirs}, set(known), config)
    check_buffers(config, known)
    _check_tied(config, known)
    parameters = declare(config).parameters()
    return {
        entry.ours: entry.join(known, parameters[entry.ours].declared, dtype) for entry in table
    }


class _PrefixView(Mapping[str, Any]):
    """Arrays under names with a prefix that a model saved without its head does not write."""

    def __init__(self, arrays: Arrays, prefix: str):
        self.arrays, self.prefix = arrays, prefix

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name.removeprefix(self.prefix) if self._inside(name) else name]

    def __iter__(self) -> Iterator[str]:
        for name in self.arrays:
            yield self.prefix + name if self._inside(name) else name

    def __len__(self) -> int:
        return len(self.arrays)

    @staticmethod
    def _inside(name: str) -> bool:
        return name != _HEAD


def _check_names(wanted: set[str], given: set[str], config: Config) -> None:
    ignored = {name for name in given if is_buffer(name)}
    if config.tied:  # some files hold the table twice
        ignored.add(_HEAD)
    missing, extra = sorted(wanted - given), sorted(given - wanted - ignored)
    if missing or extra:
        raise WeightsError(
            f"the weights are not those of {config}: {len(missing)} missing {missing[:3]}, "
            f"{len(extra)} that no parameter has {extra[:3]}"
        )


def _check_tied(config: Config, given: Arrays) -> None:
    """Refuse a head beside a tied table that holds other values: one of both would be lost."""
    table = _TABLES[type(config)]
    if config.tied and _HEAD in given and not np.array_equal(given[_HEAD], given[table]):
        raise WeightsError(
            f"{_HEAD} differs from {table}, but config.json ties them; set tie_word_embeddings to "
            f"false there to keep both, or take {_HEAD} out of the file"
        )


def _gpt(config: GPTConfig) -> Iterator[Entry]:
    yield Entry("embedding.token.weight", ("transformer.wte.weight",), inner=1)
    yield Entry("embedding.position.weight", ("transformer.wpe.weight",), inner=1)
    linears = {
        "attention.qkv": ("attn.c_attn", 1),
        "attention.out": ("attn.c_proj", 2),
        "mlp.up": ("mlp.c_fc", 1),
        "mlp.down": ("mlp.c_proj", 1),
    }
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from _norm(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from _norm(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        for name, (other, inner) in linears.items():
            yield Entry(f"{ours}.{name}.weight", (f"{theirs}.{other}.weight",), inner)
            yield Entry(f"{ours}.{name}.bias", (f"{theirs}.{other}.bias",))
    yield from _norm("norm", "transformer.ln_f")
    if not config.tied:
        yield Entry("head.weight", ("lm_head.weight",), inner=1)


def _norm(ours: str, theirs: str) -> Iterator[Entry]:
    for part in ("weight", "bias"):
        yield Entry(f"{ours}.{part}", (f"{theirs}.{part}",))


def _llama(config: LlamaConfig) -> Iterator[Entry]:
    yield Entry("embedding.token.weight", ("model.embed_tokens.weight",), inner=1)
    linears = {
        "attention.q": (("self_attn.q_proj",), 1),
        "attention.kv": (("self_attn.k_proj", "self_attn.v_proj"), 1),
        "attention.out": (("self_attn.o_proj",), 2),
        "mlp.gate_up": (("mlp.gate_proj", "mlp.up_proj"), 1),
        "mlp.down": (("mlp.down_proj",), 1),
    }
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield Entry(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
        yield Entry(f"{ours}.mlp_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        for name, (others, inner) in linears.items():
            names = tuple([f"{theirs}.{other}.weight" for other in others])
            yield Entry(f"{ours}.{name}.weight", names, inner, turned=True)
        for name in ("attention.q", "attention.kv") if config.biased else ():
            names = tuple([f"{theirs}.{other}.bias" for other in linears[name][0]])
            yield Entry(f"{ours}.{name}.bias", names)
    yield Entry("norm.weight", ("model.norm.weight",))
    if not config.tied:
        yield Entry("head.weight", ("lm_head.weight",), inner=1)
