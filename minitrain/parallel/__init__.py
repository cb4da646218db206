"""Parallel strategies: each takes the plain model and a mesh and returns the parallel one."""

from minitrain.parallel.compose import Loss, ParallelModel, parallelize
from minitrain.parallel.mesh import Mesh

__all__ = ["Loss", "Mesh", "ParallelModel", "parallelize"]
