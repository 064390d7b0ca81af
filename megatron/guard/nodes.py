# SPDX-License-Identifier: Apache-2.0
"""The nodes of a supervised job: check them, and start the job without those that failed. Needs no torch.

    nodes = Nodes("python -m megatron.tools.doctor --node", bad_nodes=Path("runs/a/bad_nodes"))
    bad = nodes.failing(words)                    # {"n3": "GPU 5: Xid 79"}
    nodes.exclude(bad)
    words = nodes.placed(words)                   # srun --exclude=n3 ...

With srun in the command, the check runs on every node of the allocation, and nodes beyond those that the job uses are its
spares. Without it there is this node alone. A file keeps the names of excluded nodes for the next allocation.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Optional

from megatron.errors import in_a_line, node_name
from megatron.guard import slurm
from megatron.guard.command import is_srun, on_nodes, shape_of

CHECK = f"{sys.executable} -m megatron.tools.doctor --node"
PATIENCE = 180.0  # seconds for the check of a node: one that does not answer has failed
# On each node: "ok NAME", or "bad NAME REASON".
ON_NODE = (
    f'said=$(timeout {PATIENCE:.0f} bash -c "$1" 2>&1) && echo "ok $SLURMD_NODENAME" || '
    'echo "bad $SLURMD_NODENAME $(tail -n 1 <<<"$said")"'
)


class Nodes:
    """The nodes on which a supervisor starts the ranks of a job.

    check:     a shell command that fails on a node which cannot train (default: `CHECK`)
    bad_nodes: file with the names of excluded nodes; None: they are not kept
    """

    def __init__(self, check: Optional[str] = None, bad_nodes: Optional[Path] = None):
        self.check, self.bad_nodes = check, bad_nodes
        self.excluded: dict[str, str] = {}  # name -> reason
        self.suspects: list[str] = []  # nodes whose ranks have reported a lost device

    def left(self, words: list[str]) -> list[str]:
        """The nodes that can be used."""
        names = slurm.nodes() if is_srun(words) else [node_name()]
        return [name for name in names if name not in self.excluded]

    def failing(self, words: list[str], gpus: Optional[int] = None) -> dict[str, str]:
        """Node -> what its check said, for each that fails it or does not answer. gpus: of each node, if that is known"""
        names, check = self.left(words), self.check or (CHECK if gpus is None else f"{CHECK} {gpus}")
        if not is_srun(words):
            return {names[0]: said} if names and (said := failure_here(check)) is not None else {}
        command = ["srun", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1"]
        command += [f"--nodelist={','.join(names)}", "--kill-on-bad-exit=0", "bash", "-c", ON_NODE, "check", check]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE + 60).stdout
        except subprocess.TimeoutExpired as late:
            text = (late.stdout or b"").decode(errors="replace")
        except OSError as error:  # no srun: nothing is known
            return {names[0]: str(error)} if names else {}
        said = {name: why or "its check fails" for name, _, why in (_words(line) for line in _lines(text, "bad "))}
        well = {line[3:].strip() for line in _lines(text, "ok ")}
        return {name: said.get(name, "does not answer") for name in names if name not in well}

    def suspected(self, hosts: Iterable[str], at_start: bool) -> dict[str, str]:
        """Nodes that have failed although they pass the check: at a start, or twice."""
        hosts = list(dict.fromkeys(hosts))
        found = [host for host in hosts if at_start or host in self.suspects]
        self.suspects += hosts
        return dict.fromkeys(found, "its ranks lost their device")

    def exclude(self, bad: dict[str, str]) -> None:
        """Leave these nodes out from now on."""
        self.excluded |= bad
        if self.bad_nodes is None:
            return
        with suppress(OSError):  # a full disk: the nodes are left out nevertheless
            self.bad_nodes.parent.mkdir(parents=True, exist_ok=True)
            known = self.bad_nodes.read_text().split() if self.bad_nodes.exists() else []
            self.bad_nodes.write_text("".join(f"{name}\n" for name in sorted({*known, *bad})))

    def all_excluded(self) -> list[str]:
        """The names of the excluded nodes, those of earlier allocations too."""
        kept = self.bad_nodes.read_text().split() if self.bad_nodes and self.bad_nodes.exists() else []
        return sorted({*kept, *self.excluded})

    def placed(self, words: list[str]) -> list[str]:
        """The command with the excluded nodes left out."""
        return on_nodes(words, sorted(self.excluded), self.left(words)) if is_srun(words) and self.excluded else words

    def suffice(self, words: list[str]) -> bool:
        """Whether as many nodes are left as the command uses."""
        return len(self.left(words)) >= (shape_of(words)[0] if is_srun(words) else 1)


def failure_here(check: str) -> Optional[str]:
    """What the check says on this node, if it fails."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            ["bash", "-c", check], capture_output=True, text=True, timeout=PATIENCE, env={**os.environ, "RANK": "0"}
        )
    except subprocess.TimeoutExpired:
        return f"does not answer within {time.monotonic() - began:.0f} s"
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return None if done.returncode == 0 else in_a_line("".join(last)) or f"exit code {done.returncode}"


def _words(line: str) -> tuple[str, str, str]:
    """The parts of "bad NAME REASON"."""
    return line.partition(" ")[2].partition(" ")


def _lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]
