# SPDX-License-Identifier: Apache-2.0
"""Exceptions for errors that a user can cause or has to handle, each with its exit code.

A failure has up to three lines: what was wrong (with numbers and flags), why or where, and what to do.
Entry points run through `run_main`, which prints them once, without a traceback unless `--debug` is given. `explain`
converts errors of the disk, memory and installation, which can occur anywhere, to the same form.

    raise DataError("corpus.json: no such file", do="check --input")
"""

import contextlib
import difflib
import errno
import gc
import hashlib
import importlib.util
import json
import os
import re
import socket
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
    about: str | None = None  # identifies one error on ranks whose texts differ, as by numbers; default: the text

    def __init__(self, what: str, why: str | None = None, do: str | None = None):
        super().__init__(what)
        self.what, self.why, self.do = what, why, do

    def __str__(self) -> str:
        return "\n".join([self.what] + [f"  {line}" for line in (self.why, self.do and f"-> {self.do}") if line])


def numbered(lines: Iterable[str]) -> str:
    """Lines as a numbered list, to follow a heading."""
    return "".join(f"\n  {number}. {line}" for number, line in enumerate(lines, 1))


def in_a_line(text: str, most: int = 200) -> str:
    """The first line of a message, with the next one if it is only a heading.

    >>> in_a_line(f"settings that cannot work:{numbered(['--tp 3 does not divide 4 heads', 'more'])}")
    'settings that cannot work: 1. --tp 3 does not divide 4 heads'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return " ".join(lines[: 1 + lines[0].endswith(":")])[:most]


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A suggestion for an unknown word, as the end of a sentence; "" if no known word is similar (difflib's ratio).

    >>> did_you_mean("Cosin", ["constant", "linear", "cosine"])
    '; did you mean cosine?'
    """
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return f"; did you mean {names[near[0]]}?" if near else ""


def no_such_file(path: str | os.PathLike, what: str = "file") -> str:
    """The words for a missing file (or `what` is missing), with the similar name of one beside it."""
    path = Path(path)
    try:
        beside = [other.name for other in path.parent.iterdir()]
    except OSError:
        return f"no such {what}"
    near = did_you_mean(path.name, beside, 0.75)
    name = near.removeprefix("; did you mean ").removesuffix("?")
    return f"no such {what}" + (f"; did you mean {path.with_name(name)}?" if near else "")


def no_folder(path: Path) -> str | None:
    """Why a path is no folder, as the second line of a message; None for a folder. path: or `storage.urls.UrlPath`"""
    if path.is_dir():
        return None
    return "it is a file, and no folder" if path.exists() else "there is no such folder"


class UsageError(Failure):
    """The command line cannot be understood: unknown flag, missing value, wrong type."""

    code = 2


def missing_file(path: str | os.PathLike, flag: str = "", what: str = "file") -> "DataError":
    """The error for a missing file. flag: the one that names it; what: instead of "file" """
    where = None if os.path.isabs(path) else f"the working directory is {os.getcwd()}"
    return DataError(f"{flag} {path}".lstrip() + f": {no_such_file(path, what)}", where, "check the path")


class SettingsError(Failure):
    """The settings are valid one by one, but cannot work together or on this many ranks."""

    code = 3


class MissingPackage(SettingsError):
    """An optional package that the command needs is not installed here. `do` has the command that installs it."""


class DataError(Failure):
    """Data, vocabulary or text is missing or damaged."""

    code = 4


class CheckpointError(Failure):
    """A checkpoint is missing, damaged, or not the requested one."""

    code = 5


class StorageError(Failure):
    """The disk is full, read-only or failing."""

    code = 6


class PeerLost(Failure):
    """Another rank has exited or does not respond."""

    code = 7


class NumericsError(Failure):
    """Loss or gradients are not finite, or a spike stopped the run."""

    code = 8


class SilentError(NumericsError):
    """A device computed something wrong without an error, or its memory changed."""

    code = 17  # as Megatron-LM ends when a result fails its validation


class ResumeToDisambiguate(SilentError):
    """A suspicious step that only other devices can judge: to be resumed, on others if possible."""

    code = 16  # as in Megatron-LM


class Preempted(Failure):
    """The job was asked to stop and saved a checkpoint first."""

    code = 9


class Interrupted(Preempted):
    """The user interrupted the job with Ctrl-C."""

    code = 130  # as in shells


class Locked(Failure):
    """Another job is writing to the same output."""

    code = 10


class DeviceLost(Failure):
    """A GPU is missing or failing: the node's fault, not that of the settings."""

    code = 11


# Errors that a driver gives for a broken or missing device (CUDA's error strings 46, 100, 214, 220, 714, 721, 802, 999,
# NVML's 15, torch's own). An illegal access or a failed launch is most often a kernel's bug, and is not among them.
DEVICE_ERROR = re.compile(
    r"uncorrectable ECC error|uncorrectable NVLink error|hardware stack error|or a hardware error|GPU is lost|"
    r"fallen off the bus|no CUDA-capable device|No CUDA GPUs are available|busy or unavailable|"
    r"CUDA error: (?:unknown error|system not yet initialized)|CUDA driver initialization failed"
)


def explain(error: BaseException) -> Failure | None:
    """Convert an error of memory, disk, device or installation to a Failure with a clear message; None for any other error.

    >>> explain(PermissionError(13, "Permission denied", "/runs")).code
    6
    """
    if isinstance(error, Failure):
        return error
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _REMEDIES):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes, os.PathLike)) else ""
        do = _REMEDIES.get(error.errno, "check the path; --debug shows what it is for")
        said = error.strerror or error
        if error.errno == errno.ENOENT and isinstance(error.filename, (str, os.PathLike)):
            said = f"{said}{no_such_file(error.filename).removeprefix('no such file')}"
        return StorageError(f"{where}{said}", do=do)
    if is_out_of_memory(error):
        return Failure(
            "out of memory",
            _requested_memory(str(error)),
            "lower --micro-batch-size, --seq-length or --workers, add --recompute-granularity full, or use more ranks",
        )
    if isinstance(error, RuntimeError) and DEVICE_ERROR.search(str(error)):
        who = f"the GPU of rank {os.environ.get('RANK', '0')} on {node_name()}"
        return DeviceLost(
            f"{who} failed: {next(line for line in str(error).splitlines() if DEVICE_ERROR.search(line)).strip()}",
            do="on that node: python -m megatron.tools.doctor --node, and dmesg | grep Xid",
        )
    if isinstance(error, ModuleNotFoundError) and (error.name or "megatron").partition(".")[0] != "megatron":
        return MissingPackage(
            f"the package {error.name.partition('.')[0]} is missing in {sys.executable}",
            do="source .venv/bin/activate (scripts/quickstart.sh makes it), or pip install -r requirements.txt",
        )
    return None


def _requested_memory(text: str) -> Optional[str]:
    """The amount of memory that an error message says was requested, or the first line of the message.

    >>> _requested_memory("DefaultCPUAllocator: can't allocate memory: you tried to allocate 137438953472 bytes. "
    ...                   "Error code 12 (Cannot allocate memory)")
    'tried to allocate 137.4 GB'
    """
    asked = re.search(r"tried to allocate (\d+) bytes", text)
    if asked:
        return f"tried to allocate {int(asked[1]) / 1e9:.1f} GB"
    return text.strip().splitlines()[0][:200] if text.strip() else None


_REMEDIES = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space in your quota, or write to another disk",
    errno.EROFS: "use a writable folder",
    errno.EACCES: "use a path that this user can read and write",
    errno.EPERM: "use a path that this user can read and write",
    errno.EEXIST: "expected a folder, but it is a file: use another path",
    errno.ENOTDIR: "expected a folder, but it is a file: use another path",
    errno.EISDIR: "expected a file, but it is a folder: use another path",
    errno.EIO: "check the disk",
    errno.EMFILE: "raise the limit of open files: ulimit -n 65536",
}


def is_out_of_memory(error: BaseException) -> bool:
    """True for the errors of Python, CUDA, and torch on CPUs, which raises a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def node_name() -> str:
    """This node's name, as SLURM or else the system has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def exit_code(error: BaseException) -> int:
    """The documented exit code of an exception."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.code
    failure = explain(error)
    return failure.code if failure else 1


def _print_uncaught(kind, error, trace) -> None:
    """`sys.excepthook`: one message where a file of this suite imports a package that is not installed."""
    calls = traceback.extract_tb(trace)
    own = [call for call in calls if not call.filename.startswith("<")][-1:]
    failure = explain(error) if isinstance(error, ModuleNotFoundError) else None
    if failure and own and Path(own[0].filename).is_relative_to(Path(__file__).parent):
        sys.stderr.write(f"error: {failure}\n")
        sys.exit(failure.code)  # the code is otherwise 1
    else:
        sys.__excepthook__(kind, error, trace)


if sys.excepthook is sys.__excepthook__:  # a command's file imports packages before `run_main` sees its errors
    sys.excepthook = _print_uncaught


def run_main(main, argv: list[str] | None = None) -> None:
    """Run `main(argv)` as a command: failures become one message on stderr and their exit code.

    The ranks of a node print one message only once, and a lost peer is not reported if the peer has printed why it ended.
    Ranks of `megatron.tools.launch` leave printing to the launcher, so that the message comes last.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _QuickTorch())
    try:
        main(argv)
    except BrokenPipeError:  # the reader of our output (head, less) has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        if asks_for_debug(argv):
            raise
        _write_last_message("interrupted\n", Interrupted.code)
        sys.exit(Interrupted.code)
    except Exception as error:
        failure, in_full = explain(error), getattr(error, "in_full", asks_for_debug(argv))
        code = failure.code if failure else 1
        if failure is None or in_full:
            brief = None if in_full else partial(last_calls, error)
            _write_last_message(traceback.format_exc(), code, brief, about=f"{type(error).__name__}: {error}")
        else:
            text = f"{failure}\n" if isinstance(failure, Preempted) else f"error: {failure}\n"
            _write_last_message(text, code, partial(shortened, text), failure.about, isinstance(failure, PeerLost))
        _leave(code)
    finally:
        # Skip the garbage collection at exit, which takes half a second once torch has been loaded.
        gc.freeze()


class _QuickTorch:
    """A finder of modules: loads torch without garbage collections, which take a fifth of the time for objects that stay.

    They are frozen: later collections ignore them, and forked processes do not copy them.
    """

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader and gc.isenabled():
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _without_collections(load, module)
        return spec


def _without_collections(load, module) -> None:
    gc.disable()
    try:
        load(module)
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def debugging(wanted: bool):
    """Make `run_main` print errors raised inside with their traceback, or without it. wanted: the value of --debug."""
    try:
        yield
    except Exception as error:
        error.in_full = wanted
        raise


def asks_for_debug(argv: list[str]) -> bool:
    """Whether a command line that has not been parsed has `--debug`, with or without a value; the last one counts."""
    for at in reversed(range(len(argv))):
        flag, _, value = argv[at].partition("=")
        if flag == "--debug":
            value = value or (argv[at + 1] if at + 1 < len(argv) else "")
            return value.lower() not in ("false", "0", "no", "off")
    return False


MOST_LINES = 12  # of a launcher's message about a failed job
LAUNCHER = "MEGATRON_LAUNCHER"  # environment variable with a folder, set by a launcher that prints the message of ranks


def _write_last_message(
    text: str,
    code: int,
    brief: Callable[[str], str] | None = None,
    about: str | None = None,
    quiet_after_others: bool = False,
) -> None:
    """Write a message to stderr, unless another rank of this node has written the same one.

    code: the upcoming exit code
    brief: file with the whole text -> the text that a launcher prints; default: the whole text
    about: the part of the text that identifies the message

    torchrun gives each rank an error file, which it repeats in its own report, in a folder that the ranks of one attempt
    share; a file in that folder marks each message that was written. Our own launcher also reads the error files, and
    prints the most useful message when all ranks have ended. Without a launcher each rank writes its message.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        with contextlib.suppress(OSError):
            message = dict(message=text, extraInfo=dict(timestamp=str(int(time.time()) + quiet_after_others)))
            if launcher := os.environ.get(LAUNCHER):
                short, launcher_prints = _save_and_shorten(text, brief, launcher), _is_last_attempt()
                words = dict(message=message, code=code, brief=short, told=not launcher_prints)
                Path(error_file).write_text(json.dumps(words), encoding="utf-8")
                if launcher_prints:
                    return
            else:
                Path(error_file).write_text(json.dumps(dict(message=message)), encoding="utf-8")
            common = Path(error_file).parent.parent
            if quiet_after_others and any(common.glob("told-*")):
                return
            mark = hashlib.sha256((about or text).encode(errors="replace")).hexdigest()[:16]
            try:
                (common / f"told-{mark}").touch(exist_ok=False)
            except FileExistsError:
                return
    with contextlib.suppress(BrokenPipeError):  # the exit code still reports the failure
        sys.stderr.write(text)  # one write: ranks share the terminal
        sys.stderr.flush()


def _is_last_attempt() -> bool:
    """Whether the launcher will not start the ranks again (--max-restarts): it then reports the end of this attempt."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS")


def _save_and_shorten(text: str, brief: Callable[[str], str] | None, folder: str) -> str:
    """The text that a launcher prints. If it is shorter than the message, the whole goes to a file in the folder."""
    whole = Path(folder) / f"rank_{os.environ.get('RANK', '0')}.txt"
    short = brief(str(whole)) if brief else text
    if short != text:
        whole.write_text(text, encoding="utf-8", errors="replace")
    return short


def shortened(text: str, whole: str, most: int = MOST_LINES) -> str:
    """Shorten a message to `most` lines: its beginning, and its last line, which says what to do.

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
    """A traceback in a few lines, with the message last."""
    calls = traceback.extract_tb(error.__traceback__)
    shown = calls[-most:]
    lines = [
        f"error: rank {os.environ.get('RANK', '0')} raised an exception; the last {len(shown)} of its {len(calls)} "
        f"calls (all of them: {whole}):"
    ]
    lines += [f"  {_nearby(call.filename)}:{call.lineno}, in {call.name}: {call.line}"[:160] for call in shown]
    message = "".join(traceback.format_exception_only(type(error), error))
    return "\n".join(lines) + "\n" + shortened(message, whole, MOST_LINES - len(lines))


def with_place(error: BaseException) -> str:
    """An error in one line, with file and line of the innermost call outside of this suite and of libraries, if any.

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
    message = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
    return f"{message[:300]} ({_nearby(own[-1].filename)}:{own[-1].lineno})"


def _nearby(path: str) -> str:
    """A path relative to the working directory, if that is shorter."""
    with contextlib.suppress(ValueError):
        return min(os.path.relpath(path), path, key=len)
    return path


def _leave(code: int) -> None:
    """Exit. A failed rank exits immediately, so that its connections to others cannot block it or change its exit code."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        if sys.stdout is not None:  # None in a process that was started without one
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
