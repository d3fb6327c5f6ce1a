"""What the bench raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import Report


class BenchError(Exception):
    """Anything that goes wrong on the bench."""


class Unavailable(BenchError):
    """The bench cannot run on this machine; the text says why."""


class SourceRejected(BenchError):
    """The Metal source does not compile here, or Apple's compiler would reject it. Gives file and line."""


class KernelFault(BenchError):
    """A launch had findings; `report` has them all."""

    def __init__(self, name: str, report: Report):
        self.report = report
        lines = "\n".join(f"  {finding}" for finding in report.findings)
        super().__init__(f"kernel {name}: {len(report.findings)} finding(s)\n{lines}")
