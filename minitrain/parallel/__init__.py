"""Parallel strategies: each takes the plain model and a mesh and returns the parallel one."""

from minitrain.parallel.compose import parallelize
from minitrain.parallel.mesh import Mesh
from minitrain.parallel.model import Loss, ParallelModel

__all__ = ["Loss", "Mesh", "ParallelModel", "parallelize"]
