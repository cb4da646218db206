"""The correctness oracle: what every rank must hold, and the first tensor that is wrong."""

from minitrain.oracle.compare import BOUND, Row, compare, compare_gradients, compare_weights
from minitrain.oracle.faults import FAULTS, planted
from minitrain.oracle.task import NANO, Task
from minitrain.oracle.verify import Report, verify

__all__ = [
    "BOUND", "FAULTS", "NANO", "Report", "Row", "Task", "compare", "compare_gradients",
    "compare_weights", "planted", "verify",
]  # fmt: skip
