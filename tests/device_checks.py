"""What must hold on any array module: run with the stand-in everywhere, with CuPy on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from engine_examples import EXAMPLES, drawn

from minitrain import functional as F
from minitrain import nn
from minitrain.array import from_host, namespace, to_host
from minitrain.autograd.check import check_vjp
from minitrain.autograd.tensor import Tensor

MIXTURE = nn.MixtureConfig(
    5, 2, shared=1, scores="sigmoid", capacity=1.0, z_loss=0.01, bias_rate=0.1
)
MODELS = {
    "gpt": lambda: nn.GPT(
        nn.GPTConfig(vocab=13, context=9, layers=2, heads=2, width=8, dropout=0.2)
    ),
    "llama": lambda: nn.Llama(
        nn.LlamaConfig(vocab=13, context=9, layers=2, heads=4, kv_heads=2, width=16)
    ),
    "mixture": lambda: nn.GPT(
        nn.GPTConfig(vocab=13, context=9, layers=2, heads=2, width=8, mixture=MIXTURE)
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 13, (3, 9))
LABELS = np.where(TOKENS % 5 == 0, -100, (TOKENS * 7 + 1) % 13)
LABELS[0, :2] = 0, 12


def check_operation(name: str, xp: Any) -> None:
    """An operation's example on xp: NumPy's values, and a gradient that differences confirm."""
    run, inputs = EXAMPLES[name][0], drawn(name)
    on_host = run(*[Tensor(x) for x in inputs]).array
    moved = [from_host(x, xp) for x in inputs]
    on_device = run(*[Tensor(x) for x in moved]).array
    assert namespace(on_device) is xp
    np.testing.assert_allclose(to_host(on_device), on_host, rtol=1e-12, atol=1e-13)
    check_vjp(run, *moved)


def trained(name: str, xp: Any, dtype: str = "float64") -> tuple[list[float], dict[str, Any]]:
    """Losses and weights, on the host, of three steps of plain gradient descent on xp."""
    model, losses = MODELS[name]().initialize(0, dtype=dtype, xp=xp), []
    for step in range(3):
        with nn.window(nn.Window(1, step, np.arange(3) + 5, np.arange(9))):
            loss = model.loss(model(from_host(TOKENS, xp)), LABELS)
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters().values():
            if parameter.trained:
                parameter.array -= 0.3 * parameter.grad.astype(dtype, copy=False)
                parameter.version += 1
                parameter.grad = None
        for router in nn.routers_of(model).values():
            router.adjust()
    return losses, {n: to_host(p.array) for n, p in model.parameters().items()}


def check_model(name: str, xp: Any) -> None:
    """Training on xp, dropout masks included, equals training on the host."""
    losses, weights = trained(name, xp)
    right_losses, right_weights = trained(name, np)
    assert losses[2] < losses[0]
    np.testing.assert_allclose(losses, right_losses, rtol=1e-12)
    for key, right in right_weights.items():
        assert abs(weights[key] - right).max() <= 1e-12 * abs(right).max(), key


def check_dtypes(xp: Any) -> None:
    """float32 stays float32, and halves sum in float32."""
    losses, weights = trained("gpt", xp, "float32")
    assert {w.dtype for w in weights.values()} == {np.dtype(np.float32)}
    np.testing.assert_allclose(losses, trained("gpt", np)[0], rtol=1e-5)
    ones = Tensor(xp.ones(5000, np.float16), requires_grad=True)
    row = Tensor(xp.zeros((2, 1), np.float16), requires_grad=True)
    F.embedding(row, xp.zeros(5000, np.int64)).backward(xp.ones((5000, 1), np.float16))
    assert float(row.grad[0, 0]) == 5000.0  # type: ignore[index]
    assert ones.mean().item() == 1.0
