# SPDX-License-Identifier: Apache-2.0
"""Check that a training repeats to the bit: run it twice, and once more stopped and resumed after every step.

    python -m megatron.tools.verify_determinism --steps 20 -- torchrun --nproc-per-node 8 pretrain_gpt.py ...

The command runs as it will, on the devices of the training, but for some steps and with checkpoints in a folder of their
own. All weights, the optimizer's state, and where the data and the schedules are, are compared with those of the first run
after each of these steps, and the first step that differs is reported with the tensors that do. Exit code 0: all are equal;
1: one differs; else that of the training, which failed.

Bits depend on the layout, on the number of threads and on the libraries: `--batch-invariant-mode` removes the first, and
docs/survival.md#determinism lists the rest.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megatron.errors import Failure, SettingsError, UsageError, run_main
from megatron.guard import command as commands
from megatron.guard.exits import to_shell
from megatron.guard.processes import end_descendants, start_job
from megatron.guard.resume_command import resumed
from megatron.settings.parse import parse
from megatron.settings.schema import setting
from megatron.storage.processes import adopt_orphans
from megatron.telemetry.run_folder import newest_checkpoint

NAMED = 3  # tensors that differ, in a row of the table
FIRST, AGAIN, RESTARTS = "first", "again", "restarts"  # runs, and their folders
SHOWN = {AGAIN: "the same command again", RESTARTS: "stopped and resumed after each"}
LINES = 20  # of a failed run's output


@dataclass(frozen=True)
class VerifyDeterminismOptions:
    """How long the runs are, and where their checkpoints lie."""

    steps: int = setting("steps of each run", 5)
    every: int = setting("save, compare, stop and resume after each so many steps", 1)
    folder: Optional[str] = setting(
        "folder for the checkpoints of the runs, 3 x steps / every of them, which stay there (default: a temporary one)",
        None,
    )


class RunFailed(Failure):
    """A run of the command failed. Its exit code is that of the run."""


def main(argv: list[str]) -> None:
    """Run the command, print a line for each comparison, exit with 1 if a bit differs."""
    at = argv.index("--") if "--" in argv else len(argv)
    prog, about = "python -m megatron.tools.verify_determinism", __doc__.splitlines()[0]
    fields = tuple(VerifyDeterminismOptions.__dataclass_fields__)
    options = parse(argv[:at], {"check": VerifyDeterminismOptions}, prog=prog, description=about, common=fields)[
        "check"
    ]
    if not argv[at + 1 :]:
        raise UsageError(
            "the command to check is missing", do="verify_determinism ... -- torchrun ... pretrain_gpt.py ..."
        )
    for name in ("steps", "every"):
        if getattr(options, name) < 1:
            raise SettingsError(f"--{name} {getattr(options, name)} must be at least 1")
    if options.steps % options.every:
        raise SettingsError(f"--steps {options.steps} is not a multiple of --every {options.every}")
    adopt_orphans()
    with folder_of(options.folder) as folder:
        if not repeats(RepeatedRuns(argv[at + 1 :], options, folder)):
            sys.exit(1)


@contextlib.contextmanager
def folder_of(given: Optional[str]) -> Iterator[Path]:
    """The folder for the runs: `--folder`, which must be empty and stays, or a temporary one."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="verify-determinism-") as folder:
            yield Path(folder)
        return
    folder = Path(given)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise SettingsError(f"--folder {folder} is not empty", do="give another one, or remove it")
    yield folder
    print(f"the checkpoints of the runs are in {folder}")


class RepeatedRuns:
    """The runs of a command.

    start: the step from which it starts, if it loads a checkpoint; else 0
    """

    def __init__(self, words: list[str], options: VerifyDeterminismOptions, folder: Path):
        self.words, self.options, self.folder = words, options, folder
        commands.refuse_unknown(words, "verify_determinism")
        config = commands.config_of(words)
        loaded = config.checkpoint if config else None
        self.start = 0
        if loaded and loaded.load and not loaded.finetune:
            self.start = loaded.ckpt_step or newest_checkpoint(loaded.load) or 0

    @property
    def stops(self) -> range:
        """The steps after which runs are compared."""
        return range(self.start + self.options.every, self.start + self.options.steps + 1, self.options.every)

    def make(self, name: str) -> None:
        """Make one of the runs. Raises RunFailed."""
        last = self.stops[-1]
        for stop in self.stops if name == RESTARTS else [last]:
            save = str(self.folder / name)
            words = resumed(self.words, save)  # as given while there is nothing to resume from
            for flag, value in (("--save", save), ("--save-interval", self.options.every), ("--exit-interval", stop)):
                words = commands.with_flag(words, flag, str(value))
            self._run(
                commands.without(words, "--keep-last", "--save-retain-interval", "--save-mirror", "--save-copy"), name
            )
            if newest_checkpoint(save) != stop:
                raise SettingsError(
                    f"the training ended before step {stop}",
                    "its length is that of --train-iters or --train-samples",
                    f"--steps {max(1, (newest_checkpoint(save) or self.start) - self.start)}",
                )

    def _run(self, words: list[str], name: str) -> None:
        output = self.folder / f"{name}.log"
        with output.open("ab") as file:
            job = start_job(words, file)
        try:
            job.wait()
        finally:
            end_descendants(os.getpid(), job.pid)
        if job.returncode:
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]
            failed = RunFailed(f"the command failed with exit code {job.returncode}", "\n  ".join(["", *lines]))
            failed.code = to_shell(job.returncode)
            raise failed

    def differences(self, name: str) -> Iterator[tuple[int, list[str]]]:
        """(step, what differs from the first run after it), for each stop."""
        from megatron.checkpoint.compare import differences
        from megatron.checkpoint.reader import Reader

        for stop in self.stops:
            one, two = (Reader(self.folder / run / f"iter_{stop:07d}") for run in (FIRST, name))
            with one, two:
                places = [key for key, value in one.state["state"].items() if two.state["state"].get(key) != value]
                yield stop, [*places, *map(str, differences(one, two))]


def repeats(runs: RepeatedRuns) -> bool:
    """Make all runs and print how each compares with the first one. Returns whether all are equal."""
    runs.make(FIRST)
    count, good = len(runs.stops), []
    each = "step" if runs.options.every == 1 else f"{runs.options.every} steps"
    print(f"{runs.options.steps} steps, compared with the first run after each {each}")
    for name, shown in SHOWN.items():
        runs.make(name)
        differs = next(((stop, what) for stop, what in runs.differences(name) if what), None)
        good.append(differs is None)
        text = f"PASS  {count} checkpoints are equal to the bit"
        if differs:
            stop, what = differs
            more = f"; and {len(what) - NAMED} more" * (len(what) > NAMED)
            text = f"FAIL  first after step {stop}: {'; '.join(what[:NAMED])}{more}"
        print(f"{shown:<32} {text}", flush=True)
    if not all(good):
        print("what changes bits, and what keeps them (--deterministic-mode): docs/survival.md#determinism")
    return all(good)


if __name__ == "__main__":
    run_main(main)
