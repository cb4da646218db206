"""The folder of a run: metrics.jsonl, config.toml, checkpoints/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

RUNS = Path("runs")
_NUMBERED = re.compile(r"(\d{4,})-")


class FolderError(ValueError):
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
        if self.config.exists() or self.metrics.exists():
            raise FolderError(
                f"{self.path} already holds a run; go on with it by --resume, or take another "
                "--run-dir"
            )
        if self.path.exists() and not self.path.is_dir():
            raise FolderError(f"{self.path} is no folder; take another --run-dir")

    def create(self, config: str) -> None:
        """Make the folder, with the text of its config.toml."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.config.write_text(config, encoding="utf-8")
        except OSError as error:
            raise FolderError(
                f"cannot write to {self.path}: {error.strerror}; take another --run-dir"
            ) from error


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
    return {
        int(match[1]): path
        for path in (runs.iterdir() if runs.is_dir() else ())
        if (match := _NUMBERED.match(path.name))
    }
