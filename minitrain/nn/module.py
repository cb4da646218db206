"""Parameters and modules: a tree with names, declared first and filled later; and the window.

The window says which samples, positions and step the forward on this thread is looking at. A
dropout mask is a function of (seed, step, site, global indices of the element), never of a call
order or a shared random stream. The numbers that the tensors don't carry are ambient, per thread,
because ranks can be threads. So every layout draws the same masks, and a second forward (for
recomputation) draws them again when it restores the window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from minitrain.array import cast, digest, from_host, stream
from minitrain.autograd.tensor import Tensor
from minitrain.errors import UserError

Init = Callable[[np.random.Generator, tuple[int, ...]], "np.ndarray[Any, Any]"]


def normal(std: float) -> Init:
    """Values of a normal distribution around 0."""
    return partial(_normal, std)  # and no lambda, which could not be pickled


def constant(value: float) -> Init:
    """The same value everywhere."""
    return partial(_constant, value)


def _normal(std: float, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.normal(0.0, std, shape)


def _constant(value: float, rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return np.full(shape, value)


class UnfilledError(AttributeError, UserError):
    """A parameter that is declared, but has no values yet."""


class Parameter(Tensor):
    """A leaf that training changes, declared with its global shape and filled later.

    Attributes:
        name: its global name, such as "blocks.0.mlp.up.weight": its path in the whole model, unless
            it was declared with one, as a shared parameter is.
        declared: the shape of the whole parameter, whatever a rank holds of it.
        init: how the initial value is drawn.
        trained: False for what no gradient steps, such as a router's bias.
        decays: whether weight decay shrinks it: weights of two or more axes, no norm and no bias
            (the bias of a linear may have several axes: (3, H, D)).
        placement: where its pieces live, for the strategies; None in a plain model.
        state: where they are stepped, and so where the optimizer's arrays are; likewise.
    """

    __slots__ = ("decays", "declared", "init", "name", "placement", "state", "trained")
    is_weight: ClassVar[bool] = True

    def __init__(
        self, declared: tuple[int, ...], init: Init, *, bias: bool = False, name: str = "",
        trained: bool = True,
    ):  # fmt: skip
        self.declared, self.init, self.name, self.trained = declared, init, name, trained
        self.decays = len(declared) > 1 and not bias
        self.placement: Any = None
        self.state: Any = None
        self.grad, self.node, self.requires_grad, self.version = None, None, trained, 0

    def __getattr__(self, attribute: str) -> Any:
        # Reached only where the slot is empty: a parameter without an array.
        if attribute == "array":
            raise UnfilledError(
                f"parameter {self.name or '(unnamed)'} {self.declared} is declared but not "
                "filled; call model.initialize(seed=0) or load a checkpoint first"
            )
        raise AttributeError(attribute)

    def initial(self, seed: int) -> np.ndarray[Any, Any]:
        """The whole initial value in float64: a function of (seed, global name), of no layout."""
        return self.init(stream(seed, "initial", self.name), self.declared)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, {self.declared})"


class Module:
    """A part of a model: its parameters, modules and lists of modules form a tree."""

    path: str = ""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's output; each subclass says of what."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        out = self.forward(*args, **kwargs)
        if _ambient.after_module is not None:
            _ambient.after_module()
        return out

    def children(self) -> Iterator[tuple[str, Module | Parameter]]:
        """The direct parts by name; the items of a list are called by its name and their number."""
        for name, value in vars(self).items():
            if isinstance(value, (Module, Parameter)):
                yield name, value
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{i}", item

    def modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """All modules of the tree by path, this one first (its path is "")."""
        yield prefix, self
        for name, child in self.children():
            if isinstance(child, Module):
                yield from child.modules(f"{prefix}.{name}".lstrip("."))

    def parameters(self) -> dict[str, Parameter]:
        """All parameters by global name (before they have one: by path), in the order of the tree;
        a shared one where it comes first."""
        found: dict[Parameter, str] = {}
        for path, module in self.modules():
            for name, child in module.children():
                if isinstance(child, Parameter):
                    found.setdefault(child, child.name or f"{path}.{name}".lstrip("."))
        return {name: parameter for parameter, name in found.items()}

    def name_tree(self) -> None:
        """Tell every module its path, and every parameter without a name its own."""
        for path, module in self.modules():
            module.path = path
        for name, parameter in self.parameters().items():
            parameter.name = name

    def replace(self, path: str, module: Module) -> None:
        """Put another module at a path, such as "blocks.0.mlp"; what has no name yet gets one."""
        *parents, last = path.split(".")
        owner: Any = self
        for part in parents:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        if isinstance(owner, list):
            owner[int(last)] = module
        else:
            setattr(owner, last, module)
        module.path = path
        for inner, found in module.modules(path):
            found.path = found.path or inner
            for name, child in found.children():
                if isinstance(child, Parameter):
                    child.name = child.name or f"{inner}.{name}"

    def initialize(self, seed: int = 0, dtype: str = "float32", xp: Any = np) -> Module:
        """Fill every parameter with its initial value, on the host (xp=numpy) or a GPU (cupy)."""
        for parameter in self.parameters().values():
            parameter.array = from_host(cast(parameter.initial(seed), dtype), xp)
        return self


@dataclass(frozen=True)
class Window:
    """What a training forward looks at.

    Attributes:
        seed, step: of the run; a step's micro-batches share it.
        samples: (B,) index of each sequence in the global batch.
        positions: (T,) index of each token in its sequence (not always a range: zigzag).
        length: of the whole sequences, where positions may be a part of them; None: they are whole.
        training: whether dropout drops, and the loss has what is added to it for training.
        tokens: of the whole batch, by which terms of the loss inside the model are divided. None:
            those at hand; 0: no label of the batch counts, and they add nothing.
        scale: what the loss is multiplied by for the backward, and so are these terms.
    """

    seed: int
    step: int
    samples: Any
    positions: Any
    training: bool = True
    length: int | None = None
    tokens: int | None = None
    scale: float = 1.0

    def key(self, site: str) -> int:
        """64 random bits for one place in the model at this step."""
        return digest(self.seed, self.step, site) & (2**64 - 1)


class _Ambient(threading.local):
    window: Window | None = None
    after_module: Callable[[], None] | None = None


_ambient = _Ambient()


def current() -> Window | None:
    """The window of this thread; None outside training, where nothing is dropped."""
    return _ambient.window


@contextmanager
def window(view: Window | None) -> Iterator[None]:
    """Inside, the forward looks through this window; the one before it comes back on exit."""
    outer, _ambient.window = _ambient.window, view
    try:
        yield
    finally:
        _ambient.window = outer


@contextmanager
def after_each_module(hook: Callable[[], None]) -> Iterator[None]:
    """Inside, the hook is called after each module has run; messages make progress here, as they do
    after each node of a backward."""
    outer, _ambient.after_module = _ambient.after_module, hook
    try:
        yield
    finally:
        _ambient.after_module = outer
