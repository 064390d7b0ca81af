# SPDX-License-Identifier: Apache-2.0
"""Samples of BERT and T5: equal to Megatron-LM's, recorded in megatron_masked.jsonl from megatron-core 0.16.1, and to plain
loops over sentences and words."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import bert_dataset, t5_dataset
from megatron.data.indexed import write_index
from megatron.data.masked_settings import MASKED_RULES, MaskedSettings
from megatron.data.masking import Masking, Replacement
from megatron.data.sentence_samples import build_sentence_samples, kept_documents, mt19937, mt19937_64
from megatron.errors import DataError, SettingsError
from megatron.settings.general_rules import violations
from megatron.settings.parse import parse_pretrain
from megatron.tokenizer import build_tokenizer
from tests.data import masked_corpus as corpus

RECORDED = [json.loads(line) for line in Path(__file__).with_name("megatron_masked.jsonl").read_text().splitlines()]
SENTINELS = corpus.SENTINELS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The corpus, and its vocabulary as vocab.txt."""
    place = tmp_path_factory.mktemp("masked")
    corpus.write_sentences(place / "corpus")
    (place / "vocab.txt").write_text("\n".join(corpus.TOKENS) + "\n")
    return place


def config_of(folder, *flags, name="corpus", seq=64, seed=1234, extra_ids=SENTINELS):
    words = f"""--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length {seq} --train-iters 1
        --micro-batch-size 1 --lr 1e-3 --seed {seed} --tokenizer-type BertWordPieceCase --vocab-file {folder}/vocab.txt
        --vocab-extra-ids {extra_ids} --split 80,20,0""".split()
    data = [] if "--mock-data" in flags else ["--data-path", f"{folder}/{name}"]
    return parse_pretrain([*words, *data, *flags], {"masked": MaskedSettings})


def datasets(config, kind: str, sizes=(40, 5, 0), log=lambda line: None, decoder=64):
    tokenizer = build_tokenizer(config.tokenizer)
    if kind == "t5":
        return t5_dataset.build_datasets(
            config, tokenizer, tokenizer.vocab_size, sizes, log, decoder_seq_length=decoder
        )
    binary = kind == "bert"
    return bert_dataset.build_datasets(config, tokenizer, tokenizer.vocab_size, sizes, log, binary_head=binary)


# The streams of random numbers, and the order of samples --------------------------------------------------------------


def test_random_numbers_are_those_of_the_c_plus_plus_standard():
    assert int(mt19937_64(5489, 10000)[-1]) == 9981545732273789042  # [rand.predef], both
    assert int(next(mt19937(5489, 10000))[-1]) == 4123659995


@pytest.mark.parametrize("line", RECORDED, ids=lambda line: "-".join(map(str, line["case"].values())))
def test_samples_are_megatrons(line, folder):
    case, expected = line["case"], line["expected"]
    flags = "--mask-prob", str(case["prob"]), "--short-seq-prob", str(case["short"])
    config = config_of(folder, *flags, seq=case["seq"], seed=case["seed"])
    train, _, _ = datasets(config, case["kind"], (case["size"], 5, 0))
    assert len(train) == expected["length"]
    assert corpus.digest(train.sample_index) == expected["index"]
    samples = {place: corpus.sample_digest(train[int(place)]) for place in expected["samples"]}
    assert samples == expected["samples"]


def plain_samples(bounds, lengths, epochs, longest, least, targets):
    """The walk over sentences as one says it, without the shuffle."""
    rows = []
    for _ in range(epochs):
        for first, last in pairwise(bounds):
            sizes = lengths[first:last]
            if last - first < least or last == first or (last - first > 1 and max(sizes) > 512):
                continue
            start, tokens, target = first, 0, next(targets)
            for sentence in range(first, last):
                tokens += lengths[sentence]
                left = last - sentence - 1
                full = tokens >= target and left > 1 and sentence - start + 1 >= least
                if full or left == 0:
                    rows.append((start, sentence + 1, target))
                    start, tokens, target = sentence + 1, 0, next(targets)
    return rows


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 30) | st.just(600), max_size=9), min_size=1, max_size=12),
    st.sampled_from((1, 2)),
    st.sampled_from((0.0, 0.1, 0.15, 0.5, 1.0)),
    st.integers(1, 40),
)
def test_the_walk_is_the_plain_one(documents, least, short, count):
    lengths = np.array([length for document in documents for length in document], np.int32)
    bounds = np.cumsum([0, *map(len, documents)])
    options = dict(longest=40, least=least, short_seq_prob=short, seed=3)
    found = build_sentence_samples(bounds, lengths, count, **options).tolist()

    every = round(1 / short) if short else 0
    per_epoch = len(plain_samples(bounds.tolist(), lengths.tolist(), 1, 40, least, iter([9] * 10**4)))
    expected = []
    if per_epoch:
        for epochs in range(1, count + 1):
            numbers = iter(np.random.RandomState(3).randint(0, 2**32, 20000, np.uint32).tolist())
            targets = (40 if not every or (x := next(numbers)) % every else 2 + x % 39 for _ in range(10**6))
            expected = plain_samples(bounds.tolist(), lengths.tolist(), epochs, 40, least, targets)
            if len(expected) >= count:
                break
    assert sorted(map(tuple, found)) == sorted(expected)


def test_dropped_documents_are_counted_by_rule_and_told(folder):
    lengths, bounds = corpus.sentences()
    counts = np.diff(bounds)
    empty = int((counts == 0).sum())
    long = sum(b - a > 1 and max(lengths[a:b]) > 512 for a, b in pairwise(bounds.tolist()))
    single = int((counts == 1).sum())
    assert kept_documents(bounds, lengths, 2)[1] == (empty, long, single)
    assert kept_documents(bounds, lengths, 1)[1] == (empty, long, 0)
    told = []
    datasets(config_of(folder, "--split", "1,0,0"), "bert", (10, 0, 0), told.append)
    line = next(line for line in told if "dropped" in line)
    assert (
        f"{empty + long + single} of 120 documents are dropped: {empty} without a sentence, {long} of several" in line
    )
    assert f"more than 512 tokens, {single} with fewer than 2 sentences" in line


# What a sample is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_many_passes_over_the_text_are_told(folder, kind):
    """The note comes with the fifth pass, and for training alone. Without short samples all passes are equal."""
    config = config_of(folder, "--short-seq-prob", "0")
    one = len(datasets(config, kind, sizes=(1, 1, 0))[0])
    for count, told in ((4 * one, []), (4 * one + 1, [4]), (6 * one, [5])):
        lines = []
        datasets(config, kind, sizes=(count, 500, 0), log=lines.append)
        notes = [line for line in lines if "times: beyond 4 passes" in line]
        assert len(notes) == len(told)
        assert all(
            f"reads corpus-train more than {passes} times" in note for passes, note in zip(told, notes, strict=True)
        )


def text_of(dataset, place: int) -> list[int]:
    """The tokens of a sample's sentences, read from the file by its own loop."""
    first, last, target = dataset.sample_index[place].tolist()
    return np.concatenate([dataset.tokens.get(i) for i in range(first, last)]).tolist(), target


def test_t5_gives_back_the_text_where_sentinels_stand(folder):
    train, _, _ = datasets(config_of(folder), "t5")
    sentinels = range(corpus.WORDS + 2, corpus.WORDS + 2 + SENTINELS)
    for place in range(40):
        sample, (text, target) = train[place], text_of(train, place)
        read = sample["text_enc"][sample["enc_mask"] > 0].tolist()
        entered = sample["text_dec"][sample["dec_mask"] > 0].tolist()
        written = sample["labels"][sample["loss_mask"] > 0].tolist()
        assert entered[0] == corpus.WORDS and written[-1] == corpus.WORDS + 1 and entered[1:] == written[:-1]
        used = [token for token in read if token in sentinels]
        assert used == list(sentinels[: len(used)]) == [token for token in written if token in sentinels]
        answers = {}
        for token in written[:-1]:
            if token in sentinels:
                last = answers.setdefault(token, [])
            else:
                last.append(token)
        whole = [piece for token in read for piece in (answers[token] if token in answers else [token])]
        assert whole == text[:target]
        assert sample["truncated"] == (len(text) > target)


def test_bert_gives_back_the_text_where_labels_stand(folder):
    train, _, _ = datasets(config_of(folder), "bert")
    exchanged = 0
    for place in range(40):
        sample, (text, target) = train[place], text_of(train, place)
        tokens = np.where(sample["loss_mask"] > 0, sample["labels"], sample["text"])[sample["padding_mask"] > 0]
        first_sep = tokens.tolist().index(3)
        assert tokens[0] == 2 and tokens[-1] == 3 and (tokens == 3).sum() == 2
        assert sample["types"][sample["padding_mask"] > 0].tolist() == [0] * (first_sep + 1) + [1] * (
            len(tokens) - first_sep - 1
        )
        pieces = [tokens[1:first_sep].tolist(), tokens[first_sep + 1 : -1].tolist()]
        if sample["is_random"]:
            exchanged += 1
            pieces.reverse()
        if not sample["truncated"]:
            assert pieces[0] + pieces[1] == text
        else:
            assert len(tokens) == target + 3 and len(text) > target
            joined = " ".join(map(str, text))
            assert all(" ".join(map(str, piece)) in joined for piece in pieces)
    assert 8 < exchanged < 32


VOCAB = 1000


def masking(**options) -> Masking:
    inner = np.arange(VOCAB) % 3 == 0
    return Masking(**dict(dict(prob=0.15, spans="ngrams", max_ngram=3, inner=inner), **options))


def masked_words(spans, tokens, inner):
    """(words of each span, whether spans are whole words) by a plain loop."""
    sizes = []
    for span in spans:
        assert not inner[tokens[span.positions[0]]] or span.positions[0] == 0
        after = span.positions[-1] + 1
        assert after == len(tokens) or not inner[tokens[after]]
        assert span.positions == list(range(span.positions[0], after))
        sizes.append(sum(not inner[tokens[position]] or position == 0 for position in span.positions))
    return sizes


@pytest.mark.parametrize(
    "options",
    [dict(), dict(spans="geometric", max_ngram=10), dict(spans="words", max_ngram=1), dict(prob=0.4, max_ngram=2)],
    ids=str,
)
def test_masked_spans_are_whole_words_in_their_shares(options):
    chosen, state = masking(**options), np.random.RandomState(1)
    masked = total = words = 0
    sizes = []
    for place in range(150):
        tokens = state.randint(1, VOCAB, 500)
        tokens[0] = 1
        spans, _ = chosen.choose(tokens, 500, np.random.RandomState(place))
        positions = [position for span in spans for position in span.positions]
        assert len(set(positions)) == len(positions) and positions == sorted(positions)
        assert [span.tokens for span in spans] == [tokens[span.positions].tolist() for span in spans]
        sizes += masked_words(spans, tokens, chosen.inner)
        masked, total, words = masked + len(positions), total + 500, words + len(chosen.words(tokens))
    if chosen.spans == "words":
        assert set(sizes) == {1} and abs(len(sizes) / words - 0.15) < 0.002
        return
    assert masked / total == pytest.approx(chosen.prob, abs=0.002)  # it stops short of a span that is too long
    assert max(sizes) == chosen.max_ngram
    shares = np.bincount(sizes, minlength=chosen.max_ngram + 1)[1:] / len(sizes)
    drawn = 1 / np.arange(1, chosen.max_ngram + 1)
    if chosen.spans == "geometric":
        drawn = 0.2 * 0.8 ** np.arange(chosen.max_ngram)
        drawn[-1] = 1 - drawn[:-1].sum()
    # Longer spans meet masked words more often and are given up: they are some fewer than drawn.
    assert shares[0] >= drawn[0] / drawn.sum() - 0.02
    assert np.allclose(shares, drawn / drawn.sum(), atol=0.06)


def test_what_bert_reads_is_the_mask_a_random_token_or_the_same():
    state, tokens = np.random.RandomState(0), 7
    read = np.array([Replacement("80/10/10", 4, VOCAB)(tokens, state) for _ in range(20000)])
    assert (read == 4).mean() == pytest.approx(0.8, abs=0.01)
    assert (read == 7).mean() == pytest.approx(0.1, abs=0.01)
    others = read[(read != 4) & (read != 7)]
    assert others.min() < 10 and others.max() > VOCAB - 10 and np.bincount(others).max() < 15
    assert {Replacement("all-mask", 4, VOCAB)(7, state) for _ in range(100)} == {4}


def test_single_words_are_masked_each_by_its_own_sentinel(folder):
    config = config_of(folder, "--mask-spans", "words")
    train, _, _ = datasets(config, "t5")
    inner = np.array([token.startswith("##") for token in corpus.TOKENS])
    for place in range(30):
        text, target = text_of(train, place)
        text = text[:target]
        words = sum(position == 0 or not inner[token] for position, token in enumerate(text))
        sentinels = int((train[place]["text_enc"] >= corpus.WORDS + 2).sum())
        assert sentinels == max(1, round(0.15 * words))


# Splits, blends, caches -----------------------------------------------------------------------------------------------


def test_samples_depend_on_seed_and_place_alone(folder):
    config = config_of(folder)
    train, valid, test = datasets(config, "bert", (40, 500, 0))
    again = datasets(config, "bert", (40, 500, 0))[0]
    for place in (3, 17, 3, 0):
        one, two = train[place], again[place]
        assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)
    assert test is None and len(valid) >= 500
    other = datasets(config_of(folder, seed=5), "bert")[0]
    assert any(not np.array_equal(train[i]["text"], other[i]["text"]) for i in range(5))
    _, bounds = corpus.sentences()
    assert valid.sample_index[:, 0].min() >= bounds[96] > train.sample_index[:, 1].max() - 1


def test_blends_mix_files_of_sentences(folder):
    corpus.write_sentences(folder / "other")
    config = config_of(folder, "--data-path", "3", f"{folder}/corpus", "1", f"{folder}/other")
    train = datasets(config, "t5", (80, 0, 0))[0]
    prefixes = [train.origin(place).prefix for place in range(80)]
    assert prefixes.count(f"{folder}/corpus") == 60 and prefixes.count(f"{folder}/other") == 20
    assert train[79]["text_enc"].shape == (64,)


def test_made_up_samples_need_no_files(folder):
    config = config_of(folder, "--mock-data")
    for kind, names in (("t5", ("text_enc", "text_dec")), ("bert", ("text", "types"))):
        train, valid, test = datasets(config, kind, (20, 10, 0))
        assert len(train) == 20 and len(valid) == 10 and test is None
        one, two = train[4], datasets(config, kind, (50, 10, 0))[0][4]
        assert all(np.array_equal(one[name], two[name]) for name in names)
        assert not np.array_equal(one[names[0]], valid[4][names[0]])
    bare = bert_dataset.build_datasets(config, None, 512, (3, 0, 0))[0]
    assert bare[2]["text"][0] == 509 and bare[2]["text"].max() < 512
    assert t5_dataset.build_datasets(config, None, 512, (3, 0, 0), decoder_seq_length=64)[0][2]["text_enc"].max() < 512


# Mistakes -------------------------------------------------------------------------------------------------------------


def test_files_without_sentences_are_told(folder):
    lengths = np.full(50, 300, np.int32)
    write_index(folder / "whole.idx", np.uint16, lengths, np.arange(51))
    np.full(300 * 50, 9, np.uint16).tofile(folder / "whole.bin")
    with pytest.raises(DataError, match="(?s)not split into sentences.*--split-sentences.*--bert-no-binary-head"):
        datasets(config_of(folder, name="whole"), "bert")
    told = []
    datasets(config_of(folder, name="whole"), "t5", (40, 0, 0), told.append)
    assert any("79.3% of the text of whole-train is cut off" in line and "--split-sentences" in line for line in told)


def test_parts_without_a_sample_are_told_with_a_split_that_has_some(folder):
    lengths = np.array([5, 6, 7, 8, 9, 4, 600, 9], np.int32)  # four documents of two sentences, the last of a long one
    write_index(folder / "few.idx", np.uint16, lengths, np.arange(0, 9, 2))
    np.full(lengths.sum(), 9, np.uint16).tofile(folder / "few.bin")
    told = []
    flags = "--split", "50,25,25"
    train, valid, test = datasets(config_of(folder, *flags, name="few"), "bert", (9, 9, 9), told.append)
    assert len(train) >= 9 and len(valid) == 9 and test is None
    assert any("there is no evaluation on test data" in line for line in told)
    with pytest.raises(
        DataError, match="(?s)leaves nothing for valid.*without a sample.*--split 2,2,0 gives each its part"
    ):
        datasets(config_of(folder, "--split", "75,25,0", name="few"), "bert", (9, 9, 0))


def test_special_tokens_that_are_lacking_are_named(folder):
    with pytest.raises(SettingsError, match=r"(?s)no sentinels <extra_id_0>.*--vocab-extra-ids 100"):
        datasets(config_of(folder, extra_ids=0), "t5")
    (folder / "bare.txt").write_text("[UNK]\nw1\n##w2\n")
    config = config_of(folder, "--vocab-file", f"{folder}/bare.txt", extra_ids=0)
    with pytest.raises(SettingsError, match=r"(?s)no \[CLS\], no \[SEP\], no \[MASK\].*BertWordPieceLowerCase"):
        datasets(config, "bert")
    with pytest.raises(SettingsError, match="need a tokenizer"):
        bert_dataset.build_datasets(config, None, 512, (3, 0, 0))


def test_room_for_spans(folder):
    with pytest.raises(SettingsError, match="--vocab-extra-ids 19 --decoder-seq-length 39"):
        datasets(config_of(folder, "--mask-spans", "words", seq=128), "t5", decoder=30)
    told = []
    config = config_of(folder, "--mask-prob", "0.5", seq=128, extra_ids=4)
    train = datasets(config, "t5", log=told.append)[0]
    assert any("stay unmasked" in line for line in told)
    for place in range(20):
        sample = train[place]
        assert (sample["text_enc"] >= corpus.WORDS + 2).sum() <= 4
        assert sample["dec_mask"].sum() == sample["loss_mask"].sum() <= 64
    config = config_of(folder, "--mask-prob", "0.5", seq=128)
    short, long = (datasets(config, "t5", decoder=size)[0] for size in (20, 200))
    for place in range(20):
        written, whole = (one[place]["labels"][one[place]["loss_mask"] > 0].tolist() for one in (short, long))
        assert len(written) <= 20 and written[:-1] == whole[: len(written) - 1]
        # What is left out begins with a sentinel
        assert written == whole or whole[len(written) - 1] >= corpus.WORDS + 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--mask-prob 0", "--mask-prob 0.0 must be above 0 and below 1"),
        ("--mask-prob 15", "--mask-prob 15.0 must be"),
        ("--short-seq-prob -0.1", "--short-seq-prob -0.1 must be from 0 to 1"),
        ("--mask-max-ngram 0", "--mask-max-ngram 0 must be at least 1"),
        ("--mask-spans words --mask-max-ngram 3", "leave one of the two out"),
        ("--seq-length 4", "--seq-length 4 is too short for a masked sample"),
        ("--dataset-type webtext", "--dataset-type webtext is of models that predict the next token"),
        ("--train-epochs 3", "--train-epochs 3: an epoch of masked samples has no number"),
        ("--vocab-extra-ids -1", "--vocab-extra-ids -1 must be at least 0"),
    ],
)
def test_settings_that_cannot_work(folder, flags, words):
    found, _ = violations(config_of(folder, *flags.split()), 1, MASKED_RULES)
    assert any(words in line for line in found), found
    assert not violations(config_of(folder), 1, MASKED_RULES)[0]
