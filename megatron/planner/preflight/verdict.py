# SPDX-License-Identifier: Apache-2.0
"""Results of the checks of `--preflight`, and the lines that report them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron.errors import SettingsError, numbered
from megatron.telemetry.figures import sentence


class Check(NamedTuple):
    """The result of one check; it passed unless there is a fault.

    summary: what was checked, with figures
    fault:   the problem
    do:      the remedy
    """

    name: str
    summary: str
    fault: str = ""
    do: str = ""

    @property
    def line(self) -> str:
        """`PASS  clocks   ...` or `FAIL  clocks   ... -> ...`."""
        if not self.fault:
            return f"PASS  {self.name:<11} {self.summary}"
        return f"FAIL  {self.name:<11} {self.fault}{f' -> {self.do}' if self.do else ''}"


class PreflightReport:
    """Logs every check and collects the failed ones."""

    def __init__(self, log: Callable[[str], None]):
        self.log, self.checks = log, []

    def add(self, *checks: Check) -> None:
        for check in checks:
            self.checks.append(check)
            self.log(check.line)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.fault]

    def end(self, unchecked: Sequence[str]) -> None:
        """Raise SettingsError with all failed checks, or log that all passed, and what was not checked."""
        if self.failed:
            raise refusal(self.failed, len(self.checks))
        not_checked = sentence(f"  not checked: {', '.join(unchecked)}")
        self.log(f"preflight: all {len(self.checks)} checks passed\n{not_checked}")


def refusal(failed: list[Check], number: int) -> SettingsError:
    """The error of a failed preflight."""
    lines = [f"{check.name}: {check.fault}{f' -> {check.do}' if check.do else ''}" for check in failed]
    return SettingsError(f"preflight: {len(failed)} of {number} checks failed{numbered(lines)}")
