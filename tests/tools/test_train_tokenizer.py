# SPDX-License-Identifier: Apache-2.0
"""A vocabulary trained here is a GPT-2 vocabulary to everybody who reads it."""

import json
import random

import pytest
from tokenizers import BertWordPieceTokenizer

from megatron.errors import DataError, SettingsError
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer import build_tokenizer
from megatron.tools import train_tokenizer

TEXTS = ["the cat sat on the mat", "the hat is on the cat \u4f60\u597d", 'a "quoted" line\nand another, the cat'] * 20


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": t, "other": "zzzz"}) + "\n" for t in TEXTS))
    return path


def train(corpus, output, *more) -> dict[str, int]:
    train_tokenizer.main(["--input", str(corpus), "--output", str(output), *more])
    return json.loads((output / "vocab.json").read_text(encoding="utf-8"))


def test_layout_of_ids_is_gpt2s(corpus, tmp_path):
    vocab = train(corpus, tmp_path / "v", "--vocab-size", "300")
    merges = (tmp_path / "v" / "merges.txt").read_text(encoding="utf-8").splitlines()
    assert merges[0].startswith("#version")
    assert sorted(vocab.values()) == list(range(len(vocab)))
    assert vocab["<|endoftext|>"] == len(vocab) - 1 and vocab["!"] == 0
    assert len(vocab) == 256 + len(merges) - 1 + 1 <= 300
    assert [vocab[m.replace(" ", "")] for m in merges[1:]] == list(range(256, len(vocab) - 1))
    assert "\u0120the" in vocab


def test_the_tokenizer_reads_what_was_trained(corpus, tmp_path):
    train(corpus, tmp_path / "v", "--vocab-size", "300")
    tokenizer = build_tokenizer(
        TokenizerSettings(vocab_file=str(tmp_path / "v/vocab.json"), merge_file=str(tmp_path / "v/merges.txt"))
    )
    text = TEXTS[1] + " <|endoftext|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and tokenizer.eod not in ids
    assert len(ids) < len(text.encode())


def test_the_same_files_every_time(corpus, tmp_path):
    for name in "ab":
        train(corpus, tmp_path / name, "--vocab-size", "290")
    for file in ("vocab.json", "merges.txt"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_unigrams_are_sentencepieces(tmp_path, capsys):
    """The library reads the file; words of Chinese, which has no spaces, are pieces; special tokens are no text."""
    processor = pytest.importorskip("sentencepiece").SentencePieceProcessor
    words = ["\u6211\u4eec", "\u559c\u6b22", "\u65b0\u95fb", "\u8d22\u7ecf", "\u6559\u80b2", "\u7684"]
    texts = ["".join(random.Random(at).choices(words, k=9)) for at in range(60)] + ["the cat sat"] * 9
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for folder in "ab":
        flags = ["--input", str(path), "--kind", "unigram", "--vocab-size", "45", "--output", str(tmp_path / folder)]
        train_tokenizer.main([*flags, "--max-piece-length", "4"])
    model = tmp_path / "a" / "tokenizer.model"
    assert model.read_bytes() == (tmp_path / "b" / "tokenizer.model").read_bytes()
    theirs = processor(model_file=str(model))
    ours = build_tokenizer(TokenizerSettings(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(model)))
    assert ours.vocab_size == theirs.GetPieceSize() <= 45 and f"{ours.vocab_size} tokens" in capsys.readouterr().out
    assert [theirs.IdToPiece(id) for id in range(7)] == ["<pad>", "</s>", "<unk>", "<s>", "[CLS]", "[SEP]", "[MASK]"]
    assert [ours.special(name) for name in ("pad", "eos", "bos", "cls", "sep", "mask")] == [0, 1, 3, 4, 5, 6]
    text = "\u6211\u4eec\u559c\u6b22\u8d22\u7ecf\u65b0\u95fb"
    pieces = theirs.EncodeAsPieces(text)
    assert pieces == [theirs.IdToPiece(id) for id in ours.encode(text)] and text[:2] in pieces
    assert len(pieces) < len(text) and max(map(len, pieces)) <= 4
    assert ours.decode(ours.encode(text)) == text and max(ours.encode("[MASK] text")) < ours.vocab_size
    assert 6 not in ours.encode("[MASK] text")


def test_spaces_apart_words_are_the_same_pieces_everywhere(tmp_path):
    processor = pytest.importorskip("sentencepiece").SentencePieceProcessor
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["news of", "of news", "snews, news"] * 30))
    flags = ["--input", str(path), "--kind", "unigram", "--vocab-size", "40", "--output", str(tmp_path)]
    for apart in ([], ["--spaces-apart"]):
        train_tokenizer.main([*flags, *apart])
        model = processor(model_file=str(tmp_path / "tokenizer.model"))
        begun = [piece for piece in map(model.IdToPiece, range(len(model))) if piece[0] == "\u2581" and len(piece) > 1]
        assert bool(begun) == (not apart)
        if apart:
            assert model.EncodeAsIds("news")[-1] == model.EncodeAsIds("of news")[-1]
            assert model.DecodeIds(model.EncodeAsIds("of news")) == "of news"


def test_files_that_are_replaced_are_named(corpus, tmp_path, capsys):
    (tmp_path / "vocab.txt").touch()  # of another kind
    train(corpus, tmp_path, "--vocab-size", "300")
    assert "replaces" not in capsys.readouterr().out
    train(corpus, tmp_path, "--vocab-size", "300")
    assert f"note: replaced {tmp_path}/vocab.json and {tmp_path}/merges.txt\n" in capsys.readouterr().out


def test_unigrams_that_cannot_be(corpus, tmp_path, capsys):
    pytest.importorskip("sentencepiece")
    (tmp_path / "bad.jsonl").write_text('{"text": "a b c"}\n{"body": 1}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n')
    wrong = {
        f"{corpus} --vocab-size 9": (SettingsError, "--vocab-size 9"),
        f"{corpus} --max-piece-length 0": (SettingsError, "from 1 to 512"),
        f"{corpus} --character-coverage 0.5": (SettingsError, "from 0.98 to 1"),
        f"{tmp_path}/bad.jsonl": (DataError, "bad.jsonl, line 2: no key 'text'"),
        f"{tmp_path}/empty.jsonl": (DataError, "there is no text in"),
    }
    for words, (error, told) in wrong.items():
        with pytest.raises(error, match=told):
            train_tokenizer.main(["--kind", "unigram", "--output", str(tmp_path / "v"), "--input", *words.split()])
    assert not (tmp_path / "v").exists()
    train_tokenizer.main(["--input", str(corpus), "--output", str(tmp_path), "--vocab-size", "300", "--spaces-apart"])
    assert "warning: --spaces-apart has no effect with --kind byte-level\n" in capsys.readouterr().out
    words = ["--vocab-size", "300", "--max-piece-length", "16"]  # the default
    train_tokenizer.main(["--input", str(corpus), "--output", str(tmp_path), *words])
    assert "warning: --max-piece-length has no effect with --kind byte-level\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind, name", [("word-piece", "LowerCase"), ("word-piece-cased", "Case")])
def test_word_pieces_are_what_bert_reads(kind, name, tmp_path, capsys):
    """The library itself numbers pairs of equal frequency by chance; here the file is the same each time."""
    words = [f"{a}{b}{c}" for a in "abcdefghij" for b in "klmnop" for c in "qrst"]
    texts = ["The Cat s\u00e1t, unaffable; " + " ".join(words[at::7]) + " \u4f60\u597d" for at in range(7)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 3))
    files = []
    for folder in "abc":
        flags = ["--input", str(path), "--kind", kind, "--vocab-size", "150", "--output", str(tmp_path / folder)]
        train_tokenizer.main(flags)
        files.append((tmp_path / folder / "vocab.txt").read_text(encoding="utf-8"))
    assert len(set(files)) == 1
    tokens = files[0].splitlines()
    assert tokens[:5] == list(train_tokenizer.SPECIAL) and len(tokens) == len(set(tokens)) == 150
    assert ("T" in tokens) == (kind == "word-piece-cased") and "##\u597d" not in tokens and "\u597d" in tokens
    ours = build_tokenizer(
        TokenizerSettings(tokenizer_type=f"BertWordPiece{name}", vocab_file=str(tmp_path / "a/vocab.txt"))
    )
    theirs = BertWordPieceTokenizer(str(tmp_path / "a/vocab.txt"), lowercase=kind == "word-piece")
    for text in texts:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
    with pytest.raises(SettingsError, match="no room for pieces"):
        train_tokenizer.main([*flags[:5], "8", *flags[6:]])


def test_a_small_corpus_gives_a_smaller_vocabulary_and_says_so(corpus, tmp_path, capsys):
    vocab = train(corpus, tmp_path / "v", "--vocab-size", "5000")
    assert len(vocab) < 5000
    assert "--vocab-size 5000 was not reached" in capsys.readouterr().out


def test_other_keys(corpus, tmp_path):
    assert "zzzz" in train(corpus, tmp_path / "v", "--json-keys", "other", "--vocab-size", "260")


@pytest.mark.parametrize(
    "line, words", [("{not json}", "line 2: not JSON"), ('{"body": "x"}', "no key 'text'"), ('{"text": 3}', "a number")]
)
def test_bad_lines_are_named(tmp_path, line, words):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "good"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=words):
        train(path, tmp_path / "v")
    assert not (tmp_path / "v").exists()


def test_mistakes(corpus, tmp_path):
    with pytest.raises(DataError, match="no such file"):
        train(tmp_path / "missing.jsonl", tmp_path)
    with pytest.raises(SettingsError, match="--vocab-size 100 is too small"):
        train(corpus, tmp_path, "--vocab-size", "100")
