"""The autograd engine: tensors, operations with their vjps, and the backward pass.

A tensor's operators are operations, which make tensors; the files that define them enter them in
`tensor.operations`, so each is imported here.
"""

from minitrain.autograd import engine, ops, reduce, shapes
from minitrain.autograd.tensor import Tensor, no_grad

__all__ = ["Tensor", "engine", "no_grad", "ops", "reduce", "shapes"]
