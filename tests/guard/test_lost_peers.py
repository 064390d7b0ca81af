# SPDX-License-Identifier: Apache-2.0
"""A rank that says nothing: whoever waits for it gives up with exit code 7, and says what it waited for."""

import dataclasses
import json
import os
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import pretrain_gpt
from megatron.errors import PeerLost
from megatron.guard.endings import peer_lost
from megatron.settings.parse import parse_pretrain
from megatron.telemetry.events import read_events
from megatron.training.loop import pretrain
from megatron.training.rules import resolve

TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --eval-iters 0 --device cpu --num-workers 0 --train-iters 9 "
    "--distributed-timeout-minutes 0.06"
)


def _silent_at_step_3(rank, flags, folder):
    """Rank 1 reads no sample of step 3 (8 to 11) before rank 0 has ended."""
    over = folder / "over"

    class Slow:
        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            while index >= 8 and os.environ["RANK"] == "1" and not over.exists():
                time.sleep(0.05)
            return self.dataset[index]

    def build_datasets(*args):
        train, *rest = pretrain_gpt.build_datasets(*args)
        return (Slow(train), *rest)

    # The group of all ranks that `run_ranks` has made has a patience of its own.
    dist.barrier()  # until both are connected
    dist.destroy_process_group()
    store, patience = dist.FileStore(str(folder / "meeting"), 2), timedelta(minutes=0.06)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
    recipe = dataclasses.replace(pretrain_gpt.recipe(), build_datasets=build_datasets)
    try:
        pretrain(resolve(parse_pretrain(f"{TINY} {flags}".split()), 2), recipe)
    except PeerLost as lost:
        return lost.what, lost.why, lost.do
    except BaseException as error:
        return repr(error)
    finally:
        over.touch()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout, where", [("", "dp group 0"), ("--tp 2", "tp group 0"), ("--pp 2", "pp group 0")])
def test_a_silent_rank_is_given_up_with_what_was_waited_for(layout, where, run_ranks, tmp_path):
    flags = f"{layout} --save {tmp_path / 'run'} --save-interval 2"
    found, _ = run_ranks(2, _silent_at_step_3, flags, tmp_path)
    what, why, do = found
    assert what == "rank 0 waited 3.6 s for another rank (--distributed-timeout-minutes 0.06)"
    assert where in why and "step 3" in why
    assert f"the last checkpoint is {tmp_path / 'run' / 'iter_0000002'}; " in do and "megatron.tools.supervise" in do
    *_, end = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert (end["kind"], end["code"], end["why"]) == ("end", 7, what)
    *_, event = read_events(tmp_path / "run")
    assert (event["event"], event["level"], event["code"], event["why"]) == ("end", "error", 7, what)


@pytest.mark.parametrize(
    "kind, text, what",
    [
        ("RuntimeError", "Application timeout caused pair closure", "rank 0 waited 30 s for another rank (--dist"),
        (
            "DistBackendError",
            "NCCL error ... Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE, "
            "Timeout(ms)=18000) ran for 18063 milliseconds before timing out.",
            "rank 0 waited 18 s for another rank (--dist",
        ),
        ("RuntimeError", "[x/pair.cc:534] Connection closed by peer [127.0.0.1]:4", "another rank is gone or silent"),
        ("RuntimeError", "shapes do not match", None),
        ("ValueError", "Timed out waiting 18000ms for recv", None),
    ],
)
def test_words_of_the_libraries(kind, text, what):
    """As gloo and NCCL have them; what is no word of theirs stays what it was."""
    error = RuntimeError(text) if kind == "RuntimeError" else type(kind, (Exception,), {})(text)
    settings = SimpleNamespace(
        parallel=SimpleNamespace(distributed_timeout_minutes=0.5),
        checkpoint=SimpleNamespace(save=None, save_mirror=None),
    )
    found = peer_lost(error, None, settings)
    assert (found is None) == (what is None) and (found is None or found.what.startswith(what))
