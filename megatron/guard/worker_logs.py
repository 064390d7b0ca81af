# SPDX-License-Identifier: Apache-2.0
"""The output of a machine's ranks in files as PaddlePaddle's launcher has them: one for each rank.

    DIR/workerlog.0      what rank 0 prints, stdout and stderr in the order in which they come
    DIR/workerlog.0.1    the file of the launch before, or of the start before (--max-restarts); .2 is newer than .1

The number is the rank's in the job, so machines may share a folder.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler


class WorkerLogs(DefaultLogsSpecs):
    """torch's choice of files, but that both streams of a rank go to one file of the folder itself."""

    def __init__(self, log_dir: str, torchs: DefaultLogsSpecs):
        """torchs: with the streams and ranks that the command line names"""
        super().__init__(log_dir, torchs._redirects, torchs._tee, torchs._local_ranks_filter)
        self.files: dict[int, Path] = {}  # rank -> its file

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        chosen = super().reify(envs)
        for local, env in envs.items():
            path = Path(self.root_log_dir) / f"workerlog.{env['RANK']}"
            set_aside(path)
            self.files[int(env["RANK"])] = path
            chosen.stdouts[local] = chosen.stderrs[local] = str(path)
            chosen.tee_stderrs.pop(local, None)  # the one file is followed once
            if local in chosen.tee_stdouts:
                chosen.tee_stdouts[local] = str(path)
        return chosen

    @property
    def folder(self) -> str:
        """torch's own folder of this launch, which has nothing but the reports of failed ranks."""
        return self._run_log_dir or ""

    def add(self, rank: int, message: str) -> None:
        """Add the error of a rank, which the launcher prints, to the end of its file."""
        if message and rank in self.files:
            with contextlib.suppress(OSError), self.files[rank].open("a") as file:
                file.write(message)


def set_aside(path: Path) -> None:
    """Rename the file of an earlier start: .1, then .2."""
    if path.exists():
        numbers = [one.suffix[1:] for one in path.parent.glob(f"{path.name}.*")]
        path.rename(f"{path}.{1 + max((int(one) for one in numbers if one.isdecimal()), default=0)}")


@contextlib.contextmanager
def one_file_for_both() -> Iterator[None]:
    """Where stdout and stderr of a rank have the same path, open it once: two descriptors would write over each other."""
    popen = SubprocessHandler._popen

    def with_one(handler: Any, *words, **named):
        out, err = handler._stdout, handler._stderr
        if out and err and out.name == err.name:
            err.close()
            handler._stderr = out
        return popen(handler, *words, **named)

    SubprocessHandler._popen = with_one
    try:
        yield
    finally:
        SubprocessHandler._popen = popen
