# SPDX-License-Identifier: Apache-2.0
"""The log of a run: short lines and a progress bar on a terminal, Megatron-LM's lines everywhere else.

    console = Console("auto", active=rank == 0)
    console.log("an event")                           # folded to the width of a terminal
    console.log(megatron_line, short=line)            # two forms of one message
    console.keep(path)                                # also write the log to this file, in full and from its start
    console.begin(train_iters, iteration)             # show a bar at the bottom from now on
    console.advance({"loss": "7.2"}); console.close()

Threads may log, too: checkpoints are written in the background.
"""

import contextlib
import errno
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Optional, TextIO

WIDTH = 100  # maximal columns of a line on a terminal


class Console:
    """The log of a rank. Silent without `active`.

    form: `short` or `megatron` lines; `auto` is short if stdout is a terminal. bar: a progress bar on a terminal.
    prints: False: log to the file only. prefix: of each line on stdout
    """

    def __init__(
        self,
        form: Literal["auto", "short", "megatron"] = "auto",
        *,
        bar: bool = True,
        active: bool = True,
        prints: bool = True,
        prefix: str = "",
    ):
        self.active, self.terminal = active, active and prints and is_terminal(sys.stdout)
        self._prints, self._prefix = prints, prefix
        self.short = form == "short" or (form == "auto" and self.terminal)
        self._wants_bar, self._bar = bar and self.terminal, None
        self._out = _Terminal(sys.stdout, self._lost) if self.terminal else None  # None: the present stdout
        self._lock = threading.RLock()
        self._file: Optional[TextIO] = None
        self._unkept: Optional[list[str]] = []  # lines before there was a file; None: there will be none
        self._above = contextlib.ExitStack()

    # -- lines -------------------------------------------------------------------------------------------------------

    def log(self, text: str, short: Optional[str] = None) -> None:
        """Log a message. short: its form on a terminal; "" prints nothing there."""
        if not self.active:
            return
        with self._lock:
            self._keep(text)
            shown = short if self.short and short is not None else text
            if shown and self._prints:
                shown = fold(shown, self.width) if self.terminal and self.short else shown
                self._print("\n".join(f"{self._prefix}{line}" for line in shown.split("\n")))

    def keep_only(self, text: str) -> None:
        """Write a message to the file only."""
        with self._lock:
            if self.active:
                self._keep(text)

    @property
    def width(self) -> int:
        """Columns of a line: the terminal's width, but at most `WIDTH`; `WIDTH` without a terminal."""
        return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if self.terminal else WIDTH

    def keep(self, path: Path) -> None:
        """Append the log to this file, including earlier lines. Raises OSError."""
        if not self.active:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._file = path.open("a", encoding="utf-8", buffering=1)
            earlier, self._unkept = self._unkept or [], None
            for text in earlier:
                self._keep(text)

    def forget(self) -> None:
        """Drop the lines kept for a file: there will be none."""
        self._unkept = None

    def _keep(self, text: str) -> None:
        if self._file is None:
            if self._unkept is not None:
                self._unkept.append(text)
            return
        try:
            self._file.write(text + "\n")
        except OSError as error:  # training continues without a log file when the disk is full
            name, self._file = self._file.name, None
            self.log(f"warning: {name} is no longer written: {error}")

    def _print(self, text: str) -> None:
        if self._bar is None:
            print(text + "\n", end="", file=self._out, flush=True)  # in one piece: unbuffered ranks share a pipe
        else:
            self._bar.clear()
            self._out.write(text + "\n")
            self._bar.refresh()
            self._out.flush()

    def _lost(self) -> None:
        """Continue the run without the terminal, which is gone."""
        self.terminal = False
        self._keep("warning: the terminal is gone; the run continues, and logs to this file only")

    # -- the bar -----------------------------------------------------------------------------------------------------

    def begin(self, total: int, done: int) -> None:
        """Show a progress bar of the steps at the bottom of a terminal."""
        if not self._wants_bar or self._bar is not None:
            return
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no drawing thread: each step draws
        tqdm.set_lock(self._lock)
        layout = "{percentage:3.0f}% {bar} {n}/{total} [{elapsed} < {remaining}{postfix}]"
        self._bar = tqdm(
            total=total, initial=done, bar_format=layout, ncols=self._columns(), leave=False, file=self._out
        )
        # Other output, such as warnings of libraries, is written above the bar.
        for redirect, stream in ((contextlib.redirect_stdout, sys.stdout), (contextlib.redirect_stderr, sys.stderr)):
            if is_terminal(stream):
                above = _AboveTheBar(self, stream)
                self._above.callback(above.finish)
                self._above.enter_context(redirect(above))

    def advance(self, shown: dict[str, str]) -> None:
        """Advance the bar by a step. shown: name -> value next to the bar"""
        if self._bar is not None:
            with self._lock:
                self._bar.ncols = self._columns()
                self._bar.set_postfix(shown, refresh=False)
                self._bar.update()

    def note(self, doing: str) -> None:
        """Show the present activity between two steps next to the bar."""
        if self._bar is not None:
            with self._lock:
                self._bar.set_postfix_str(doing)

    def rewind(self, iteration: int) -> None:
        """Set the bar back to this iteration."""
        if self._bar is not None:
            with self._lock:
                self._bar.n = self._bar.last_print_n = iteration
                self._bar.refresh()

    def _columns(self) -> int:
        return self.width - 1  # some terminals begin a line when the last column is written

    def close(self) -> None:
        """Remove the bar and close the file; later messages go to stdout only."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
                self._above.close()
            if self._file is not None:
                self._file.close()
            self._file = self._unkept = None


class _Terminal:
    """A terminal that may be closed at any moment: all later output of the process to it is discarded."""

    def __init__(self, stream: TextIO, lost: Callable[[], None]):
        self._stream, self._lost = stream, lost
        self._terminals = [other.fileno() for other in (stream, sys.__stderr__) if is_terminal(other)]

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for number in self._terminals:
                os.dup2(nowhere, number)
            os.close(nowhere)
            self._lost()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


class _AboveTheBar:
    """A stream of a terminal that writes its lines above the progress bar; an incomplete line waits for its end."""

    def __init__(self, console: Console, stream: TextIO):
        self._console, self._stream, self._pid, self._half = console, stream, os.getpid(), ""

    def write(self, text: str) -> int:
        if os.getpid() != self._pid:  # a forked process draws no bar
            return self._stream.write(text)
        with self._console._lock:
            lines, newline, self._half = (self._half + text).rpartition("\n")
            if newline:
                bar = self._console._bar
                if bar is not None:
                    bar.clear()
                self._stream.write(lines + newline)
                self._stream.flush()
                if bar is not None:
                    bar.refresh()
        return len(text)

    def finish(self) -> None:
        """Write the incomplete line."""
        self._stream.write(self._half)
        self._half = ""

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def is_terminal(stream: Optional[TextIO]) -> bool:
    """Whether a stream is a terminal that can move its cursor."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # it is closed
        return False


def fold(text: str, width: int) -> str:
    """Wrap text to lines of at most `width` columns at blanks, with indented continuation. Longer words stay whole.

    >>> print(fold("  saved checkpoint at iteration 20 to runs/a/iter_0000020", 30))
      saved checkpoint at
          iteration 20 to
          runs/a/iter_0000020
    """
    folded = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        folded += textwrap.wrap(
            line.lstrip(),
            width,
            initial_indent=indent,
            subsequent_indent=indent + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(folded)
