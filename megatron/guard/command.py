# SPDX-License-Identifier: Apache-2.0
"""Read and edit the command line of a supervised job: its flags, and its number of ranks. No torch.

>>> words = "torchrun --nproc-per-node 2 pretrain_gpt.py --save ckpt".split()
>>> with_flag(words, "--heartbeat-dir", "/dev/shm/x")[-2:]
['--heartbeat-dir', '/dev/shm/x']
>>> ranks_of(words), " ".join(with_ranks(words, 1))
(2, 'torchrun --nproc-per-node=1 pretrain_gpt.py --save ckpt')
"""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Optional

from megatron.errors import Failure, SettingsError, UsageError
from megatron.model.command_line import parse_any
from megatron.model.recipe import MODEL_TYPES, SCRIPTS, named_recipe
from megatron.settings.schema import GROUPS, Config
from megatron.settings.spelling import spellings_of

RANKS, NODES = ("--nproc-per-node", "--nproc_per_node"), ("--nnodes",)  # of torchrun
LAUNCHERS = ("torch.distributed.run", "megatron.tools.launch")
SLURM_NODES, SLURM_TASKS, EXCLUDE = ("--nodes", "-N"), ("--ntasks", "-n"), ("--exclude", "-x")  # of srun
NODE_RANK, MASTER = ("--node-rank", "--node_rank"), ("--master-addr", "--master_addr")  # of torchrun
MEETING = ("--rdzv-endpoint", "--rdzv_endpoint", "--master-addr", "--master_addr")  # of launchers: where ranks meet
_SETTING = {flag.replace("_", "-"): spelling.setting.name for flag, spelling in spellings_of(GROUPS).items()}


def script_at(words: list[str], tool: str = "supervise") -> int:
    """Index of the training script, or of the module after -m, in the command; the training's own flags follow it.

    tool: that reads the command, for the error

    >>> script_at("python -m pretrain_gpt --lr 1".split()), script_at("python -m megatron.tools.launch -m finetune".split())
    (2, 4)
    """
    named = list(zip(["", *words], words))  # (the word before, a word)
    for number, (before, word) in enumerate(named):
        if before == "-m" and "." not in word and trains(word, is_module=True):
            return number
        name, ending = Path(word).stem, Path(word).suffix
        if name.startswith("pretrain") and ending in (".py", ".sh") or name.startswith("auto_") and ending == ".sh":
            return number
        if trains(word):
            return number
    for number, (before, word) in enumerate(named):
        if before == "-m" and "." in word and word not in LAUNCHERS:
            return number
    raise SettingsError(
        "no training script (pretrain_*.py, another that imports megatron.entry, scripts/pretrain_*.sh, -m pretrain_gpt, "
        f"-m a.module) in: {' '.join(words)}",
        do=f"{tool} ... -- torchrun ... pretrain_gpt.py ...; in a wrapper of your own, put {tool} into it, before "
        'torchrun, or call it pretrain_NAME.sh and let it pass "$@" on to the training script',
    )


def trains(script: str, is_module: bool = False) -> bool:
    """Whether a script, or a module, is a training of this suite or a user's own: it imports `megatron.entry`.

    A script of the suite's is found in any folder, as `tools.launch` finds it: finetune.py.
    """
    path = file_of(script, is_module)
    return path is not None and path.suffix == ".py" and b"megatron.entry" in path.read_bytes()


def file_of(script: str, is_module: bool = False) -> Optional[Path]:
    """The file of a script, or of a module that Python finds here; None if there is none. Imports nothing.

    >>> file_of("finetune.py").name, file_of("megatron.tasks.chat", is_module=True).name, file_of("none.py")
    ('finetune.py', 'chat.py', None)
    """
    if not is_module and Path(script).is_file():
        return Path(script)
    name, *parts = script.split(".") if is_module else [script.removesuffix(".py")]
    if not name.isidentifier() or not is_module and name == script:
        return None
    try:
        found = importlib.util.find_spec(name)
    except ValueError:  # it runs, and was not imported
        found = None
    if found is None:
        return None
    folders = found.submodule_search_locations or ()
    paths = [Path(folder, *parts).with_suffix(".py") for folder in folders] if parts else [Path(found.origin or "")]
    return next((path for path in paths if path.is_file()), None)


def refuse_unknown(words: list[str], tool: str) -> None:
    """Raise an error if a command, which `tool` is to run, has no training script, or its program does not exist."""
    script_at(words, tool)
    if shutil.which(words[0]) is None:
        raise UsageError(f"{words[0]}: there is no such command", do=f"{tool} ... -- torchrun ... pretrain_gpt.py ...")


def value_of(words: list[str], *flags: str) -> Optional[str]:
    """The value of a flag on the command line, under any of its names; the last one counts."""
    result = None
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in flags or name.replace("_", "-") in flags:
            result = value if equals else next(iter(words[number + 1 : number + 2]), None)
    return result


def has_flag(words: list[str], flag: str) -> bool:
    """Whether a flag is on the command line, in either spelling."""
    return any(word.partition("=")[0].replace("_", "-") == flag for word in words)


def with_flag(words: list[str], flag: str, value: Optional[str] = None) -> list[str]:
    """The command with the flag at its end, in place of all flags of the same setting."""
    words = without(words, flag)
    return [*words, flag] if value is None else [*words, flag, value]


def without(words: list[str], *flags: str) -> list[str]:
    """The command without some of the training's flags, in all their spellings.

    >>> " ".join(without("torchrun pretrain_gpt.py --tp 2 --seed=3 --save_interval 4".split(), "--save-interval",
    ...                  "--tensor-model-parallel-size"))
    'torchrun pretrain_gpt.py --seed=3'
    """
    names, at = {_SETTING[flag] for flag in flags}, script_at(words) + 1
    kept, removes = words[:at], False
    for word in words[at:]:
        if word.startswith("--"):
            removes = _SETTING.get(word.partition("=")[0].replace("_", "-")) in names
        if not removes:
            kept.append(word)
    return kept


def shape_of(words: list[str]) -> tuple[int, int]:
    """The number of machines, and of processes on each, that the launcher starts; (1, 1) without a launcher.

    >>> shape_of("srun -N 4 torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py".split())
    (4, 8)
    """
    words = expanded(words)
    nodes, each = _number(value_of(words, *NODES)), _number(value_of(words, *RANKS))
    if not is_srun(words):
        return nodes or 1, each or 1
    own = words[: script_at(words)]
    nodes = nodes or _number(value_of(own, *SLURM_NODES)) or _number(os.environ.get("SLURM_NNODES")) or 1
    tasks = _number(value_of(own, *SLURM_TASKS)) or _number(os.environ.get("SLURM_NTASKS")) or nodes
    return nodes, each or max(1, tasks // nodes)


def ranks_of(words: list[str]) -> int:
    """Number of processes of the job, on all machines."""
    nodes, each = shape_of(words)
    return nodes * each


def is_srun(words: list[str]) -> bool:
    """Whether srun starts the job, on all its machines."""
    return Path(words[0]).name == "srun"


def with_ranks(words: list[str], ranks: int) -> list[str]:
    """The same command on another number of processes: first fewer machines, then fewer processes on one.

    >>> " ".join(with_ranks("srun -N 4 torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py".split(), 16))
    'srun --nodes=2 torchrun --nnodes=2 --nproc-per-node=8 pretrain_gpt.py'
    """
    nodes, each = shape_of(words)
    one_each = nodes * each == (_number(value_of(words, *SLURM_TASKS)) or _number(os.environ.get("SLURM_NTASKS")))
    launched = value_of(words, *RANKS) is not None
    if not launched and (not is_srun(words) or ranks % each and not one_each):
        raise SettingsError(
            f"the command does not give the number of processes: {' '.join(words)}",
            do="torchrun --nproc-per-node N ...",
        )
    each = min(each, ranks)
    nodes = ranks // each
    if launched:
        words = _put(_put(words, RANKS, each), NODES, nodes)
    if is_srun(words):
        tasks = ranks if one_each and not launched else nodes
        for flags, number, inherited in ((SLURM_NODES, nodes, "SLURM_NNODES"), (SLURM_TASKS, tasks, "SLURM_NTASKS")):
            if value_of(words[: script_at(words)], *flags) is not None:
                words = _put(words, flags, number)
            elif os.environ.get(inherited) not in (None, str(number)):
                words = [words[0], f"{flags[0]}={number}", *words[1:]]
    return words


def on_nodes(words: list[str], excluded: list[str], left: list[str]) -> list[str]:
    """A command of srun without some nodes of its allocation. left: the others; one is where ranks meet from now on

    >>> words = "srun -N 2 torchrun --nnodes 2 --rdzv-endpoint=n1:29500 pretrain_gpt.py".split()
    >>> " ".join(on_nodes(words, ["n1"], ["n2", "n3"]))
    'srun --exclude=n1 -N 2 torchrun --nnodes 2 --rdzv-endpoint=n2:29500 pretrain_gpt.py'
    """
    own = words[: script_at(words)]
    given = [name for name in (value_of(own, *EXCLUDE) or "").split(",") if name]
    names = ",".join(dict.fromkeys([*given, *excluded]))
    words = _put(words, EXCLUDE, names) if given else [words[0], f"{EXCLUDE[0]}={names}", *words[1:]]
    if value_of(own, *SLURM_NODES) is None:  # else it would be all nodes of the allocation
        words = [words[0], f"{SLURM_NODES[0]}={shape_of(words)[0]}", *words[1:]]
    meeting = value_of(words[: script_at(words)], *MEETING)
    host = (meeting or "").partition(":")[0]
    if left and host.partition(".")[0] in excluded:
        at = script_at(words)
        moved = meeting.replace(host, left[0], 1)
        words = [word.replace(meeting, moved) if n < at else word for n, word in enumerate(words)]
    return words


def in_place(words: list[str], nodes: int, rank: int, address: Optional[str]) -> list[str]:
    """A launcher's command of one node for another place in the job. address: of the first node; None: as it is

    >>> words = "torchrun --nnodes 4 --node-rank 3 --master-addr=n0 --nproc-per-node 8 pretrain_gpt.py".split()
    >>> " ".join(in_place(words, 2, 1, "n5"))
    'torchrun --nnodes=2 --node-rank=1 --master-addr=n5 --nproc-per-node 8 pretrain_gpt.py'
    """
    words = _put(_put(words, NODES, nodes), NODE_RANK, rank)
    return words if address is None else _put(words, MASTER, address)


def _put(words: list[str], flags: tuple[str, ...], value: int | str) -> list[str]:
    """The command with a new value for a launcher's flag, if it has that flag. Flags of the training do not change."""
    at, result, skip = script_at(words), [], False
    for number, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif number < at and name in flags:
            skip = not equals
            result.append(f"{flags[0]}={value}")
        else:
            result.append(word)
    return result


def _number(text: Optional[str]) -> Optional[int]:
    return int(text) if text is not None and text.isdecimal() else None


def config_of(words: list[str]) -> Optional[Config]:
    """The job's settings, as given; None if they cannot be read. The job itself prints notes, and the reason."""
    flags = flags_of(words)
    for model_type in _model_types(expanded(words)):
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                return parse_any(flags, recipe=model_type and named_recipe(model_type))
        except (Failure, SystemExit):
            continue
    return None


def _model_types(words: list[str]) -> list[Optional[str]]:
    """The model types that the script or module may train; None: that of --model-type."""
    at = script_at(words)
    is_module = words[at - 1] == "-m"
    name = words[at] if is_module else Path(words[at]).stem
    if name in MODEL_TYPES.values():
        return [model_type for model_type, module in MODEL_TYPES.items() if module == name]
    others = [model_type for model_type, script in SCRIPTS.items() if script == f"{name}.py"]
    return [name, *others] if is_module or others else [None]  # a module is its recipe's name


def flags_of(words: list[str]) -> list[str]:
    """The training's own flags."""
    words = expanded(words)
    return words[script_at(words) + 1 :]


def expanded(words: list[str]) -> list[str]:
    """The command with a script of `scripts/` replaced by the command that it runs, which it prints with PRINT=1.

    A user's own script is not replaced: it does not know PRINT and would start training.
    """
    at = script_at(words)
    if not words[at].endswith(".sh") or is_foreign(words):
        return words
    start = at - 1 if at and Path(words[at - 1]).name in ("bash", "sh") else at
    return [*words[:start], *_printed_command(*words[at:])]


def is_foreign(words: list[str]) -> bool:
    """Whether the training script is a user's shell script. All scripts in `scripts/` run _launch.sh.

    Raises SettingsError when it cannot be read, or does not pass on the arguments that a supervisor adds.
    """
    script = Path(words[script_at(words)])
    if script.suffix != ".sh":
        return False
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SettingsError(f"{script} cannot be read: {error.strerror}") from None
    if script.with_name("_launch.sh").exists() and re.search(r"/_launch\.sh|^(exec bash|source) ", text, re.MULTILINE):
        return False
    if not re.search(r"\$[@*]|\$\{[@*]", text):
        raise SettingsError(
            f"{script} does not pass its arguments on to the training",
            "the supervisor adds --heartbeat-dir, --exit-signal-handler and --load",
            'put "$@" after the last flag of its training command',
        )
    return True


@cache
def _printed_command(*words: str) -> list[str]:
    try:
        done = subprocess.run(
            ["bash", *words],
            env={**os.environ, "PRINT": "1", "SUPERVISE": ""},
            text=True,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SettingsError(f"{words[0]} does not print its command", "no answer to PRINT=1 within 60 s") from None
    if done.returncode:
        raise SettingsError(f"{words[0]} does not print its command", done.stderr.strip()[:500])
    return shlex.split(done.stdout)
