# SPDX-License-Identifier: Apache-2.0
"""preprocess_data.py: its bytes against a slow definition, bad lines, and every way in which a run can end early."""

import ast
import gzip
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import zstandard

import preprocess_data
from megatron.corpus.tokenize import TokenizeOptions, preprocess_settings
from megatron.data import preprocess_encode, preprocess_worker
from megatron.data.indexed import IndexedDataset
from megatron.data.preprocess import preprocess
from megatron.data.workspace import Workspace
from megatron.errors import DataError, Failure, Locked, StorageError, exit_code
from megatron.guard import processes
from megatron.settings.schema import TokenizerSettings
from megatron.storage.processes import state
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.base import Tokenizer
from megatron.tools.create_pretraining_data import CreateOptions
from tests.tokenizer.turns import save_tokenizer

pytestmark = pytest.mark.sampled(5)

EDGE = [
    dict(text="", title="empty text"),
    dict(text="Hello \U0001f600\U0001f468\u200d\U0001f469 emoji \u4e2d\u6587\u5206\u8bcd\u3002", title=""),
    dict(text="very long " * 3000, title="a\u2028b\x85c"),
    dict(text="a <|endoftext|> b", title="\r\n\t tabs"),
    dict(text=["One sentence.", "", "Another."], title="list"),
    dict(text=[], title="empty list"),
    dict(text=[""], title="   \n "),
    dict(text="\x00\x01 \u0c5c letter of Unicode 17", title="It's o'clock, we'll"),
]
DOCUMENTS = EDGE + [dict(text=f"document {i} " * (i * 7 % 23), title=str(i)) for i in range(200)]
LINES = [json.dumps(document, ensure_ascii=bool(i % 2)) for i, document in enumerate(DOCUMENTS)]


@pytest.fixture(scope="module")
def vocab(tmp_path_factory):
    """A byte-level BPE of 500 tokens, trained here: (vocab.json, merges.txt)."""
    from tokenizers import ByteLevelBPETokenizer

    folder = tmp_path_factory.mktemp("vocab")
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(LINES, vocab_size=500, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save_model(str(folder))
    return TokenizerSettings("GPT2BPETokenizer", str(folder / "vocab.json"), str(folder / "merges.txt"))


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(LINES), newline="")
    return str(path)


def flags(vocab, input, prefix, *more):
    inputs = [input] if isinstance(input, str) else input
    files = ["--vocab-file", vocab.vocab_file, "--merge-file", vocab.merge_file]
    return ["--input", *inputs, "--output-prefix", str(prefix), "--tokenizer-type", "GPT2BPETokenizer", *files, *more]


def run(vocab, input, prefix, *more):
    preprocess_data.main(flags(vocab, input, prefix, *more))


def settings(input, prefix, **more):
    more = dict(json_keys=["text"], workers=2) | more
    return preprocess_data.PreprocessOptions(input=[input], output_prefix=str(prefix), **more)


def slow_definition(vocab, documents, key, append_eod, split=lambda text: [text]) -> tuple[bytes, bytes]:
    """The bytes of .bin and .idx, from the documented format with nothing but `tokenizers` and `struct`."""
    from tokenizers import ByteLevelBPETokenizer

    model = ByteLevelBPETokenizer(vocab.vocab_file, vocab.merge_file)
    tokens, lengths, boundaries = [], [], [0]
    for document in documents:
        value = document[key]
        sentences = [model.encode(s).ids for s in (value if isinstance(value, list) else split(value))]
        sentences = [ids for ids in sentences if ids]
        if sentences and append_eod:
            sentences[-1].append(model.token_to_id("<|endoftext|>"))
        tokens += [id for ids in sentences for id in ids]
        lengths += map(len, sentences)
        boundaries.append(len(lengths))
    pointers = [2 * sum(lengths[:i]) for i in range(len(lengths))]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(boundaries))
    index = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *pointers)
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    return struct.pack(f"<{len(tokens)}H", *tokens), header + index


def written(prefix) -> tuple[bytes, bytes]:
    return tuple(open(f"{prefix}{suffix}", "rb").read() for suffix in (".bin", ".idx"))


@pytest.mark.parametrize("append_eod", [True, False])
def test_equals_the_slow_definition(vocab, corpus, tmp_path, append_eod):
    run(vocab, corpus, tmp_path / "out", "--json-keys", "text", "title", *["--append-eod"] * append_eod)
    for key in ("text", "title"):
        assert written(tmp_path / f"out_{key}_document") == slow_definition(vocab, DOCUMENTS, key, append_eod)
    leftovers = {path.name for path in tmp_path.iterdir()} - {"corpus.jsonl"}
    endings = (".bin", ".idx", ".origin", ".stats.json", ".sums.json")
    assert leftovers == {f"out_{key}_document{end}" for key in ("text", "title") for end in endings}


@pytest.mark.parametrize("workers, block_size", [(1, 1 << 20), (1, 1000), (2, 700), (3, 37), (5, 4096)])
def test_workers_and_blocks_change_nothing(vocab, corpus, tmp_path, workers, block_size):
    tokenizer = build_tokenizer(vocab)
    preprocess(settings(corpus, tmp_path / "out", workers=workers, append_eod=True), tokenizer, block_size=block_size)
    assert written(tmp_path / "out_text_document") == slow_definition(vocab, DOCUMENTS, "text", True)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
@pytest.mark.parametrize("files, workers", [(1, 3), (4, 2)])
def test_compressed_files_fed_or_shared_out(vocab, tmp_path, pack, files, workers):
    (tmp_path / "in").mkdir()
    for number, lines in enumerate(np.array_split(LINES, files)):
        (tmp_path / "in" / f"{number}.jsonl.packed").write_bytes(pack(("\n".join(lines) + "\n").encode()))
    tokenizer = build_tokenizer(vocab)
    options = settings(str(tmp_path / "in" / "*.packed"), tmp_path / "out", workers=workers, append_eod=True)
    preprocess(options, tokenizer, block_size=600)
    assert written(tmp_path / "out_text_document") == slow_definition(vocab, DOCUMENTS, "text", True)


@pytest.mark.parametrize("workers", ["1", "2"])  # a worker reads the file, or the parent does
def test_compressed_file_that_is_cut_short(vocab, tmp_path, workers):
    data = gzip.compress("\n".join(LINES * 20).encode())
    (tmp_path / "cut.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="cut.gz: the compressed data is damaged or cut short"):
        run(vocab, str(tmp_path / "cut.gz"), tmp_path / "out", "--workers", workers)
    assert {path.name for path in tmp_path.iterdir()} == {"cut.gz"}


def test_named_pipe(vocab, corpus, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = subprocess.Popen(["sh", "-c", f"cat {corpus} > {tmp_path}/pipe"])
    run(vocab, str(tmp_path / "pipe"), tmp_path / "out")
    writer.wait(100)
    assert written(tmp_path / "out_text_document") == slow_definition(vocab, DOCUMENTS, "text", False)


@pytest.mark.parametrize("compressed", [False, True])
def test_partitions_deal_lines_out(vocab, corpus, tmp_path, compressed):
    if compressed:
        middle = len(LINES) // 3
        for name, lines in (("a", LINES[:middle]), ("b", LINES[middle:])):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))
        corpus = str(tmp_path / "*.gz")
    dealt = [document for partition in range(3) for document in DOCUMENTS[partition::3]]
    options = settings(corpus, tmp_path / "out", partitions=3, json_keys=["text", "title"])
    preprocess(options, build_tokenizer(vocab), block_size=500)
    for key in ("text", "title"):
        assert written(tmp_path / f"out_{key}_document") == slow_definition(vocab, dealt, key, False)
    preprocess(settings(corpus, tmp_path / "out", partitions=3, keep_sequential_samples=True), build_tokenizer(vocab))
    assert written(tmp_path / "out_text_document") == slow_definition(vocab, DOCUMENTS, "text", False)


@pytest.mark.sampled(10)
def test_sentences(vocab, tmp_path):
    pytest.importorskip("sentencex")
    texts = ["Mr. Smith came. He left!  Why?\n\nNobody knows.", "", "One."]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    run(vocab, str(path), tmp_path / "out", "--split-sentences", "--append-eod")
    expected = [["Mr. Smith came.", "He left!", "Why?", "Nobody knows."], [], ["One."]]
    shrunk = slow_definition(vocab, [dict(text=sentences) for sentences in expected], "text", True)
    assert written(tmp_path / "out_text_sentence") == shrunk


def test_settings_of_sentences_without_sentences_are_told(vocab, corpus, tmp_path, capsys):
    run(vocab, corpus, tmp_path / "out", "--lang", "english", "--keep-newlines")  # english: the default
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert told == [f"warning: --{name} has no effect without --split-sentences" for name in ("lang", "keep-newlines")]


def test_stdin_of_a_pipe(vocab, tmp_path, root):
    command = [sys.executable, str(root / "preprocess_data.py"), *flags(vocab, "-", tmp_path / "out", "--workers", "2")]
    subprocess.run(command, input="\n".join(LINES).encode(), check=True, capture_output=True)
    assert written(tmp_path / "out_text_document") == slow_definition(vocab, DOCUMENTS, "text", False)


def test_the_token_that_ends_documents_is_named(vocab, corpus, tmp_path, capsys):
    """The tokenizer's eos_token: a chat model's has the end of an answer there, and says so."""
    from tokenizers import Tokenizer, models

    run(vocab, corpus, tmp_path / "out", "--append-eod")
    assert "end of document: <|endoftext|> (" in capsys.readouterr().out
    words = {"<|endoftext|>": 0, "a": 1, "<|im_end|>": 2}
    Tokenizer(models.WordLevel(words, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(eos_token="<|im_end|>")))
    line = ["--input", str(corpus), "--output-prefix", str(tmp_path / "chat"), "--tokenizer-model", str(tmp_path)]
    preprocess_data.main([*line, "--append-eod", "--workers", "1"])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("end of document")]
    assert len(said) == 1 and said[0].startswith(
        "end of document: <|im_end|> (2); --append-eod takes the tokenizer's eos"
    )
    assert said[0].endswith("how to take <|endoftext|> (0)")
    assert np.fromfile(tmp_path / "chat_text_document.bin", np.uint16)[-1] == 2
    preprocess_data.main([*line, "--workers", "1"])
    assert "end of document" not in capsys.readouterr().out


def test_what_it_prints(vocab, corpus, tmp_path, capsys):
    run(vocab, corpus, tmp_path / "out", "--log-interval", "10", "--tensor-model-parallel-size", "2")
    out, err = capsys.readouterr()
    assert f"Opening {corpus}\n> building GPT2BPETokenizer tokenizer ...\n" in out
    assert " > padded vocab (size: 500) with 12 dummy tokens (new size: 512)\nVocab size: 500\n" in out
    assert f"Output prefix: {tmp_path}/out\n" in out
    assert re.search(r"^Time to startup: [\d.]+$", out, re.M) and "Done! Now finalizing." in out
    tokens = IndexedDataset(tmp_path / "out_text_document").num_tokens
    assert f"Total documents num: {len(LINES)}\n" in out and f"Total tokens num: {tokens}\n" in out
    assert re.search(r"^Processed 208 documents \([\d.]+ docs/s, [\d.]+ [kM]B/s\)\. .* 100%, ETA 0:00:00$", err, re.M)
    stats = json.loads((tmp_path / "out_text_document.stats.json").read_text())
    assert stats["tokens"] == tokens and stats["tokenizer"]["vocab_size"] == 500


BAD = ['{"text": "cut', '{"body": 1}', "\udcff", '{"text": 3}']


def with_bad_lines(tmp_path):
    """Two files with bad lines at known places, and blank lines that are none: (folder, [(file, line)])."""
    (tmp_path / "in").mkdir()
    places = []
    for name, every in (("a.jsonl", 7), ("b.jsonl", 11)):
        lines = []
        for i, line in enumerate(LINES):
            lines.append(line)
            if i % 5 == 0:
                lines.append("")
            if i % every == 0:
                lines.append(BAD[i % 4])
                places.append((str(tmp_path / "in" / name), len(lines)))
        (tmp_path / "in" / name).write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    return str(tmp_path / "in"), places


@pytest.mark.parametrize("workers, block_size", [(1, 1 << 20), (3, 300)])
def test_bad_lines_are_set_aside(vocab, tmp_path, workers, block_size):
    folder, places = with_bad_lines(tmp_path)
    totals = preprocess(
        settings(folder, tmp_path / "out", workers=workers), build_tokenizer(vocab), block_size=block_size
    )
    assert written(tmp_path / "out_text_document") == slow_definition(vocab, DOCUMENTS * 2, "text", False)
    rejected = [json.loads(line) for line in open(tmp_path / "out.rejected.jsonl")]
    assert [(record["file"], record["line"]) for record in rejected] == places
    assert all(record["reason"] for record in rejected) and totals.rejected == len(places)
    assert IndexedDataset(tmp_path / "out_text_document").num_documents == 2 * len(LINES)


def test_a_line_without_one_key_is_left_out_of_all(vocab, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a", "title": "b"}\n{"text": "only"}\n')
    run(vocab, str(tmp_path / "in.jsonl"), tmp_path / "out", "--json-keys", "text", "title")
    assert [IndexedDataset(tmp_path / f"out_{key}_document").num_documents for key in ("text", "title")] == [1, 1]


@pytest.mark.parametrize("workers", [1, 3])
def test_stop_at_the_first_bad_line(vocab, tmp_path, workers):
    folder, [(file, line), *_] = with_bad_lines(tmp_path)
    options = settings(folder, tmp_path / "out", workers=workers, on_bad_line="stop")
    with pytest.raises(DataError, match=re.escape(f"{file}, line {line}: ")):
        preprocess(options, build_tokenizer(vocab), block_size=300)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}


def test_nothing_to_write(vocab, tmp_path):
    for name, content in dict(empty="", blank="\n\n", bad="{\n", no_text='{"text": ""}\n').items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(content)
        with pytest.raises(DataError, match="no text in"):
            run(vocab, str(path), tmp_path / "out" / name)
        assert {path.name for path in (tmp_path / "out").iterdir()} <= {"bad.rejected.jsonl"}


def test_plain_text_under_another_name(vocab, tmp_path):
    (tmp_path / "a.md").write_text("# Title\n\nplain text\n\n17\n")
    with pytest.raises(DataError, match="plain text is read from a file whose name ends in .txt"):
        run(vocab, str(tmp_path / "a.md"), tmp_path / "out")


def test_a_folder_with_earlier_output_gives_the_same_again(vocab, corpus, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "the quick fox"}\n')
    run(vocab, str(folder), folder / "one")
    run(vocab, str(folder), folder / "two")
    assert (folder / "two_text_document.bin").read_bytes() == (folder / "one_text_document.bin").read_bytes()
    assert not list(folder.glob("*.rejected.jsonl"))


def test_two_jobs_with_one_prefix(vocab, corpus, tmp_path):
    with Workspace(str(tmp_path / "out")):
        with pytest.raises(Locked, match="another job"):
            run(vocab, corpus, tmp_path / "out")
    run(vocab, corpus, tmp_path / "out")


def test_old_output_survives_a_failure_and_is_replaced_by_success(vocab, corpus, tmp_path):
    run(vocab, corpus, tmp_path / "out")
    before = written(tmp_path / "out_text_document")
    (tmp_path / "bad.jsonl").write_text("{\n")
    with pytest.raises(DataError):
        run(vocab, str(tmp_path / "bad.jsonl"), tmp_path / "out")
    assert written(tmp_path / "out_text_document") == before
    run(vocab, corpus, tmp_path / "out", "--append-eod")
    assert written(tmp_path / "out_text_document") == slow_definition(vocab, DOCUMENTS, "text", True)


@pytest.mark.parametrize("number, words", [(28, "No space left"), (30, "Read-only"), (5, "Input/output error")])
def test_failing_disk(vocab, corpus, tmp_path, monkeypatch, number, words):
    def failing(target, data, offset):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(preprocess_worker, "write_at", failing)
    with pytest.raises(StorageError, match=words) as caught:
        run(vocab, corpus, tmp_path / "out")
    assert exit_code(caught.value) == 6
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl"}


def test_killed_worker_is_noticed(vocab, corpus, tmp_path, monkeypatch):
    def dying(target, data, offset):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(preprocess_worker, "write_at", dying)
    with pytest.raises(Failure, match="SIGKILL"):
        run(vocab, corpus, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl"}


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_ended_by_a_signal(vocab, tmp_path, root, number, code):
    """A run that waits for more stdin is ended: nothing under the final names, workers gone, and the next run works."""
    command = [sys.executable, str(root / "preprocess_data.py"), *flags(vocab, "-", tmp_path / "out", "--workers", "2")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write("\n".join(LINES * 300).encode())
    process.stdin.flush()
    while not list(tmp_path.glob("out.partial/*.bin")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    children = processes.descendants(process.pid)
    process.send_signal(number)
    process.stdin.close()
    assert process.wait(100) == code
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"out.partial"} if number == signal.SIGKILL else set())
    deadline = time.monotonic() + 100
    while any(state(child) not in ("", "Z") for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (tmp_path / "corpus.jsonl").write_text("\n".join(LINES))
    run(vocab, str(tmp_path / "corpus.jsonl"), tmp_path / "out")
    assert written(tmp_path / "out_text_document") == slow_definition(vocab, DOCUMENTS, "text", False)


@pytest.mark.parametrize(
    "more, code, words",
    [
        (["--input", "nowhere.jsonl"], 4, "nowhere.jsonl: no such file"),
        (["--vocab-file", "nowhere.json"], 4, "nowhere.json: no such file"),
        (["--merge-file", "{vocab}"], 4, "not a list of merges"),
        (["--vocab-file", "{merges}"], 4, "not JSON"),
        (["--output-prefix", "/proc/nowhere/out"], 6, "cannot write"),
        (["--workers", "0"], 3, "--workers 0"),
        (["--json-key", "text"], 2, "--json-keys"),
        (["--tokenizer-type", "Typo"], 2, "GPT2BPETokenizer"),
        (["--json-keys", "body"], 4, "no text in"),
    ],
)
def test_mistakes_are_one_message_and_an_exit_code(vocab, corpus, tmp_path, root, more, code, words):
    more = [word.format(vocab=vocab.vocab_file, merges=vocab.merge_file) for word in more]
    command = [sys.executable, str(root / "preprocess_data.py"), *flags(vocab, corpus, tmp_path / "out"), *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert words in done.stderr and "Done!" not in done.stdout
    assert "no such file" not in words or "--input" not in more or not done.stdout  # the vocabulary is not read first
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.parametrize(
    "text, do",
    [
        ('[{"text": "a b"}, {"text": "c"}]', "jq -c '.[]' "),
        ('{"messages": [{"role": "user", "content": "Hi"}]}', "conversations are learned as they are: finetune.py"),
        ('{"body": "a b"}', "check --input and --json-keys"),
    ],
)
def test_files_without_texts_are_told_apart(vocab, tmp_path, text, do):
    (tmp_path / "one.jsonl").write_text(text + "\n")
    with pytest.raises(DataError, match="no text in") as raised:
        preprocess_data.main(list(map(str, flags(vocab, [tmp_path / "one.jsonl"], tmp_path / "out"))))
    assert do in raised.value.do


def test_imports_no_torch(vocab, corpus, tmp_path, root):
    code = "import sys, preprocess_data as p; p.main(sys.argv[1:]); assert not {'torch', 'awkward'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code, *flags(vocab, corpus, tmp_path / "out")], check=True, cwd=root)
    code = "import sys, preprocess_data as p\ntry: p.main(['--help'])\nexcept SystemExit: assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_tokenizers_are_renewed_when_their_caches_grow(vocab, corpus, tmp_path, monkeypatch):
    renewed = []
    memory = iter(range(1 << 40, 1 << 50, 1 << 30))
    monkeypatch.setattr(preprocess_encode, "resident_memory", lambda: next(memory))
    tokenizer = build_tokenizer(vocab)
    monkeypatch.setattr(tokenizer, "renew", lambda: renewed.append(tokenizer.engine))
    encode = preprocess_encode.BlockEncoder(tokenizer, ["text"], np.dtype("<u2"), False)
    block = "\n".join(LINES).encode()
    first = encode(block)
    assert not renewed
    assert np.array_equal(encode(block).targets[0].tokens, first.targets[0].tokens) and len(renewed) == 1
    tokenizer.use_fastest([])
    before = tokenizer.encoder
    Tokenizer.renew(tokenizer)
    assert tokenizer.encoder is not before and tokenizer.encode("a b") == list(before("a b"))


def test_caches_of_many_processes_share_what_is_free(monkeypatch):
    monkeypatch.setattr(preprocess_encode, "available_memory", lambda: 16 << 30)
    sizes = [preprocess_encode.cache_memory(processes) >> 20 for processes in (1, 8, 16, 32, 256)]
    assert sizes == [256, 256, 128, 64, 64]


def test_files_that_are_replaced_are_said_before_the_work(vocab, corpus, tmp_path):
    """Megatron-LM replaces them, too; with how many tokens they are is what somebody needs to stop in time."""
    settings = preprocess_data.check(
        preprocess_data.PreprocessOptions([corpus], str(tmp_path / "out"), json_keys=["text", "title"], workers=1)
    )
    said = []
    preprocess(settings, build_tokenizer(vocab), log=said.append)
    assert not [line for line in said if "replaces" in line]
    prefixes = [str(tmp_path / f"out_{key}_document") for key in ("text", "title")]
    sizes = [os.path.getsize(f"{prefix}.bin") // 2 for prefix in prefixes]  # 500 ids: two bytes each
    os.unlink(f"{prefixes[1]}.idx")
    preprocess(settings, build_tokenizer(vocab), log=said.append)
    told = [line for line in said if "replaces" in line]
    assert told == [f"note: replaces {prefixes[0]} ({sizes[0]:,} tokens)", f"note: replaces {prefixes[1]}.bin"]
    assert said.index(told[-1]) < said.index("Done! Now finalizing.", 2)


def test_vocabulary_flags_without_effect_are_told(corpus, tmp_path, capsys):
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *"abcdefghij"]))
    words = f"--vocab-file {tmp_path}/vocab.txt --tokenizer-type BertWordPieceLowerCase --merge-file m.txt"
    preprocess_data.main(["--input", str(corpus), "--output-prefix", str(tmp_path / "out"), *words.split()])
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert told == ["warning: --merge-file m.txt has no effect without --tokenizer-type GPT2BPETokenizer"]


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", "stdin"])
@pytest.mark.parametrize(
    "texts, more, said",
    [
        (
            ["<|im_start|>user\nq<|im_end|>\n"] * 20,
            "",
            "20 of 20 documents have <|im_start|>, <|im_end|>, which are text here",
        ),
        (["q", "a<|im_end|><|im_end|>", "<|im_end|"] * 3, "", "3 of 9 documents have <|im_end|>, which are text here"),
        (["<|im_start|>user\nq<|im_end|>\n"] * 20, "--parse-special", None),
        (["q", "<|im_end|"], "", None),
        (["<|im_end|>" + "x" * 99_990] * 30, "", "of 30 documents"),
    ],
)
def test_names_of_special_tokens_in_documents_are_counted(tmp_path, capsys, kind, texts, more, said, monkeypatch):
    save_tokenizer(tmp_path, "q a user x")
    data = "".join(json.dumps(dict(text=text)) + "\n" for text in texts).encode()
    file = tmp_path / f"a{kind}"
    file.write_bytes(gzip.compress(data) if kind.endswith("gz") else data)
    if kind == "stdin":
        monkeypatch.setattr("sys.stdin", open(file))
    words = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path} --append-eod --workers 2 {more}"
    inputs = ["--input", "-" if kind == "stdin" else str(file), "--output-prefix", str(tmp_path / "out")]
    preprocess_data.main([*inputs, *words.split()])
    [*notes] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    if len(texts) == 30:  # a sample: the first characters of each block of 1 MB
        [[named, searched]] = [
            re.findall(r"(\d+) of (\d+) documents that were searched have", note)[0] for note in notes
        ]
        assert named == searched and 3 <= int(searched) < 30
    else:
        assert notes == ([f"note: {said}; --parse-special makes them tokens"] if said else [])


@pytest.mark.parametrize(
    "text, flags, notes",
    [
        ("1 2\r\n3\r\n", [], ["2 line ends", "--append-eod"]),
        ("1 2\n3\r4", ["--append-eod"], []),
        ("1\r\n", ["--append-eod"], ["1 line ends"]),
    ],
)
def test_windows_line_ends_and_documents_without_an_end_are_noted(tmp_path, capsys, text, flags, notes):
    """Line ends of the JSON lines themselves do not count."""
    (tmp_path / "a.jsonl").write_bytes(json.dumps(dict(text=text)).encode() + b"\r\n" + b'{"text": "5"}\r\n')
    vocabulary = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    preprocess_data.main(
        ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "a"), *vocabulary, *flags]
    )
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert len(said) == len(notes) and all(map(str.__contains__, said, notes))


def test_every_command_declares_all_settings_that_are_read():
    """None is probed for: what a command does not declare would count as its absence."""
    names, probes = set(), []
    for path in sorted(Path(preprocess_encode.__file__).parent.glob("preprocess*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            of = getattr(node, "value", None) if isinstance(node, ast.Attribute) else None
            if isinstance(of, (ast.Name, ast.Attribute)) and "settings" in (
                getattr(of, "id", ""),
                getattr(of, "attr", ""),
            ):
                names.add(node.attr)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                probes += [ast.unparse(node)] * ("settings" in ast.unparse(node.args[0]))
    assert not probes and {"input", "lines_only", "document_separator", "contamination", "origin"} <= names
    of_commands = [
        {one.name for one in fields(kind)} | set(vars(kind))
        for kind in (preprocess_data.PreprocessOptions, CreateOptions)
    ]
    for declared in (*of_commands, set(vars(preprocess_settings(TokenizeOptions(), Path("in"), Path("out"))))):
        assert names <= declared, names - declared
