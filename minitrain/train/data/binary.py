"""Token ids in .bin files, as nanoGPT prepares them: bare uint16 or uint32, little-endian.

The file does not say of what tokenizer its ids are, nor how wide: the tokenizer says both. uint16
holds vocabularies of up to 65536 ids, and larger ones have uint32. It is memory-mapped, so that it
may be larger than the memory; nothing is unpickled (nanoGPT's meta.pkl is not looked at).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from minitrain.train.data.reading import TextError
from minitrain.train.data.tokenizer import Ids, Tokenizer
from minitrain.train.download import problem

_CHECKED = 1 << 20  # ids at either end that are looked at; the others when a batch is made


def is_binary(path: Path) -> bool:
    """Whether a path means ids: a .bin file, or a folder with nanoGPT's train.bin."""
    return path.suffix.lower() == ".bin" or os.path.exists(path / "train.bin")


def read_ids(path: Path, tokenizer: Tokenizer) -> tuple[Ids, Ids]:
    """The ids to train on and those held out: train.bin and val.bin, or a file's last tenth.

    Raises:
        TextError: a file that cannot be read, or that was not made with this tokenizer.
    """
    if tokenizer.spec == "byte":
        raise TextError(
            f"{path} holds ids, not text; give the tokenizer they were made with, "
            "--tokenizer tokenizer.json; or, without one, --tokenizer ids:50257 for GPT-2's"
        )
    ids = _mapped(path / "train.bin" if os.path.isdir(path) else path, tokenizer)
    if os.path.exists(path / "val.bin"):
        return ids, _mapped(path / "val.bin", tokenizer)
    start = len(ids) - len(ids) // 10
    return ids[:start], ids[start:]


def _mapped(path: Path, tokenizer: Tokenizer) -> Ids:
    dtype = np.dtype("<u2" if tokenizer.vocab <= 1 << 16 else "<u4")
    try:
        if wrong := problem(path):
            raise TextError(f"{path} {wrong}")
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise TextError(
                f"{path} has {size} bytes, not a whole number of the {dtype.name} ids that "
                f"tokenizer {tokenizer.spec} of {tokenizer.vocab} ids has"
            )
        # An empty file cannot be mapped.
        ids = np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from None
    for part in (ids[:_CHECKED], ids[-_CHECKED:]):
        _check(path, part, tokenizer)
    return ids


def _check(path: Path, ids: Ids, tokenizer: Tokenizer) -> None:
    largest = int(ids.max(initial=0))
    if largest >= tokenizer.vocab:
        raise TextError(
            f"{path} holds the {ids.dtype.name} id {largest}, but tokenizer {tokenizer.spec} has "
            f"ids 0 to {tokenizer.vocab - 1}; give --tokenizer the one it was made with"
        )
    if ids.dtype.itemsize == 2 and len(ids) > 1 and ids.any() and not ids[1::2].any():
        raise TextError(
            f"{path} holds uint32 ids, as every second uint16 in it is 0, but tokenizer "
            f"{tokenizer.spec} of {tokenizer.vocab} ids has uint16; convert the file to uint16"
        )
