# SPDX-License-Identifier: Apache-2.0
"""Failures that a user can cause or has to handle, each with its exit code.

A failure carries up to three lines: what was wrong (with numbers and flags), why or where, and what to do.
Entry points run through `run_main`, which prints them once, without a traceback unless `--debug` is given. A disk, the
memory or a missing package can fail anywhere; `explain` puts such failures into the same form.

    raise DataError("corpus.json: no such file", do="check --input")
"""

import contextlib
import difflib
import errno
import gc
import hashlib
import json
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Optional


class Failure(Exception):
    """Base of all failures that end a command with a clear message. Exit code 1 unless a subclass says otherwise."""

    code = 1
    about: str | None = None  # what ranks have in common that say the same with other numbers; default: the text

    def __init__(self, what: str, why: str | None = None, do: str | None = None):
        super().__init__(what)
        self.what, self.why, self.do = what, why, do

    def __str__(self) -> str:
        return "\n".join([self.what] + [f"  {line}" for line in (self.why, self.do and f"-> {self.do}") if line])


def numbered(lines: Iterable[str]) -> str:
    """Several things to say as a list, to follow its heading."""
    return "".join(f"\n  {number}. {line}" for number, line in enumerate(lines, 1))


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The end of a sentence about a word that is not among the known ones; "" where none is near (difflib's ratio).

    >>> did_you_mean("Cosin", ["constant", "linear", "cosine"])
    '; did you mean cosine?'
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return f"; did you mean {names[near[0]]}?" if near else ""


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
    """A checkpoint is missing, damaged, or not what was asked for."""

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


class Interrupted(Preempted):
    """Ctrl-C: somebody at the terminal has ended the job."""

    code = 130  # as shells say it


class Locked(Failure):
    """Another job is writing to the same output."""

    code = 10


def explain(error: BaseException) -> Failure | None:
    """The error as a failure in words: what memory, disk or installation lack; None for a surprise, a mistake of ours.

    >>> explain(PermissionError(13, "Permission denied", "/runs")).code
    6
    """
    if isinstance(error, Failure):
        return error
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _REMEDIES):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes, os.PathLike)) else ""
        do = _REMEDIES.get(error.errno, "check the path; --debug shows what it is for")
        return StorageError(f"{where}{error.strerror or error}", do=do)
    if _is_out_of_memory(error):
        return Failure(
            "out of memory",
            _wanted(str(error)),
            "lower --micro-batch-size, --seq-length or --workers, add --recompute-granularity full, or use more ranks",
        )
    if isinstance(error, ModuleNotFoundError) and (error.name or "megatron").partition(".")[0] != "megatron":
        return Failure(
            f"the package {error.name.partition('.')[0]} is missing in {sys.executable}",
            do="source .venv/bin/activate (scripts/quickstart.sh makes it), or pip install -r requirements.txt",
        )
    return None


def _wanted(text: str) -> Optional[str]:
    """How much memory somebody asked for, in words, or the first line of what they say.

    >>> _wanted("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    ...         "allocate 137438953472 bytes. Error code 12 (Cannot allocate memory)")
    '137.4 GB were wanted at once'
    """
    asked = re.search(r"tried to allocate (\d+) bytes", text)
    if asked:
        return f"{int(asked[1]) / 1e9:.1f} GB were wanted at once"
    return text.strip().splitlines()[0][:200] if text.strip() else None


_REMEDIES = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space in your quota, or write to another disk",
    errno.EROFS: "give a folder that can be written",
    errno.EACCES: "give a path that this user may read and write",
    errno.EPERM: "give a path that this user may read and write",
    errno.EEXIST: "a file is where a folder is wanted: give another path",
    errno.ENOTDIR: "a file is where a folder is wanted: give another path",
    errno.EISDIR: "a folder is where a file is wanted: give another path",
    errno.EIO: "check the disk",
    errno.EMFILE: "raise the limit of open files: ulimit -n 65536",
}


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's, CUDA's, or that of torch on CPUs, which is a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def exit_code(error: BaseException) -> int:
    """The documented exit code of an exception."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.code
    failure = explain(error)
    return failure.code if failure else 1


def run_main(main, argv: list[str] | None = None) -> None:
    """Run `main(argv)` as a command: failures become one message on stderr and their exit code.

    The ranks of a node say the same thing once, whichever meets it first, and a lost peer is not told where the peer
    itself has said why it ended. Ranks of `megatron.tools.launch` leave their message to it: it stands last.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        main(argv)
    except BrokenPipeError:  # the reader of our output (head, less) went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        if asks_for_debug(argv):
            raise
        _say_last("interrupted\n", Interrupted.code)
        sys.exit(Interrupted.code)
    except Exception as error:
        failure, in_full = explain(error), getattr(error, "in_full", asks_for_debug(argv))
        code = failure.code if failure else 1
        if failure is None or in_full:
            brief = None if in_full else partial(last_calls, error)
            _say_last(traceback.format_exc(), code, brief, about=f"{type(error).__name__}: {error}")
        else:
            text = f"{failure}\n" if isinstance(failure, Preempted) else f"error: {failure}\n"
            _say_last(text, code, partial(shortened, text), failure.about, isinstance(failure, PeerLost))
        _leave(code)
    finally:
        # Python ends with a look at every object there is, for cycles: half a second, once torch has been loaded.
        gc.freeze()


@contextlib.contextmanager
def debugging(wanted: bool):
    """What is raised inside is told with its traceback, or without, by `run_main`: `--debug` as a command has read it."""
    try:
        yield
    except Exception as error:
        error.in_full = wanted
        raise


def asks_for_debug(argv: list[str]) -> bool:
    """`--debug` on a command line that nobody has read yet, with or without a value; the last one counts."""
    for at in reversed(range(len(argv))):
        flag, _, value = argv[at].partition("=")
        if flag == "--debug":
            value = value or (argv[at + 1] if at + 1 < len(argv) else "")
            return value.lower() not in ("false", "0", "no", "off")
    return False


MOST_LINES = 12  # of what a launcher says of a failed job
LAUNCHER = "MEGATRON_LAUNCHER"  # in the environment of ranks whose launcher prints what one of them says last: a folder


def _say_last(
    text: str,
    code: int,
    brief: Callable[[str], str] | None = None,
    about: str | None = None,
    quiet_after_others: bool = False,
) -> None:
    """Write to stderr what no other rank of this node has said: all of them stand in each other's way there.

    code: the exit code to come
    brief: where the whole text is kept -> what a launcher prints of it; default: all of it
    about: the part of the text that counts as the same

    torchrun gives each rank a file for its last words, which it repeats in its own report, in a folder that the ranks
    of one attempt have in common; there, a file stands for what was said. Our own launcher reads that file, too, and
    prints the one message that says most when all ranks have ended. Without a launcher each rank speaks for itself.
    """
    last_words = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if last_words:
        with contextlib.suppress(OSError):
            said = dict(message=text, extraInfo=dict(timestamp=str(int(time.time()) + quiet_after_others)))
            if launcher := os.environ.get(LAUNCHER):
                short, left_to_it = _kept_and_shortened(text, brief, launcher), _is_last_attempt()
                words = dict(message=said, code=code, brief=short, told=not left_to_it)
                Path(last_words).write_text(json.dumps(words), encoding="utf-8")
                if left_to_it:
                    return
            else:
                Path(last_words).write_text(json.dumps(dict(message=said)), encoding="utf-8")
            common = Path(last_words).parent.parent
            if quiet_after_others and any(common.glob("told-*")):
                return
            mark = hashlib.sha256((about or text).encode(errors="replace")).hexdigest()[:16]
            try:
                (common / f"told-{mark}").touch(exist_ok=False)
            except FileExistsError:
                return
    with contextlib.suppress(BrokenPipeError):  # the exit code says it, too
        sys.stderr.write(text)  # one write: ranks share the terminal
        sys.stderr.flush()


def _is_last_attempt() -> bool:
    """Whether the launcher will not start the ranks again (--max-restarts): it then reports the end of this attempt."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS")


def _kept_and_shortened(text: str, brief: Callable[[str], str] | None, folder: str) -> str:
    """What a launcher prints of a text; where that is not all, the whole is kept in a file of the folder."""
    whole = Path(folder) / f"rank_{os.environ.get('RANK', '0')}.txt"
    short = brief(str(whole)) if brief else text
    if short != text:
        whole.write_text(text, encoding="utf-8", errors="replace")
    return short


def shortened(text: str, whole: str, most: int = MOST_LINES) -> str:
    """A message of at most so many lines: its beginning and its last line, which says what to do.

    >>> print(shortened("\\n".join("abcdef"), "message.txt", most=4), end="")
    a
    b
      ... 3 more lines in message.txt
    f
    """
    lines = text.rstrip("\n").split("\n")
    if len(lines) <= most:
        return text
    left_out = f"  ... {len(lines) - most + 1} more lines in {whole}"
    return "\n".join([*lines[: most - 2], left_out, lines[-1]]) + "\n"


def last_calls(error: BaseException, whole: str, most: int = 4) -> str:
    """A traceback in a few lines, the message last."""
    calls = traceback.extract_tb(error.__traceback__)
    shown = calls[-most:]
    lines = [
        f"error: rank {os.environ.get('RANK', '0')} ended by an exception; the last {len(shown)} of its {len(calls)} "
        f"calls (all of them: {whole}):"
    ]
    lines += [f"  {_nearby(call.filename)}:{call.lineno}, in {call.name}: {call.line}"[:160] for call in shown]
    message = "".join(traceback.format_exception_only(type(error), error))
    return "\n".join(lines) + "\n" + shortened(message, whole, MOST_LINES - len(lines))


def with_place(error: BaseException) -> str:
    """An error in one line with file and line: of the innermost call outside of this suite and of libraries, if any.

    >>> try:
    ...     compile("x = (", "my_model.py", "exec")
    ... except SyntaxError as error:
    ...     with_place(error)
    "SyntaxError: '(' was never closed (my_model.py:1)"
    """
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({_nearby(error.filename or '?')}:{error.lineno})"
    calls = traceback.extract_tb(error.__traceback__)
    libraries = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    own = [call for call in calls if not call.filename.startswith(libraries)] or calls
    said = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
    return f"{said[:300]} ({_nearby(own[-1].filename)}:{own[-1].lineno})"


def _nearby(path: str) -> str:
    """A path as seen from here, where that is shorter."""
    with contextlib.suppress(ValueError):
        return min(os.path.relpath(path), path, key=len)
    return path


def _leave(code: int) -> None:
    """Exit. A rank that failed is not held up, or brought down with another code, by its connections to the others."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        if sys.stdout is not None:  # as it is for a process that was started without one
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
