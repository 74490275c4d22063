"""Kernels by batch size: compiled in the background, and combined so that a size changes without a stall."""

from .compiled import Kernel as Kernel
from .kernels import Kernels as Kernels
from .options import KernelOptions as KernelOptions
