"""Arrays as bytes: where a message could be read in two ways."""

from __future__ import annotations

import numpy as np
import pytest

from minitrain.comm.mpi.wire import as_bytes, decoded, header_of

MARK = header_of(np.zeros(3))[-8:].view(np.int64)[0]
"""What ends the header of a float64 array of one axis."""


def test_an_array_that_ends_as_a_header_does_is_not_taken_for_one() -> None:
    """Such an array is rare, and a header tells how many bytes lie before it: 3 · 8, not 2 · 8."""
    x = np.array([7, 8, 3, MARK])
    np.testing.assert_array_equal(decoded(as_bytes(x), np.empty(4, np.int64), 0), x)
    with pytest.raises(ValueError, match="rank 5 sent 32 bytes without a header"):
        decoded(as_bytes(x), None, 5)


def test_an_array_and_its_header_are_not_taken_for_a_longer_one() -> None:
    x = np.array([7.0, 8.0])
    message = np.concatenate([as_bytes(x), header_of(x)])
    np.testing.assert_array_equal(decoded(message, None, 0), x)
    with pytest.raises(ValueError, match=r"expected float64 \(4,\) from rank 0, .* float64 \(2,\)"):
        decoded(message, np.empty(4), 0)
