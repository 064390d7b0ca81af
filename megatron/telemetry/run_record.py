# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl: the settings of a run and the values of each step, one JSON object per line.

Kinds: `run` (first: resolved settings, versions, host, mesh), `start` (times before the first step), `step` (one per
iteration), `eval` (`final`: at the end of training), `timers` (one per log interval, if they are on), `memory` (of the
first rank, one per log interval), `ranks` (seconds of a step by part and rank), `experts` (tokens of a step by layer and
expert), `save` (a checkpoint was written, or started), `spike` (that caused a rollback), `rewind` (to this iteration) and
`end` (exit code and reason, unless the process was killed). The file only grows. A resumed run appends a `run` record with
the iteration it starts from: it invalidates the `step`, `eval`, `ranks` and `experts` records of a killed run after that
iteration, and telemetry/history.py leaves them out. A line torn by the kill is skipped.
"""

import functools
import json
import math
import mmap
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Optional

LIBRARIES = ("torch", "numpy", "tokenizers", "tiktoken", "safetensors", "triton", "flash-attn", "apex")


def run_record(config, mesh: dict[str, int], iteration: int = 0, **more) -> dict:
    """The record that makes a run reproducible. config: a dataclass or dict; mesh: axis -> size; more: anything else."""
    return dict(
        kind="run",
        iteration=iteration,
        time=now(),
        host=socket.gethostname(),
        pid=os.getpid(),
        folder=os.getcwd(),
        machine=f"{platform.system()} {platform.machine()}",
        command=sys.argv,
        commit=source_commit(),
        versions=library_versions(),
        mesh=dict(mesh),
        config=config.to_record() if hasattr(config, "to_record") else config,
        **more,
    )


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


@functools.cache
def library_versions() -> dict[str, str]:
    """Versions of Python and of LIBRARIES that are installed. Read once in a process."""
    versions = dict(python=platform.python_version())
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)  # reads the installed metadata; imports nothing
        except metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def source_commit() -> Optional[str]:
    """Commit of the source tree, with a + if files differ from it; None outside a checkout. Read once in a process."""
    output = git("describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    return output.decode().strip() or None if output else None


def git(*words: str) -> Optional[bytes]:
    """Output of a git command on the source tree; None outside a checkout, and if git is missing or fails."""
    root = Path(__file__).parent.parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


class JsonLines:
    """Appends records to a file; every record is handed to the operating system when `write` returns."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
        self.file = path.open("a", encoding="utf-8", buffering=1)
        if torn:
            self.file.write("\n")

    def write(self, record: dict) -> None:
        self.file.write(json.dumps(as_json(record), ensure_ascii=False) + "\n")

    def close(self) -> None:
        self.file.close()


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def ranks_of(mesh: dict) -> int:
    """The number of ranks of a run record's mesh. Expert axes divide the same ranks once more.

    >>> ranks_of(dict(pp=1, replicate=1, shard=2, cp=1, tp=2, ep=2, etp=1))
    4
    """
    return math.prod(size for axis, size in mesh.items() if isinstance(size, int) and axis not in EXPERT_AXES)


EXPERT_AXES = ("ep", "etp")


def as_json(value):
    """A value for JSON, which has no NaN: numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return value if isinstance(value, (str, int, type(None))) else str(value)


EVENTS = ("run", "save", "spike", "rewind", "end")
LOSS, TASK_LOSS = "lm loss", "loss"
OF_EVERY_EVALUATION = {
    *("kind", "split", "iteration", "consumed_samples", "time", "final", "first_sample", "samples", "seconds", LOSS)
}
RATES = {  # keys of a step that repeat its throughput in other units
    *("samples_per_second", "steps_per_second", "samples_per_second_per_data_rank", "tokens_per_second_per_data_rank")
}
OF_EVERY_STEP = {  # keys of a step other than the means of the stages' sums
    *("kind", "iteration", "consumed_samples", "batch_size", "learning_rate", "grad_norm", "loss_scale", "skipped"),
    *("seconds", "ledger", "tokens_per_second", "tflops_per_rank", "mfu", "spike", "decoupled_learning_rate"),
    *("tflops_per_rank_causal", "mfu_causal"),
    *RATES,
}


def own_sums(names: Iterable[str]) -> list[str]:
    """Names of the sums that a model logs in addition to the language-model loss, among the names of a step's values."""
    return [name for name in names if name not in OF_EVERY_STEP and name != LOSS]


def records(path: Path) -> Iterator[Optional[dict]]:
    """The records of a metrics file in the order of writing; None for a damaged line."""
    with Path(path).open("rb") as lines:
        yield from map(parse_record, filter(bytes.strip, lines))


def parse_record(line: bytes) -> Optional[dict]:
    """The record of a line of a metrics file; None for a damaged line."""
    import orjson  # a launch without its packages gets as far as the message that says so

    try:
        record = orjson.loads(line)
        _ = record["kind"], int(record["iteration"])
    except (ValueError, KeyError, TypeError):
        return None
    return record


LAUNCH = b'{"kind": "run"'  # how the line of a launch begins


def count_launches(text: bytes | mmap.mmap) -> int:
    """The number of launches in the text of a metrics file."""
    count, place = 0, text.find(LAUNCH)
    while place >= 0:
        count, place = count + 1, text.find(LAUNCH, place + 1)
    return count


def is_metrics(path: Path) -> bool:
    """Whether a file of JSON lines begins as the metrics of a run do."""
    try:
        with path.open("rb") as file:
            return file.read(len(LAUNCH)) == LAUNCH
    except OSError:
        return False
