# SPDX-License-Identifier: Apache-2.0
"""Failures that a user can cause or has to handle, each with its exit code.

A failure carries up to three lines: what was wrong (with numbers and flags), why or where, and what to do.
Entry points run through `run_main`, which prints them once, without a traceback unless `--debug` is given.

    >>> raise DataError("corpus.json: no such file", do="check --input")
"""

import os
import sys


class Failure(Exception):
    """Base of all failures that end a command with a clear message. Exit code 1 unless a subclass says otherwise."""

    code = 1

    def __init__(self, what: str, why: str | None = None, do: str | None = None):
        super().__init__(what)
        self.what, self.why, self.do = what, why, do

    def __str__(self) -> str:
        return "\n".join([self.what] + [f"  {line}" for line in (self.why, self.do and f"-> {self.do}") if line])


class UsageError(Failure):
    """The command line cannot be understood: unknown flag, missing value, wrong type."""

    code = 2


class SettingsError(Failure):
    """The settings are understood and cannot work together, or not on this many ranks."""

    code = 3


class DataError(Failure):
    """Data, vocabulary or text is missing or damaged."""

    code = 4


class CheckpointError(Failure):
    """A checkpoint is missing, damaged or belongs to another model."""

    code = 5


class StorageError(Failure):
    """The disk is full, read-only or failing."""

    code = 6


class PeerLost(Failure):
    """Another rank is gone or silent."""

    code = 7


class NumericsError(Failure):
    """Loss or gradients are not finite, or a spike asked for a stop."""

    code = 8


class Preempted(Failure):
    """The job was asked to stop and saved a checkpoint first."""

    code = 9


class Locked(Failure):
    """Another job is writing to the same output."""

    code = 10


def exit_code(error: BaseException) -> int:
    """The documented exit code of an exception: `Failure.code`, 6 for operating-system storage errors, else 1."""
    if isinstance(error, Failure):
        return error.code
    return StorageError.code if isinstance(error, OSError) and error.errno in _STORAGE else 1


_STORAGE = (28, 30, 122, 5, 13)  # no space, read-only file system, quota, I/O error, permission denied


def run_main(main, argv: list[str] | None = None) -> None:
    """Run `main(argv)` as a command: failures become one message on stderr and their exit code.

    Rank 0 speaks for all ranks when `RANK` is set, unless the failure is this rank's own surprise (no `Failure`).
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        main(argv)
    except BrokenPipeError:  # the reader of our output (head, less) went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (Failure, OSError) as error:
        if "--debug" in argv:
            raise
        code = exit_code(error)
        if isinstance(error, Failure) or code != 1:
            if os.environ.get("RANK", "0") == "0" or not isinstance(error, (UsageError, SettingsError)):
                print(f"error: {error}\n", end="", file=sys.stderr, flush=True)  # one write: ranks share the terminal
            sys.exit(code)
        raise
