# SPDX-License-Identifier: Apache-2.0
"""The settings of data and vocabulary: which tokens come, in what order, and what is masked."""

import base64
import json
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data import manifest
from megatron.data.indexed import write_index
from megatron.errors import DataError, SettingsError
from megatron.settings.parse import parse_pretrain
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.byte_level import BYTE_TO_CHARACTER
from megatron.training.rules import resolve

NUMBERS = "--mock-data false --tokenizer-type NullTokenizer --num-layers 1 --hidden-size 8 --num-attention-heads 1"


@pytest.fixture
def corpus(tmp_path):
    """`corpus(name, first, documents, length)`: a token file whose document n is all token first + n; its prefix."""

    def write(name, first=0, documents=20, length=40):
        tokens = np.repeat(np.arange(first, first + documents), length).astype(np.uint16)
        tokens.tofile(tmp_path / f"{name}.bin")
        lengths = np.full(documents, length, np.int32)
        write_index(str(tmp_path / f"{name}.idx"), np.uint16, lengths, np.arange(documents + 1))
        manifest.write_manifest(str(tmp_path / name))
        return str(tmp_path / name)

    return write


def tokens_of(batches, samples=40):
    """The tokens of the first samples of a loader with micro-batches of two."""
    return torch.cat([batch.tokens for batch in batches.step(0, samples // 2)], 1)


def share_of(batches, low, high):
    tokens = tokens_of(batches)
    return ((tokens >= low) & (tokens < high)).float().mean().item()


LONG = "--train-samples 40 --eval-iters 2 --eval-interval 100"


def test_data_path_mixes_by_weight(corpus, build):
    a, b = corpus("a", 0), corpus("b", 20)
    run = build(f"{NUMBERS} {LONG} --split 1,0,0 --eval-iters 0 --data-path 3 {a} 1 {b}")
    assert share_of(run.loaders.train, 0, 20) == pytest.approx(0.75, abs=0.03)
    assert share_of(build(f"{NUMBERS} {LONG} --split 1,0,0 --eval-iters 0 --data-path {b}").loaders.train, 20, 40) == 1


def test_each_split_has_its_own_path(corpus, build):
    a, b, c = corpus("a", 0), corpus("b", 20), corpus("c", 40)
    run = build(f"{NUMBERS} {LONG} --train-data-path {a} --valid-data-path {b} --test-data-path {c}")
    for first, batches in zip((0, 20, 40), (run.loaders.train, run.loaders.valid, run.loaders.test), strict=True):
        found = torch.cat([batch.tokens for batch in batches.step(0, 2)])
        assert first <= found.min() and found.max() < first + 20


def test_split_divides_the_documents_in_order(corpus, build):
    """50, 30 and 20 per cent of 20 documents: tokens 0 to 9, 10 to 15, 16 to 19."""
    run = build(f"{NUMBERS} {LONG} --split 50,30,20 --data-path {corpus('a')}")
    for first, last, batches in ((0, 9, run.loaders.train), (10, 15, run.loaders.valid), (16, 19, run.loaders.test)):
        found = torch.cat([batch.tokens for batch in batches.step(0, 2)])
        assert first <= found.min() and found.max() <= last


def test_index_maps_lie_where_they_are_wanted(corpus, build, tmp_path):
    flags = f"{NUMBERS} {LONG} --split 8,1,1 --data-path {corpus('a')}"
    build(f"{flags} --data-cache-path {tmp_path / 'cache'}")
    assert list((tmp_path / "cache").iterdir()) and not (tmp_path / "index_cache").exists()
    build(flags)
    assert list((tmp_path / "index_cache").iterdir())


def test_verify_data_reads_every_byte_first(corpus, build, tmp_path):
    flags = f"{NUMBERS} {LONG} --split 1,0,0 --eval-iters 0 --data-path {corpus('a')}"
    raw = bytearray((tmp_path / "a.bin").read_bytes())
    raw[-1] ^= 64
    (tmp_path / "a.bin").write_bytes(raw)
    build(flags)
    with pytest.raises(DataError, match="differ from what was written"):
        build(f"{flags} --verify-data")
    with pytest.raises(SettingsError, match="--verify-data reads every token, and --object-storage-cache-path only"):
        flags = f"{NUMBERS} {LONG} --data-path s3://b/a --object-storage-cache-path c --verify-data"
        resolve(parse_pretrain(flags.split()), 1)


def test_mock_data_needs_no_files_and_is_the_same_each_time(build):
    one, two = build("--train-samples 40"), build("--train-samples 40 --mock-data")
    assert torch.equal(tokens_of(one.loaders.train), tokens_of(two.loaders.train))
    with pytest.raises(SettingsError, match="no data is given"):
        build("--mock-data false --tokenizer-type NullTokenizer")


def test_cyclic_shuffles_each_epoch_anew(corpus, build):
    """Epochs of the same samples in torch's random order of the epoch's number; single ends behind the first."""
    flags = f"{NUMBERS} --train-samples 20 --split 1,0,0 --data-path {corpus('a')} --seq-length 40"
    single, cyclic = (build(f"{flags} --dataloader-type {kind}").loaders.train for kind in ("single", "cyclic"))
    count = len(single.dataset)
    in_order = torch.stack([torch.as_tensor(single.dataset[n][:-1]) for n in range(count)], 1)
    assert torch.equal(tokens_of(single, 20), in_order[:, :20])
    found = tokens_of(cyclic, 2 * count)
    for epoch in (0, 1):
        order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
        assert torch.equal(found[:, epoch * count : (epoch + 1) * count], in_order[:, order])
    with pytest.raises(DataError, match="or --dataloader-type cyclic"):
        tokens_of(single, 2 * count)


def test_workers_prepare_batches_in_threads(train, build):
    assert train("--num-workers 3", "ahead").losses == train("--num-workers 0", "here").losses
    run = build("--num-workers 3 --train-samples 40 --micro-batch-size 2")
    at_once = threading.Barrier(3)  # which only three threads at the same time get past
    waits = [run.loaders.train.pool.submit(at_once.wait, 60) for _ in range(3)]
    assert sorted(wait.result() for wait in waits) == [0, 1, 2]
    with pytest.raises(threading.BrokenBarrierError):  # four are not to be had
        more = threading.Barrier(4)
        for wait in [run.loaders.train.pool.submit(more.wait, 0.2) for _ in range(4)]:
            wait.result()
    assert build("--num-workers 0").loaders.train.pool is None


# ---- documents -------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(tmp_path):
    """Documents of 3 to 9 random numbers below 12 with 12, the end of document, behind each; two samples hold several."""
    random = np.random.default_rng(3)
    documents = [[*random.integers(0, 12, random.integers(3, 10)), 12] for _ in range(30)]
    np.concatenate(documents).astype(np.uint16).tofile(tmp_path / "s.bin")
    write_index(str(tmp_path / "s.idx"), np.uint16, np.array(list(map(len, documents)), np.int32), np.arange(31))
    return f"{NUMBERS} --vocab-size 12 --data-path {tmp_path / 's'} --split 1,0,0 --init-method-std 0.5"


def losses_alone(model, tokens, labels, restart):
    """Losses of a sample's tokens, each document run by itself: at positions from 0 (restart), or at its own ones."""
    ends = [at + 1 for at, token in enumerate(tokens.tolist()) if token == 12]
    found = []
    for start, stop in zip([0, *ends], [*ends, len(tokens)], strict=True):
        if start < stop:
            positions = torch.arange(stop - start).unsqueeze(1) + (0 if restart else start)
            logits = model.logits(tokens[start:stop, None], position_ids=positions)[:, 0]
            found.append(F.cross_entropy(logits, labels[start:stop], reduction="none"))
    return torch.cat(found)


@pytest.mark.parametrize("flags", ["--reset-attention-mask", "--reset-attention-mask --reset-position-ids"])
def test_documents_are_alone(flags, short, build):
    run = build(f"{short} {flags}")
    (model,), [micro] = run.stages, run.loaders.train.step(0, 1)
    assert (micro.tokens == 12).sum() > 2
    found = model.token_losses(None, micro)
    for n in range(2):
        want = losses_alone(model.eval(), micro.tokens[:, n], micro.labels[:, n], "position" in flags)
        torch.testing.assert_close(found[:, n], want, rtol=1e-4, atol=1e-5)


def test_positions_alone_start_again(short, build):
    [micro] = build(f"{short} --reset-position-ids").loaders.train.step(0, 1)
    assert micro.document_ids is None
    for n in range(2):
        position = 0
        for token, found in zip(micro.tokens[:, n].tolist(), micro.position_ids[:, n].tolist(), strict=True):
            assert found == position
            position = 0 if token == 12 else position + 1


def test_ends_of_documents_have_no_loss(short, build):
    run, plain = build(f"{short} --eod-mask-loss"), build(short)
    [micro] = run.loaders.train.step(0, 1)
    loss, count = run.stages[0](None, micro)[1].values()
    losses = plain.stages[0].token_losses(None, plain.loaders.train.step(0, 1)[0])
    counted = micro.tokens != 12
    assert count.item() == counted.sum() < counted.numel()
    torch.testing.assert_close(loss, losses[counted].sum(), rtol=1e-5, atol=1e-5)


# ---- vocabulary and seed ---------------------------------------------------------------------------------------------


def test_vocabulary_is_as_large_as_said(build):
    """Numbers need one token more, for the end of document; the table is padded to a multiple of 128."""
    run = build("--vocab-size 200")
    assert run.vocab_size == 201 and run.stages[0].embedding.word.weight.shape[0] == 256


def test_seed_decides_weights_data_and_dropout(build):
    def parts(flags):
        run = build(f"--hidden-dropout 0.5 {flags}")
        (model,), [micro] = run.stages, run.loaders.train.step(0, 1)
        x = torch.ones(16, 2, 32)
        return model.blocks["0"].mlp.up.weight.detach(), micro.tokens, model.embedding.dropout(x, torch.arange(2))

    one, again, other = parts("--seed 5"), parts("--seed 5"), parts("--seed 6")
    assert all(map(torch.equal, one, again)) and not any(map(torch.equal, one, other))


def test_a_vocabulary_and_its_merges_are_files(command, tmp_path):
    """Every byte is a token, and the only merge makes one of "ab"; the end of document is the vocabulary's own."""
    tokens = [*BYTE_TO_CHARACTER, "ab", "<|endoftext|>"]
    (tmp_path / "v.json").write_text(json.dumps({token: n for n, token in enumerate(tokens)}))
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\n")
    flags = f"--tokenizer-type GPT2BPETokenizer --vocab-file {tmp_path / 'v.json'} --merge-file {tmp_path / 'm.txt'}"
    tokenizer = build_tokenizer(parse_pretrain(command(flags)).tokenizer)
    assert tokenizer.encode("bab") == [tokens.index("b"), tokens.index("ab")]
    assert (tokenizer.eod, tokenizer.vocab_size) == (257, 258)


@pytest.mark.parametrize("pattern, ids", [("[ab]+", [256, 97]), (".", [97, 98, 97])])
def test_tiktoken_splits_by_its_pattern(pattern, ids, command, tmp_path):
    """Ranks are the bytes and "ab", which is one token only where the pattern leaves it in one piece."""
    ranks = [*(bytes([n]) for n in range(256)), b"ab"]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks)]
    (tmp_path / "r.tiktoken").write_bytes(b"".join(lines))
    words = command(f"--tokenizer-model {tmp_path / 'r.tiktoken'} --tiktoken-pattern {pattern}")
    tokenizer = build_tokenizer(parse_pretrain(words).tokenizer)
    assert tokenizer.encode("aba") == ids and tokenizer.name == "TikTokenizer"


def test_tokenizer_type_says_what_a_file_is(command, tmp_path):
    """The same file of ranks, by its name a tokenizer of Hugging Face, which it is not."""
    entries = [dict(rank=n, token_bytes=base64.b64encode(bytes([n])).decode(), token_str=None) for n in range(256)]
    (tmp_path / "ranks.json").write_text(json.dumps(entries))
    words = command(f"--tokenizer-model {tmp_path / 'ranks.json'} --vocab-size 2000")
    typed = parse_pretrain([*words, "--tokenizer-type", "TikTokenizer"]).tokenizer
    assert build_tokenizer(typed).encode("b") == [1000 + ord("b")]
    with pytest.raises(DataError):
        build_tokenizer(parse_pretrain(words).tokenizer)
