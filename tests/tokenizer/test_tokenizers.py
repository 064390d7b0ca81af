# SPDX-License-Identifier: Apache-2.0
"""All kinds of tokenizers: equal ids from every library, special names as text, and vocabularies that are none."""

import base64
import importlib.util
import io
import json

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.preprocess_encode import BlockEncoder
from megatron.errors import DataError, SettingsError
from megatron.settings.schema import TokenizerSettings as Settings
from megatron.tokenizer import build_tokenizer, engines, padded_vocab_size
from megatron.tokenizer.base import PROBES, Tokenizer
from megatron.tokenizer.byte_level import BYTE_TO_CHARACTER, parse_merges, ranks

CORPUS = ["the quick brown fox jumps over the lazy dog, isn't it? " * 3, *PROBES, "def f(x):\n    return x + 1\n" * 5]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """Trained by `tokenizers`: its ids do not follow the order of GPT-2's bytes."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("bpe")
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(CORPUS, vocab_size=340, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save_model(str(folder))
    model.save(str(folder / "tokenizer.json"))
    return folder


def gpt2(folder) -> Settings:
    return Settings("GPT2BPETokenizer", str(folder / "vocab.json"), str(folder / "merges.txt"))


@pytest.fixture(scope="module")
def byte_level(bpe):
    return build_tokenizer(gpt2(bpe))


def every_engine(tokenizer) -> dict:
    names = [name for name in tokenizer._engines if name != "gigatoken" or importlib.util.find_spec("gigatoken")]
    return {name: tokenizer._engines[name]() for name in names}


@pytest.fixture(scope="module")
def all_engines(byte_level):
    return every_engine(byte_level)


# Characters on which libraries disagree are likelier than others.
TRICKY = (
    " \n\t\r'stdmrevl\u00a0\u3000\u2028\x85\x1c\u200b\u0301\u0661\u00b2\u0c5c\ua7ce\U000323b0\U0001f468\u200d\ufe0f"
)
TEXTS = st.text(st.one_of(st.sampled_from(TRICKY), st.characters(exclude_categories=["Cs"])), max_size=60)


@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_all_libraries_give_the_same_ids(all_engines, byte_level, text):
    expected = all_engines["tokenizers"](text)
    assert {name: list(encode(text)) for name, encode in all_engines.items()} == dict.fromkeys(all_engines, expected)
    assert byte_level.decode(expected) == text


def test_text_that_the_fast_library_gives_up_on():
    PanicException = type("PanicException", (BaseException,), {})

    def fast(text):
        raise PanicException

    encode = engines.guarded(fast, lambda: lambda text: [1, 2])
    assert encode("hard") == encode("\U000323b0") == [1, 2]


def test_only_pieces_with_new_letters_go_to_the_reference(byte_level, all_engines):
    """A letter of Unicode 17 in a long text: the same ids as of the whole, and one piece of it for the slow library."""
    text, seen = "so it goes, " * 300 + "\U000323b0 " + "and so on " * 300, []

    def reference():
        return lambda text: seen.append(text) or all_engines["tokenizers"](text)

    encode = engines.guarded(all_engines["tokenizers"], reference, may_cut=True)
    assert np.array_equal(encode(text), all_engines["tokenizers"](text))
    assert len(seen) == 1 and "\U000323b0" in seen[0] and len(seen[0]) < 1100
    encode = engines.guarded(all_engines["tokenizers"], reference, may_cut=True)
    assert np.array_equal(encode("\U000323b0" * 3000), all_engines["tokenizers"]("\U000323b0" * 3000))


def test_the_fast_library_may_be_interrupted():
    def fast(text):
        raise KeyboardInterrupt

    encode = engines.guarded(fast, lambda: lambda text: [1, 2])
    with pytest.raises(KeyboardInterrupt):
        encode("easy")


PUBLISHED = dict(
    gpt2=r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    cl100k=r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s",
    o200k=r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    v1=r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    v2=r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=400, deadline=None)
@given(TEXTS)
def test_our_spelling_of_a_pattern_splits_as_the_published_one(name, text):
    pieces = regex.findall(engines.PATTERNS[name], text)
    assert pieces == regex.findall(PUBLISHED[name], text) and "".join(pieces) == text


@pytest.mark.sampled(2)
def test_text_that_tiktoken_gives_up_on(byte_level, all_engines, capfd):
    text = " " * 1_200_000 + "a"
    assert np.array_equal(all_engines["tiktoken"](text), all_engines["tokenizers"](text))
    ours = engines.tiktoken_engine({bytes([byte]): byte for byte in range(256)}, engines.PATTERNS["gpt2"])
    with pytest.raises(DataError, match="gives up"):
        ours(text)


@pytest.mark.parametrize("name", PUBLISHED)
@settings(max_examples=200, deadline=None)
@given(TEXTS, st.integers(1, 8))
def test_long_texts_may_be_cut_before_a_space(name, text, size):
    cut = list(engines.pieces(text, size))
    assert "".join(cut) == text and all(len(piece) >= size for piece in cut[:-1])
    split = lambda text: regex.findall(engines.PATTERNS[name], text)
    assert [piece for part in cut for piece in split(part)] == split(text)


def test_long_texts_in_pieces(byte_level, all_engines):
    text = " ".join(CORPUS * 300)
    assert len(text) > 2 * engines.PIECE
    expected = engines.in_pieces(all_engines["tokenizers"], 1 << 30)(text)
    assert all(np.array_equal(encode(text), expected) for encode in all_engines.values())


def test_unicode_17_ranges():
    """Both ends of each range are found, their neighbours are not, and plain text never is."""
    starts, ends = engines.UNICODE_17_HIGH
    for first, last in zip(starts.tolist(), ends.tolist(), strict=True):
        assert [engines.has_unicode_17(f"a{chr(point)}") for point in (first - 1, first, last, last + 1)] == [
            False,
            True,
            True,
            False,
        ]
    assert all(engines.has_unicode_17(f"\ue000{character}") for character in engines.UNICODE_17_LOW)
    assert not any(map(engines.has_unicode_17, ("\u4e2d \U0001f600", "\u0e20 \uac00", "", "abc")))


def test_interface(byte_level):
    assert (byte_level.name, byte_level.vocab_size, byte_level.eod) == ("GPT2BPETokenizer", 340, 0)
    assert byte_level.decode(byte_level.encode("\u4e2d")[:1]) == "\ufffd"


def test_special_names_are_text(byte_level):
    ids = byte_level.encode("a<|endoftext|>b")
    assert byte_level.eod not in ids and byte_level.decode(ids) == "a<|endoftext|>b"


def test_ids_in_the_order_of_merges_need_no_map():
    vocab = {token: id for id, token in enumerate([*BYTE_TO_CHARACTER, "ab", "abc"])}
    assert ranks(vocab, ["a b", "ab c"])[2] is None
    swapped = vocab | {"ab": 257, "abc": 256}
    table, _, ids = ranks(swapped, ["a b", "ab c"])
    assert table[b"ab"] < table[b"abc"] and [ids[table[token]] for token in (b"ab", b"abc")] == [257, 256]
    with pytest.raises(ValueError, match="same token"):
        ranks(vocab, ["a b", "ab c", "a bc"])


class TestSelfCheck:
    """A library whose ids differ must never be used."""

    def build(self, **fast):
        reference = lambda text: [ord(character) % 100 for character in text]
        makers = {name: (lambda encode=encode: encode) for name, encode in fast.items()}
        return Tokenizer("test", 100, None, "", {**makers, "reference": lambda: reference}, str), reference

    def test_agreeing(self):
        encode = lambda text: np.array([ord(character) % 100 for character in text], np.uint32)
        tokenizer, _ = self.build(fast=encode)
        assert tokenizer.use_fastest(["sample"]) == tokenizer.engine == "fast"
        assert tokenizer.encode("ab") == [97, 98]

    def test_wrong_only_on_this_input(self):
        tokenizer, reference = self.build(fast=lambda text: reference(text.replace("rare", "")))
        said = []
        assert tokenizer.use_fastest(["common"], said.append) == "fast" and not said
        assert tokenizer.use_fastest(["a rare word"], said.append) == "reference"
        assert "fast is not used" in said[0] and "a rare word" in said[0]
        assert tokenizer.encode("rare") == reference("rare")

    def test_falls_through_to_the_next(self):
        class Panic(BaseException):
            pass

        def panic(text):
            raise Panic("index out of bounds")

        tokenizer, reference = self.build(panicking=panic, good=lambda text: reference(text))
        said = []
        assert tokenizer.use_fastest([], said.append) == "good" and "Panic" in said[0]

    def test_not_installed(self):
        tokenizer, _ = self.build()

        def missing():
            raise ImportError

        tokenizer._engines = {"fast": missing, **tokenizer._engines}
        said = []
        assert tokenizer.use_fastest([], said.append) == "reference" and "not installed" in said[0]


def test_fingerprint_follows_the_vocabulary_not_its_layout(bpe, tmp_path, byte_level):
    vocab = json.loads((bpe / "vocab.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(dict(reversed(vocab.items())), indent=2))
    (tmp_path / "merges.txt").write_text((bpe / "merges.txt").read_text().replace("\n", "\r\n"), newline="")
    assert build_tokenizer(gpt2(tmp_path)).fingerprint == byte_level.fingerprint
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    assert build_tokenizer(gpt2(tmp_path)).fingerprint != byte_level.fingerprint


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("vocab.json", None, "no such file"),
        ("vocab.json", "a b\n", "not JSON"),
        ("vocab.json", "[]", "not a vocabulary"),
        ("vocab.json", '{"a": "b"}', "not a vocabulary"),
        ("vocab.json", '{"a": 1, "b": 1}', "share an id"),
        ("vocab.json", '{"a": 0, "b": 1}', "does not belong to"),
        ("merges.txt", None, "no such file"),
        ("merges.txt", "", "it is empty"),
        ("merges.txt", "a b\na b c\n", "line 2"),
        ("merges.txt", "{\n", "line 1"),
    ],
)
def test_vocabulary_files_that_are_none(bpe, tmp_path, name, content, words):
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_text((bpe / file).read_text())
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=words):
        build_tokenizer(gpt2(tmp_path))


def test_merges_with_and_without_version_line():
    assert parse_merges("#version: 0.2\na b\n# #\n", "") == parse_merges("a b\r\n# #\r\n", "") == ["a b", "# #"]


def test_tokenizer_json(bpe, byte_level, tmp_path):
    tokenizer = build_tokenizer(Settings("HuggingFaceTokenizer", tokenizer_model=str(bpe)))
    assert (tokenizer.vocab_size, tokenizer.eod) == (340, 0)
    for text in CORPUS:
        expected = byte_level.encode(text)
        assert {tuple(encode(text)) for encode in every_engine(tokenizer).values()} == {tuple(expected)}
        assert tokenizer.decode(expected) == text
    description = json.loads((bpe / "tokenizer.json").read_text())
    description["added_tokens"].append(description["added_tokens"][0] | dict(id=340, content="[STOP]"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "[STOP]"}}')
    tokenizer = build_tokenizer(Settings(tokenizer_model=str(tmp_path / "tokenizer.json")))
    assert (tokenizer.vocab_size, tokenizer.eod) == (341, 340)
    assert 340 not in tokenizer.encode("a [STOP]") and tokenizer.decode([340]) == "[STOP]"


def test_unigram_tokenizer_json_reads_special_names_as_text(tmp_path):
    from tokenizers import Tokenizer as HuggingFace
    from tokenizers.models import Unigram

    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -1.0) for character in "ab</s>")]
    model = HuggingFace(Unigram(pieces, unk_id=0))
    model.add_special_tokens(["</s>"])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = build_tokenizer(Settings(tokenizer_model=str(tmp_path)))
    assert tokenizer.eod == 1 and tokenizer.encode("a</s>b") == [2, 4, 5, 6, 7, 3]


def test_tokenizer_json_that_is_none(tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in ("", "{}", '{"model": {"type": "Nothing"}}'):
        path.write_text(content)
        with pytest.raises(DataError, match="tokenizer.json"):
            build_tokenizer(Settings("HuggingFaceTokenizer", tokenizer_model=str(path)))
    with pytest.raises(DataError, match="no such file"):
        build_tokenizer(Settings("HuggingFaceTokenizer", tokenizer_model="org/model"))


def a_sentencepiece_model(path, kind="bpe", **more):
    """A model of the corpus in a file, and as the library reads it."""
    library = pytest.importorskip("sentencepiece")
    stream = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in CORPUS if "\x00" not in text] * 4),
        model_writer=stream,
        vocab_size=360,
        model_type=kind,
        byte_fallback=True,
        minloglevel=2,
        hard_vocab_limit=False,
        **more,
    )
    path.write_bytes(stream.getvalue())
    return library.SentencePieceProcessor(model_proto=stream.getvalue())


def test_llama2_begins_documents_and_prompts(tmp_path):
    """Megatron-LM's Llama2Tokenizer.tokenize: bos and the pieces; its eod is </s>, also where there is <EOD>."""
    reference = a_sentencepiece_model(path := tmp_path / "tokenizer.model", user_defined_symbols=["<EOD>"])
    settings = Settings("Llama2Tokenizer", tokenizer_model=str(path))
    tokenizer = build_tokenizer(settings)
    assert tokenizer.vocab_size == reference.get_piece_size() and tokenizer.eod == reference.eos_id()
    for fast in (False, True):
        if fast:
            tokenizer.use_fastest(CORPUS)
        for text in ("the quick fox", "", " two  spaces "):
            wanted = [reference.bos_id(), *reference.encode(text)]
            assert list(tokenizer.document_encoder(text)) == wanted == tokenizer.encode_prompt(text)
            assert tokenizer.encode(text) == wanted[1:]  # tasks put a beginning before their texts
    plain = build_tokenizer(Settings(tokenizer_model=str(path)))
    assert list(plain.document_encoder("the fox")) == plain.encode("the fox")
    assert plain.fingerprint != tokenizer.fingerprint
    blocks = BlockEncoder(tokenizer, ["text"], np.dtype("<u2"), append_eod=True)
    encoded = blocks(json.dumps(dict(text="the quick fox")).encode()).targets[0].tokens.tolist()
    assert encoded == [*reference.encode("the quick fox", add_bos=True, add_eos=True)]
    folder = build_tokenizer(Settings("Llama2Tokenizer", tokenizer_model=str(tmp_path)))
    assert folder.fingerprint == tokenizer.fingerprint
    a_sentencepiece_model(path, bos_id=-1)
    with pytest.raises(DataError, match="has no token that begins texts"):
        build_tokenizer(settings)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(tmp_path, kind):
    reference = a_sentencepiece_model(path := tmp_path / "test.model", kind)
    tokenizer = build_tokenizer(Settings(tokenizer_model=str(path)))
    assert (tokenizer.name, tokenizer.eod) == ("GPTSentencePieceTokenizer", reference.eos_id())
    assert tokenizer.vocab_size == reference.get_piece_size()
    assert tokenizer.encode(CORPUS[0]) == reference.encode(CORPUS[0])
    tokenizer.use_fastest(CORPUS)
    assert tokenizer.encode(CORPUS[0]) == reference.encode(CORPUS[0])
    assert tokenizer.eod not in tokenizer.encode("a</s>b")
    assert tokenizer.decode(tokenizer.encode("the quick fox")) == "the quick fox"


@pytest.mark.parametrize(
    "kind, wanted",
    {
        "SentencePieceTokenizer": "a .model file of SentencePiece",
        "TikTokenizer": "a .tiktoken file, or Megatron-LM's JSON ranks",
        "HuggingFaceTokenizer": "a tokenizer.json of Hugging Face",
    }.items(),
)
def test_a_vocabulary_in_the_place_of_a_model_says_what_is_wanted(kind, wanted, tmp_path):
    if kind == "SentencePieceTokenizer":
        pytest.importorskip("sentencepiece")
    path = tmp_path / "vocab.json"
    path.write_text('{"a": 0, "b": 1}')
    with pytest.raises(
        DataError, match=f"vocab.json: .*(\n.*)?\n  -> {kind} reads {wanted}; vocab.json and merges.txt are"
    ):
        build_tokenizer(Settings(kind, tokenizer_model=str(path)))


@pytest.fixture(scope="module")
def rank_bytes(bpe, byte_level):
    """The byte-level vocabulary as ranks: bytes by rank, and the reference's texts."""
    vocab = json.loads((bpe / "vocab.json").read_text())
    table, _, _ = ranks(vocab, parse_merges((bpe / "merges.txt").read_text(), ""))
    return sorted(table, key=table.__getitem__)


def test_tiktoken_ranks(rank_bytes, byte_level, tmp_path):
    path = tmp_path / "small.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(rank_bytes)))
    with pytest.raises(SettingsError, match="--tiktoken-pattern"):
        build_tokenizer(Settings("TikTokenizer", tokenizer_model=str(path)))
    tokenizer = build_tokenizer(Settings(tokenizer_model=str(path), tiktoken_pattern="gpt2"))
    assert (tokenizer.vocab_size, tokenizer.eod) == (len(rank_bytes) + 1, len(rank_bytes))
    for text in CORPUS:
        pieces = [rank_bytes[id] for id in tokenizer.encode(text)]
        assert b"".join(pieces) == text.encode() and len(pieces) == len(byte_level.encode(text))
        assert {tuple(encode(text)) for encode in every_engine(tokenizer).values()} == {tuple(tokenizer.encode(text))}
        assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(SettingsError, match="not a pattern"):
        build_tokenizer(Settings(tokenizer_model=str(path), tiktoken_pattern="(")).encode("a")
    path.write_bytes(b"nonsense\n")
    with pytest.raises(DataError, match="not a .tiktoken file"):
        build_tokenizer(Settings(tokenizer_model=str(path), tiktoken_pattern="gpt2"))


def test_ranks_of_megatron(rank_bytes, tmp_path):
    in_order = [bytes([byte]) for byte in range(256)] + rank_bytes[256:]
    entries = [
        dict(rank=rank, token_bytes=base64.b64encode(token).decode(), token_str=None)
        for rank, token in enumerate(in_order)
    ]
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(entries))
    tokenizer = build_tokenizer(Settings("TikTokenizer", tokenizer_model=str(path)))
    assert (tokenizer.vocab_size, tokenizer.eod) == (1000 + len(in_order), 2)
    assert tokenizer.encode("~")[0] == 1000 + ord("~")
    assert tokenizer.decode(tokenizer.encode(CORPUS[0])) == CORPUS[0]
    path.write_text("{}")
    with pytest.raises(DataError, match="JSON ranks"):
        build_tokenizer(Settings("TikTokenizer", tokenizer_model=str(path)))


def test_null_tokenizer():
    tokenizer = build_tokenizer(Settings("NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.encode("3 1  4") == [3, 1, 4] and tokenizer.decode([3, 1]) == "3 1" and tokenizer.encode("") == []
    for text in ("one", "101", "-1"):
        with pytest.raises(DataError, match="NullTokenizer"):
            tokenizer.encode(text)


def test_missing_flags():
    for given_ in (Settings(), Settings("GPT2BPETokenizer"), Settings("NullTokenizer"), Settings("Typo")):
        with pytest.raises(SettingsError):
            build_tokenizer(given_)


@pytest.mark.parametrize(
    "size, divisible_by, tp, padded", [(50257, 128, 1, 50304), (50257, 128, 2, 50432), (128, 128, 1, 128)]
)
def test_padded_vocab_size(size, divisible_by, tp, padded):
    assert padded_vocab_size(size, divisible_by, tp) == padded
