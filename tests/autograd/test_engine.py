"""The engine: order, accumulation, refusals, modes and hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minitrain import functional as F
from minitrain.autograd.deferral import Backward
from minitrain.autograd.engine import backward
from minitrain.autograd.function import Function
from minitrain.autograd.tensor import Tensor, grad_enabled, no_grad


def leaf(value: Any) -> Tensor:
    return Tensor(np.array(value, np.float64), requires_grad=True)


def test_a_node_with_several_users_is_visited_once() -> None:  # case I1
    x = leaf(2)
    y = x * x
    z = y + y * x
    w = z * y
    w.backward()
    assert (w.item(), x.grad) == (48, 112)  # 4x³ + 5x⁴; recursion over paths gives 176


@pytest.mark.parametrize("k", range(1, 13))
def test_a_weight_used_many_times(k: int) -> None:  # case I13
    w, m = leaf(1.1), leaf([[1.1, 0], [0, 1.1]])
    for times in (1, 2):
        y, z = Tensor(1.0), Tensor(np.eye(2))
        for _ in range(k):
            y, z = y * w, z @ m
        y.backward()
        z.backward(np.eye(2))
        right = times * k * 1.1 ** (k - 1)
        assert w.grad == pytest.approx(right, rel=1e-12)
        np.testing.assert_allclose(np.diag(m.grad), right, rtol=1e-12)  # type: ignore[arg-type]


def test_a_second_backward_is_refused() -> None:  # case I12
    w = leaf(3)
    u = w * w
    first, second = u * u, u * 5
    first.backward()
    assert w.grad == 108
    for again in (first, second, u):
        with pytest.raises(ValueError, match="already run"):
            again.backward()
    assert w.grad == 108
    with pytest.raises(ValueError, match="already run"):
        (u + 1).backward()


def test_gradients_accumulate_in_one_array_of_their_own() -> None:
    x, given = leaf([1, 2]), np.array([10.0, 20.0])
    (x + 0).backward(given)  # a vjp that hands its grad_out through
    kept = x.grad
    x.backward(given)  # the leaf itself
    (x.reshape(2, 1) * 1).backward(given[:, None])  # a view of another's array
    F.transpose(x, (0,)).backward(given)
    assert x.grad is kept
    np.testing.assert_array_equal(kept, 4 * given)  # type: ignore[arg-type]
    np.testing.assert_array_equal(given, [10, 20])


def test_no_two_leaves_share_a_gradient() -> None:
    a, b, given = leaf([1, 2]), leaf([3, 4]), np.array([1.0, 1.0])
    (a + b).backward(given)
    assert a.grad is not None
    a.grad += 1
    np.testing.assert_array_equal(b.grad, [1, 1])  # type: ignore[arg-type]
    np.testing.assert_array_equal(given, [1, 1])
    # A sum's gradient is one number repeated: adding to it must not add to that number again.
    c = leaf([1, 2, 3])
    for _ in range(2):
        (c + 0).sum().backward()
    np.testing.assert_array_equal(c.grad, [2, 2, 2])  # type: ignore[arg-type]


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\) needs grad_out of that shape"):
        leaf([1, 2]).backward()
    with pytest.raises(ValueError, match=r"grad_out has shape \(3,\), the tensor \(2,\)"):
        leaf([1, 2]).backward(np.ones(3))
    with pytest.raises(ValueError, match="requires no gradient"):
        Tensor(1.0).backward()
    with pytest.raises(ValueError, match=r"write 2.0 instead of 2"):
        Tensor(2, requires_grad=True)
    with pytest.raises(ValueError, match="respect to complex128 makes no sense"):
        Tensor(np.ones(2, complex), requires_grad=True)
    for what, name in (("a", "str"), (None, "NoneType"), (leaf(1), "Tensor")):
        with pytest.raises(ValueError, match=f"an array or numbers, not of a {name}"):
            Tensor(what)


def test_no_grad_is_of_its_thread_also_as_a_shared_decorator() -> None:
    together = threading.Barrier(2, timeout=20)

    @no_grad()
    def decorated() -> bool:
        together.wait()
        return grad_enabled()

    def outer(grad: bool) -> None:
        if grad:
            seen[grad] = [decorated(), grad_enabled()]
        else:
            with no_grad():
                seen[grad] = [decorated(), grad_enabled()]

    seen: dict[bool, list[bool]] = {}
    threads = [threading.Thread(target=outer, args=(grad,)) for grad in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {True: [False, True], False: [False, False]}
    with no_grad(), no_grad():
        assert not (leaf(1) * 2).requires_grad
    assert (leaf(1) * 2).requires_grad
    with pytest.raises(RuntimeError), no_grad():
        raise RuntimeError
    assert grad_enabled()


def test_a_gradient_is_final_once_and_complete() -> None:
    a, b, unused = leaf(2), leaf(3), leaf(4)
    final: list[tuple[Tensor, Any]] = []
    nodes: list[int] = []
    for _ in range(2):  # in each pass anew
        final.clear()
        backward(
            a * b + a * unused.detach() + a,
            on_final=lambda t: final.append((t, float(t.grad))),  # type: ignore[arg-type]
            after_node=lambda: nodes.append(1),
        )
        assert {t for t, _ in final} == {a, b}
        assert len(final) == 2
        assert all(t.grad == value for t, value in final)
    assert len(nodes) == 2 * 4
    assert (a.grad, b.grad, unused.grad) == (2 * (3 + 4 + 1), 2 * 2, None)


class _Cut(Function):
    """x, through which nothing flows back."""

    def forward(self, x: Any) -> Any:
        return x * 1

    def vjp(self, grad_out: Any, needs: tuple[bool, ...]) -> tuple[Any, ...]:
        return (None,)


def test_a_leaf_behind_a_vjp_of_nothing_is_final_too() -> None:
    a, b = leaf(2), leaf(3)
    final: list[Tensor] = []
    (_Cut.apply(a * 5) + _Cut.apply(b) + 1 * b).backward(on_final=final.append)
    assert (a.grad, b.grad) == (None, 1)
    assert sorted(map(id, final)) == sorted(map(id, (a, b)))


def _add(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize("use", [_add, lambda x: x * x, lambda x: F.linear(Tensor(np.ones(1)), x)])
def test_a_leaf_that_was_changed_meanwhile_is_refused(use: Callable[[Tensor], Tensor]) -> None:
    w = leaf([[2.0]])  # case I16
    y = use(w)
    w.array += 1
    w.version += 1
    with pytest.raises(ValueError, match="changed in place between a forward"):
        y.backward(np.ones(y.shape))
    assert w.grad is None
    y = use(w)
    y.backward(np.ones(y.shape))
    assert w.grad is not None


def test_each_half_of_a_backward_runs_once() -> None:
    x = leaf(2)
    both = Backward(x * x)
    both.run()
    halves = Backward(x * x)
    with pytest.raises(ValueError, match="call it first"):
        halves.run_weights()
    halves.run_activations()
    for again in (both.run, both.run_weights, halves.run_activations, halves.run):
        with pytest.raises(ValueError, match="already run"):
            again()
    halves.run_weights()
    assert x.grad == 8
