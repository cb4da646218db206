"""The autograd engine: tensors, operations with their vjps, and the backward pass.

Tensor and the operations need each other; importing tensor first ties the knot in one place.
"""

from minitrain.autograd.tensor import Tensor, no_grad

__all__ = ["Tensor", "no_grad"]
