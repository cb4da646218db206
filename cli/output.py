"""All that the commands print. A stream that takes no more ends no work: what cannot be written to
stderr is lost, and what cannot be written to stdout is a line on stderr and a status at the end."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from contextlib import suppress
from typing import Any

from minitrain.comm.errors import LauncherError
from minitrain.comm.mpi.launch import launched

UNWRITTEN = 2
"""Exit status where everything went well but the results could not be written."""


class Descriptor(io.RawIOBase):
    """A file descriptor to which writing never fails.

    It has no buffer, so that nothing is left to fail as the process ends, and a signal handler may
    write while something else does.

    Attributes:
        name: as in "<stdout>".
        error: the first failure, with which some output was lost; None so far.
    """

    def __init__(self, number: int, name: str):
        self.number, self.name = number, name
        self.error: OSError | None = None

    def fileno(self) -> int:
        """Its number."""
        return self.number

    def isatty(self) -> bool:
        """Whether it is a terminal that is still there."""
        return os.isatty(self.number)

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of it, or as much as there is room for; its length."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                view = view[self._some(view) :]
        except OSError as error:
            self.error = self.error or error
        return size

    def _some(self, view: memoryview) -> int:
        try:
            return os.write(self.number, view)
        except BlockingIOError:  # who shares the terminal may have told it not to block
            select.select([], [self.number], [])
            return 0


def guard() -> None:
    """From now on writing to this process's stdout and stderr never fails.

    What stdin, stdout or stderr the caller has closed (`2>&-`) is /dev/null: their numbers must not
    stay free, since the next file that is opened would get one, and what a library prints. Results
    (--help is one too) are the first rank's to print.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        own = stream is getattr(sys, f"__{name}__")  # and not a test's
        if stream is None or (own and name == "stdout" and not first()):
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif own:
            setattr(sys, name, _guarded(stream))


def _guarded(stream: Any) -> io.TextIOWrapper:
    codecs.register_error("minitrain.escape", _escape)
    # Python's own choices; another one is the user's, by PYTHONIOENCODING.
    ours = stream.errors in ("strict", "surrogateescape", "backslashreplace")
    return io.TextIOWrapper(
        Descriptor(stream.fileno(), stream.name),
        encoding=stream.encoding,
        errors="minitrain.escape" if ours else stream.errors,
        write_through=True,
    )


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""What an encoding cannot say, as Python writes it: a byte of a file name as \xff."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(map(_escaped, text)), error.end


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how Python carries a byte that is no text
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("ascii", "backslashreplace").decode()


def first() -> bool:
    """Whether this process speaks for all: it is the only one, or the first rank."""
    with suppress(LauncherError):  # a launcher that is not understood: each one says so
        launch = launched()
        return launch is None or launch.rank == 0
    return True


def say(line: str) -> None:
    """A line on stderr, on the first rank alone; nobody need read it."""
    if first():
        _write(sys.stderr, line)


def tell(text: str) -> None:
    """A result, on stdout."""
    _write(sys.stdout, text)


def pour(text: str) -> None:
    """A piece of a result, on stdout at once, with no line end of its own."""
    sys.stdout.write(text)
    sys.stdout.flush()


def complain(text: str) -> None:
    """Lines on stderr, on whichever rank."""
    _write(sys.stderr, text)


def _write(stream: Any, text: str) -> None:
    stream.write(text + "\n")
    stream.flush()


def unwritten() -> str | None:
    """What to say if something that was written to stdout did not get there."""
    error = getattr(getattr(sys.stdout, "buffer", None), "error", None)
    return f"minitrain: cannot write to stdout: {error.strerror}" if error else None


def final(status: int) -> int:
    """The status to exit with: 0 and 1 are results, which somebody must have been able to read."""
    words = unwritten()
    if words is None or status > 1:
        return status
    say(words)
    return UNWRITTEN
