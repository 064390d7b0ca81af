# SPDX-License-Identifier: Apache-2.0
"""create_pretraining_data: its files against a slow reading of PaddleNLP's rules, whole words, and wrong uses."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import numpy as np
import pytest
import xxhash

import preprocess_data
from megatron.data import preprocess_worker
from megatron.data.formats import open_tokens
from megatron.data.origin import lines_at, open_origins
from megatron.errors import Failure
from megatron.tools import get_sample_data
from megatron.tools.create_pretraining_data import main

TEXTS = ["  Hello world. It's a text.\n", "", "   \n ", "a\u2028b <|endoftext|> c", "two\n\nlines  ", "x" * 70, " y"]
TEXTS += [f"document {i} " * (i * 7 % 23) for i in range(150)]
CHARACTERS = (
    "\u901a\u8fc7\u5229\u7528\u6838\uff0c\u5c06\u6837\u672c\u4ece\u8f93\u5165\u7a7a\u95f4\u6620\u5c04\u5230\u9ad8\u7ef4"
)
WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS, "me", "##rc", "##er", "##\u8fc7", "a", "1"]


def write_lines(path, texts, key="text"):
    path.write_text("\n".join(json.dumps({key: text}, ensure_ascii=False) for text in texts) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("gpt2-tiny")
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(TEXTS, vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save_model(str(folder))
    return folder


@pytest.fixture
def word_pieces(tmp_path):
    folder = tmp_path / "ernie-tiny"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORD_PIECES) + "\n", encoding="utf-8")
    return folder


def flags(model, kind, input, prefix, *more):
    return ["--model_name", str(model), "--tokenizer_name", kind, "--input_path", str(input)] + [
        *("--output_prefix", str(prefix), "--data_format", "JSON", "--log_interval", "1000"),
        *more,
    ]


def slow_files(documents, end=None, dtype="<u2") -> tuple[bytes, bytes]:
    """Both files by numpy, from the ids of the sentences of each document: sentences without ids are none, and a document
    without sentences neither; the end of the document belongs to its last sentence."""
    ids, lens, docs = [], [], [0]
    for sentences in documents:
        sentences = [list(sentence) for sentence in sentences if len(sentence)]
        if not sentences:
            continue
        if end is not None:
            sentences[-1].append(end)
        ids += [id for sentence in sentences for id in sentence]
        lens += [len(sentence) for sentence in sentences]
        docs.append(len(lens))
    tokens, index = io.BytesIO(), io.BytesIO()
    np.save(tokens, np.array(ids, dtype))
    np.savez(index, lens=np.array(lens, "i4"), sents=np.cumsum([0, *lens], dtype="i8"), docs=np.array(docs, "i8"))
    return tokens.getvalue(), index.getvalue()


def files(prefix):
    return tuple(Path(f"{prefix}{ending}").read_bytes() for ending in ("_ids.npy", "_idx.npz"))


def bpe_ids(folder):
    from tokenizers import ByteLevelBPETokenizer

    model = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    return lambda text: model.encode(text).ids, model.token_to_id("<|endoftext|>")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("workers, block", [(1, 1 << 20), (2, 600), (3, 37)])
@pytest.mark.parametrize("eos", [True, False])
def test_files_are_those_of_the_rules_for_any_number_of_workers(bpe, tmp_path, monkeypatch, workers, block, eos):
    encode, end = bpe_ids(bpe)
    monkeypatch.setattr(preprocess_worker, "BLOCK", block)
    monkeypatch.setattr("megatron.data.preprocess.divide", _divide(block))
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    more = ["--workers", str(workers), *["--append_eos"] * eos]
    main(flags(bpe, "GPTTokenizer", source, tmp_path / "out", *more))
    assert files(tmp_path / "out") == slow_files([[encode(text.strip())] for text in TEXTS], end if eos else None)
    made = {path.name for path in tmp_path.iterdir()} - {"in.jsonl"}
    assert made == {"out_ids.npy", "out_idx.npz", "out.stats.json", "out.sums.json", "out.origin"}
    check_origins(tmp_path / "out", [text for text in TEXTS if len(encode(text.strip()))])
    main(flags(bpe, "GPTTokenizer", source, tmp_path / "out", "--no-origin", *more))
    assert not (tmp_path / "out.origin").exists()


def check_origins(prefix, texts):
    """Each document's line, which leads to its text, and the text's hash; documents without tokens are none."""
    origins = open_origins(str(prefix), len(texts), verify=True)
    for origin, text in zip((origins[number] for number in range(len(texts))), texts, strict=True):
        assert json.loads(lines_at(origin.file, [origin.offset])[origin.offset])["text"] == text
        assert int(origin.hash, 16) == xxhash.xxh3_64_intdigest(text.encode())


def _divide(block):
    from megatron.data.preprocess import divide

    return lambda sources, workers, size: divide(sources, workers, block)


def test_folders_compressed_files_and_another_key(bpe, tmp_path, capsys):
    encode, end = bpe_ids(bpe)
    (tmp_path / "in").mkdir()
    for number, part in enumerate(np.array_split(TEXTS, 3)):
        path = tmp_path / "in" / f"{number}.jsonl"
        write_lines(path, part.tolist(), "content")
        path.with_name(f"{number}.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    main(flags(bpe, "GPTTokenizer", tmp_path / "in", tmp_path / "out", "--json_key", "content", "--workers", "2"))
    assert files(tmp_path / "out") == slow_files([[encode(text.strip())] for text in TEXTS])
    assert "Total documents num: " in capsys.readouterr().out


def test_large_vocabularies_take_int32(tmp_path):
    """PaddleNLP's limit is 65535 tokens; Megatron-LM's is 65500."""
    words = [*WORD_PIECES, *(f"w{i}" for i in range(65600))]
    source = write_lines(tmp_path / "in.jsonl", ["a w1 w2"])
    for size, dtype in ((65534, "uint16"), (65535, "int32")):
        (tmp_path / "vocab.txt").write_text("\n".join(words[:size]), encoding="utf-8")
        main(flags(tmp_path, "BertTokenizer", source, tmp_path / f"out{size}"))
        assert np.load(tmp_path / f"out{size}_ids.npy").dtype.name == dtype


def test_the_documented_command(bpe, tmp_path, monkeypatch, capsys):
    """As PaddleNLP prints it, but for the paths; the vocabulary is in the cache under the model's name."""
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-en").symlink_to(bpe)
    (tmp_path / "openwebtext").mkdir()
    write_lines(tmp_path / "openwebtext" / "a.jsonl", TEXTS)
    line = (
        "--model_name gpt2-en --tokenizer_name GPTTokenizer --data_format JSON --input_path openwebtext/ --append_eos"
    )
    main(f"{line} --output_prefix gpt_openwebtext --workers 40 --log_interval 10000".split())
    encode, end = bpe_ids(bpe)
    assert files("gpt_openwebtext") == slow_files([[encode(text.strip())] for text in TEXTS], end)


def test_preprocess_data_writes_the_same_format(bpe, tmp_path, capsys):
    """Its texts keep their white space; several keys fill files of their own."""
    encode, end = bpe_ids(bpe)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(dict(text=text, title=text[:3])) + "\n" for text in TEXTS))
    line = ["--input", str(path), "--output-prefix", str(tmp_path / "out"), "--output-format", "paddle", "--append-eod"]
    line += ["--vocab-file", str(bpe / "vocab.json"), "--merge-file", str(bpe / "merges.txt"), "--workers", "2"]
    preprocess_data.main(line)
    assert files(tmp_path / "out") == slow_files([[encode(text)] for text in TEXTS], end)
    preprocess_data.main([*line, "--json-keys", "title", "text"])
    assert files(tmp_path / "out_text") == files(tmp_path / "out")
    assert files(tmp_path / "out_title") == slow_files([[encode(text[:3])] for text in TEXTS], end)
    assert "out_title_ids.npy and _idx.npz (key 'title'):" in capsys.readouterr().out


# Whole words ------------------------------------------------------------------------------------------------------------

WORDS = [
    "\u901a\u8fc7",
    "\u5229\u7528",
    "mercer",
    "\u6838",
    "\uff0c",
    "\u5c06",
    "\u6837\u672c",
    "\u4ece",
    "\u8f93\u5165",
]
WORDS += ["\u7a7a\u95f4", "\u6620\u5c04", "\u5230", "\u9ad8\u7ef4"]
MARKED = "\u901a ##\u8fc7 \u5229 ##\u7528 me ##rc ##er \u6838 \uff0c \u5c06 \u6837 "
MARKED += "##\u672c \u4ece \u8f93 ##\u5165 \u7a7a ##\u95f4 \u6620 ##\u5c04 \u5230 \u9ad8 ##\u7ef4"


def slow_marks(pieces: list[str], words: list[str]) -> list[str]:
    """PaddleNLP's whole-word marks from its documentation: the longest known word of at most four tokens from each Chinese
    token on, all but its first token with ##."""
    if not pieces:
        return []
    if re.search("[\u4e00-\u9fa5]", pieces[0]):
        for length in (4, 3, 2):
            if len(pieces) >= length and "".join(pieces[:length]) in words:
                return [pieces[0], *("##" + piece for piece in pieces[1:length]), *slow_marks(pieces[length:], words)]
    return [pieces[0], *slow_marks(pieces[1:], words)]


def slow_vocab():
    """ERNIE's vocabulary with marked characters behind it."""
    lacking = ["##" + c for c in WORD_PIECES if re.fullmatch("[\u4e00-\u9fa5]", c) and "##" + c not in WORD_PIECES]
    return {token: id for id, token in enumerate([*WORD_PIECES, *lacking])}


def slow_word_ids(folder, words):
    from tokenizers import BertWordPieceTokenizer

    vocab = slow_vocab()
    pieces = BertWordPieceTokenizer(str(folder / "vocab.txt")).encode("".join(words), add_special_tokens=False).tokens
    return [vocab.get(token, 1) for token in slow_marks(pieces, words)]


def test_the_documented_example(word_pieces, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", [" ".join(WORDS)])
    main(flags(word_pieces, "ErnieTokenizer", source, tmp_path / "out", "--cn_whole_word_segment", "--cn_splited"))
    vocab = slow_vocab()
    assert np.load(tmp_path / "out_ids.npy").tolist() == [vocab[token] for token in MARKED.split()]


@pytest.mark.parametrize("mark", ["|", "\t", "  ", " "])
def test_what_stands_between_words(word_pieces, tmp_path, mark):
    """Two marks with nothing between them are a word that is the mark itself."""
    source = write_lines(tmp_path / "in.jsonl", [mark.join(["\u901a\u8fc7", "", "", "a", "\u7a7a\u95f4"])])
    more = ["--cn_whole_word_segment", "--cn_splited", "--cn_split_dimer", mark]
    main(flags(word_pieces, "ErnieTokenizer", source, tmp_path / "out", *more))
    words = ["\u901a\u8fc7", mark, "a", "\u7a7a\u95f4"]
    assert np.load(tmp_path / "out_ids.npy").tolist() == slow_word_ids(word_pieces, words)


def test_the_longest_word_wins(word_pieces, tmp_path):
    """Where a word begins like another of the text. Five characters are no word for the marks."""
    words = ["\u7a7a\u95f4", "\u7a7a\u95f4\u6620\u5c04", "\u7a7a\u95f4\u6620\u5c04\u5230"]
    source = write_lines(tmp_path / "in.jsonl", [" ".join(words)])
    main(flags(word_pieces, "ErnieTokenizer", source, tmp_path / "out", "--cn_whole_word_segment", "--cn_splited"))
    marked = "\u7a7a ##\u95f4 " + 2 * "\u7a7a ##\u95f4 ##\u6620 ##\u5c04 " + "\u5230"
    assert np.load(tmp_path / "out_ids.npy").tolist() == [slow_vocab()[token] for token in marked.split()]


def jieba(cut):
    return types.SimpleNamespace(cut=cut, __spec__=object())


def lac(cut):
    class LAC:
        def __init__(self, mode):
            self.mode = mode

        def run(self, text):
            return (cut(text), ["n"]) if self.mode == "lac" else cut(text)

    return types.SimpleNamespace(LAC=LAC, __spec__=object())


def _pieces(text):
    """Pieces of 1 to 6 characters: those longer than four tokens are no words for the marks."""
    found, at = [], 0
    while at < len(text):
        size = (at * 5 + len(text)) % 6 + 1
        found.append(text[at : at + size])
        at += size
    return found


@pytest.mark.parametrize("name, module", [("jieba", "jieba"), ("lac", "LAC"), ("seg", "LAC")])
@pytest.mark.parametrize("chinese", [True, False])
def test_segmenters_and_sentences(word_pieces, tmp_path, monkeypatch, name, module, chinese):
    monkeypatch.setitem(sys.modules, module, (jieba if module == "jieba" else lac)(_pieces))
    dice = np.random.default_rng(3)
    texts = [
        "a\u2028a\n".join("".join(dice.choice(list(CHARACTERS + "aZ1?"), 17)) for _ in range(3)) + " \n\n"
        for _ in range(20)
    ]
    source = write_lines(tmp_path / "in.jsonl", texts)
    more = ["--split_sentences", "--chinese"] if chinese else []
    more += ["--cn_whole_word_segment", "--cn_seg_func", name, "--workers", "2"]
    main(flags(word_pieces, "ErnieTokenizer", source, tmp_path / "out", *more))
    split = [[part.strip() for part in text.split("\n")] if chinese else [text.strip()] for text in texts]
    wanted = [[slow_word_ids(word_pieces, _pieces(part)) for part in parts] for parts in split]
    assert files(tmp_path / "out") == slow_files(wanted)
    assert json.loads((tmp_path / "out.stats.json").read_text())["tokenizer"]["vocab_size"] == len(slow_vocab())


def test_append_eos_without_such_a_token_is_told(word_pieces, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", ["a"])
    main(flags(word_pieces, "BertTokenizer", source, tmp_path / "out", "--append_eos"))
    assert "nothing is appended, as in PaddleNLP" in capsys.readouterr().out
    assert open_tokens(tmp_path / "out").get(0).tolist() == [WORD_PIECES.index("a")]


# Mistakes ---------------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("--input_path {t}/none.jsonl", 4, "no such file"),
    ("--input_path {t}/empty", 4, "holds no JSON lines"),
    ("--input_path {t}/blank.jsonl", 4, "no text in"),
    *((f"--input_path {{t}}/{raw}", 4, "raw_trans_to_json") for raw in "raw.txt raw.txt.gz raw.tar raw raws".split()),
    ("--json_key body", 4, "no key 'body'"),
    ("--json_key text title", 3, "one key fills one pair of files"),
    ("--on-bad-line stop --input_path {t}/bad.jsonl", 4, "bad.jsonl, line 2"),
    ("--data_format text", 2, "'text' is none of JSON"),
    ("--workers 0", 3, "--workers 0: at least 1"),
    ("--workers many", 2, "--workers"),
    ("--log_interval 0", 3, "--log-interval 0"),
    ("--tokenizer_name GTPTokenizer", 2, "--tokenizer-name"),
    ("--tokenizer_name ErnieTokenizer", 4, "lacks vocab.txt"),
    ("--model_name no-such-model", 4, "no-such-model"),
    ("--model_name {t}/empty", 4, "lacks vocab.json"),
    ("--cn_splited", 3, "--cn-splited has no use without --cn-whole-word-segment"),
    ("--cn_splited --cn_whole_word_segment --cn_split_dimer=", 2, "--cn-split-dimer is empty"),
    ("--cn_whole_word_segment", 3, "needs a WordPiece vocabulary"),
    ("--cn_seg_func pkuseg", 2, "--cn-seg-func"),
    ("--tokenizer_name ErnieTokenizer --model_name {w} --cn_whole_word_segment", 3, "needs the package jieba"),
    ("--tokenizer_name BertTokenizer --model_name {w} --cn_whole_word_segment --cn_seg_func lac", 3, "the package lac"),
    ("--split_sentences --sentence_splitter nltk", 3, "nltk"),
    ("--output_prefix {t}/old", 4, "would share the name"),
    ("--output_prefix {t}/blank.jsonl/x", 6, "cannot write"),
    ("--cn_segfunc jieba", 2, "unknown flag --cn-segfunc; did you mean --cn-seg-func"),
    ("--tensor-model-parallel-size 2", 2, "has no use for it"),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("words, code, message", MISTAKES)
def test_a_mistake_is_one_message_and_leaves_nothing(bpe, word_pieces, tmp_path, monkeypatch, words, code, message):
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / "cache"))
    for name in ("jieba", "LAC", "nltk"):  # as where they are not installed
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "old.idx").write_text("")
    (tmp_path / "raws").mkdir()
    for name in ("raw.txt", "raw", "raws/a.txt"):
        (tmp_path / name).write_text("First document.\nOf two lines.\n\nSecond document.\n")
    (tmp_path / "raw.txt.gz").write_bytes(gzip.compress(b"First.\n\nSecond.\n"))
    with tarfile.open(tmp_path / "raw.tar", "w") as archive:
        archive.add(tmp_path / "raw.txt", "raw.txt")
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    line = flags(bpe, "GPTTokenizer", source, tmp_path / "out")
    for word in words.format(t=tmp_path, w=word_pieces).split(" --"):  # in place of the right ones, or behind them
        flag, _, value = word.removeprefix("--").partition(" ")
        if f"--{flag}" in line:
            del line[(at := line.index(f"--{flag}")) : at + 2]
        line += [f"--{flag}", *value.split()]
    with pytest.raises(Failure) as caught:
        main(line)
    assert caught.value.code == code and message in str(caught.value), str(caught.value)
    left = [path.name for path in tmp_path.rglob("*") if path.name != "out.rejected.jsonl"]
    assert sorted(left) == before


@pytest.mark.full
def test_these_tests_pass_where_the_segmenters_are_installed(root, tmp_path):
    """`pip install '.[all]'` installs jieba; what is said where it is absent has to be tested there, too."""
    for name in ("jieba", "LAC"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "tests/tokenizer", __file__]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(tmp_path), str(root)]))
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_an_interrupted_run_leaves_nothing(bpe, tmp_path, monkeypatch, capsys):
    source = write_lines(tmp_path / "in.jsonl", TEXTS)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(preprocess_worker.Worker, "run", lambda self: None)
    monkeypatch.setattr("megatron.data.preprocess.finish", stop)
    with pytest.raises(SystemExit) as caught:
        main(flags(bpe, "GPTTokenizer", source, tmp_path / "out"))
    assert caught.value.code == 130 and "nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_data_impl_is_named(bpe, tmp_path, capsys):
    """PaddleNLP writes .bin and .idx for it."""
    (tmp_path / "in.jsonl").write_text('{"text": "a b"}\n')
    main([*flags(bpe, "GPTTokenizer", tmp_path / "in.jsonl", tmp_path / "out"), "--data_impl", "mmap"])
    assert "note: --data-impl mmap has no effect: _ids.npy and _idx.npz are written" in capsys.readouterr().err
    assert (tmp_path / "out_ids.npy").exists() and not (tmp_path / "out.bin").exists()


IDLE = [
    ("--chinese", "--chinese has no effect without --split-sentences"),
    ("--lang german", "--lang german has no effect without --split-sentences"),
    ("--sentence_splitter nltk", "--sentence-splitter nltk has no effect without --split-sentences"),
    ("--cn_seg_func lac", "--cn-seg-func lac has no effect without --cn-whole-word-segment"),
    ("--cn_split_dimer |", "--cn-split-dimer | has no effect without --cn-splited"),
    ("--merge_file {m}/merges.txt", "merges.txt has no effect without the other one of --vocab-file and --merge-file"),
    (
        "--vocab_file nothere",
        "--vocab-file nothere has no effect without the other one of --vocab-file and --merge-file",
    ),
    ("--vocab_file {m}/vocab.json --merge_file {m}/merges.txt", ""),
    ("--split_sentences --chinese", ""),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("words, told", IDLE)
def test_words_without_effect_are_named(bpe, tmp_path, capsys, words, told):
    (tmp_path / "in.jsonl").write_text('{"text": "a b"}\n')
    main([*flags(bpe, "GPTTokenizer", tmp_path / "in.jsonl", tmp_path / "out"), *words.format(m=bpe).split()])
    err = capsys.readouterr().err
    assert told in err and err.count("has no effect") == bool(told)


# Sample -----------------------------------------------------------------------------------------------------------------


def test_a_sample_that_is_ready_in_both_formats(tmp_path, capsys):
    main_words = ["--max-megabytes", "0.2", "--vocab-size", "400", "--kinds", "topics"]
    get_sample_data.main(["--output", f"{tmp_path}/data/", *main_words])
    own, other = open_tokens(tmp_path / "data" / "sample"), open_tokens(tmp_path / "data/megatron/sample_text_document")
    texts = [json.loads(line)["text"] for line in (tmp_path / "data" / "sample.jsonl").read_text().splitlines()]
    encode, end = bpe_ids(tmp_path / "data")
    assert own.tokens.tolist() == [id for text in texts for id in [*encode(text.strip()), end]]
    assert np.array_equal(own.tokens, other.tokens) and len(own) == len(other) == len(texts)
    get_sample_data.main(["--output", f"{tmp_path}/again/", *main_words])
    assert files(tmp_path / "data" / "sample") == files(tmp_path / "again" / "sample")
