"""Kernels by batch size: compiled in the background, and combined so that a size changes without a stall."""

from .compiled import Kernel as Kernel
from .kernels import KernelOptions as KernelOptions
from .kernels import Kernels as Kernels
