"""What a user can ask of the MPI world."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MPIOptions:
    """How MPI ranks talk; thread ranks need none of it, since all of them can be seen."""

    check_collectives: bool = False
    """Members of a group tell each other their call before each collective."""

    stall_timeout: float | None = 30.0
    """Seconds after which a rank that waits says so, and for what; None: never."""

    stall_abort: bool = False
    """End the job then."""

    cuda_aware: bool = False
    """MPI can read and write GPU memory; otherwise messages pass through pinned host memory."""

    shared_memory: bool = True
    """Ranks of one node talk through memory that they share; otherwise MPI brings everything, as
    it does with cuda_aware and synchronous."""

    synchronous: bool = False
    """A send waits until it is received: for tests that nothing relies on buffering."""

    limit: int = 1 << 30
    """Bytes in one MPI message; larger ones are cut, since MPI's counts overflow at 2^31."""
