# SPDX-License-Identifier: Apache-2.0
"""kill -9 at random times of real saves. A crash after each single change to the disk: tests/chaos/test_files.py."""

import itertools
import os
import random
import signal
import time

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver, restore
from megatron.checkpoint.store import Piece


def pieces_of(value, size=6):
    return [
        Piece(name, (size,), Box.whole((size,)), torch.full((size,), float(value))) for name in ("weight", "moment")
    ]


def prepare(folder):
    """Iterations 1 and 2, whose tensors are full of their number."""
    folder.mkdir()
    with Saver(folder) as saver:
        for iteration in (1, 2):
            saver.save(iteration, pieces_of(iteration), {})
    return folder


def test_kills_at_random_times_lose_nothing(memory_folder):
    folder, dice, newest = prepare(memory_folder / "folder"), random.Random(5), 2
    big, limit, kills = 1 << 18, 0.02, 0
    with Saver(folder) as saver:
        saver.save(newest, pieces_of(newest, big), {})
    while kills < 25 or newest < 5:
        child = os.fork()
        if child == 0:
            try:
                with Saver(folder, keep_last=2) as saver:
                    for iteration in itertools.count(newest + 1):
                        saver.save(iteration, pieces_of(iteration, big), {})
            finally:
                os._exit(1)
        time.sleep(dice.uniform(0, limit))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        wanted = pieces_of(-1, big)
        found = restore(folder, wanted).state["iteration"]
        assert found >= newest and all((piece.tensor == found).all() for piece in wanted)
        limit *= 0.8 if found > newest else 1.3  # about one save in the time, on any machine
        newest, kills = found, kills + 1
