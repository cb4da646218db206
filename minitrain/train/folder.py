"""The folder of a run: metrics.jsonl, config.toml, checkpoints/."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from minitrain.errors import UserError
from minitrain.train.disk import listing, own_kind, replace_text

RUNS = Path("runs")
_NUMBERED = re.compile(r"(\d{4,})-")
_IN_USE = (errno.EWOULDBLOCK, errno.EACCES)


class FolderError(UserError):
    """A run folder that already holds a run, or holds none where one is wanted."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps what it writes.

    Attributes:
        numbered: nobody named it: its number is only a proposal until `claim`.
        unfinished: what a run without a checkpoint has left in it may be replaced.
    """

    path: Path
    numbered: bool = False
    unfinished: bool = False

    @property
    def metrics(self) -> Path:
        """A JSON record for each step and each evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def trace(self) -> Path:
        """A timeline of some steps, where one is asked for."""
        return self.path / "trace.json"

    @property
    def samples(self) -> Path:
        """A JSON record for each text that the model wrote on the way, where that is asked for."""
        return self.path / "samples.jsonl"

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
        if kind := own_kind(self.path):
            raise FolderError(
                f"{self.path} is {kind} already, and a new run would be mixed up with it; take "
                "another --run-dir"
            )
        if not above.is_dir():
            raise FolderError(f"{above} is not a folder; take another --run-dir")
        if not os.access(above, os.W_OK | os.X_OK):
            raise FolderError(f"{above} cannot be written to; take another --run-dir")

    def claim(self) -> RunFolder:
        """Make the folder, and return it: where nobody named it, with the next number that is free.

        To make a folder is one act, which of several runs that start at once one alone achieves.

        Raises:
            FolderError: it can't be made.
        """
        try:
            if not self.numbered:
                self.path.mkdir(parents=True, exist_ok=True)
                return self
            self.path.parent.mkdir(parents=True, exist_ok=True)
            folder = self
            while not folder._made_alone():
                time.sleep(random.uniform(0.001, 0.02))
                number = max(_all_numbers(self.path.parent), default=0) + 1
                folder = self.renumbered(number)
            return folder
        except OSError as error:
            raise self._refusal(error) from error

    def _made_alone(self) -> bool:
        """Whether this is now the only folder of its number: of two runs of different presets,
        each makes its own folder, and at least the later one sees the other's."""
        try:
            self.path.mkdir()
        except FileExistsError:
            return False
        alone = _all_numbers(self.path.parent).count(self.number) == 1
        if not alone:
            self.path.rmdir()
        return alone

    @property
    def number(self) -> int:
        """Of a numbered one: the number; 0 of others."""
        match = _NUMBERED.match(self.path.name)
        return int(match[1]) if match and self.numbered else 0

    def renumbered(self, number: int) -> RunFolder:
        """The same with another number; one that somebody named is left alone."""
        if not self.numbered:
            return self
        rest = self.path.name.partition("-")[2]
        return RunFolder(self.path.with_name(f"{number:04d}-{rest}"), numbered=True)

    @contextmanager
    def in_use(self, *, shared: bool = False) -> Iterator[None]:
        """Inside, the run is this process's: the system's lock, which ends with the process.

        shared: only look whether another process has it; any number may look at a time.

        Raises:
            FolderError: another process has it.
        """
        handle = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except OSError as error:  # other reasons: a file system that has no locks
                if error.errno in _IN_USE:
                    raise FolderError(
                        f"{self.path} is in use: another process trains this run; wait until it "
                        "ends, or take another --run-dir"
                    ) from None
            yield
        finally:
            os.close(handle)

    def create(self, config: str, *, new: bool) -> None:
        """Make the folder, with the text of its config.toml, or give that file a new text.

        Raises:
            FolderError: it can't be made, or another run has come to be there.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            # "x": of two runs that start at once in one folder, one gets it.
            if new and not self.unfinished:
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
    number = max(_all_numbers(runs), default=0) + 1
    return RunFolder(runs / f"{number:04d}-{preset}", numbered=True)


def newest_if_any(runs: Path = RUNS) -> RunFolder | None:
    """The run with the highest number; None if there is none."""
    return newest(runs) if _numbers(runs) else None


def newest(runs: Path = RUNS) -> RunFolder:
    """The run with the highest number.

    Raises:
        FolderError: there is none.
    """
    numbers = _numbers(runs)
    if not numbers:
        raise FolderError(f"there is no run in {runs}/ yet; start one with `minitrain train`")
    return RunFolder(numbers[max(numbers)])


def _all_numbers(runs: Path) -> list[int]:
    return [int(match[1]) for path in listing(runs) if (match := _NUMBERED.match(path.name))]


def _numbers(runs: Path) -> dict[int, Path]:
    return {int(match[1]): path for path in listing(runs) if (match := _NUMBERED.match(path.name))}
