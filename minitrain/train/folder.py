"""The folder of a run: metrics.jsonl, config.toml, checkpoints/."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from minitrain.errors import UserError
from minitrain.train.disk import listing, replace_text

RUNS = Path("runs")
_NUMBERED = re.compile(r"(\d{4,})-")


class FolderError(UserError):
    """A run folder that already holds a run, or holds none where one is wanted."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what it writes."""

    path: Path

    @property
    def metrics(self) -> Path:
        """A JSON record for each step and each evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def checkpoints(self) -> Path:
        """The folder of step-NNNNNN folders."""
        return self.path / "checkpoints"

    def check_free(self) -> None:
        """Refuse a folder that holds a run, or where none can be made.

        Raises:
            FolderError: naming the folder and what to do.
        """
        try:
            held = self.config.exists() or self.metrics.exists()
            above = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
        except OSError as error:  # such as a name that is too long
            raise self._refusal(error) from error
        if held:
            raise self._held()
        if not above.is_dir():
            raise FolderError(f"{above} is not a folder; take another --run-dir")
        if not os.access(above, os.W_OK | os.X_OK):
            raise FolderError(f"{above} cannot be written to; take another --run-dir")

    def create(self, config: str, *, new: bool) -> None:
        """Make the folder, with the text of its config.toml, or give that file a new text.

        Raises:
            FolderError: it can't be made, or another run has come to be there.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            if new:  # "x": of two runs that start at once in one folder, one gets it
                with self.config.open("x", encoding="utf-8") as file:
                    file.write(config)
            else:
                replace_text(self.config, config)
        except FileExistsError:
            raise self._held() from None
        except OSError as error:
            raise self._refusal(error) from error

    def _held(self) -> FolderError:
        return FolderError(
            f"{self.path} already holds a run; go on with it by --resume, or take another --run-dir"
        )

    def _refusal(self, error: OSError) -> FolderError:
        return FolderError(f"cannot write to {self.path}: {error.strerror}; take another --run-dir")


def next_free(preset: str, runs: Path = RUNS) -> RunFolder:
    """The folder of a new run: runs/NNNN-preset, one number above the highest there is."""
    return RunFolder(runs / f"{max(_numbers(runs), default=0) + 1:04d}-{preset}")


def newest(runs: Path = RUNS) -> RunFolder:
    """The run with the highest number.

    Raises:
        FolderError: there is none.
    """
    numbers = _numbers(runs)
    if not numbers:
        raise FolderError(f"there is no run in {runs}/ yet; start one with `minitrain train`")
    return RunFolder(numbers[max(numbers)])


def _numbers(runs: Path) -> dict[int, Path]:
    return {int(match[1]): path for path in listing(runs) if (match := _NUMBERED.match(path.name))}
