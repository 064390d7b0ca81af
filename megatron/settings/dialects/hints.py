# SPDX-License-Identifier: Apache-2.0
"""What the hints of our messages add for a user of another suite's files (`table.OtherSuite`)."""

from collections.abc import Collection, Iterable

from megatron.settings.dialects.fleetx_command_line import FleetX
from megatron.settings.statements import Statement

SUITES = (FleetX,)  # those with hints


def hint(setting: str, statements: Collection[Statement]) -> str:
    """What a hint about a setting adds if a suite's file is among the statements: how that says it; else ""."""
    suites = [suite for suite in SUITES if setting in suite.hints and suite.said_any(statements)]
    return "".join(f" (of a {suite.title} file: {suite.hints[setting]})" for suite in suites)


def lacks_vocabulary(statements: Collection[Statement]) -> str:
    """What to do if a suite's file is among the statements, and the vocabulary that it trains with is not found."""
    return "".join(suite.lacks_vocabulary() for suite in SUITES if suite.said_any(statements))


def as_overrides(values: Iterable[tuple[Statement, object]]) -> str:
    """A suite's words that give settings of the model, said by its files, other values; "" for other settings."""
    values = list(values)
    return " ".join(filter(None, (suite.as_overrides(values) for suite in SUITES)))
