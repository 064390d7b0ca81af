# SPDX-License-Identifier: Apache-2.0
"""The command that resumes a job from its newest checkpoint, and the command line that started this job. No torch."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Optional

from megatron.errors import SettingsError, StorageError
from megatron.guard.command import config_of, has_flag, with_flag, without
from megatron.settings.schema import Checkpoint
from megatron.storage.urls import location
from megatron.telemetry.run_folder import SNAPSHOTS, newest_checkpoint

COMMAND = "MEGATRON_COMMAND"  # in the environment of ranks: the command line that started the job


def resumed(words: list[str], save: Optional[str], others: Iterable[Optional[str]] = ()) -> list[str]:
    """The command that resumes from the newest checkpoint under `--save`, if there is one, instead of its own `--load`.

    others: folders of checkpoints (the mirror, copies) to load if `--save` holds none
    """
    load = next((folder for folder in (save, *others) if newest_checkpoint(folder) is not None), None)
    if load is None:
        return with_flag(words, "--load", save) if save and _begins_from_memory(words, save) else words
    words = with_flag(words, "--load", load)
    finetunes = has_flag(words, "--finetune")
    for flag in ("--finetune", "--no-load-optim", "--auto-resume"):
        if has_flag(words, flag):
            words = with_flag(words, flag, "false")
    words = without(words, "--ckpt-step")
    if finetunes and config_of(words) is None:  # its sizes came from the checkpoint that it started from
        words = with_flag(words, "--use-checkpoint-args")
    return words


def resuming_words(checkpoint: Checkpoint) -> list[str]:
    """The words after those of a job that --finetune began, with which it resumes; none for another one.

    One with --pretrained-checkpoint resumes by itself.
    """
    begun = checkpoint.finetune and checkpoint.pretrained_checkpoint is None
    return ["--finetune", "false", "--use-checkpoint-args"] if begun else []


def _begins_from_memory(words: list[str], save: str) -> bool:
    """Whether a job without a checkpoint may go on from memory. One that starts from another folder does so again."""
    config = config_of(words)
    return config is not None and config.checkpoint.load is None and has_snapshots(save)


def has_snapshots(save: Optional[str]) -> bool:
    """Whether a job may have snapshots in memory (--non-persistent-save-interval)."""
    try:
        return save is not None and (location(save) / SNAPSHOTS).exists()
    except StorageError:  # an object store that does not answer
        return False


def module_command(argv: list[str], module: str) -> str:
    """The command line of one of this suite's modules, quoted for a shell."""
    return shlex.join([_python(), "-m", module, *argv])


def job_command() -> list[str]:
    """The command line that started this process's job: the supervisor's or launcher's if it is known, else its own."""
    if COMMAND in os.environ:
        return shlex.split(os.environ[COMMAND])
    own = [_python(), *sys.orig_argv[1:]]
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return own
    try:  # torchrun starts the ranks itself
        launcher = Path(f"/proc/{os.getppid()}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return own
    return ["torchrun", *launcher[2:]] if Path(next(iter(launcher[1:2]), "")).name == "torchrun" else launcher


def _python() -> str:
    return "python" if shutil.which("python") == sys.executable else sys.executable


def last_checkpoint(checkpoint: Checkpoint) -> Optional[str]:
    """Path of the newest complete checkpoint of a run with these settings."""
    for folder in (checkpoint.save, checkpoint.save_mirror):
        if (iteration := newest_checkpoint(folder)) is not None:
            return str(location(folder) / f"iter_{iteration:07d}")
    return None


def resume_command(checkpoint: Checkpoint) -> str:
    """The command that resumes this job from its last checkpoint: its own, with `--load` if that is missing.

    A script that does more than train sets RESUME_COMMAND to its own command line.
    """
    if os.environ.get("RESUME_COMMAND"):
        return os.environ["RESUME_COMMAND"].strip()
    words = job_command()
    resumes = checkpoint.load == checkpoint.save and not (checkpoint.ckpt_step or checkpoint.finetune)
    if not resumes and "megatron.tools.supervise" not in words:  # which finds the checkpoint itself
        try:
            words = resumed(words, checkpoint.save, (checkpoint.save_mirror, checkpoint.save_copy))
        except SettingsError:  # a training script of an unknown name
            words = [*words, "--load", checkpoint.save, *resuming_words(checkpoint)]
    return shlex.join(words)
