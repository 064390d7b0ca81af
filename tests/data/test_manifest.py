# SPDX-License-Identifier: Apache-2.0
"""Every damage of token files is found and located; hostile files are refused."""

import random

import numpy as np
import pytest

import pretrain_gpt
from megatron.data import manifest
from megatron.data.indexed import write_index
from megatron.data.verify import contradictions
from megatron.errors import DataError, UsageError
from megatron.tools import verify_data as tool


def token_files(prefix, tokens=3000, seed=0):
    """A dataset of documents of several lengths, with its manifest."""
    generator = np.random.default_rng(seed)
    lengths = np.full(tokens // 10, 10)
    generator.integers(0, 90, tokens).astype("<u2").tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", np.uint16, lengths, np.arange(0, len(lengths) + 1))
    manifest.write_manifest(str(prefix))
    return str(prefix)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK", 4096)
    monkeypatch.setattr(manifest.checksums, "__defaults__", (0, 1, 4096))


def flip(path, at, bit=4):
    raw = bytearray(path.read_bytes())
    raw[at] ^= bit
    path.write_bytes(raw)


def test_good_files_are_good(tmp_path, capsys):
    prefix = token_files(tmp_path / "d")
    assert manifest.verify(prefix) == []
    tool.main([prefix, f"{prefix}.bin"])
    assert capsys.readouterr().out.count("s: good") == 2


def test_a_flipped_bit_is_located(tmp_path, small_blocks, capsys):
    prefix = token_files(tmp_path / "d")
    flip(tmp_path / "d.bin", 5000)
    assert manifest.verify(prefix) == [f"{prefix}.bin is damaged between bytes 4,096 and 6,000"]
    with pytest.raises(DataError, match="1 of 1 dataset is damaged") as caught:
        tool.main([prefix])
    assert caught.value.code == 4 and "1 PROBLEM" in capsys.readouterr().out


def test_ranks_share_the_reading(tmp_path, small_blocks):
    prefix = token_files(tmp_path / "d", tokens=20_000)
    for at in (0, 5000, 9000):
        flip(tmp_path / "d.bin", at)
    found = [manifest.verify(prefix, part, 3) for part in range(3)]
    assert sorted(sum(found, [])) == sorted(manifest.verify(prefix)) and all(found)


def test_200_random_damages_are_all_found(tmp_path):
    prefix, chance = token_files(tmp_path / "d"), random.Random(5)
    good = {suffix: (tmp_path / f"d{suffix}").read_bytes() for suffix in (".bin", ".idx", ".sums.json")}
    for _ in range(200):
        suffix = chance.choice(list(good))
        raw, kind = bytearray(good[suffix]), chance.randrange(4)
        at = chance.randrange(len(raw))
        if kind == 0:
            raw[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            raw[at : at + 64] = bytes(len(raw[at : at + 64]))
        elif kind == 2:
            del raw[at:]
        else:
            raw += b"\x00"
        if raw == good[suffix]:
            continue
        (tmp_path / f"d{suffix}").write_bytes(raw)
        try:
            assert manifest.verify(prefix), (suffix, kind, at)
        except DataError:
            assert suffix == ".sums.json"
        (tmp_path / f"d{suffix}").write_bytes(good[suffix])


def test_without_a_manifest_one_can_be_written(tmp_path, capsys):
    prefix = token_files(tmp_path / "d")
    (tmp_path / "d.sums.json").unlink()
    with pytest.raises(DataError, match="cannot be verified") as caught:
        tool.main([prefix])
    assert "--write" in str(caught.value)
    tool.main([prefix, "--write"])
    tool.main([prefix])


@pytest.mark.parametrize("what", ["offset", "boundary"])
def test_numbers_that_contradict_each_other_get_no_manifest(tmp_path, capsys, what):
    prefix = token_files(tmp_path / "d")
    (tmp_path / "d.sums.json").unlink()
    sequences = 300
    at = 34 + 4 * sequences + (8 * 7 if what == "offset" else 8 * sequences + 8 * 5)
    raw = bytearray((tmp_path / "d.idx").read_bytes())
    raw[at : at + 8] = (1 << 62).to_bytes(8, "little")
    (tmp_path / "d.idx").write_bytes(raw)
    with pytest.raises(DataError, match="damaged"):
        tool.main([prefix, "--write"])
    said = capsys.readouterr().out
    assert "offset of sequence 7" in said if what == "offset" else "run backwards" in said
    assert not (tmp_path / "d.sums.json").exists()


def test_hostile_headers_are_refused_without_memory(tmp_path):
    prefix = token_files(tmp_path / "d")
    good = (tmp_path / "d.idx").read_bytes()
    for at in (18, 26):
        for number in (1 << 63, (1 << 64) - 1, 1 << 40, 0):
            (tmp_path / "d.idx").write_bytes(good[:at] + number.to_bytes(8, "little") + good[at + 8 :])
            with pytest.raises(DataError, match="its header promises|documents do not cover"):
                contradictions(prefix)


def test_training_verifies_first(tmp_path, capsys):
    prefix = token_files(tmp_path / "d")
    flags = (
        "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 100 --lr 1e-3 "
        "--device cpu --tokenizer-type NullTokenizer --train-iters 1 --eval-iters 0 --verify-data "
        f"--data-path {prefix}"
    )
    pretrain_gpt.main(flags.split())
    assert "verified 1 dataset in" in capsys.readouterr().out
    flip(tmp_path / "d.bin", 77)
    with pytest.raises(DataError, match="differ from what was written") as caught:
        pretrain_gpt.main(flags.split())
    assert "d.bin is damaged between bytes 0 and 6,000" in str(caught.value)


def test_nothing_to_verify():
    with pytest.raises(UsageError, match="nothing to verify"):
        tool.main([])
