"""What every collective does before its first message, and how it runs, waited for or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minitrain.array import Array
from minitrain.comm import signature
from minitrain.comm.operation import Operation, Steps
from minitrain.comm.peers import Peers
from minitrain.comm.transport import check_purpose

if TYPE_CHECKING:
    from minitrain.comm.group import Group


class Caller:
    """Opens and runs the collectives of a group."""

    _group: Group

    def _finish(self, operation: Operation) -> Any:
        """What a call returns: a blocking one the result, a non-blocking one the operation."""
        raise AssertionError("Group and Started each have their own")

    def _open(self, op: str, algorithm: str, purpose: str, *agreed: object) -> Peers:
        """Begin a collective: its route, and the check that all members begin the same one.

        agreed: what every member must have passed alike.
        """
        group = self._group
        route = group.next_route()
        peers = Peers(group, route, op, algorithm, check_purpose(purpose), agreed)
        group.transport.enter(peers)
        return peers

    def _run(self, peers: Peers, steps: Steps) -> Any:
        transport = self._group.transport
        if transport.check_collectives:
            steps = signature.checked(peers, steps)
        return self._finish(Operation(transport, steps, peers.route))


def normal_axis(op: str, x: Array, axis: int) -> int:
    """axis counted from 0."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{op} along axis {axis}: an array of shape {x.shape} has no such axis")
    return axis % int(x.ndim)


def check_sizes(op: str, sizes: Sequence[int], size: int, total: int | None = None) -> list[int]:
    """sizes as a list, if there is one for each of size ranks, and they make up the total."""
    if len(sizes) != size:
        raise ValueError(f"{op}: {len(sizes)} sizes for a group of {size} ranks")
    if total is not None and sum(sizes) != total:
        raise ValueError(f"{op}: the sizes {list(sizes)} add up to {sum(sizes)}, not to {total}")
    return list(sizes)
