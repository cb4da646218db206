"""What a checkpoint says of itself, and what is said of one that is broken."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from minitrain.errors import UserError
from minitrain.parallel.placement import Piece
from minitrain.train.download import problem

NAME = re.compile(r"step-(\d{6,})$")
# What a manifest's values must be at least, so that an edited one is refused as it is read.
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("step", "updates", "blas"), int),
    **dict.fromkeys(("layout", "text", "tokenizer"), str),
    **dict.fromkeys(("model", "config", "arrays", "checksums", "sources"), dict),
    "loss_scale": dict | None,
    "val_loss": int | float | None,
}


class CheckpointError(UserError):
    """A checkpoint that is not whole, or is of another model."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: steps done.
        updates: updates applied, fewer where batches had no valid token; more with a parameter
            server, which applies each worker's.
        layout: the layout that wrote it, for information.
        model: family and sizes of the model, as `families.to_values` gives them.
        text: a digest of the tokens that it was trained on, "" if there were none.
        tokenizer: what `tokenizer_of` makes the tokenizer from, in the checkpoint's folder.
        config: every option of the run by key, as `config.values` gives them; empty for weights
            that no run of ours made.
        arrays: by key ("weights/NAME", "first/NAME"): {"shape", "dtype", "pieces"}; a piece is
            {"file", "slice"} with the slice as [start, stop] for each axis, and, if it is but a
            part of these elements, flattened, "flat": [start, stop].
        loss_scale: state of mixed precision; None without.
        blas: BLAS threads of a rank, which the order of sums in a product depends on; 0: unknown.
        val_loss: of an evaluation after this step; None if there was none.
        sources: the text files that it was trained on, see `reading.Text`.
        checksums: of each file beside the manifest, by name; none in what was written before there
            were any. On the disk there is one of the manifest too, without it.
    """

    step: int
    updates: int
    layout: str
    model: dict[str, Any]
    tokenizer: str
    config: dict[str, Any]
    arrays: dict[str, dict[str, Any]]
    text: str = ""
    loss_scale: dict[str, float] | None = None
    blas: int = 0
    val_loss: float | None = None
    sources: dict[str, str] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


def described(file: str, piece: Piece) -> dict[str, Any]:
    """What a manifest says of a piece of an array: its file, and which part of the whole it is."""
    spans = [[span.start, span.stop] for span in piece.spans]
    flat = {} if piece.flat is None else {"flat": [piece.flat.start, piece.flat.stop]}
    return {"file": file, "slice": spans, **flat}


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: a manifest that is missing, cut off or edited.
    """
    with reading(path):
        if wrong := problem(path / _OWN):
            raise ValueError(f"{_OWN} {wrong}")
        tree = json.loads((path / _OWN).read_text(encoding="utf-8"))
        _check_own(tree)
        manifest = Manifest(**tree)
        for name, kind in _KINDS.items():
            if not isinstance(getattr(manifest, name), kind):
                raise ValueError(f"its {name} is {getattr(manifest, name)!r:.40}")
        served = manifest.config.get("sync.mode") == "async"
        if manifest.updates < 0 or (manifest.updates > manifest.step and not served):
            raise ValueError(f"{manifest.updates} updates in {manifest.step} steps")
        if NAME.match(path.name) and manifest.step != step_of(path):
            raise ValueError(f"it is of step {manifest.step}")
    return manifest


_OWN = "manifest.json"


def to_text(manifest: Manifest) -> str:
    """What manifest.json holds, with its own checksum as the last of the checksums."""
    tree = dict(manifest.__dict__)
    tree["checksums"] = {**manifest.checksums, _OWN: _checksum(tree)}
    return json.dumps(tree, indent=1) + "\n"


def _check_own(tree: Any) -> None:
    """Refuse a manifest with a bit that flipped; its own checksum leaves the tree."""
    expected = tree.get("checksums", {}).pop(_OWN, None)
    if expected is not None and expected != _checksum(tree):
        raise ValueError(f"{_OWN} is not as it was written (its CRC-32 is another)")


def _checksum(tree: Any) -> str:
    return f"{zlib.crc32(json.dumps(tree).encode()):08x}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What files that are missing, cut off or edited make a reader raise, said plainly."""
    broken = (OSError, SafetensorError, ValueError, TypeError, LookupError, AttributeError)
    try:
        yield
    except UserError:  # sizes that no model has, say: it has its own words
        raise
    except broken as error:
        raise CheckpointError(
            f"{path} is not a whole checkpoint: {type(error).__name__}: {error}; remove that "
            "folder to go on from the one before it, or start a new run"
        ) from error


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = NAME.match(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not called step-NNNNNN, as a checkpoint is")
    return int(match[1])
