"""A checkpoint that is written while training goes on: of a copy, by a thread of each rank.

The threads send no messages, which would mix with those of the step. Each rank writes its file, and
beside it the file's checksum; the first rank waits until all are there, and finishes the draft. One
that fails removes the draft, by which the first rank knows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from minitrain.array import Array, to_host
from minitrain.train.checkpoint.files import Draft, file_of
from minitrain.train.checkpoint.manifest import Manifest
from minitrain.train.disk import WriteError

_NAP = 0.02  # seconds between two looks for the other ranks' files


class Saving:
    """A checkpoint on its way to the disk; as many ranks as write a part of it have one.

    Args:
        mine: by key what this rank writes; it is copied.
        manifest, texts: on the first rank, what it finishes the draft with.
    """

    def __init__(self, draft: Draft, rank: int, mine: Mapping[str, Array],
                 manifest: Manifest | None, texts: Mapping[str, str]):  # fmt: skip
        self.draft, self.rank, self.manifest, self.texts = draft, rank, manifest, texts
        self.mine = {key: np.array(to_host(x)) for key, x in mine.items()}
        self.path: Path | None = None
        self.error: WriteError | None = None
        self.thread = threading.Thread(target=self._write)
        self.thread.start()

    def wait(self) -> Path | None:
        """Its path on the first rank, once it is whole; None on the others.

        Raises:
            WriteError: the disk is full or refuses; earlier checkpoints are as they were.
        """
        self.thread.join()
        if self.error is not None:
            raise self.error
        return self.path

    def _write(self) -> None:
        try:
            if self.mine:
                total = self.draft.add(self.rank, self.mine)
                self.draft.note(_sum_of(file_of(self.rank)), total)
            self.mine = {}
            if self.manifest is not None:
                self._finish(self.manifest)
        except WriteError as error:
            self.error = error

    def _finish(self, manifest: Manifest) -> None:
        entries = manifest.arrays.values()
        names = sorted({piece["file"] for entry in entries for piece in entry["pieces"]})
        notes = [self.draft.temporary / _sum_of(name) for name in names]
        while not all(note.exists() for note in notes):
            if not self.draft.temporary.exists():
                raise WriteError(
                    f"another rank could not write its part of {self.draft.target}; see what it "
                    "says. Earlier checkpoints are untouched"
                )
            time.sleep(_NAP)
        sums = {name: note.read_text() for name, note in zip(names, notes, strict=True)}
        for note in notes:
            note.unlink()
        self.path = self.draft.finish(replace(manifest, checksums=sums), self.texts)


def _sum_of(name: str) -> str:
    """The file in which a rank notes the checksum of another one of its."""
    return f"{name}.sum"
