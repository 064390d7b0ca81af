# SPDX-License-Identifier: Apache-2.0
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megatron.data import batch_arrays
from megatron.data.loader import MicroBatchLoader, cyclic_order
from megatron.errors import DataError, SettingsError
from megatron.settings.schema import Data


class Counting:
    """Sample i is i, i + 1, ..., and what was read is remembered."""

    def __init__(self, size=100, seq_length=5, bad=None):
        self.size, self.seq_length, self.bad, self.read = size, seq_length, bad, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        if index == self.bad:
            raise DataError(f"sample {index} is damaged")
        return np.arange(index, index + self.seq_length + 1)


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batches_are_a_function_of_consumed_samples(num_workers):
    with MicroBatchLoader(
        Counting(), Data(num_workers=num_workers), micro_batch_size=2, dp_rank=1, dp_size=3
    ) as batches:
        for consumed, num_microbatches in ((0, 2), (12, 2), (24, 3), (0, 2), (60, 1)):  # grows, and jumps back
            step = batches.step(consumed, num_microbatches)
            firsts = [[consumed + m * 6 + 2, consumed + m * 6 + 3] for m in range(num_microbatches)]
            assert [batch.samples.tolist() for batch in step] == firsts
            assert [batch.tokens[0].tolist() for batch in step] == firsts
            for batch in step:
                assert batch.tokens.shape == (5, 2) and batch.tokens.dtype == torch.int64
                assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
                assert (batch.labels == batch.tokens + 1).all()
                assert batch.loss_mask is None and batch.position_ids is None and batch.document_ids is None
                assert (batch.to("cpu").tokens == batch.tokens).all()


def idle(pool, workers):
    """Wait until a pool's threads have done all that they were given: until all of them are here."""
    barrier = threading.Barrier(workers, timeout=100)
    [future.result() for future in [pool.submit(barrier.wait) for _ in range(workers)]]


def test_the_next_step_is_prepared_with_the_size_it_will_have():
    dataset = Counting()
    sizes = {0: (2, 1), 2: (4, 2), 6: (6, 3)}
    with MicroBatchLoader(dataset, Data(num_workers=2), micro_batch_size=2, next_step=sizes.__getitem__) as batches:
        batches.step(0, 1)
        idle(batches.pool, 2)
        assert sorted(dataset.read) == [0, 1, 2, 3, 4, 5]
        batches.step(2, 2)
        idle(batches.pool, 2)
        assert sorted(dataset.read) == list(range(12))  # each sample once: what was foretold came


def test_nothing_is_read_past_the_end():
    with MicroBatchLoader(Counting(size=8), Data(num_workers=1), micro_batch_size=4) as batches:
        assert len(batches.step(0, 1)) == 1 and len(batches.step(4, 1)) == 1
        with pytest.raises(DataError, match="8 to 12 are asked for, and the dataset has 8"):
            batches.step(8, 1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_errors_come_out_in_the_training_thread_and_threads_end(num_workers):
    before = set(threading.enumerate())
    batches = MicroBatchLoader(Counting(bad=5), Data(num_workers=num_workers), micro_batch_size=4)
    assert len(batches.step(0, 1)) == 1
    with pytest.raises(DataError, match="sample 5 is damaged"):
        batches.step(4, 1)
    batches.close()
    assert set(threading.enumerate()) <= before


def test_cyclic_goes_on_with_another_order():
    data = Data(num_workers=0, dataloader_type="cyclic")
    batches = MicroBatchLoader(Counting(size=7), data, micro_batch_size=7)
    epochs = [batches.step(7 * epoch, 1)[0].tokens[0].tolist() for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3 and epochs[0] != epochs[1]
    assert epochs[1] == torch.randperm(7, generator=torch.Generator().manual_seed(1)).tolist()
    assert MicroBatchLoader(Counting(size=7), data, micro_batch_size=2).step(6, 1)[0].tokens[0].tolist() == [
        cyclic_order(0, 7)[6],
        cyclic_order(1, 7)[0],
    ]


def test_masks_of_a_batch():
    class Fixed(Counting):
        def __getitem__(self, index):
            return np.array([5, 0, 6, 0, 0, 7]) if index % 2 else np.array([0, 5, 6, 7, 8, 9])

    data = Data(num_workers=0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    (batch,) = MicroBatchLoader(Fixed(), data, micro_batch_size=2, eod=0).step(0, 1)
    assert batch.loss_mask.T.tolist() == [[0, 1, 1, 1, 1], [1, 0, 1, 0, 0]]
    assert batch.position_ids.T.tolist() == [[0, 0, 1, 2, 3], [0, 1, 0, 1, 0]]
    assert batch.document_ids.T.tolist() == [[0, 1, 1, 1, 1], [0, 0, 1, 1, 2]]
    assert (batch.loss_mask.dtype, batch.document_ids.dtype) == (torch.float32, torch.int32)
    with pytest.raises(SettingsError, match="--eod-mask-loss"):
        MicroBatchLoader(Fixed(), data, micro_batch_size=2)


@given(arrays(np.int64, st.tuples(st.integers(1, 3), st.integers(1, 20)), elements=st.integers(0, 3)))
def test_masks_against_a_walk(tokens):
    documents = batch_arrays.document_ids(tokens, 0)
    positions = batch_arrays.position_ids(documents)
    loss = batch_arrays.loss_mask(tokens, 0)
    for row in range(len(tokens)):
        position = document = 0
        for at, token in enumerate(tokens[row]):
            assert (positions[row, at], documents[row, at], loss[row, at]) == (position, document, token != 0)
            position, document = (0, document + 1) if token == 0 else (position + 1, document)
