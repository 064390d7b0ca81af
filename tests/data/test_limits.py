# SPDX-License-Identifier: Apache-2.0
"""Counts and lengths exactly at a limit, in what makes samples of files; and widths from which on another kernel runs."""

import json
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.data.bert_dataset import BertSamples
from megatron.data.contamination import cut
from megatron.data.index_maps import make_epoch_plan
from megatron.data.json_input import find_sources
from megatron.data.masked_settings import whole_weights
from megatron.data.sentence_samples import build_sentence_samples, kept_documents
from megatron.data.t5_dataset import T5Samples, _check_room
from megatron.data.tables import _spoilt
from megatron.errors import DataError, SettingsError
from megatron.fused_kernels import TABLE, VARLEN, Case
from megatron.inference.choices import RowState, probabilities
from megatron.inference.sampling import Sampling
from megatron.settings.kernel_sizes import causal_blocks
from megatron.tools.get_sample_data import hold_out, text_hash


@pytest.mark.parametrize("percent, count", [(25, 5), (20, 4), (50, 10)])
def test_documents_are_held_out_by_their_hashes_from_five_on(percent, count, tmp_path):
    """Those with the smallest hashes, as many as were asked for; of fewer, a part of each text."""
    texts = [f"Document {number}. It has a second sentence. And a third one." for number in range(20)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    paths = [str(tmp_path / name) for name in ("train.jsonl", "held.jsonl")]
    hold_out(find_sources([str(tmp_path / "all.jsonl")]), *paths, percent)
    held = [json.loads(line)["text"] for line in (tmp_path / "held.jsonl").read_text().splitlines()]
    whole = sorted(texts, key=text_hash)[:count]
    assert (sorted(held) == sorted(whole)) == (count >= 5)


def test_a_separate_last_epoch_from_four_fifths_on():
    """Megatron-LM's rule: it is shuffled alone where fewer than int(.8 x its samples) of it are needed. An epoch of 1,001
    tokens has 100 samples of 10.
    """
    lengths = np.full(1, 1001)
    plan = lambda samples: make_epoch_plan(range(1), lengths, 10, 1, samples)
    found = [(plan(samples).epochs, plan(samples).separate_last) for samples in (100, 101, 179, 180)]
    assert found == [(1, False), (2, True), (2, True), (2, False)]
    with pytest.raises(AssertionError, match="no tokens"):
        make_epoch_plan(range(1), np.zeros(1, np.int64), 10, 1)


def test_a_sentence_of_512_tokens_is_not_too_long():
    """Megatron-LM drops documents with a longer one."""
    documents, lengths = np.array([0, 2, 4, 5, 6]), np.array([512, 3, 513, 3, 513, 1])
    kept, dropped = kept_documents(documents, lengths, 1)
    assert kept.tolist() == [True, False, True, True] and tuple(dropped) == (0, 1, 0)
    kept, dropped = kept_documents(documents, lengths, 2)
    assert kept.tolist() == [True, False, False, False] and tuple(dropped) == (0, 1, 2)


def test_a_sample_has_two_tokens_at_least():
    documents, lengths = np.array([0, 2]), np.array([3, 3])
    arguments = dict(num_samples=1, longest=2, short_seq_prob=0.0, seed=1, least=1)
    assert len(build_sentence_samples(documents, lengths, **arguments))
    with pytest.raises(SettingsError, match="2 are the least"):
        build_sentence_samples(documents, lengths, **arguments | dict(longest=1))
    assert len(build_sentence_samples(documents, lengths, **arguments | dict(short_seq_prob=1.0)))
    with pytest.raises(SettingsError, match="from 0 to 1"):
        build_sentence_samples(documents, lengths, **arguments | dict(short_seq_prob=1.0000001))


def test_rows_that_are_spoilt_are_left_out_up_to_a_hundredth_and_one():
    spoilt = lambda count: _spoilt("a.tsv", [(number, 2) for number in range(count)], 300, 3)
    assert spoilt(0) == [] and "4 lines" in spoilt(4)[0]
    with pytest.raises(DataError, match="so it is with 5 of 300 lines"):
        spoilt(5)


def test_weights_come_round_after_a_hundred_thousand_samples():
    assert whole_weights([Fraction(99_999), Fraction(1)]) == [99_999, 1]
    with pytest.raises(SettingsError, match="100,001 samples"):
        whole_weights([Fraction(100_000), Fraction(1)])


@pytest.mark.parametrize("second", [None, 3])
def test_a_labelled_text_that_just_fits_is_whole(second):
    """T5: room for the text and an end after each part; BERT: beside [CLS] and two [SEP]."""
    pair = None if second is None else np.arange(second)
    t5 = SimpleNamespace(encoder=10, decoder=4, eos=1, _arrays=lambda read, label, cut: (len(read), cut))
    room = 9 if second is None else 8 - second
    assert T5Samples.labelled(t5, np.arange(room), pair, np.arange(2)) == (10, False)
    assert T5Samples.labelled(t5, np.arange(room + 1), pair, np.arange(2)) == (10, True)
    bert = SimpleNamespace(longest=7, cls=1, sep=2, kinds=2, seq_length=10)
    room = 7 - (second or 0)
    truncated = lambda length: int(BertSamples.labelled(bert, np.arange(length), pair, np.zeros(1))["truncated"])
    assert (truncated(room), truncated(room + 1)) == (0, 1)


def test_labels_leave_room_for_the_end():
    samples = SimpleNamespace(decoder=4)
    T5Samples.check_labels(samples, "a.tsv", {"good": np.arange(3)})
    with pytest.raises(DataError, match="has 4 tokens"):
        T5Samples.check_labels(samples, "a.tsv", {"good": np.arange(3), "long": np.arange(4)})


def test_a_decoder_that_just_has_room():
    """Of 6 masked words: 6 sentinels, and [BOS] with a sentinel and a token for each; spans of three take 1 + 6 + 2."""
    said = []
    _check_room("words", 6, 6, 13, 40, said.append)
    _check_room("ngrams", 6, 6, 9, 40, said.append)
    _check_room("words", 1, 1, 3, 40, said.append)
    assert said == []
    for sentinels, decoder in ((5, 13), (6, 12)):
        with pytest.raises(SettingsError, match="--vocab-extra-ids 6 --decoder-seq-length 13"):
            _check_room("words", 6, sentinels, decoder, 40, said.append)
    for sentinels, decoder in ((5, 9), (6, 8)):
        _check_room("ngrams", 6, sentinels, decoder, 40, said.append)
        assert said.pop().startswith("note: up to 6 tokens") and not said
    with pytest.raises(SettingsError, match="no room for a masked token"):
        _check_room("ngrams", 1, 1, 2, 40, said.append)


def test_a_text_of_ten_pieces_is_kept_and_of_eleven_dropped():
    """Megatron-LM's filter_ngrams: --splits_count 10; and pieces of more than 200 characters."""
    sentence = "x" * 299 + "."

    def pieces(count, **more):
        text = "BAD.".join([sentence] * count)
        spans = [(at, at + 3) for at in range(len(text)) if text.startswith("BAD", at)]
        return cut(text, spans, side=0, **more)

    assert [len(pieces(count)) for count in (1, 9, 10, 11)] == [1, 9, 10, 0]
    assert len(pieces(3, most_pieces=3)) == 3 and pieces(3, most_pieces=2) == []
    lengths = {len("BAD.".join([sentence] * 3)[start:end]) for start, end in pieces(3, least=299)}
    assert lengths == {300} and pieces(3, least=300) == []


# ---- kernels ---------------------------------------------------------------------------------------------------------


def covers(name: str, **case) -> bool:
    [kernel] = [one for one in TABLE["attention"] if one.name == name]
    plain = dict(queries=case.get("keys", 64), keys=64, causal=name != "block-full")
    return bool(kernel.suits(Case("cpu", torch.float32, **plain | case)))


def test_explicit_attention_is_for_up_to_4096_keys():
    """Of a window those that a query reaches; with dropout for any."""
    for name in ("block-causal", "block-full"):
        assert covers(name, keys=4096) and not covers(name, keys=4097)
        assert covers(name, keys=4097, dropout=True)
    assert covers("block-causal", keys=9999, window=4000)


def test_kernels_of_blocks_leave_one_new_token_to_the_reference():
    assert covers("block-causal", keys=64, queries=2) and not covers("block-causal", keys=64, queries=1)


def test_flash_attention_of_documents_is_for_heads_of_up_to_256():
    [kernel] = [one for one in TABLE["attention"] if one.name == VARLEN]
    case = lambda width: Case("cuda", torch.bfloat16, 64, 64, causal=True, documents=True, head_dim=width)
    assert kernel.suits(case(256)) and not kernel.suits(case(257))


def test_blocks_of_causal_attention_are_wider_from_513_positions_on():
    assert causal_blocks(512, 1)[:2] == [(0, 128), (128, 256)] and causal_blocks(513, 1)[:2] == [(0, 256), (256, 512)]
    assert causal_blocks(512, 4)[0] == (0, 32) and causal_blocks(512, 999)[0] == (0, 1)


def test_a_nucleus_of_everything_is_everything():
    """Also of tokens so unlikely that those before them round to 1; and 0 stands for no nucleus."""
    left = lambda logits, **how: probabilities(logits, [RowState(Sampling(**how))])[0] > 0
    logits = torch.tensor([[20.0, 0.0, -20.0, -40.0]])
    for top_p in (0.0, 1.0):
        assert left(logits, top_p=top_p).all()
    half = torch.tensor([[0.0, 0.0, float("-inf")]])  # the first token reaches one half: nothing follows
    assert left(half, top_p=0.5).tolist() == [True, False, False]
    assert left(logits, top_k=4).all() and left(logits, top_k=3).sum() == 3
    assert left(torch.zeros(1, 4), top_k=2).all()  # as likely as the last one that is kept
