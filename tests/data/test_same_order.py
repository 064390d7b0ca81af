# SPDX-License-Identifier: Apache-2.0
"""Lengths of training that keep the order of samples, against the orders themselves."""

import numpy as np
import pytest

import pretrain_gpt
from megatron.data import manifest
from megatron.data.epochs import same_order
from megatron.data.gpt_dataset import build_datasets
from megatron.data.indexed import write_index
from megatron.errors import SettingsError
from megatron.settings.schema import Data

LENGTH = 8


def write(folder, name, documents, seed):
    lengths = np.random.default_rng(seed).integers(5, 30, documents).astype(np.int32)
    write_index(f"{folder / name}.idx", np.uint16, lengths, np.arange(documents + 1))
    (np.arange(lengths.sum()) + 100 * seed).astype(np.uint16).tofile(f"{folder / name}.bin")
    manifest.write_manifest(str(folder / name))
    return str(folder / name)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("samples", [9, 30, 45, 62])
@pytest.mark.parametrize("blend", [False, True])
def test_the_order_is_the_same_with_these_numbers_and_no_others(blend, samples, tmp_path):
    one, other = write(tmp_path, "one", 12, 1), write(tmp_path, "other", 5, 2)
    data = Data(data_path=["0.7", one, "0.3", other] if blend else [one], split="1")

    def order(count):
        train, _, _ = build_datasets(data, LENGTH, (count, 0, 0), seed=3)
        return train, [train[place].tolist() for place in range(count)]

    dataset, wanted = order(samples)
    orders = {count: order(count)[1] for count in range(1, 90)}
    same = [count for count, found in orders.items() if found[: min(count, samples)] == wanted[: min(count, samples)]]
    found = same_order(dataset, data, samples)
    assert samples in found and found == same_order(order(70)[0], data, samples)
    # Short orders can begin alike by chance, and blends may differ behind what is looked at.
    assert set(found) <= {*same, *range(90, found.stop)}
    assert not {count for count in same if count >= samples} - set(found)


def test_prefixes_without_weights_and_other_datasets_are_not_judged(tmp_path):
    one, other = write(tmp_path, "one", 12, 1), write(tmp_path, "other", 5, 2)
    data = Data(data_path=[one, other], split="1")
    assert same_order(build_datasets(data, LENGTH, (20, 0, 0), seed=3)[0], data, 20) is None
    assert same_order(object(), Data(data_path=[one]), 20) is None


def test_a_run_that_goes_on_with_other_steps_is_told_which_ones_it_may_have(tmp_path, capsys):
    """The least and the most are what they say: one more step, or one fewer, has other samples."""
    prefix = write(tmp_path, "one", 40, 1)
    flags = (
        f"--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length {LENGTH} --data-path {prefix} --split 1,0,0 "
        "--tokenizer-type NullTokenizer --vocab-size 2000 --micro-batch-size 4 --global-batch-size 4 --device cpu "
        f"--num-workers 0 --eval-iters 0 --lr 1e-3 --lr-decay-iters 99 --save {tmp_path / 'run'} --load {tmp_path / 'run'}"
    )
    pretrain_gpt.main(f"{flags} --train-iters 20 --exit-interval 3".split())

    def goes_on(steps):
        pretrain_gpt.main(f"{flags} --train-iters {steps} --exit-interval {steps}".split())

    with pytest.raises(SettingsError) as refused:
        goes_on(60)
    words = refused.value.do.split()
    assert words[:2] == ["give", "--train-iters"] and words[3] == "to" and "of another length" in refused.value.why
    least, most = int(words[2]), int(words[4].rstrip(":"))
    assert 3 <= least <= 20 <= most < 60
    for steps in {least - 1, most + 1} - set(range(4)):
        with pytest.raises(SettingsError, match=f"give --train-iters {least} to {most}: the order is the checkpoint's"):
            goes_on(steps)
    goes_on(most)
