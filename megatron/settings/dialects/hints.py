# SPDX-License-Identifier: Apache-2.0
"""What the hints of our messages add for a user of another suite's files (`table.OtherSuite`)."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager

from megatron.errors import Failure
from megatron.settings.dialects.fleetx_command_line import FleetX
from megatron.settings.statements import Statement, in_users_words, placed

SUITES = (FleetX,)  # those with hints


@contextmanager
def failing_in_users_words(said: Mapping[str, Statement]) -> Iterator[None]:
    """Put the failures that are raised inside into the user's words. What to do is said in another suite's words, too, if
    its file is among the settings.
    """
    try:
        yield
    except Failure as failure:
        failure.what = in_users_words(placed(failure.what, said), said)
        failure.why = failure.why and in_users_words(failure.why, said)
        failure.do = failure.do and failure.do + hint(failure.do, said.values())
        raise


def hint(advice: str, statements: Collection[Statement]) -> str:
    """The end of the advice of a message if a suite's file is among the statements: its words for our flags, or ""."""
    suites = [suite for suite in SUITES if suite.said_any(statements)]
    found = [(suite.title, words) for suite in suites if (words := suite.words_for(advice))]
    return "".join(f" (of a {title} file: {words})" for title, words in found)


def lacks_vocabulary(statements: Collection[Statement]) -> str:
    """What to do if a suite's file is among the statements, and the vocabulary that it trains with is not found."""
    return "".join(suite.lacks_vocabulary() for suite in SUITES if suite.said_any(statements))


def as_overrides(values: Iterable[tuple[Statement, object]]) -> str:
    """A suite's words that give settings of the model, said by its files, other values; "" for other settings."""
    values = list(values)
    return " ".join(filter(None, (suite.as_overrides(values) for suite in SUITES)))
