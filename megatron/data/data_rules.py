# SPDX-License-Identifier: Apache-2.0
"""Checks of the data settings (`settings.rules`)."""

import math
from types import SimpleNamespace

from megatron.errors import DataError
from megatron.settings.rules import Rule

SOURCE = (  # not for recipes that make their own samples
    Rule(
        lambda s: not (s.mock_data or s.settings.data.files),
        lambda s: (
            "no data is given; --data-path PREFIX (of .bin/.idx files, from preprocess_data.py), "
            "--train-data-path, or --mock-data for synthetic samples"
        ),
    ),
)
RULES = (
    Rule(
        lambda s: s.mock_data and (s.data_path or s.paths),
        lambda s: (
            f"--mock-data reads no files, and files are given ({', '.join(_given_paths(s))}); drop one or the other"
        ),
    ),
    Rule(
        lambda s: s.data_path and s.paths,
        lambda s: f"--data-path goes with --split, and {', '.join(_given_paths(s)[1:])} without; give one or the other",
    ),
    Rule(
        lambda s: s.paths and "train" not in s.paths and not s.data_path,
        lambda s: f"{', '.join(_given_paths(s))} without --train-data-path: there is nothing to train on",
    ),
    Rule(
        lambda s: s.data_path and not s.paths and _split(s.split) is None,
        lambda s: f"--split {s.split} must be up to three numbers for train,valid,test, as in 969,30,1",
    ),
    Rule(
        lambda s: s.data_path and not s.paths and _split(s.split) and not _split(s.split)[0],
        lambda s: f"--split {s.split} leaves nothing to train on; raise its first number",
    ),
    Rule(
        lambda s: s.verify_data and s.object_storage_cache_path and s.settings.data.in_a_store,
        lambda s: (
            "--verify-data reads every token, and --object-storage-cache-path only those of samples; "
            "leave one of the two out"
        ),
    ),
    Rule(lambda s: _blend_problems(s), lambda s: "; ".join(_blend_problems(s))),
)


def _given_paths(s: SimpleNamespace) -> list[str]:
    return ["--data-path"] * bool(s.data_path) + [f"--{name}-data-path" for name in s.paths]


def _split(text: str) -> list[float] | None:
    """The parts of --split; None if it is invalid."""
    try:
        parts = [float(word) for word in text.replace("/", ",").split(",")]
    except ValueError:
        return None
    return parts if len(parts) <= 3 and min(parts) >= 0 and sum(parts) < math.inf else None


def _blend_problems(s: SimpleNamespace) -> list[str]:
    """Problems with lists of weights and prefixes."""
    problems = []
    for flag in _given_paths(s):
        from megatron.data.blend import number_in, parse_blend  # imports numpy

        words = getattr(s, flag[2:].replace("-", "_"))
        if len(words) == 1 and len(words[0].split()) > 1 and number_in(words[0].split()[0]) is not None:
            problems.append(f"{flag} '{words[0]}' is one word for the shell; leave out the quotes")
            continue
        try:
            parse_blend(words, flag, open_folders=False)  # their content is data, not a setting
        except DataError as error:
            problems.append(f"{error.what}; {error.do}")
    return problems
