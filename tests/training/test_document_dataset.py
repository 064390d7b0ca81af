# SPDX-License-Identifier: Apache-2.0
"""`--dataset-type webtext`: one document is one sample. Expected samples are cut here, from the arrays the files hold."""

import json

import numpy as np
import pytest
import torch

from megatron.data import formats, manifest
from megatron.data.epochs import samples_of_epochs
from megatron.data.gpt_dataset import build_datasets
from megatron.data.indexed import write_index
from megatron.errors import DataError, SettingsError
from megatron.settings.schema import Data
from megatron.tools import dump_samples
from tests.training.plain_loop import EOD, LENGTH, Job, initial_weights, logits
from tests.training.test_plain_loop import FLAGS, PLAIN, pretrain, records

# Tokens of each document's sequences: shorter than a sample, as long, longer, of several sequences, too short, empty.
SHAPES = [[5], [LENGTH + 1], [3 * LENGTH], [4, 0, 9], [1], [LENGTH, 7], [], [2], [0], [LENGTH], [6], [LENGTH + 2]]
KEPT = [number for number, shape in enumerate(SHAPES) if sum(shape) > 1]


def documents(shapes=SHAPES, seed=0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, EOD, sum(shape)).astype(np.uint16) for shape in shapes]


def token_files(path, shapes=SHAPES, seed=0) -> str:
    """Both formats have the same tokens, sequences and documents."""
    tokens = np.concatenate(documents(shapes, seed))
    lengths = np.array([length for shape in shapes for length in shape], np.int32)
    starts = np.cumsum([0, *map(len, shapes)])
    if path.name.startswith("paddle"):
        np.save(f"{path}_ids.npy", tokens)
        np.savez(f"{path}_idx.npz", lens=lengths, sents=np.cumsum([0, *lengths]), docs=starts)
    else:
        tokens.tofile(f"{path}.bin")
        write_index(f"{path}.idx", np.uint16, lengths, starts)
    manifest.write_manifest(str(path))
    return str(path)


def row(document, length=LENGTH) -> tuple[list[int], list[float]]:
    """A document as a sample: cut off behind its first length + 1 tokens, or filled up, which is not to be learned."""
    ids = document[: length + 1].tolist()
    lacks = length + 1 - len(ids)
    return ids + [EOD] * lacks, [1.0] * len(ids) + [0.0] * lacks


def samples_of(dataset, places):
    return [(ids.tolist(), mask.tolist()) for ids, mask in (dataset[place] for place in places)]


def build(sizes=(10, 0, 0), seed=1, **data):
    told = []
    built = build_datasets(
        Data(dataset_type="webtext", **data), LENGTH, sizes, seed, eod=EOD, vocab_size=EOD + 1, log=told.append
    )
    return *built, told


@pytest.mark.parametrize("name", ["megatron", "paddle"])
def test_an_epoch_is_each_document_once(name, tmp_path):
    prefix = token_files(tmp_path / name)
    whole, count = documents(), len(KEPT)
    expected = [row(whole[number]) for number in KEPT]
    train, _, _, told = build((3 * count - 2, 0, 0), data_path=[prefix], split="1,0,0")
    assert len(train) == 3 * count
    epochs = [samples_of(train, range(start, start + count)) for start in range(0, 3 * count, count)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(expected) and epoch != expected
    assert epochs[0] != epochs[1] != epochs[2]
    [line] = [line for line in told if "documents are as many samples" in line]
    taken = sum(min(len(whole[number]), LENGTH + 1) for number in KEPT)
    text = sum(len(whole[number]) for number in KEPT)
    assert f"-train: {count} documents" in line and "3 of less than 2 tokens left out" in line
    assert f"{1 - taken / count / (LENGTH + 1):.1%} of their tokens are filled up, {1 - taken / text:.1%} of" in line
    # A longer run begins as a shorter one; another seed has another order.
    longer, *_ = build((5 * count, 0, 0), data_path=[prefix], split="1,0,0")
    assert samples_of(longer, range(3 * count)) == sum(epochs, [])
    other, *_ = build((3 * count, 0, 0), seed=2, data_path=[prefix], split="1,0,0")
    assert samples_of(other, range(count)) != epochs[0]


def test_splits_blends_and_epochs_count_documents(tmp_path):
    prefix, other = token_files(tmp_path / "one"), token_files(tmp_path / "two", SHAPES[:4], seed=5)
    whole = documents()
    train, valid, test, _ = build((4, 9, 2), data_path=[prefix], split="6,4,2")
    parts = [range(0, 6), range(6, 10), range(10, 12)]
    for dataset, part in zip((train, valid, test), parts, strict=True):
        own = [row(whole[number]) for number in part if number in KEPT]
        assert sorted(samples_of(dataset, range(len(own)))) == sorted(own)
    assert samples_of(valid, range(2)) == samples_of(valid, range(2, 4)) and len(valid) == 9  # the same order again
    count = lambda paths, epochs, split="1,0,0": samples_of_epochs(
        Data(dataset_type="webtext", data_path=paths, split=split), LENGTH, epochs
    )
    assert count([prefix], 3) == 3 * len(KEPT) and count([prefix], 2, "6,6,0") == 2 * 5
    assert count([prefix, other], 1) == len(KEPT) + 4
    mixed, *_ = build((len(KEPT) + 4, 0, 0), data_path=[prefix, other], split="1,0,0")
    both = [row(whole[number]) for number in KEPT] + [row(one) for one in documents(SHAPES[:4], 5)]
    assert sorted(samples_of(mixed, range(len(mixed)))) == sorted(both)


def test_what_cannot_be(tmp_path):
    prefix = token_files(tmp_path / "one")
    with pytest.raises(DataError) as caught:
        build((1, 1, 0), data_path=[prefix], split="8,1,3")
    assert "it has 12 documents; valid gets 1 of them" in str(caught.value) and "--split 8,2,2" in str(caught.value)
    with pytest.raises(SettingsError, match="no end-of-document token"):
        build_datasets(Data(dataset_type="webtext", data_path=[prefix], split="1,0,0"), LENGTH, (1, 0, 0), 1)
    with pytest.raises(DataError, match=r"outside of the vocabulary of 50\n  in sample \d+, which starts in document"):
        data = Data(dataset_type="webtext", data_path=[prefix], split="1,0,0")
        train, *_ = build_datasets(data, LENGTH, (9, 0, 0), 1, eod=49, vocab_size=50)
        samples_of(train, range(9))
    assert formats.PaddleDataset(token_files(tmp_path / "paddle")).num_documents == len(SHAPES)


def mean_loss(samples) -> float:
    """Over the tokens of these documents, by the plain network with its initial weights."""
    rows, masks = (torch.tensor(part) for part in zip(*map(row, samples), strict=True))
    found = logits(initial_weights(1234), rows[:, :-1], Job(**PLAIN)).log_softmax(-1)
    losses = -found.gather(-1, rows[:, 1:, None]).squeeze(-1)
    return (losses * masks[:, 1:]).sum().item() / masks[:, 1:].sum().item()


DOCUMENTS = "--mock-data false --tokenizer-type NullTokenizer --split 1,0,0 --dataset-type webtext"


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "world, layout",
    [
        (1, ""),
        (2, ""),
        (2, "--context-parallel-size 2"),
        (2, "--pipeline-model-parallel-size 2"),
        (3, "--tensor-model-parallel-size 3 --sequence-parallel"),
        (2, "--sharding-stage 3"),
    ],
)
def test_losses_are_those_of_the_documents(world, layout, run_ranks, tmp_path):
    """At a rate of almost 0: a step over all documents, twice, and a validation over each once."""
    shapes = [shape for shape in SHAPES if sum(shape) > 1][:8]
    prefix = token_files(tmp_path / "tokens", shapes)
    flags = f"{DOCUMENTS} --train-data-path {prefix} --valid-data-path {prefix} --full-validation --eval-iters 1 "
    flags += f"--train-epochs 2 --global-batch-size 8 --micro-batch-size 4 --lr 1e-12 --log-interval 1 {layout}"
    pretrain(0, f"{flags} --save {tmp_path / 'run'}") if world == 1 else run_ranks(
        world, pretrain, f"{flags} --save {tmp_path / 'run'}"
    )
    wanted = pytest.approx(mean_loss(documents(shapes)), rel=2e-6)
    assert [step["lm loss"] for step in records(tmp_path / "run", "step")] == [wanted, wanted]
    assert [one["lm loss"] for one in records(tmp_path / "run", "eval")] == [wanted]


def test_it_goes_on_to_the_bit_and_as_no_other_kind(tmp_path, capsys):
    prefix = token_files(tmp_path / "tokens")
    flags = f"{DOCUMENTS} --data-path {prefix} --train-iters 9 --global-batch-size 2 --lr 1e-2 --eval-iters 0"
    pretrain(0, f"{flags} --save {tmp_path / 'whole'}")
    pretrain(0, f"{flags} --save {tmp_path / 'parts'} --exit-interval 4")
    pretrain(0, f"{flags} --save {tmp_path / 'parts'} --load {tmp_path / 'parts'}")
    whole, parts = ([one["lm loss"] for one in records(tmp_path / name, "step")] for name in ("whole", "parts"))
    assert whole == parts and len(set(whole)) == 9
    with pytest.raises(SettingsError, match="dataset_type webtext -> gpt|--dataset-type"):
        pretrain(0, f"{flags} --dataset-type gpt --train-iters 12 --load {tmp_path / 'parts'}")
    # The order of training, as a tool prints it.
    capsys.readouterr()
    words = (
        f"--data-path {prefix} --split 1,0,0 --dataset-type webtext --tokenizer-type NullTokenizer --vocab-size {EOD}"
    )
    dump_samples.main(f"{words} --seq-length {LENGTH} --train-samples 18 --first 9".split())
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted((one["tokens"], one["loss_mask"]) for one in printed) == sorted(
        row(documents()[number]) for number in KEPT
    )
    assert FLAGS.count("--vocab-size 100") == 1 and EOD == 100
