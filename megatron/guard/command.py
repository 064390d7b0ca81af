# SPDX-License-Identifier: Apache-2.0
"""The command line of a supervised job: how it is started again from its checkpoint, or on fewer ranks. No torch.

>>> words = "torchrun --nproc-per-node 2 pretrain_gpt.py --save ckpt".split()
>>> with_flag(words, "--heartbeat-dir", "/dev/shm/x")[-2:]
['--heartbeat-dir', '/dev/shm/x']
>>> ranks_of(words), " ".join(with_ranks(words, 1))
(2, 'torchrun --nproc-per-node=1 pretrain_gpt.py --save ckpt')
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Optional

from megatron.errors import Failure, SettingsError
from megatron.model.arguments import parse_any
from megatron.settings.schema import GROUPS, Checkpoint, Config
from megatron.settings.spelling import spellings_of
from megatron.storage.urls import location

RANKS, NODES = ("--nproc-per-node", "--nproc_per_node"), ("--nnodes",)  # of torchrun
LAUNCHERS = ("torch.distributed.run", "megatron.tools.launch")
SLURM_NODES, SLURM_TASKS = ("--nodes", "-N"), ("--ntasks", "-n")  # of srun
_SETTING = {flag.replace("_", "-"): spelling.setting.name for flag, spelling in spellings_of(GROUPS).items()}
CHECKPOINT = re.compile(r"iter_(\d{7,})")


def script_at(words: list[str]) -> int:
    """Where the training script, or the module behind -m, stands in the command; behind it are its own flags."""
    for number, word in enumerate(words):
        name = Path(word).name
        if (
            name.startswith("pretrain")
            and word.endswith(".py")
            or name.startswith(("pretrain", "auto_"))
            and (word.endswith(".sh"))
        ):
            return number
    for number in range(1, len(words)):
        if words[number - 1] == "-m" and "." in words[number] and words[number] not in LAUNCHERS:
            return number
    raise SettingsError(
        f"no training script (pretrain_*.py, scripts/pretrain_*.sh, -m a.module) in: {' '.join(words)}",
        do="supervise ... -- torchrun ... pretrain_gpt.py ...; in a wrapper of your own, put supervise into it, before "
        'torchrun, or call it pretrain_NAME.sh and let it pass "$@" on to the training script',
    )


def value_of(words: list[str], *flags: str) -> Optional[str]:
    """The value of a flag on the command line, whatever of its names is used: the last one counts."""
    found = None
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in flags or name.replace("_", "-") in flags:
            found = value if equals else next(iter(words[number + 1 : number + 2]), None)
    return found


def with_flag(words: list[str], flag: str, value: Optional[str] = None) -> list[str]:
    """The flag at the end, in the place of whatever the command says of the same setting."""
    words = without(words, flag)
    return [*words, flag] if value is None else [*words, flag, value]


def without(words: list[str], *flags: str) -> list[str]:
    """The words without what they say of some of the training's settings, in whatever spelling.

    >>> " ".join(without("torchrun pretrain_gpt.py --tp 2 --seed=3 --save_interval 4".split(), "--save-interval",
    ...                  "--tensor-model-parallel-size"))
    'torchrun pretrain_gpt.py --seed=3'
    """
    names, at = {_SETTING[flag] for flag in flags}, script_at(words) + 1
    found, meant = words[:at], False
    for word in words[at:]:
        if word.startswith("--"):
            meant = _SETTING.get(word.partition("=")[0].replace("_", "-")) in names
        if not meant:
            found.append(word)
    return found


def shape_of(words: list[str]) -> tuple[int, int]:
    """(machines, processes on each) that the launcher starts; (1, 1) without a launcher.

    >>> shape_of("srun -N 4 torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py".split())
    (4, 8)
    """
    words = expanded(words)
    nodes, each = _number(value_of(words, *NODES)), _number(value_of(words, *RANKS))
    if not of_slurm(words):
        return nodes or 1, each or 1
    own = words[: script_at(words)]
    nodes = nodes or _number(value_of(own, *SLURM_NODES)) or _number(os.environ.get("SLURM_NNODES")) or 1
    tasks = _number(value_of(own, *SLURM_TASKS)) or _number(os.environ.get("SLURM_NTASKS")) or nodes
    return nodes, each or max(1, tasks // nodes)


def ranks_of(words: list[str]) -> int:
    """Processes that the job has, on all machines."""
    nodes, each = shape_of(words)
    return nodes * each


def of_slurm(words: list[str]) -> bool:
    """Whether srun starts the job, on all its machines."""
    return Path(words[0]).name == "srun"


def with_ranks(words: list[str], ranks: int) -> list[str]:
    """The same command on another number of processes: fewer machines first, and then fewer on one.

    >>> " ".join(with_ranks("srun -N 4 torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py".split(), 16))
    'srun --nodes=2 torchrun --nnodes=2 --nproc-per-node=8 pretrain_gpt.py'
    """
    nodes, each = shape_of(words)
    one_each = nodes * each == (_number(value_of(words, *SLURM_TASKS)) or _number(os.environ.get("SLURM_NTASKS")))
    launched = value_of(words, *RANKS) is not None
    if not launched and (not of_slurm(words) or ranks % each and not one_each):
        raise SettingsError(
            f"the command does not say how many processes it starts: {' '.join(words)}",
            do="torchrun --nproc-per-node N ...",
        )
    each = min(each, ranks)
    nodes = ranks // each
    if launched:
        words = _put(_put(words, RANKS, each), NODES, nodes)
    if of_slurm(words):
        tasks = ranks if one_each and not launched else nodes
        for flags, number, inherited in ((SLURM_NODES, nodes, "SLURM_NNODES"), (SLURM_TASKS, tasks, "SLURM_NTASKS")):
            if value_of(words[: script_at(words)], *flags) is not None:
                words = _put(words, flags, number)
            elif os.environ.get(inherited) not in (None, str(number)):
                words = [words[0], f"{flags[0]}={number}", *words[1:]]
    return words


def _put(words: list[str], flags: tuple[str, ...], value: int) -> list[str]:
    """The words with this value of a flag that they hold, under its first name; only before the training's own flags."""
    at, found, skip = script_at(words), [], False
    for number, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif number < at and name in flags:
            skip = not equals
            found.append(f"{flags[0]}={value}")
        else:
            found.append(word)
    return found


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and text.isdecimal() else None


def config_of(words: list[str]) -> Optional[Config]:
    """The job's settings, as given; None when they cannot be read: the job itself will say why."""
    at = script_at(words)
    recipe = ["--model-type", words[at]] if words[at - 1] == "-m" else []  # a module is its recipe's name
    try:
        return parse_any([*recipe, *flags_of(words)])
    except (Failure, SystemExit):
        return None


def flags_of(words: list[str]) -> list[str]:
    """The training's own flags."""
    words = expanded(words)
    return words[script_at(words) + 1 :]


def expanded(words: list[str]) -> list[str]:
    """The command with a script of `scripts/` replaced by what that runs, which it tells (PRINT=1).

    Somebody's own script stays as it is: asked, it would train.
    """
    at = script_at(words)
    if not words[at].endswith(".sh") or is_foreign(words):
        return words
    start = at - 1 if at and Path(words[at - 1]).name in ("bash", "sh") else at
    return [*words[:start], *_said_by(*words[at:])]


def is_foreign(words: list[str]) -> bool:
    """Whether the training script is a shell script that is none of `scripts/`, which all go through _launch.sh there.

    Raises SettingsError when it cannot be read, or keeps the arguments that a supervisor adds to itself.
    """
    script = Path(words[script_at(words)])
    if script.suffix != ".sh":
        return False
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SettingsError(f"{script} cannot be read: {error.strerror}") from None
    if script.with_name("_launch.sh").exists() and re.search(r"/_launch\.sh|^exec bash ", text, re.MULTILINE):
        return False
    if not re.search(r"\$[@*]|\$\{[@*]", text):
        raise SettingsError(
            f"{script} does not hand its arguments on to the training",
            "the supervisor adds --heartbeat-dir, --exit-signal-handler and --load",
            'put "$@" behind the last flag of its training command',
        )
    return True


@cache
def _said_by(*words: str) -> list[str]:
    try:
        told = subprocess.run(
            ["bash", *words],
            env={**os.environ, "PRINT": "1", "SUPERVISE": ""},
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SettingsError(f"{words[0]} does not say what it runs", "it was asked with PRINT=1, for 60 s") from None
    if told.returncode:
        raise SettingsError(f"{words[0]} does not say what it runs", told.stderr.strip()[:500])
    return shlex.split(told.stdout)


def newest_checkpoint(folder: Optional[str]) -> Optional[int]:
    """The iteration of the newest complete checkpoint of a folder. Whether it is whole is seen when it is loaded."""
    found = [
        int(match[1])
        for path in location(folder or "/nonexistent").glob("iter_*")
        if (match := CHECKPOINT.fullmatch(path.name)) and (path / "index.json").exists()
    ]
    return max(found, default=None)


def resumed(words: list[str], save: Optional[str], others: Iterable[Optional[str]] = ()) -> list[str]:
    """The command that goes on from the newest checkpoint under `--save`, if there is one, whatever was loaded at first.

    others: where checkpoints may be that `--save` does not hold: the mirror, copies. A run with `--load` looks there by
    itself; it is given one of them where `--save` has none.
    """
    load = next((folder for folder in (save, *others) if newest_checkpoint(folder) is not None), None)
    if load is None:
        return words
    words = with_flag(words, "--load", load)
    finetunes = _given(words, "--finetune")
    for flag in ("--finetune", "--no-load-optim", "--auto-resume"):
        if _given(words, flag):
            words = with_flag(words, flag, "false")
    words = without(words, "--ckpt-step")
    if finetunes and config_of(words) is None:  # its shape was that of the checkpoint that it began with
        words = with_flag(words, "--use-checkpoint-args")
    return words


COMMAND = "MEGATRON_COMMAND"  # in the environment of ranks: the command line that started the job


def started_by(argv: list[str], module: str) -> str:
    """The command line of a module of ours, to be typed again."""
    return shlex.join([_python(), "-m", module, *argv])


def of_this_job() -> list[str]:
    """The command line that started this process's job: a supervisor's or a launcher's, as far as it is known here."""
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
    """Where a run with these settings has its newest complete checkpoint."""
    for folder in (checkpoint.save, checkpoint.save_mirror):
        if (found := newest_checkpoint(folder)) is not None:
            return str(location(folder) / f"iter_{found:07d}")
    return None


def that_goes_on(checkpoint: Checkpoint) -> str:
    """The command that takes this job up from its last checkpoint: its own, with `--load` where it has none such. A script
    that does more than to train says in RESUME_COMMAND how it is called itself.
    """
    if os.environ.get("RESUME_COMMAND"):
        return os.environ["RESUME_COMMAND"].strip()
    words = of_this_job()
    resumes = checkpoint.load == checkpoint.save and not (checkpoint.ckpt_step or checkpoint.finetune)
    if not resumes and "megatron.tools.supervise" not in words:  # which finds the checkpoint itself
        try:
            words = resumed(words, checkpoint.save, (checkpoint.save_mirror, checkpoint.save_copy))
        except SettingsError:  # a script under a name that is not known here
            words = [*words, "--load", checkpoint.save]
    return shlex.join(words)


def _given(words: list[str], flag: str) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == flag for word in words)
