# SPDX-License-Identifier: Apache-2.0
"""Order of samples: equal to Megatron-LM's, recorded in megatron_order.jsonl from megatron-core 0.16.1."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import index_maps
from megatron.data.blend import BlendedDataset, Repeated
from megatron.data.gpt_dataset import SPLITS, SampleCounts, build_datasets
from megatron.data.index_maps import build_index_maps, make_epoch_plan, parse_split, sequences_of, suggest_split
from megatron.data.indexed import write_index
from megatron.data.mock import MockDataset
from megatron.errors import DataError, SettingsError, StorageError
from megatron.settings.schema import Data

RECORDED = [json.loads(line) for line in Path(__file__).with_name("megatron_order.jsonl").read_text().splitlines()]
VOCABULARY = 60000


def recorded_lengths(spec: dict) -> np.ndarray:
    """The sequence lengths that the recording was made with."""
    state = np.random.RandomState(spec["seed"])
    lengths = state.randint(spec["low"], spec["high"] + 1, spec["count"])
    if spec["empty"]:
        lengths[state.random_sample(spec["count"]) < spec["empty"]] = 0
    return lengths.astype(np.int32)


def write_tokens(prefix, lengths) -> str:
    """A token file whose token number i is i, modulo VOCABULARY."""
    lengths = np.asarray(lengths, np.int32)
    write_index(f"{prefix}.idx", np.uint16, lengths, np.arange(len(lengths) + 1))
    (np.arange(lengths.sum()) % VOCABULARY).astype(np.uint16).tofile(f"{prefix}.bin")
    return str(prefix)


def digest(array) -> str:
    head = f"{array.dtype.str} {list(array.shape)} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(array).tobytes()).hexdigest()[:12]


def build_recorded(case: dict, folder: Path):
    for name, spec in case["files"].items():
        write_tokens(folder / name, recorded_lengths(spec))
    place = lambda words: words and [str(folder / word) if word in case["files"] else word for word in words]
    if "path" in case:
        data = Data(data_path=place(case["path"]), split=case["split"])
    else:
        data = Data(
            **{f"{split}_data_path": place(words) for split, words in zip(SPLITS, case["per_split"], strict=True)}
        )
    return build_datasets(data, case["seq"], case["sizes"], case["seed"], vocab_size=VOCABULARY)


def assert_as_recorded(dataset, expected):
    if expected is None:
        assert dataset is None
        return
    assert len(dataset) == expected["length"]
    if "files" in expected:
        assert isinstance(dataset, BlendedDataset)
        assert digest(dataset.dataset_index) == expected["dataset"]
        assert digest(dataset.dataset_sample_index) == expected["sample"]
        for own, recorded in zip(dataset.datasets, expected["files"], strict=True):
            assert_as_recorded(own, recorded)
    else:
        assert digest(dataset.document_index) == expected["document"]
        assert digest(dataset.sample_index) == expected["sample"]
        assert digest(dataset.shuffle_index) == expected["shuffle"]
    for index, recorded in expected["samples"].items():
        assert digest(dataset[int(index)]) == recorded


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_order_is_megatrons(number, tmp_path):
    case, expected = RECORDED[number]["case"], RECORDED[number]["expected"]
    for dataset, recorded in zip(build_recorded(case, tmp_path), expected, strict=True):
        assert_as_recorded(dataset, recorded)


def test_recordings_cover_the_kinds(tmp_path):
    """Single files in one epoch, in several, with a separate last one; blends; files of their own for each split."""
    train = [recorded["expected"][0] for recorded in RECORDED]
    assert sum("files" in expected for expected in train) >= 8
    plans = []
    for number in (0, 2, 4):
        folder = tmp_path / str(number)
        folder.mkdir()
        plans.append(build_recorded(RECORDED[number]["case"], folder)[0].plan)
    assert [(plan.epochs, plan.separate_last) for plan in plans] == [(1, False), (2, True), (3, True)]


def test_last_epoch_is_separate_below_four_fifths():
    lengths = np.full(1601, 1, np.int32)  # 100 samples of 16 in the first epoch and 100 in the second
    plans = {n: make_epoch_plan(range(1601), lengths, 16, 1, n) for n in (100, 101, 179, 180, 200)}
    assert {n: (plan.epochs, plan.separate_last) for n, plan in plans.items()} == {
        100: (1, False),
        101: (2, True),
        179: (2, True),
        180: (2, False),
        200: (2, False),
    }


def slow_sample_index(document, lengths, seq_length, num_samples):
    """The definition of the sample index: walk the stream, one token at a time."""
    stream = [[place, offset] for place, d in enumerate(document) for offset in range(lengths[d])]
    return [[0, 0]] + [stream[i * seq_length] for i in range(1, num_samples + 1)]


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(any),
    seq_length=st.integers(1, 17),
    num_samples=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    block=st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_sample_index_walks_the_stream(lengths, seq_length, num_samples, seed, block):
    lengths = np.array(lengths, np.int32)
    plan = make_epoch_plan(range(len(lengths)), lengths, seq_length, seed, num_samples)
    assert plan.num_samples >= num_samples
    assert plan.epochs == 1 or ((plan.epochs - 1) * plan.tokens - 1) // seq_length < num_samples
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_maps, "BLOCK", block)
        maps = build_index_maps(plan, lengths)
    assert sorted(maps.document.tolist()) == sorted(list(range(len(lengths))) * plan.epochs)
    assert sorted(maps.shuffle.tolist()) == list(range(plan.num_samples))
    assert maps.sample.tolist() == slow_sample_index(maps.document, lengths, seq_length, plan.num_samples)
    if plan.separate_last:
        assert max(maps.shuffle[: plan.samples_before_last]) < plan.samples_before_last


def test_sample_is_the_stream_and_says_where_from(tmp_path):
    lengths = [3, 0, 8, 2, 40, 1]
    prefix = write_tokens(tmp_path / "a", lengths)
    train, valid, test = build_datasets(Data(data_path=[prefix], split="1,0,0"), 5, (30, 3, 3), 1)
    assert valid is None and test is None and len(train) >= 30
    starts = np.cumsum([0] + lengths)
    for i in range(len(train)):
        origin = train.origin(i)
        assert origin.prefix == prefix and origin.number == train.shuffle_index[i]
        tokens = [starts[d] + offset + k for d, offset, length in origin.parts for k in range(length)]
        assert train[i].dtype == np.int64 and train[i].tolist() == tokens and len(tokens) == 6


@pytest.mark.parametrize("length, told", [(54, 0), (55, 1)])
def test_a_sample_longer_than_the_text_is_told(length, told, tmp_path):
    heard = []
    data = Data(data_path=[write_tokens(tmp_path / "a", [14, 40])], split="1,0,0")
    build_datasets(data, length, (3, 0, 0), 1, log=heard.append)
    assert sum("is longer than all of a-train, 54 tokens" in line for line in heard) == told


@pytest.mark.parametrize(
    "kind, samples, told", [("gpt", 40, False), ("gpt", 41, True), ("webtext", 36, False), ("webtext", 37, True)]
)
def test_more_than_four_passes_are_told(kind, samples, told, tmp_path):
    """41 tokens are 10 samples of 4 and a last token, 4 times 41 are 40 and three more; 9 documents are 9 samples."""
    heard, prefix = [], write_tokens(tmp_path / "a", [5] * 7 + [3, 3])
    data = Data(data_path=[prefix], split="1,0,0", dataset_type=kind)
    build_datasets(data, 4, (samples, 0, 0), 1, eod=0, log=heard.append)
    notes = [line for line in heard if "2305.16264" in line]
    assert len(notes) == told and all("a-train more than 4 times" in line for line in notes)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_longer_run_keeps_the_order_of_its_validation(weighted, tmp_path):
    """The first 30 samples are those of the first launch, in three epochs; then they repeat."""
    first, second = write_tokens(tmp_path / "a", [20] * 50), write_tokens(tmp_path / "b", [9] * 90)
    data = Data(data_path=["1", first, "3", second] if weighted else [first], split="80,10,10")
    build = lambda sizes: build_datasets(data, 8, sizes, 7)[1]
    short, known = build((10, 30, 2)), build(SampleCounts((900, 300, 2), valid_order=30))
    count = len(short)
    assert 30 <= count < 300 and len(known) == 300 and isinstance(known, Repeated)
    assert all((known[i] == short[i % count]).all() for i in range(300))
    other = build((900, 300, 2))  # the order of a run that was as long from the start
    assert len(other) >= 300 and any((other[i] != short[i]).any() for i in range(30))
    assert build(SampleCounts((900, 20, 2), valid_order=30)).__class__ is short.__class__  # a shorter run


def test_cache_is_used_and_repaired(tmp_path):
    prefix = write_tokens(tmp_path / "a", [7] * 40)
    cache, said = tmp_path / "cache", []
    data = Data(data_path=[prefix], split="1,0,0", data_cache_path=str(cache))
    build = lambda seed=1, size=60: build_datasets(data, 4, (size, 0, 0), seed, log=said.append)[0]
    first = build()
    assert len(said) == 1 and isinstance(first.shuffle_index.base, np.memmap)
    build(), build(size=65)  # 65 samples take the same epochs
    assert len(said) == 1
    build(seed=2)
    assert len(said) == 2
    (entry,) = [
        folder
        for folder in cache.iterdir()
        if folder.is_dir()
        and "shuffle.npy" in str(list(folder.iterdir()))
        and (np.load(folder / "shuffle.npy") == first.shuffle_index).all()
    ]
    reference = first.shuffle_index.copy(), first.sample_index.copy()
    whole = {path: path.read_bytes() for path in entry.iterdir()}
    damages = {
        "shuffle.npy": [b"", whole[entry / "shuffle.npy"][:-3], whole[entry / "shuffle.npy"][:-1] + b"\7"],
        "document.npy": [whole[entry / "shuffle.npy"]],
        "index.json": [b"", b"{}", b"[]", whole[entry / "index.json"].replace(b'"seed": 1', b'"seed": 9')],
        "sample.npy": [None],
    }
    for name, contents in damages.items():
        for content in contents:
            (entry / name).unlink()
            if content is not None:
                (entry / name).write_bytes(content)
            said.clear()
            again = build()
            assert "damaged" in said[0] and len(said) == 2, (name, content, said)
            assert (again.shuffle_index == reference[0]).all() and (again.sample_index == reference[1]).all()
    write_tokens(tmp_path / "a", [6, 8] + [7] * 38)  # other data of the same size under the same name
    said.clear()
    assert len(build()) != 0 and "building" in said[0]


def test_cache_folder_that_cannot_be_written(tmp_path):
    prefix = write_tokens(tmp_path / "a", [7] * 40)
    (tmp_path / "index_cache").write_text("a file where the folder should be")
    said = []
    train = build_datasets(Data(data_path=[prefix]), 4, (60, 0, 0), 1, log=said.append)[0]
    assert len(train) >= 60 and any("--data-cache-path" in line for line in said)
    data = Data(data_path=[prefix], data_cache_path=str(tmp_path / "index_cache"))
    with pytest.raises(StorageError, match="index_cache"):
        build_datasets(data, 4, (60, 0, 0), 1)


def broken(
    tmp_path, message, lengths=(5,) * 20, sizes=(10, 2, 2), error=DataError, seq_length=4, vocab_size=None, **data
):
    prefix = write_tokens(tmp_path / "a", lengths)
    data = {key: [prefix if w == "P" else w for w in v] if isinstance(v, list) else v for key, v in data.items()}
    with pytest.raises(error, match=message) as caught:
        train = build_datasets(Data(**data), seq_length, sizes, 1, vocab_size=vocab_size)[0]
        [train[i] for i in range(len(train))]
    return str(caught.value)


def test_a_test_without_documents_is_left_out_with_a_note(tmp_path):
    """As in Megatron-LM; a validation without documents is an error."""
    prefix, said = write_tokens(tmp_path / "a", (5,) * 20), []
    train, valid, test = build_datasets(Data(data_path=[prefix]), 4, (10, 2, 2), 1, log=said.append)
    assert len(train) >= 10 and len(valid) >= 2 and test is None
    [note] = [line for line in said if line.startswith("note: ")]
    assert "leaves nothing for test" in note and "--split 18,1,1" in note  # 969,30,1 of 20 gives 19, 1, 0
    both, said = [prefix, write_tokens(tmp_path / "b", (5,) * 20)], []
    assert build_datasets(Data(data_path=both), 4, (10, 2, 2), 1, log=said.append)[2] is None
    assert sum("leaves nothing for test" in line for line in said) == 2
    both[1] = write_tokens(tmp_path / "b", (5,) * 2000)
    test = build_datasets(Data(data_path=both), 4, (10, 2, 2), 1, log=print)[2]
    assert test is not None and {test.origin(i).prefix for i in range(len(test))} == {both[1]}
    text = broken(tmp_path, "leaves nothing for valid", data_path=["P"], split="99,0.5,0.5")
    assert "--split 18,1,1" in text and "--eval-iters 0" in text


def test_mistakes_are_answered(tmp_path):
    broken(tmp_path, "has no tokens", data_path=["P"], lengths=[0, 0])
    broken(tmp_path, "has no tokens", data_path=["P"], lengths=[])
    assert "more documents" in broken(tmp_path, "leaves nothing", data_path=["P"], lengths=[9, 0, 0], sizes=(1, 1, 1))
    one = broken(tmp_path, "leaves nothing for valid", data_path=["P"], lengths=[99], sizes=(9, 1, 0), split="95,5,0")
    assert "it has 1 sequences; valid gets 0" in one and "--document-separator" in one  # of a .txt without separators
    broken(tmp_path, "nothing.idx: no such file", data_path=["nothing"])
    broken(tmp_path, "weight 0 of", data_path=["0", "P", "1", "P"])
    broken(tmp_path, "weight -1 of", data_path=["-1", "P"])
    broken(tmp_path, "weight nan", data_path=["nan", "P"])
    broken(tmp_path, "'much' stands where a weight", data_path=["0.3", "P", "much", "P"])
    broken(tmp_path, "neither pairs", data_path=["P", "0.3", "P", "0.7"])
    broken(tmp_path, "neither pairs", data_path=["0.3", "P", "0.7"])
    text = broken(tmp_path, "train needs 100 samples", data_path=["P", "P"], split="8,1,1", sizes=(100, 0, 0))
    assert "give weights" in text
    broken(tmp_path, "less than one sample", data_path=["P", "P"], split="8,1,1", seq_length=400, sizes=(1, 0, 0))
    broken(tmp_path, "--split -1,2: not up to three", error=SettingsError, data_path=["P"], split="-1,2")
    for split in ("", "a,b", "0,0,0", "1,1,1,1", "inf,1", "nan"):
        broken(tmp_path, "--split", error=SettingsError, data_path=["P"], split=split)
    broken(tmp_path, "exclude each other", error=SettingsError, data_path=["P"], train_data_path=["P"])
    broken(tmp_path, "no data is given", error=SettingsError)
    broken(tmp_path, "--vocab-size", error=SettingsError, mock_data=True)
    text = broken(tmp_path, "token 50, outside of the vocabulary of 50", data_path=["P"], split="1,0,0", vocab_size=50)
    one = dict(data_path=["P"], split="1,0,0", lengths=[20], seq_length=19, sizes=(1, 0, 0))  # tokens 0 to 19
    broken(tmp_path, "token 19, outside of the vocabulary of 19", vocab_size=19, **one)
    assert "tokenizer" in text


@given(
    lengths=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    split=st.tuples(*[st.integers(0, 100)] * 3).filter(any),
    asked=st.tuples(*[st.booleans()] * 3),
)
@settings(max_examples=200, deadline=None)
def test_suggested_split_works(lengths, split, asked):
    lengths, total = np.array(lengths), len(lengths)
    shares = parse_split(",".join(map(str, split)))
    wanted = [want and share is not None for want, share in zip(asked, shares, strict=True)]
    ends, end = [], 0
    for share in shares[:2]:
        end = sequences_of(share, total).stop if share else end
        ends.append(end)
    counts = suggest_split(lengths, tuple(ends), wanted)
    if counts is None:
        assert np.count_nonzero(lengths) < sum(wanted)
        return
    assert sum(counts) == total
    for share, want, count in zip(parse_split(",".join(map(str, counts))), wanted, counts, strict=True):
        sequences = sequences_of(share, total) if share else range(0)
        assert len(sequences) == count
        assert not want or lengths[sequences.start : sequences.stop].any()


def test_mock_data_is_a_function_of_seed_split_and_index():
    build = lambda seed: build_datasets(Data(mock_data=True), 64, (20, 5, 0), seed, eod=30, vocab_size=31)
    train, valid, test = build(3)
    assert test is None and (len(train), len(valid)) == (20, 5)
    assert all((train[i] == build(3)[0][i]).all() and train[i].shape == (65,) for i in range(20))
    assert (
        not (train[1] == valid[1]).all() and not (train[1] == build(4)[0][1]).all() and not (train[0] == train[1]).all()
    )


@pytest.mark.parametrize(
    "vocab_size, eod", [(2, None), (2, 0), (2, 1), (31, 30), (50257, 50256), (50257, 0), (1000, 100)]
)
def test_mock_tokens_are_in_the_vocabulary_and_mostly_count_up(vocab_size, eod):
    tokens = np.concatenate([MockDataset(9, 300, vocab_size, eod, seed=1)[i] for i in range(9)])
    assert tokens.min() >= 0 and tokens.max() < vocab_size
    if vocab_size > 30:
        assert (np.diff(tokens) == 1).mean() > 0.9
    if eod is not None:
        assert 0.005 < (tokens == eod).mean() < (0.05 if vocab_size > 2 else 1)
