"""What travels is exactly what the formulas say, for every algorithm, on 1 to 9 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minitrain.comm import Group, run_ranks
from minitrain.comm.ledger import Ledger
from minitrain.cut import cut_sizes

ITEM = 8
NONE = np.empty(0)


def ledgers(n: int, call: Callable[[Group], Any], **options: Any) -> list[Ledger]:
    """Each rank's ledger of one call."""

    def program(group: Group) -> Ledger:
        with group.ledger() as ledger:
            call(group)
        return ledger

    return run_ranks(n, program, **options)


def log2(n: int) -> int:
    """The steps of doubling on the largest power of two up to n."""
    return n.bit_length() - 1


def children(here: int, n: int) -> int:
    """How many ranks a rank of a binomial tree sends to."""
    lowest = here & -here if here else n
    return sum(1 for k in range(n) if 1 << k < lowest and here + (1 << k) < n)


def core(rank: int, n: int) -> tuple[bool, bool]:
    """Whether a rank sits out, or stands in for another, where n is no power of two."""
    paired = rank < 2 * (n - (1 << log2(n)))
    return paired and rank % 2 == 1, paired and rank % 2 == 0


def doubling(rank: int, n: int, v: int) -> int:
    sits_out, stands_in = core(rank, n)
    return v if sits_out else v * log2(n) + v * stands_in


ALL_REDUCE: dict[str, Callable[[int, int, int], int]] = {
    # Each rank passes on all pieces but its own, then all but its right neighbour's.
    "ring": lambda r, n, v: 2 * v - cut_sizes(v, n)[r] - cut_sizes(v, n)[(r + 1) % n],
    # All pieces but its own, each to its owner; then its own to everybody.
    "pairwise": lambda r, n, v: (v - cut_sizes(v, n)[r]) + (n - 1) * cut_sizes(v, n)[r],
    "doubling": doubling,
    "tree": lambda r, n, v: v * ((r > 0) + children(r, n)),
}


@pytest.mark.parametrize("algorithm", [*ALL_REDUCE])
@pytest.mark.parametrize("n", range(1, 10))
def test_all_reduce_sends_what_the_formula_says(algorithm: str, n: int) -> None:
    v = 23
    for rank, ledger in enumerate(
        ledgers(n, lambda g: g.all_reduce(np.ones(v), algorithm=algorithm))
    ):
        want = ALL_REDUCE[algorithm](rank, n, v) * ITEM
        assert ledger.bytes() == want
        assert ledger.bytes("all_reduce", "world", "gradient", algorithm) == want


@pytest.mark.parametrize("algorithm", ["ring", "pairwise", "halving"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_fewest_bytes_where_n_divides(algorithm: str, n: int) -> None:
    for ledger in ledgers(n, lambda g: g.all_reduce(np.ones(40), algorithm=algorithm)):
        assert ledger.bytes() == 2 * (n - 1) * 40 * ITEM // n
        assert ledger.messages() == (2 * log2(n) if algorithm == "halving" else 2 * (n - 1))


@pytest.mark.parametrize("n", range(1, 10))
def test_halving_with_ranks_that_sit_out(n: int) -> None:
    """Over all ranks 2(p-1)·V in the core, and V each way for each of the n - p pairs."""
    p = 1 << log2(n)
    sent = [x.bytes() for x in ledgers(n, lambda g: g.all_reduce(np.ones(23), algorithm="halving"))]
    assert sum(sent) == (2 * (p - 1) + 2 * (n - p)) * 23 * ITEM
    for rank in range(n):
        if core(rank, n)[0]:
            assert sent[rank] == 23 * ITEM


@pytest.mark.parametrize("n", range(1, 10))
def test_scatter_and_gather_collectives(n: int) -> None:
    sizes = cut_sizes(23, n)
    v = 23 * ITEM
    root = n - 1

    def want(call: Callable[[Group], Any], formula: Callable[[int], int], purpose: str) -> None:
        for rank, ledger in enumerate(ledgers(n, call)):
            assert ledger.bytes() == ledger.bytes(purpose=purpose) == formula(rank)

    def mine(group: Group) -> Any:
        return np.ones(sizes[group.rank])

    x = np.ones(23)
    for name in ("ring", "pairwise"):
        want(
            lambda g, name=name: g.reduce_scatter(x, algorithm=name),
            lambda r: v - sizes[r] * ITEM,
            "gradient",
        )
    want(
        lambda g: g.all_gather(mine(g), sizes=sizes, algorithm="ring"),
        lambda r: v - sizes[(r + 1) % n] * ITEM,
        "parameter",
    )
    want(
        lambda g: g.all_gather(mine(g), sizes=sizes, algorithm="pairwise"),
        lambda r: (n - 1) * sizes[r] * ITEM,
        "parameter",
    )
    want(
        lambda g: g.broadcast(x, root, like=x),
        lambda r: v * children((r - root) % n, n),
        "parameter",
    )
    want(lambda g: g.reduce(x, root), lambda r: v * (r != root), "gradient")
    want(lambda g: g.gather(x, root), lambda r: v * (r != root), "scalar")
    want(lambda g: g.scatter([x] * n, root), lambda r: v * (n - 1) * (r == root), "parameter")
    want(lambda g: g.scan(x), lambda r: v * sum(r + (1 << k) < n for k in range(4)), "scalar")
    want(lambda g: g.barrier(), lambda r: 0, "control")


@pytest.mark.parametrize("n", range(1, 10))
def test_bruck_sends_few_messages(n: int) -> None:
    steps = (n - 1).bit_length()
    x = np.ones((n, 5))
    travelling = sum(1 for k in range(steps) for i in range(n) if i >> k & 1)
    for ledger in ledgers(n, lambda g: g.all_to_all(x, "bruck")):
        assert (ledger.messages(), ledger.bytes()) == (steps, travelling * 5 * ITEM)
    for ledger in ledgers(n, lambda g: g.all_to_all(x, "pairwise")):
        assert (ledger.messages(), ledger.bytes()) == (n - 1, (n - 1) * 5 * ITEM)
    gather = ledgers(n, lambda g: g.all_gather(np.ones(5), sizes=[5] * n, algorithm="bruck"))
    for ledger in gather:
        assert (ledger.messages(), ledger.bytes()) == (steps, (n - 1) * 5 * ITEM)


def test_hierarchical_crosses_between_nodes_with_few_bytes() -> None:
    """8 ranks, 2 nodes of 4: 2(m-1)/m·V/4 a rank cross, and 2(n-1)/n·V are sent in all."""
    nodes = [0, 0, 0, 0, 1, 1, 1, 1]
    v = 800
    for rank, ledger in enumerate(ledgers(8, lambda g: g.all_reduce(np.ones(v)), nodes=nodes)):
        assert ledger.bytes(algorithm="hierarchical") == 2 * 7 * v * ITEM // 8
        crossing = sum(b for dest, b in ledger.by("dest").items() if nodes[dest] != nodes[rank])
        assert crossing == v * ITEM // 4


@given(size=st.integers(1, 400), n=st.integers(2, 9), half=st.booleans())
def test_every_default_all_reduce_above_a_kilobyte_sends_the_fewest_bytes(
    size: int, n: int, half: bool
) -> None:
    x = np.ones(size + 512, np.float16 if half else np.float64)
    sent = [ledger.bytes() for ledger in ledgers(n, lambda g: g.all_reduce(x))]
    assert sum(sent) == 2 * (n - 1) * x.nbytes


def test_ledgers_count_what_is_sent_in_groups_made_from_theirs() -> None:
    def program(group: Group) -> tuple[int, int, int, int]:
        row = group.split(group.rank // 2, axis="row")
        with group.ledger() as all_of_it:
            with row.ledger() as in_row:
                row.all_reduce(np.ones(4), purpose="activation")
                group.all_reduce(np.ones(2), purpose="scalar")
            row.all_reduce(np.ones(4))
        group.all_reduce(np.ones(99))
        return (
            in_row.bytes(),
            all_of_it.bytes(),
            all_of_it.bytes(axis="row", purpose="activation"),
            all_of_it.bytes(purpose="gradient"),
        )

    for in_row, all_of_it, activation, gradient in run_ranks(4, program):
        assert (in_row, activation, gradient) == (32, 32, 32)
        assert all_of_it == 32 + 32 + 2 * 2 * ITEM


def test_point_to_point_messages_and_the_table() -> None:
    def program(group: Group) -> Ledger:
        with group.ledger() as ledger:
            if group.rank == 0:
                group.send(np.ones(3), 1, purpose="activation")
            else:
                group.recv(0, like=np.ones(3))
        return ledger

    sender, receiver = run_ranks(2, program)
    assert receiver.bytes() == receiver.messages() == 0
    assert sender.by("purpose") == {"activation": 24}
    assert sender.table().splitlines()[1].split() == [
        *("send", "direct", "world", "activation", "1", "24")
    ]


def test_a_matrix_of_who_sent_how_much_to_whom() -> None:
    def program(group: Group) -> Any:
        with group.ledger() as ledger:
            group.all_reduce(np.ones(4), algorithm="ring")
            group.isend(np.ones(group.rank), 0)
            if group.rank == 0:
                for rank in range(group.size):
                    group.recv(rank)
        return ledger.matrix(group)

    ring = np.roll(np.eye(4, dtype=np.int64), 1, axis=1) * 6 * ITEM
    ring[:, 0] += np.arange(4) * ITEM
    for matrix in run_ranks(4, program):
        np.testing.assert_array_equal(matrix, ring)


def test_an_unknown_purpose_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown purpose 'gradients': use one of gradient, "):
        run_ranks(1, lambda group: group.all_reduce(NONE, purpose="gradients"))


def test_waiting_is_timed() -> None:
    def program(group: Group) -> float:
        with group.ledger() as ledger:
            group.all_reduce(np.ones(100))
        return ledger.seconds

    assert all(0 < seconds < 50 for seconds in run_ranks(2, program))
