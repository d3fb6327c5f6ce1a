"""Runs Metal kernels on the CPU, checked. How to use it: metal_kernels/README.md."""

from .errors import BenchError, KernelFault, SourceRejected, Unavailable
from .kernel import MetalKernel
from .report import Finding, Kind, Report, Traffic
from .session import BACKWARD, FORWARD, Bench, Options
from .symbols import Location

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Bench",
    "BenchError",
    "Finding",
    "KernelFault",
    "Kind",
    "Location",
    "MetalKernel",
    "Options",
    "Report",
    "SourceRejected",
    "Traffic",
    "Unavailable",
]
