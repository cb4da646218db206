"""What can go wrong between ranks."""

from __future__ import annotations

from minitrain.errors import UserError


class CommError(RuntimeError):
    """Communication cannot go on."""


class DeadlockError(CommError):
    """Every rank that still runs waits for a message that nobody is going to send; its text tables
    who waits for what, where in the caller's code, and which messages lie unmatched."""


class RankFailedError(CommError):
    """Another rank failed, so this one was woken; the other's exception is the one to read."""


class MismatchError(UserError):
    """Ranks of one group called different collectives, or the same one with other arguments."""


class LauncherError(UserError):
    """The launcher and the MPI library disagree about the number of processes."""
