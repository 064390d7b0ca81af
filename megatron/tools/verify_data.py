# SPDX-License-Identifier: Apache-2.0
"""Verify token files: every byte against their manifest, and the numbers of the index against each other.

    python -m megatron.tools.verify_data corpus_text_document other_text_document
    python -m megatron.tools.verify_data corpus_text_document --write     make the manifest of files that have none

Exit code 4: a file is damaged; each problem is a line. Training checks the manifest with --verify-data.
"""

import time
from dataclasses import dataclass

from megatron.errors import DataError, UsageError, run_main
from megatron.settings.positional import divide, parse_one
from megatron.settings.schema import setting
from megatron.telemetry.figures import size as in_units


@dataclass(frozen=True)
class VerifyDataOptions:
    """Options in addition to reading."""

    write: bool = setting("take the files as they are now, if their numbers agree, and write their manifest", False)


def main(argv: list[str]) -> None:
    """Verify the prefixes before the flags."""
    prefixes, flags = divide(argv, VerifyDataOptions)
    settings = parse_one(flags, VerifyDataOptions, "python -m megatron.tools.verify_data PREFIX ...", __doc__)
    if not prefixes:
        raise UsageError("there is nothing to verify", do="python -m megatron.tools.verify_data corpus_text_document")

    from megatron.data.indexed import bare_prefix
    from megatron.data.verify import examine

    damaged = 0
    for prefix in map(bare_prefix, prefixes):
        start = time.perf_counter()
        problems, size = examine(prefix, settings.write)
        seconds = time.perf_counter() - start
        print(
            f"{prefix}: {in_units(size)} in {seconds:.2f} s: "
            + (f"{len(problems)} PROBLEM{'S' * (len(problems) > 1)}" if problems else "good")
        )
        for problem in problems:
            print(f"  {problem}", flush=True)
        damaged += bool(problems)
    if damaged:
        raise DataError(
            f"{damaged} of {len(prefixes)} dataset{'s' * (len(prefixes) > 1)} {'is' if damaged == 1 else 'are'} damaged",
            do="copy them again, or preprocess again",
        )


if __name__ == "__main__":
    run_main(main)
