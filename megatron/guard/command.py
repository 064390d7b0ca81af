# SPDX-License-Identifier: Apache-2.0
"""The command line of a supervised job: how it is started again from its checkpoint, or on fewer ranks. No torch.

>>> words = "torchrun --nproc-per-node 2 pretrain_gpt.py --save ckpt".split()
>>> with_flag(words, "--heartbeat-dir", "/dev/shm/x")[-2:]
['--heartbeat-dir', '/dev/shm/x']
>>> ranks_of(words), " ".join(with_ranks(words, 1))
(2, 'torchrun --nproc-per-node=1 pretrain_gpt.py --save ckpt')
"""

import re
from pathlib import Path
from typing import Optional

from megatron.config import Config
from megatron.errors import Failure, SettingsError
from megatron.flags import parse_pretrain
from megatron.rules import check, resolve

RANKS = ("--nproc-per-node", "--nproc_per_node")
CHECKPOINT = re.compile(r"iter_(\d{7,})")


def script_at(words: list[str]) -> int:
    """Where the training script stands in the command; behind it are its own flags."""
    for number, word in enumerate(words):
        if Path(word).name.startswith("pretrain") and word.endswith(".py"):
            return number
    raise SettingsError(f"no training script (pretrain_*.py) in: {' '.join(words)}",
                        do="supervise ... -- torchrun ... pretrain_gpt.py ...")  # fmt: skip


def value_of(words: list[str], flag: str) -> Optional[str]:
    """The value of a flag on the command line: the last one counts."""
    found = None
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag:
            found = value if equals else next(iter(words[number + 1 : number + 2]), None)
    return found


def with_flag(words: list[str], flag: str, value: Optional[str] = None) -> list[str]:
    """The flag at the end, where it wins over an earlier one."""
    return [*words, flag] if value is None else [*words, flag, value]


def ranks_of(words: list[str]) -> int:
    """Processes that the launcher starts on this machine; 1 without a launcher."""
    for flag in RANKS:
        value = value_of(words, flag.replace("_", "-"))
        if value is not None and value.isdecimal():
            return int(value)
    return 1


def with_ranks(words: list[str], ranks: int) -> list[str]:
    """The same command on another number of processes."""
    found, skip = [], False
    for word in words:
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name in RANKS:
            skip = not equals
            found.append(f"--nproc-per-node={ranks}")
        else:
            found.append(word)
    return found


def settings_of(words: list[str]) -> Optional[Config]:
    """The job's settings, as given; None when they cannot be read: the job itself will say why."""
    try:
        return parse_pretrain(words[script_at(words) + 1 :])
    except (Failure, SystemExit):
        return None


def newest_checkpoint(folder: Optional[str]) -> Optional[int]:
    """The iteration of the newest complete checkpoint of a folder. Whether it is whole is seen when it is loaded."""
    found = [int(match[1]) for path in Path(folder or "/nonexistent").glob("iter_*")
             if (match := CHECKPOINT.fullmatch(path.name)) and (path / "index.json").exists()]  # fmt: skip
    return max(found, default=None)


def resumed(words: list[str], save: Optional[str]) -> list[str]:
    """The command that goes on from the newest checkpoint under `--save`, if there is one, whatever was loaded at first."""
    if newest_checkpoint(save) is None:
        return words
    words = with_flag(words, "--load", save)
    for flag in ("--finetune", "--no-load-optim", "--auto-resume"):
        if _given(words, flag):
            words = with_flag(words, flag, "false")
    if not _given(words, "--ckpt-step"):
        return words
    at = max(number for number, word in enumerate(words) if word.partition("=")[0].replace("_", "-") == "--ckpt-step")
    return words[:at] + words[at + (1 if "=" in words[at] else 2) :]


def fewer_ranks(words: list[str], now: int, least: int) -> tuple[int, list[str]]:
    """The most ranks below `now` on which the job can run with the same global batch, and the command for them.

    Raises SettingsError when no number of ranks down to `least` works, with the reasons for the largest.
    """
    config = settings_of(words)
    if config is None:
        raise SettingsError("the settings of the job cannot be read, so it cannot be laid out anew")
    size = resolve(config, now).batch.global_batch_size
    words = with_flag(words, "--global-batch-size", str(size))
    why: list[str] = []
    for ranks in range(now - 1, least - 1, -1):
        found = check(settings_of(words), ranks)
        if not found:
            return ranks, with_ranks(words, ranks)
        why = why or found
    raise SettingsError(f"no layout on {least} to {now - 1} ranks keeps the global batch of {size}", "; ".join(why),
                        "see --min-world-size, --global-batch-size and --micro-batch-size")  # fmt: skip


def _given(words: list[str], flag: str) -> bool:
    return any(word.partition("=")[0].replace("_", "-") == flag for word in words)
