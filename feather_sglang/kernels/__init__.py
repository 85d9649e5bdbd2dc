"""Compute kernels that stand alone: numba and numpy, nothing of an engine's."""
