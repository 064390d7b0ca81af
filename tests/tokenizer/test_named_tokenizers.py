# SPDX-License-Identifier: Apache-2.0
"""WordPiece, GPTChinese, tokenizer.json and ranks against transformers' and tiktoken's own; vocabularies by name."""

import base64
import io
import json
import os
import sys
import types

import pytest

from megatron.errors import DataError, MissingPackage, SettingsError, UsageError
from megatron.settings.parse import parse, parse_pretrain
from megatron.settings.schema import TokenizerSettings as Settings
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.segmenters import make_segmenter
from megatron.tokenizer.vocabulary_folders import with_files
from megatron.tokenizer.word_piece import lower_cased

transformers = pytest.importorskip("transformers")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "Hello World, isn't it?  UNKNOWN tokens\tand\nlines\r\n",
    "caf\u00e9 CAFE\u0301 na\u00efve \u00c5ngstr\u00f6m Stra\u00dfe \u0130stanbul",
    "\u901a\u8fc7\u5229\u7528mercer\u6838\uff0c\u5c06\u6837\u672c\u3002 \u4e2d\u6587 1,234.56 3\u00bd",
    "x" * 101 + " " + "a" * 100,
    "control \x00\x01\x7f \ufeff zero\u200bwidth \u00a0nbsp \u3000wide \ufffd",
    "--- ... !? $5 100% a@b.c #tag ^_^ ~`|\\ <s> \U0001f600 \u0e20\u0e32\u0e29\u0e32",
    "",
    "   ",
]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    """A vocab.txt with whole words, pieces and letters of two cases."""
    letters = [chr(code) for code in range(33, 127)] + list(
        "\u00e9\u00df\u4e2d\u6587\u901a\u8fc7\u6837\u672c\u3002\uff0c\U0001f600"
    )
    pieces = [f"##{letter}" for letter in letters]
    words = [
        "hello",
        "Hello",
        "world",
        "un",
        "##known",
        "token",
        "##s",
        "cafe",
        "caf\u00e9",
        "lines",
        "mercer",
        "10",
        "##0",
    ]
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(dict.fromkeys([*SPECIAL, *letters, *pieces, *words])) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def their_bert():
    """transformers' WordPiece in plain Python: (vocab.txt, lower case) -> text -> ids."""
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    def make(path, lower):
        theirs = BertTokenizerLegacy(str(path), do_lower_case=lower)
        return lambda text: theirs.convert_tokens_to_ids(theirs.tokenize(text))

    return make


@pytest.mark.parametrize(
    "kind, lower",
    [
        ("BertWordPieceLowerCase", True),
        ("BertWordPieceCase", False),
        ("BertTokenizer", True),
        ("ErnieTokenizer", True),
        ("ElectraTokenizer", True),
    ],
)
def test_word_piece_gives_transformers_ids(vocab, their_bert, kind, lower):
    own, theirs = build_tokenizer(Settings(kind, str(vocab))), their_bert(vocab, lower)
    for text in TEXTS:
        assert own.encode(text) == theirs(text), text
    assert own.decode(own.encode("hello world")) == "hello world"
    lines = vocab.read_text(encoding="utf-8").splitlines()
    megatron = kind.startswith("BertWordPiece")
    assert (own.vocab_size, own.eod) == ((len(lines) + 2, len(lines) + 1) if megatron else (len(lines), None))


def test_electra_and_bert_of_transformers(vocab):
    own = build_tokenizer(Settings("ElectraTokenizer", str(vocab)))
    for kind in (transformers.ElectraTokenizer, transformers.BertTokenizer):
        theirs = kind(str(vocab), do_lower_case=True)
        for text in TEXTS:
            assert own.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], (kind, text)


@pytest.mark.parametrize(
    "folder, config, lower",
    [
        ("bert-base-uncased", None, True),
        ("bert-base-cased", None, False),
        ("bert-base-multilingual-cased", None, False),
        ("ernie-1.0", None, True),
        ("own", dict(do_lower_case=False), False),
        ("bert-base-cased", dict(do_lower_case=True), True),
        ("bert-base-cased", dict(), False),
    ],
)
def test_which_models_keep_the_case(vocab, their_bert, tmp_path, folder, config, lower):
    path = tmp_path / folder / "vocab.txt"
    path.parent.mkdir()
    path.write_bytes(vocab.read_bytes())
    if config is not None:
        path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    settings = with_files(Settings("BertTokenizer", tokenizer_model=str(path.parent)), "BertTokenizer")
    assert lower_cased(settings) == lower
    assert build_tokenizer(settings).encode("Hello") == their_bert(path, lower)("Hello")


def test_special_names_are_text(vocab):
    own = build_tokenizer(Settings("BertTokenizer", str(vocab)))
    assert not set(own.encode("[SEP] [MASK]")) & set(range(2, 5))


def test_ernies_own_vocabulary_has_tabs(vocab, tmp_path):
    lines = vocab.read_text(encoding="utf-8").splitlines()
    (tmp_path / "vocab.txt").write_text("".join(f"{line}\t{i}\n" for i, line in enumerate(lines)), encoding="utf-8")
    own, same = (build_tokenizer(Settings("ErnieTokenizer", str(path))) for path in (tmp_path / "vocab.txt", vocab))
    assert own.encode(TEXTS[2]) == same.encode(TEXTS[2]) and own.fingerprint == same.fingerprint


# SentencePiece, tokenizer.json, ranks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chinese_model(tmp_path_factory):
    sentencepiece = pytest.importorskip("sentencepiece")
    made = io.BytesIO()
    texts = [text.replace("\r\n", " ") for text in TEXTS[:3]] * 20 + ["\u2582 \u2583 \u4e2d\u6587 \u901a\u8fc7"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=made,
        vocab_size=120,
        hard_vocab_limit=False,
        user_defined_symbols=["<sep>", "<cls>", "<pad>", "<mask>", "<eop>", "<eod>"],
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("gpt-cpm") / "sentencepiece.model"
    path.write_bytes(made.getvalue())
    return path


def pairs(text, *_):
    """Stands for jieba: words of two characters."""
    return [text[at : at + 2] for at in range(0, len(text), 2)]


def fake(cut):
    return types.SimpleNamespace(cut=cut, __spec__=object())


def test_gpt_chinese_gives_transformers_cpm_ids(chinese_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", fake(pairs))
    monkeypatch.setitem(sys.modules, "rjieba", fake(pairs))
    own = build_tokenizer(Settings("GPTChineseTokenizer", tokenizer_model=str(chinese_model)))
    theirs = transformers.CpmTokenizer(str(chinese_model), remove_space=False, keep_accents=True)
    for text in (TEXTS[0], "\u4e2d\u6587 \u901a\u8fc7\n\u6837\u672c\u3002", "a b\nc"):
        # Of version 5, theirs leaves the cutting into words to its caller; it ends with two special ids.
        words = " ".join(word.replace(" ", "\u2582").replace("\n", "\u2583") for word in pairs(text))
        assert own.encode(text) == theirs(words)["input_ids"][:-2], text
    assert own.decode(own.encode("\u4e2d\u6587 \u901a\u8fc7\n\u6837")) == "\u4e2d\u6587 \u901a\u8fc7\n\u6837"
    assert own.eod == theirs.sp_model.PieceToId("<eod>") and own.vocab_size == theirs.vocab_size


def test_gpt_chinese_without_jieba_is_told(chinese_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(MissingPackage, match="GPTChineseTokenizer needs the package jieba, which is not installed"):
        build_tokenizer(Settings("GPTChineseTokenizer", tokenizer_model=str(chinese_model)))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("gpt2")
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(TEXTS * 3, vocab_size=350, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save_model(str(folder))
    model.save(str(folder / "tokenizer.json"))
    return folder


def test_byte_level_and_tokenizer_json_give_transformers_ids(byte_level):
    files = (str(byte_level / "vocab.json"), str(byte_level / "merges.txt"))
    gpt2 = build_tokenizer(Settings("GPT2BPETokenizer", *files))
    whole = build_tokenizer(Settings("HuggingFaceTokenizer", tokenizer_model=str(byte_level / "tokenizer.json")))
    theirs = transformers.GPT2Tokenizer(*files)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(byte_level / "tokenizer.json"))
    for text in TEXTS:
        assert gpt2.encode(text) == theirs(text)["input_ids"] == whole.encode(text) == fast(text)["input_ids"], text


def test_ranks_give_tiktokens_ids(tmp_path):
    import tiktoken

    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", b"\xe4\xb8", b" w"]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items())
    (tmp_path / "own.tiktoken").write_text("\n".join(lines))
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    theirs = tiktoken.Encoding("own", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    own = build_tokenizer(Settings("TikTokenizer", tokenizer_model=str(tmp_path), tiktoken_pattern="gpt2"))
    for text in TEXTS:
        assert own.encode(text) == theirs.encode_ordinary(text), text


# Names ------------------------------------------------------------------------------------------------------------------


def test_paddles_spelling_of_types(byte_level):
    settings = parse(["--tokenizer_name", "GPTTokenizer"], dict(tokenizer=Settings))["tokenizer"]
    assert settings.tokenizer_type == "GPT2BPETokenizer"
    for name in ("ErnieTokenizer", "BertTokenizer", "ElectraTokenizer", "GPTChineseTokenizer"):
        assert parse(["--tokenizer_name", name], dict(tokenizer=Settings))["tokenizer"].tokenizer_type == name
    with pytest.raises(UsageError, match="--tokenizer-name"):
        parse(["--tokenizer_name", "GPTTokeniser"], dict(tokenizer=Settings))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()

    def put(name, **files):
        (tmp_path / "cache" / name).mkdir()
        for path in files.values():
            (tmp_path / "cache" / name / path[1]).write_bytes(path[0].read_bytes())

    return put


def test_names_of_the_cache(cache, byte_level, vocab, chinese_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", fake(pairs))
    cache(
        "gpt2",
        vocab=(byte_level / "vocab.json", "gpt-en-vocab.json"),
        merges=(byte_level / "merges.txt", "gpt-en-merges.txt"),
    )
    cache("ernie-3.0-base-zh", vocab=(vocab, "ernie_3.0_base_zh_vocab.txt"))
    cache("gpt-cpm-large-cn", model=(chinese_model, "gpt-cpm-cn-sentencepiece.model"))
    cache("mine", whole=(byte_level / "tokenizer.json", "tokenizer.json"))
    by_name = lambda kind, name: build_tokenizer(Settings(kind, tokenizer_model=name)).fingerprint
    gpt2 = build_tokenizer(Settings("GPT2BPETokenizer", str(byte_level / "vocab.json"), str(byte_level / "merges.txt")))
    assert by_name("GPT2BPETokenizer", "gpt2") == by_name("GPT2BPETokenizer", "gpt3-1.3B-en") == gpt2.fingerprint
    assert by_name("GPT2BPETokenizer", "gpt2-en") == by_name("GPT2BPETokenizer", str(byte_level)) == gpt2.fingerprint
    ernie = build_tokenizer(Settings("ErnieTokenizer", str(vocab)))
    assert by_name("ErnieTokenizer", "ernie-3.0-base-zh") == by_name("ErnieTokenizer", str(vocab)) == ernie.fingerprint
    assert by_name("GPTChineseTokenizer", "gpt-cpm-large-cn") == by_name("GPTChineseTokenizer", str(chinese_model))
    assert by_name("HuggingFaceTokenizer", "mine") == by_name(None, "mine")


@pytest.mark.parametrize(
    "kind, name, error, words",
    [
        (
            "GPT2BPETokenizer",
            "gpt2-en",
            DataError,
            "no vocabulary 'gpt2-en'|nothing is downloaded|vocab.json and merges.txt",
        ),
        ("ErnieTokenizer", "ernie-1.0", DataError, "no vocabulary 'ernie-1.0'|put vocab.txt into|cache/ernie-1.0"),
        ("GPTChineseTokenizer", "gpt-cpm-large-cn", DataError, "put sentencepiece.model into"),
        ("HuggingFaceTokenizer", "org/model", DataError, "org/model: no such file|hub? hf://org/model downloads it"),
        ("GPT2BPETokenizer", "half", DataError, "lacks merges.txt or gpt-en-merges.txt|it has: vocab.json"),
        ("BertTokenizer", "half", DataError, "lacks vocab.txt"),
        ("BertTokenizer", "none/vocab.txt", SettingsError, "BertTokenizer needs --vocab-file"),
        ("BertTokenizer", "half/vocab.json", DataError, "not a WordPiece vocabulary"),
        ("GPT2BPETokenizer", None, SettingsError, "needs --vocab-file and --merge-file"),
        ("GPT3Tokenizer", "gpt2-en", SettingsError, "unknown; did you mean"),
    ],
)
def test_a_name_that_nothing_is_behind(cache, tmp_path, kind, name, error, words):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "vocab.json").write_text("{}")
    with pytest.raises(error) as caught:
        build_tokenizer(Settings(kind, tokenizer_model=name))
    assert [part for part in words.split("|") if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "not a WordPiece vocabulary"),
        ("the\ncat\n", "it has no [UNK], and 2 lines"),
        ("[UNK]\ta b\n", "not a vocabulary with a token a line"),
        (b"\xff\xfe[\x00", "not a UTF-8 text file"),
    ],
)
def test_vocabularies_that_are_none(tmp_path, content, words):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match="vocab-file") as caught:
        build_tokenizer(Settings("BertWordPieceLowerCase", str(path)))
    assert words in str(caught.value)


def test_jieba_is_asked_as_paddlenlp_asks_it(monkeypatch):
    asked = []
    monkeypatch.setitem(sys.modules, "jieba", fake(lambda text: asked.append(text) or iter(["a", "b"])))
    assert make_segmenter("jieba")("ab") == ["a", "b"] and asked == ["ab"]


def test_training_takes_a_name_for_its_files(cache, byte_level):
    """Settings, and the check before a launch, know the files behind a name."""
    from megatron.planner.problems import file_problems, named_files

    line = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --mock-data"
    line += " --global-batch-size 1 --train-iters 1 --lr 1e-3 --tokenizer_name GPTTokenizer --tokenizer-model gpt2-en"
    config = parse_pretrain(line.split())
    assert any("no vocabulary 'gpt2-en'" in problem for problem in file_problems(config))
    cache("gpt2-en", vocab=(byte_level / "vocab.json", "vocab.json"), merges=(byte_level / "merges.txt", "merges.txt"))
    assert file_problems(config) == []
    assert {flag for flag, _ in named_files(config)} == {"--vocab-file", "--merge-file"}
    cache("mine", whole=(byte_level / "tokenizer.json", "tokenizer.json"))
    untyped = parse_pretrain(line.replace("--tokenizer_name GPTTokenizer", "").replace("gpt2-en", "mine").split())
    assert file_problems(untyped) == []
    assert [path for _, path in named_files(untyped)] == [f"{os.environ['MEGATRON_CACHE']}/mine/tokenizer.json"]
