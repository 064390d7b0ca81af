# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds is what training held: hashes from before any copy, and state that stands still."""

import threading

import pytest
import torch

from megatron.checkpoint import folder as module
from megatron.checkpoint import manager, store
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.manager import CheckpointManager, Snapshot
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import LiveSum, Piece, StablePiece, live_sums
from megatron.errors import StorageError
from megatron.mpu.bits_sum import bits_sum
from megatron.settings import schema
from megatron.telemetry.events import EventLog, read_events

MOMENTS = ("optimizer.exp_avg.weight", "optimizer.exp_avg_sq.weight")


def piece(name, values):
    return Piece(name, tuple(values.shape), Box.whole(values.shape), values)


def pieces_of(weight, first, second):
    """Pieces of constants; one is a view with strides, as a rank has it of a padded or transposed tensor."""
    strided = torch.zeros(6, 8)[:, ::2].fill_(weight)
    return [
        piece("weight", strided),
        piece(MOMENTS[0], torch.full((6, 4), first)),
        piece(MOMENTS[1], torch.full((6, 4), second)),
    ]


@pytest.fixture
def saving(tmp_path, monkeypatch):
    """A manager that saves in the background into `tmp_path`, with events."""
    monkeypatch.setattr(manager, "RETRY_AFTER", 0.001)
    events = EventLog(tmp_path / "events.jsonl", log=lambda text: None)
    settings = schema.Checkpoint(save=str(tmp_path), async_save=True, save_retries=0, max_failed_saves=99)
    return CheckpointManager(settings, log=lambda text: None, events=events)


def kinds(tmp_path):
    return [event["event"] for event in read_events(tmp_path)]


def test_a_copy_that_was_not_renewed_is_refused(saving, tmp_path, monkeypatch):
    """As NeMo-RL 3312 and 4183: the second save would hold the weights of the first."""
    take, first = Snapshot.take, []

    def stale(self, pieces):
        copies = take(self, pieces)
        first[:] = first or [copy._replace(tensor=copy.tensor.clone()) for copy in copies]
        return list(first)

    monkeypatch.setattr(Snapshot, "take", stale)
    saving.save(1, pieces_of(1.0, 2.0, 3.0), {})
    saving.save(2, pieces_of(1.5, 2.5, 3.5), {})
    saving.wait()
    assert list(checkpoints(tmp_path)) == [1] and kinds(tmp_path) == ["save", "save_failed"]
    assert "is not what training held when the save began" in read_events(tmp_path)[-1]["why"]
    monkeypatch.undo()
    saving.save(3, pieces_of(1.6, 2.6, 3.6), {})
    saving.close()
    assert list(checkpoints(tmp_path)) == [1, 3]


def test_one_moment_that_is_not_renewed_is_refused(saving, tmp_path, monkeypatch):
    take = Snapshot.take

    def partly(self, pieces):
        copies = take(self, pieces)
        copies[2].tensor.fill_(3.0)
        return copies

    monkeypatch.setattr(Snapshot, "take", partly)
    saving.save(1, pieces_of(1.0, 2.0, 3.0), {})
    saving.save(2, pieces_of(1.5, 2.5, 3.5), {})
    saving.wait()
    assert list(checkpoints(tmp_path)) == [1] and MOMENTS[1] in read_events(tmp_path)[-1]["why"]


def test_a_copy_that_changes_while_it_is_written_is_refused(saving, tmp_path, monkeypatch):
    """As if the next save had begun to fill the same memory."""
    go, write = threading.Event(), store.write_shard
    monkeypatch.setattr(module, "write_shard", lambda *args, **live: (go.wait(60), write(*args, **live))[1])
    saving.save(1, pieces_of(1.0, 2.0, 3.0), {})
    saving._snapshot._memory[5] ^= 1
    go.set()
    saving.wait()
    assert not checkpoints(tmp_path) and kinds(tmp_path) == ["save_failed"]


@pytest.mark.parametrize("in_background", [True, False])
def test_what_is_saved_is_what_lived(in_background, tmp_path):
    settings = schema.Checkpoint(save=str(tmp_path), async_save=in_background)
    saving, pieces = CheckpointManager(settings, log=lambda text: None), pieces_of(1.0, 2.0, 3.0)
    saving.save(1, pieces, {})
    for one in pieces if in_background else ():
        one.tensor.fill_(9.0)  # training goes on
    saving.close()
    with Reader(tmp_path / "iter_0000001") as reader:
        assert [reader.read(name).unique().tolist() for name in ("weight", *MOMENTS)] == [[1.0], [2.0], [3.0]]


def test_state_that_stands_still_is_an_event(tmp_path):
    """As moments that stay those of step 1; a save of the same step again is none."""
    events = EventLog(tmp_path / "events.jsonl", log=lambda text: None)
    saving = CheckpointManager(schema.Checkpoint(save=str(tmp_path)), log=lambda text: None, events=events)
    for iteration, values in (
        (1, (1, 2, 3)),
        (1, (1, 2, 3)),
        (2, (4, 5, 6)),
        (3, (7, 8, 6)),
        (4, (7, 8, 6)),
        (5, (9, 9, 9)),
    ):
        saving.save(iteration, pieces_of(*map(float, values)), {})
    saving.close()
    found = [event for event in read_events(tmp_path) if event["event"] == "unchanged_state"]
    assert [(event["iteration"], event["kinds"]) for event in found] == [
        (3, ["optimizer.exp_avg_sq"]),
        (4, ["optimizer.exp_avg", "optimizer.exp_avg_sq", "weights"]),
    ]
    assert {event["level"] for event in found} == {"warning"}


def test_state_stands_still_only_if_it_does_on_every_rank(tmp_path):
    """This rank's moments stay, another's change; a rank without moments says nothing."""
    for others, unchanged in (([{"optimizer.exp_avg": True}], []), ([{}], ["optimizer.exp_avg"])):

        def all_gather(answer, others=others):
            value, problem = answer
            return [
                answer,
                *((((value[0], other), problem) if isinstance(value, tuple) else answer) for other in others),
            ]

        with Saver(tmp_path / f"{len(unchanged)}", all_gather_object=all_gather) as saver:
            saver._finish = lambda *_: []
            for iteration in (1, 2):
                saver.save(
                    iteration,
                    [piece(MOMENTS[0], torch.ones(3)), piece("weight", torch.full((2,), iteration * 1.0))],
                    {},
                )
        assert saver.unchanged == unchanged


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("size", [0, 1, 3, 9, 4096, 4096 * 8 + 5, 3 * 4096 * 8 + 8])
def test_every_bit_counts_in_the_sum_of_a_device(dtype, size):
    generator = torch.Generator().manual_seed(size)
    raw = torch.randint(
        0, 2, (size * torch.empty((), dtype=dtype).element_size(),), generator=generator, dtype=torch.uint8
    )
    values = raw.view(dtype)
    total = bits_sum(values)
    assert total == bits_sum(values.clone()) and total.dtype == torch.int64
    assert total == bits_sum(torch.cat([raw[:1], raw])[1:] if size else raw)  # not at a multiple of 8 bytes
    places = torch.randint(0, max(1, raw.numel()), (20,), generator=generator).tolist() if size else []
    for place in {*places, *([0, raw.numel() - 1] if size else [])}:
        for bit in (0, 7):
            raw[place] ^= 1 << bit
            assert bits_sum(raw) != total, (place, bit)
            raw[place] ^= 1 << bit
    if raw.numel() > 1 and not torch.equal(raw, raw.flip(0)):
        assert bits_sum(raw.flip(0)) != total


def test_words_that_change_places_change_the_sum():
    values = torch.arange(3 * 4096 + 5, dtype=torch.int64)
    for one, other in ((0, 1), (0, 4096), (4095, 4096), (1, 2 * 4096 + 2), (3 * 4096, 3 * 4096 + 1), (0, 3 * 4096)):
        changed = values.clone()
        changed[one], changed[other] = values[other], values[one]
        assert bits_sum(changed) != bits_sum(values), (one, other)


def test_a_device_sums_where_it_is_and_the_file_is_compared_with_that(tmp_path, monkeypatch):
    """Without a GPU: the sum of another device is compared with what arrived in the file."""
    values = torch.randn(50, 3)
    lived = LiveSum(on_device=bits_sum(values))
    one = [piece("weight", values)]
    (tmp_path / "a").mkdir()
    store.write_shard(tmp_path / "a", 0, one, live={"weight": lived})
    values[3, 1] += 1
    (tmp_path / "b").mkdir()
    with pytest.raises(
        StorageError, match="weight: what was written to shard_00000.safetensors is not what training held"
    ):
        store.write_shard(tmp_path / "b", 0, one, live={"weight": lived})
    assert not live_sums(one, on_cpu=False) and set(live_sums(one, on_cpu=True)) == {"weight"}
    # State in files: nothing is copied, and reading takes long
    assert not live_sums([StablePiece(*one[0])], on_cpu=True)


def test_live_sums_are_the_checksums_of_blocks():
    values = torch.randn(7, 5)
    assert LiveSum.of(values, block=64).blocks == tuple(
        store.checksum(values.flatten().numpy().tobytes()[at : at + 64]) for at in range(0, 140, 64)
    )
    assert LiveSum.of(values.t(), block=64).blocks == LiveSum.of(values.t().contiguous(), block=64).blocks
