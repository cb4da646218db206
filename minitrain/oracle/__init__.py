"""The correctness oracle: what every rank must hold, and the first tensor that is wrong."""

from minitrain.oracle.compare import BOUND, Row, compare, compare_gradients, compare_weights
from minitrain.oracle.mutants import MUTANTS, planted
from minitrain.oracle.task import NANO, Task
from minitrain.oracle.verify import Report, verify

__all__ = [
    "BOUND", "MUTANTS", "NANO", "Report", "Row", "Task", "compare", "compare_gradients",
    "compare_weights", "planted", "verify",
]  # fmt: skip
