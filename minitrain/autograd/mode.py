"""Whether operations are recorded for a backward: a mode of each thread."""

from __future__ import annotations

import inspect
import threading
from contextlib import ContextDecorator
from typing import Any, ClassVar


class _Mode(threading.local):
    """Whether operations record what backward needs. Per thread, since ranks can be threads."""

    def __init__(self) -> None:  # runs once in each thread
        self.grad = True
        self.outer: list[bool] = []


_mode = _Mode()


def grad_enabled() -> bool:
    """Whether operations on this thread are recorded for backward."""
    return _mode.grad


class no_grad(ContextDecorator):  # noqa: N801 (the field's name for it)
    """Inside, operations are not recorded: no graph, no gradients. A context or a decorator.

    What it must restore is kept with the thread, because a decorator is one instance for all.
    """

    recorded: ClassVar[bool] = False

    def __enter__(self) -> None:
        _mode.outer.append(_mode.grad)
        _mode.grad = self.recorded

    def __exit__(self, *exc: object) -> None:
        _mode.grad = _mode.outer.pop()

    def __call__(self, func: Any) -> Any:
        """func, decorated.

        Raises:
            ValueError: a generator or coroutine function, whose body runs after the call has
                returned: it would not be inside.
        """
        if any(is_late(func) for is_late in _LATE):
            raise ValueError(
                f"@{type(self).__name__}() would do nothing for {func.__qualname__}, whose body "
                f"runs after the call; write `with {type(self).__name__}():` around the "
                "operations in it"
            )
        return super().__call__(func)


_LATE = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction


class enable_grad(no_grad):  # noqa: N801 (the field's name for it)
    """Inside, operations are recorded, within no_grad too: a backward may run a forward again."""

    recorded = True
