# SPDX-License-Identifier: Apache-2.0
"""Special tokens and sentinels of vocabularies, which masked models need."""

import io
import json

import pytest

from megatron.settings.schema import TokenizerSettings as Settings
from megatron.tokenizer import build_tokenizer

ALL = ("cls", "sep", "mask", "pad", "bos", "eos")


def special(tokenizer) -> dict:
    return {name: tokenizer.special(name) for name in ALL}


@pytest.fixture(scope="module")
def vocab_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "##ed", "the"]) + "\n")
    return str(path)


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertTokenizer"])
def test_sentinels_stand_behind_the_vocabulary(vocab_file, kind):
    ours = kind == "BertTokenizer"  # its file is the whole vocabulary; Megatron-LM's has [BOS] and [EOS] behind it
    plain = build_tokenizer(Settings(kind, vocab_file))
    more = build_tokenizer(Settings(kind, vocab_file, vocab_extra_ids=3))
    assert special(plain) == dict(cls=2, sep=3, mask=4, pad=0, bos=None if ours else 9, eos=None if ours else 10)
    assert plain.sentinels == [] and plain.vocab_size == (9 if ours else 11)
    assert more.vocab_size == (9 + 3 + 3 if ours else 11 + 3)
    assert more.sentinels == ([12, 13, 14] if ours else [11, 12, 13])
    assert special(more) == dict(cls=2, sep=3, mask=4, pad=0, bos=10 if ours else 9, eos=11 if ours else 10)
    assert more.eod == (9 if ours else 10)
    assert more.encode("playing the") == plain.encode("playing the") == [5, 6, 8]
    assert more.decode([5, 6, more.sentinels[1], 8]) == "playing <extra_id_1> the"
    assert more.fingerprint == plain.fingerprint  # the ids of text are the same
    assert more.inner().nonzero()[0].tolist() == [6, 7] and len(more.inner()) == more.vocab_size
    assert more.encode("<extra_id_1>") == plain.encode("<extra_id_1>")  # names inside of a text are text


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 20),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("piece") / "t.model"
    path.write_bytes(model.getvalue())
    return str(path)


def test_sentence_piece_gets_megatrons_ids(sentence_piece):
    plain = build_tokenizer(Settings("SentencePieceTokenizer", tokenizer_model=sentence_piece))
    size = plain.vocab_size
    assert special(plain) == dict(cls=None, sep=None, mask=None, pad=None, bos=1, eos=2)
    more = build_tokenizer(Settings("SentencePieceTokenizer", tokenizer_model=sentence_piece, vocab_extra_ids=4))
    # Megatron-LM: <CLS> <SEP> <EOD> <MASK>, then <PAD>, <BOS>, <EOS> where the model has none, then the sentinels.
    assert special(more) == dict(cls=size, sep=size + 1, mask=size + 3, pad=size + 4, bos=1, eos=2)
    assert more.sentinels == list(range(size + 5, size + 9)) and more.vocab_size == size + 9
    assert more.eod == plain.eod and more.encode("the fox") == plain.encode("the fox")


def test_a_tokenizer_json_says_its_own(tmp_path):
    from tokenizers import Tokenizer, models

    names = ["<pad>", "</s>", "<unk>", "a", *(f"<extra_id_{i}>" for i in (1, 0, 2)), "[BOS]", "begin"]
    model = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="<unk>"))
    model.add_special_tokens(names[4:7])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(bos_token=dict(content="begin"), eos_token="</s>")))
    own = build_tokenizer(Settings("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    assert own.sentinels == [5, 4, 6]  # by their numbers, wherever they stand
    assert special(own) == dict(cls=None, sep=None, mask=None, pad=0, bos=8, eos=1)
    more = build_tokenizer(Settings("HuggingFaceTokenizer", tokenizer_model=str(tmp_path), vocab_extra_ids=5))
    assert more.sentinels == [5, 4, 6, 12, 13] and more.special("cls") == 9


def test_numbers_have_sentinels_too():
    more = build_tokenizer(Settings("NullTokenizer", vocab_size=20, vocab_extra_ids=2))
    assert more.eod == 20 and more.vocab_size == 21 + 6 + 2 and more.sentinels == [27, 28]
    assert more.decode([3, 27, 4]) == "3 <extra_id_0> 4"
