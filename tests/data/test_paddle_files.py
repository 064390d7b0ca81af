# SPDX-License-Identifier: Apache-2.0
"""PaddlePaddle's token files: what numpy reads and writes is what this reads and writes; damage; folders; conversion."""

import io
import json
import pickle
import zipfile

import numpy as np
import pytest

import merge_datasets
from megatron.data import formats, manifest, verify
from megatron.data.blend import parse_blend
from megatron.data.formats import open_tokens, prefixes_in
from megatron.data.gpt_dataset import build_datasets
from megatron.data.indexed import write_index
from megatron.errors import DataError, Failure
from megatron.settings.schema import Data

LENGTHS = [3, 0, 7, 1, 5, 4]
DOCUMENTS = [0, 2, 2, 5, 6]  # the second is empty


def tokens_of(lengths, dtype="u2"):
    return (np.arange(sum(lengths)) * 37 % 500).astype(dtype)


def write(prefix, lengths=LENGTHS, documents=DOCUMENTS, sents=True, dtype="u2", save=np.savez):
    """Files as PaddleNLP writes them, by numpy itself."""
    np.save(f"{prefix}_ids.npy", tokens_of(lengths, dtype))
    more = dict(sents=np.cumsum([0, *lengths], dtype="i8")) if sents else {}
    save(f"{prefix}_idx.npz", lens=np.array(lengths, "i4"), **more, docs=np.array(documents, "i8"))
    return str(prefix)


def write_old(prefix, lengths=LENGTHS, save=np.savez):
    save(f"{prefix}_ids.npz", ids=tokens_of(lengths), lens=np.array(lengths, np.uint32))
    return str(prefix)


def write_megatron(prefix, lengths=LENGTHS, documents=DOCUMENTS, dtype="u2"):
    tokens_of(lengths, dtype).tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", np.dtype(dtype), np.array(lengths), np.array(documents))
    return str(prefix)


def sequences(tokens):
    return [tokens.get(number).tolist() for number in range(len(tokens))]


def expected(lengths=LENGTHS):
    ends = np.cumsum(lengths)
    return [tokens_of(lengths)[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("make, documents", [(write, DOCUMENTS), (write_old, range(7))])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_reads_what_numpy_wrote(tmp_path, make, documents, save):
    tokens = open_tokens(make(tmp_path / "a", save=save))
    assert sequences(tokens) == expected() and tokens.num_tokens == sum(LENGTHS)
    assert tokens.document_indices.tolist() == list(documents)
    assert tokens.get(2, 3, 2).tolist() == expected()[2][3:5]
    mapped = isinstance(tokens.tokens.base, memoryview) or not tokens.tokens.flags.owndata
    assert mapped and not tokens.tokens.flags.writeable
    assert (tokens.place() is None) == (make is write_old and save is np.savez_compressed)
    assert sequences(pickle.loads(pickle.dumps(tokens))) == expected()


def test_the_fleetx_keys_and_wide_ids(tmp_path):
    tokens = open_tokens(write(tmp_path / "a", sents=False, dtype="i4"))
    assert sequences(tokens) == expected() and tokens.dtype == np.int32


def test_writes_the_bytes_of_numpy(tmp_path):
    prefix = write(tmp_path / "a")
    pieces = lambda: [np.array(LENGTHS[:2], "i4"), np.array(LENGTHS[2:], "i4")]
    formats.stream_npz(tmp_path / "own.npz", 6, 4, pieces, lambda: [np.diff(DOCUMENTS)])
    assert (tmp_path / "own.npz").read_bytes() == open(f"{prefix}_idx.npz", "rb").read()
    for count in (0, 9, 10**15):
        saved = io.BytesIO()
        np.lib.format.write_array_header_1_0(saved, dict(descr="<u2", fortran_order=False, shape=(count,)))
        assert formats.npy_head(np.dtype("<u2"), count) == saved.getvalue() and len(saved.getvalue()) == formats.HEAD


def test_conversion_both_ways_loses_nothing(tmp_path, capsys):
    for dtype in ("u2", "i4", "i8"):
        folder = tmp_path / dtype
        folder.mkdir()
        there, back = f"{folder}/there", f"{folder}/back"
        merge_datasets.main(
            ["--input", write(folder / "a", dtype=dtype), "--output-prefix", back, "--output-format", "megatron"]
        )
        write_megatron(folder / "same", dtype=dtype)
        merge_datasets.main(["--input", back, "--output-prefix", there, "--output-format", "paddle"])
        for made, wanted in (
            ("back.bin", "same.bin"),
            ("back.idx", "same.idx"),
            ("there_ids.npy", "a_ids.npy"),
            ("there_idx.npz", "a_idx.npz"),
        ):
            assert (folder / made).read_bytes() == (folder / wanted).read_bytes(), made
        assert verify.examine(there, False)[0] == verify.examine(back, False)[0] == []


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_old_files_are_converted_and_all_formats_merged(tmp_path, capsys, save):
    (tmp_path / "in").mkdir()
    write_old(tmp_path / "in" / "b", save=save)
    write(tmp_path / "in" / "c", [2], [0, 1])
    write_megatron(tmp_path / "in" / "a", [4, 1], [0, 2])
    merge_datasets.main(
        ["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "all"), "--output-format", "paddle"]
    )
    wanted = expected([4, 1]) + expected() + expected([2])
    assert np.load(tmp_path / "all_ids.npy").tolist() == sum(wanted, [])
    index = np.load(tmp_path / "all_idx.npz")
    assert index["lens"].tolist() == [4, 1, *LENGTHS, 2] and index["docs"].tolist() == [0, 2, 3, 4, 5, 6, 7, 8, 9]


# Damage -----------------------------------------------------------------------------------------------------------------


LENS, DOCS = np.array(LENGTHS, "i4"), np.array(DOCUMENTS, "i8")
HARM = {  # what is wrong -> (ending of the file, arrays of the .npz, an array of the .npy, or what becomes of the bytes)
    "ids cut short": ("_ids.npy", lambda data: data[:-3]),
    "ids grown": ("_ids.npy", lambda data: data + b"12"),
    "ids without a header": ("_ids.npy", lambda data: data[128:]),
    "ids of floats": ("_ids.npy", np.ones(20)),
    "ids unsigned and wide": ("_ids.npy", np.ones(20, np.uint32)),
    "ids big-endian": ("_ids.npy", tokens_of(LENGTHS, ">u2")),
    "ids in two dimensions": ("_ids.npy", tokens_of(LENGTHS).reshape(2, 10)),
    "ids of objects": ("_ids.npy", np.array([dict, 1], object)),
    "ids of another run": ("_ids.npy", tokens_of([7])),
    "ids are empty": ("_ids.npy", lambda data: b""),
    "no ids": ("_ids.npy", None),
    "index cut short": ("_idx.npz", lambda data: data[:-30]),
    "index is empty": ("_idx.npz", lambda data: b""),
    "index is no archive": ("_idx.npz", lambda data: b"lens 1 2 3" * 50),
    "no lens": ("_idx.npz", dict(docs=DOCS)),
    "lens of floats": ("_idx.npz", dict(lens=LENS.astype("f4"), docs=DOCS)),
    "lens too wide": ("_idx.npz", dict(lens=LENS.astype("i8"), docs=DOCS)),
    "lens negative": ("_idx.npz", dict(lens=np.array([20, -1, 1], "i4"), docs=np.array([0, 3]))),
    "docs too few": ("_idx.npz", dict(lens=LENS, docs=DOCS[:-1])),
    "sents of another run": ("_idx.npz", dict(lens=LENS, sents=np.array([0, 1, 2, 3, 4, 5, 7]), docs=DOCS)),
}


def harm(tmp_path, what):
    """Files with one thing wrong with them."""
    prefix = write(tmp_path / "a")
    if what == "two formats":
        return write_megatron(prefix)
    ending, change = HARM[what]
    path = tmp_path / f"a{ending}"
    if change is None:
        path.unlink()
    elif isinstance(change, dict):
        np.savez(path, **change)
    elif isinstance(change, np.ndarray):
        np.save(path, change, allow_pickle=True)
    else:
        path.write_bytes(change(path.read_bytes()))
    return prefix


@pytest.mark.parametrize(
    "what, words",
    [
        ("ids cut short", "a_ids.npy: 37 bytes of numbers, but its header promises 40"),
        ("ids grown", "a_ids.npy: 42 bytes of numbers, but its header promises 40"),
        ("ids without a header", "a_ids.npy: cut short, damaged or not of numpy's format"),
        ("ids of floats", "numbers of type <f8"),
        ("ids unsigned and wide", "holds numbers of type uint32, not token ids"),
        ("ids big-endian", "numbers of type >u2"),
        ("ids in two dimensions", "shape [2, 10]"),
        ("ids of objects", "numbers of type |O"),
        ("ids of another run", "holds 7 tokens, its .npz describes 20"),
        ("ids are empty", "a_ids.npy: cut short, damaged or not of numpy's format"),
        ("no ids", "a_idx.npz is there: its .npy was not copied"),
        ("index cut short", "a_idx.npz: cut short, damaged or no .npz file"),
        ("index is empty", "a_idx.npz: cut short, damaged or no .npz file"),
        ("index is no archive", "a_idx.npz: cut short, damaged or no .npz file"),
        ("no lens", "a_idx.npz has no array lens"),
        ("lens of floats", "lens.npy: numbers of type <f4"),
        ("lens too wide", "lens are of type int64, not int32"),
        ("lens negative", "holds 20 tokens, its .npz describes 20"),
        ("docs too few", "its documents do not cover its 6 sequences"),
        ("sents of another run", "lens and sents disagree"),
        ("two formats", "both exist"),
    ],
)
def test_damage_is_one_message(tmp_path, what, words):
    with pytest.raises(DataError) as caught:
        open_tokens(harm(tmp_path, what))
    assert words in str(caught.value) and "a_" in caught.value.what
    assert words.startswith("lens") or caught.value.do or caught.value.why


@pytest.mark.parametrize("ending", ["_ids.npy", "_idx.npz", "_ids.npz"])
def test_random_damage_is_an_error_or_harmless(tmp_path, ending):
    """A flipped bit, a cut or noise anywhere: a DataError, or lists of numbers, never another exception."""
    dice = np.random.default_rng(7)
    prefix = write_old(tmp_path / "a") if ending == "_ids.npz" else write(tmp_path / "a")
    path = tmp_path / f"a{ending}"
    good, refused = path.read_bytes(), 0
    for _ in range(150):
        data = bytearray(good)
        at = int(dice.integers(len(data)))
        kind = dice.integers(3)
        if kind == 0:
            data[at] ^= 1 << int(dice.integers(8))
        elif kind == 1:
            del data[at:]
        else:
            data[at : at + 8] = dice.bytes(8)
        path.write_bytes(data)
        try:
            tokens = open_tokens(prefix)
            for number in range(len(tokens)):
                tokens.get(number)
        except DataError:
            refused += 1
    assert refused > 30


def test_checksums_find_what_the_numbers_cannot(tmp_path):
    prefix = write(tmp_path / "a")
    manifest.write_manifest(prefix)
    assert manifest.verify(prefix) == [] and set(manifest.read_manifest(prefix)["files"]) == {"_ids.npy", "_idx.npz"}
    data = bytearray((tmp_path / "a_ids.npy").read_bytes())
    data[140] ^= 1
    (tmp_path / "a_ids.npy").write_bytes(data)
    assert open_tokens(prefix).num_tokens == 20
    assert manifest.verify(prefix) == [f"{prefix}_ids.npy is damaged between bytes 0 and 168"]


def test_sents_that_point_elsewhere_are_found_by_verify_data(tmp_path):
    prefix = write(tmp_path / "a")
    np.savez(
        tmp_path / "a_idx.npz",
        lens=np.array(LENGTHS, "i4"),
        sents=np.array([0, 3, 4, 10, 11, 16, 20]),
        docs=np.array(DOCUMENTS),
    )
    problems, _ = verify.examine(prefix, True)
    assert problems == [f"{prefix}_idx.npz: the offset of sequence 2 is not where the one before it ends"]


# Folders ------------------------------------------------------------------------------------------------------------------


def test_a_folder_is_all_its_datasets_by_size(tmp_path):
    write(tmp_path / "web")
    write_old(tmp_path / "books", [5, 5])
    write_megatron(tmp_path / "code", [30], [0, 1])
    (tmp_path / "below").mkdir()
    write(tmp_path / "below" / "not")
    (tmp_path / "web_gpt_Train_indexmap_10ns_8sl_doc_idx.npy").write_bytes(b"")
    names = [f"{tmp_path}/{name}" for name in ("books", "code", "web")]
    assert prefixes_in(tmp_path) == names
    assert parse_blend([str(tmp_path)], "") == (names, [10 / 60, 30 / 60, 20 / 60])
    assert parse_blend([str(tmp_path), "other"], "") == ([*names, "other"], None)
    blend = parse_blend(["3", str(tmp_path), "1", "other"], "")
    assert blend.prefixes == [*names, "other"] and np.allclose(blend.weights, [0.125, 0.375, 0.25, 0.25])
    assert parse_blend([f"{tmp_path}/below/"], "") == ([f"{tmp_path}/below/not"], None)


@pytest.mark.parametrize(
    "there, words",
    [
        ([], "there are no token files in the folder"),
        (["x.jsonl", "x.partial"], "there are no token files in the folder"),
        (["x_ids.npy"], "x_ids.npy has no x_idx.npz next to it"),
        (["x_idx.npz"], "x_idx.npz has no x_ids.npy next to it"),
        (["x.bin"], "x.bin has no x.idx next to it"),
    ],
)
def test_a_folder_without_whole_datasets(tmp_path, there, words):
    for name in there:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(Failure, match=words):
        parse_blend([str(tmp_path)], "--data-path")


def test_samples_are_those_of_the_same_tokens_in_the_other_format(tmp_path):
    lengths = (np.arange(60) * 13 % 40 + 1).tolist()
    for make in (write, write_megatron):
        folder = tmp_path / make.__name__
        folder.mkdir()
        make(folder / "a", lengths, range(61))
    samples = []
    for kind in ("write", "write_megatron"):
        data = Data(data_path=[str(tmp_path / kind)], split="80,10,10", data_cache_path=str(tmp_path / kind / "cache"))
        splits = build_datasets(data, 16, (100, 8, 8), 1234, vocab_size=500)
        samples.append([np.stack([split[i] for i in range(len(split))]) for split in splits])
    for own, other in zip(*samples, strict=True):
        assert np.array_equal(own, other) and len(own) >= 8


def test_a_foreign_archive_is_not_run(tmp_path):
    """A pickle inside the .npz, as numpy would load with allow_pickle, is refused without being loaded."""
    write(tmp_path / "a")
    with zipfile.ZipFile(tmp_path / "a_idx.npz", "w") as archive:
        for name in ("lens", "docs"):
            content = io.BytesIO()
            np.save(content, np.array([json, {}], object)[1:], allow_pickle=True)
            archive.writestr(f"{name}.npy", content.getvalue())
    with pytest.raises(DataError, match="numbers of type"):
        open_tokens(tmp_path / "a")


def test_the_other_format_does_not_share_a_name(tmp_path, capsys):
    prefix = write(tmp_path / "a")
    with pytest.raises(DataError, match="a_idx.npz is there, and would share the name"):
        merge_datasets.main(["--input", write(tmp_path / "b"), "--output-prefix", prefix])
    assert not (tmp_path / "a.bin").exists()


def test_a_dry_run_tells_of_a_folder_without_data(tmp_path):
    from megatron.planner.problems import file_problems
    from megatron.settings.parse import parse_pretrain

    line = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 1"
    )
    line += f" --global-batch-size 1 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 600 --input_dir {tmp_path}"
    assert [problem for problem in file_problems(parse_pretrain(line.split())) if "no token files" in problem]
    write(tmp_path / "a")
    assert file_problems(parse_pretrain(line.split())) == []
    (tmp_path / "a_ids.npy").write_bytes(b"")
    assert [problem for problem in file_problems(parse_pretrain(line.split())) if "a_ids.npy: cut short" in problem]
