"""Which checkpoints of a run are kept: the newest, and the best one by held-out loss."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from minitrain.train.checkpoint.files import whole
from minitrain.train.checkpoint.manifest import CheckpointError, read_manifest, step_of

BEST = "best"
"""The name of a link beside the checkpoints, to the best of them."""


def val_loss_of(path: Path) -> float | None:
    """A checkpoint's held-out loss; None if it has none, or is broken."""
    try:
        return read_manifest(path).val_loss
    except CheckpointError:
        return None


def best(folder: Path) -> Path | None:
    """The checkpoint in a folder with the lowest held-out loss, of equal ones the first; None if
    none has one."""
    losses = {path: loss for path in whole(folder) if (loss := val_loss_of(path)) is not None}
    return min(losses, key=lambda path: (losses[path], step_of(path)), default=None)


def keep(folder: Path, count: int) -> None:
    """Remove all but the newest checkpoints and the best one, and link that as `best`.

    What is removed loses its name first, so that nothing that is half there has one.
    """
    top = best(folder)
    if top is not None:
        _link(folder / BEST, top)
    for path in whole(folder)[:-count]:
        if path != top:
            gone = folder / f".{path.name}.part"
            with suppress(OSError):  # what cannot be removed now is left, and tried again
                shutil.rmtree(gone, ignore_errors=True)
                path.rename(gone)
                shutil.rmtree(gone)


def _link(link: Path, target: Path) -> None:
    """Let a link lead to another place, at once; where there are no links, nothing is done."""
    new = link.with_name(f".{link.name}.part")
    with suppress(OSError):
        new.unlink(missing_ok=True)
        os.symlink(target.name, new)
        new.replace(link)
