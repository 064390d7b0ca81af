# SPDX-License-Identifier: Apache-2.0
"""cleanup_dataset and cleanup_fix_dataset as commands: decisions, any number of workers, shards, failures."""

import errno
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from megatron.corpus import line_files
from megatron.errors import DataError, Locked, SettingsError, StorageError, UsageError
from megatron.tools.openwebtext import cleanup_dataset, cleanup_fix_dataset

ftfy = pytest.importorskip("ftfy", reason="ftfy is not installed")
pytest.importorskip("eldc", reason="eldc is not installed")

ENGLISH = (
    "The committee has published its report about the state of the roads in the northern counties, and it is short. "
)
GERMAN = (
    "Der Ausschuss hat seinen Bericht \u00fcber den Zustand der Stra\u00dfen ver\u00f6ffentlicht, und er ist kurz. "
)
BAD = (0, 80, 160, 200)  # lines that are no documents


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """A file of 240 documents of all kinds and four lines that are none, in no order. Small blocks make many of it."""
    chance = random.Random(7)
    kinds = {
        "kept": lambda: ENGLISH * chance.randrange(12, 40),
        "repaired": lambda: "\u201cQuoted\u201d, caf\u00c3\u00a9 &amp; bar. " + ENGLISH * chance.randrange(12, 30),
        "small": lambda: ENGLISH * chance.randrange(1, 5),
        "german": lambda: GERMAN * chance.randrange(2, 30),
        "binary": lambda: "\ufffd\0\x07x" * 300,
    }
    lines = []
    for number in range(240):
        kind = chance.choice(list(kinds))
        lines.append(json.dumps(dict(url=f"http://{number}", kind=kind, text=kinds[kind]())))
    for at in BAD:
        lines.insert(at, chance.choice(('{"text": "cut', '{"body": "no text"}', "{}", '{"text": 1}')))
    path = tmp_path_factory.mktemp("raw") / "raw.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(line_files, "BLOCK", 1 << 14)


def expected(path):
    """What the original does, document by document, and the gate before it."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            document = json.loads(line)
            text = ftfy.fix_text(document["text"])
        except (ValueError, KeyError, TypeError):
            continue
        pieces = len(re.findall(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?[^\s\w]+|\s+", text))
        if document["kind"] in ("binary", "german") or len(text) < 1024 and pieces < 128:
            continue
        kept.append(json.dumps({**document, "text": text}, ensure_ascii=False))
    return "".join(line + "\n" for line in kept)


def test_decisions_texts_and_bytes_are_the_originals(raw, tmp_path, capsys):
    cleanup_dataset.main([str(raw), str(tmp_path / "clean.jsonl"), "--log-interval", "40"])
    printed = capsys.readouterr().out
    assert (tmp_path / "clean.jsonl").read_text(encoding="utf-8") == expected(raw)
    kinds = [json.loads(line)["kind"] for line in raw.read_text().splitlines() if '"kind"' in line]
    final = dict(re.findall(r"([\w -]+): ([\d.]+)", printed.split("[FINAL] | ")[1].split("\n")[0]))
    final = {name.strip(): float(figure) for name, figure in final.items()}
    assert final["documents"] == 240 and final["binary docs"] == kinds.count("binary")
    assert final["non-english"] == kinds.count("german") and final["small docs"] == kinds.count("small")
    assert final["fixed text"] == kinds.count("repaired")
    assert final["binary docs chars"] == 1200 * kinds.count("binary")
    assert 4 <= printed.count("[PROGRESS] | elapsed time: ") <= 6
    assert "4 lines are no documents" in printed
    rejected = [json.loads(line) for line in (tmp_path / "clean.jsonl.rejected.jsonl").read_text().splitlines()]
    assert [(record["file"], record["line"]) for record in rejected] == [(str(raw), at + 1) for at in BAD]


@pytest.mark.sampled(2)
def test_same_bytes_for_any_workers_and_compression(raw, tmp_path):
    for name in ("1.jsonl", "3.jsonl", "1.jsonl.gz", "3.jsonl.gz", "2.jsonl.zst"):
        cleanup_dataset.main([str(raw), str(tmp_path / name), "--workers", name[0]])
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "3.jsonl").read_bytes()
    assert (tmp_path / "1.jsonl.gz").read_bytes() == (tmp_path / "3.jsonl.gz").read_bytes()
    assert gzip.decompress((tmp_path / "1.jsonl.gz").read_bytes()) == (tmp_path / "1.jsonl").read_bytes()
    # What was packed is read again: nothing more is found to be cleaned.
    cleanup_dataset.main([str(tmp_path / "2.jsonl.zst"), str(tmp_path / "again.jsonl")])
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()
    rejected = [(tmp_path / f"{name}.rejected.jsonl").read_bytes() for name in ("1.jsonl", "3.jsonl", "2.jsonl.zst")]
    assert rejected[0] == rejected[1] == rejected[2] and not (tmp_path / "again.jsonl.rejected.jsonl").exists()


@pytest.mark.parametrize("packed", [False, True])
def test_shards_together_are_the_whole(raw, tmp_path, packed):
    source = raw
    if packed:
        source = tmp_path / "raw.jsonl.gz"
        source.write_bytes(gzip.compress(raw.read_bytes()))
    parts, rejected = [], []
    for number in range(1, 6):
        out = tmp_path / f"{number}.jsonl"
        cleanup_dataset.main([str(source), str(out), "--shard", f"{number}/5"])
        parts.append(out.read_text(encoding="utf-8"))
        rejected += (
            [json.loads(line)["line"] for line in open(f"{out}.rejected.jsonl")]
            if os.path.exists(f"{out}.rejected.jsonl")
            else []
        )
    whole = expected(raw)
    assert all(parts) and sorted("".join(parts).split("\n")) == sorted(whole.split("\n"))
    assert packed or "".join(parts) == whole  # of a plain file, one after the other
    assert sorted(rejected) == [at + 1 for at in BAD]
    if packed:  # every fifth line each
        assert [json.loads(line)["line"] for line in open(tmp_path / "1.jsonl.rejected.jsonl")] == [
            at + 1 for at in BAD
        ]


def test_many_packed_files_are_shared_out_whole(raw, tmp_path):
    lines = raw.read_text().splitlines(keepends=True)
    for number in range(4):
        (tmp_path / f"{number}.jsonl.gz").write_bytes(gzip.compress("".join(lines[number::4]).encode()))
    parts = []
    for number in (1, 2, 3):
        cleanup_dataset.main([f"{tmp_path}/?.jsonl.gz", str(tmp_path / "out"), "--shard", f"{number}/3"])
        parts += (tmp_path / "out").read_text(encoding="utf-8").splitlines()
    assert sorted(parts) == sorted(expected(raw).splitlines())


def test_dropped_documents_with_their_reasons(raw, tmp_path):
    cleanup_dataset.main([str(raw), str(tmp_path / "clean"), "--dropped-output", str(tmp_path / "dropped.jsonl")])
    reasons = {"binary": "gate.binary", "german": "language.other_language", "small": "length.too_few_tokens"}
    found = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(record["reason"] == reasons[record["document"]["kind"]] and record["figures"] for record in found)
    kept = len((tmp_path / "clean").read_text(encoding="utf-8").splitlines())
    assert len(found) + kept == 240


def test_settings_of_cleanup_dataset(raw, tmp_path):
    out = str(tmp_path / "out.jsonl")
    cleanup_dataset.main([str(raw), out, "--lang", "de", "--min-tokens", "0", "--max-junk", "1", "--no-ftfy"])
    kinds = {json.loads(line)["kind"] for line in open(out)}
    assert kinds == {"german"}
    cleanup_dataset.main([str(raw), out + "2", "--lang", "DE", "--min-tokens", "0", "--max-junk", "1", "--no-ftfy"])
    assert open(out + "2").read() == open(out).read()
    for flags, error in (
        (["--shard", "0/4"], SettingsError),
        (["--shard", "5/4"], SettingsError),
        (["--shard", "x"], SettingsError),
        (["--workers", "0"], SettingsError),
        (["--max-junk", "2"], SettingsError),
        (["--lang", "en", "english"], SettingsError),
        (["--detector", "fasttext"], SettingsError),
        (["--detector", "fasttext", "--lang-model", str(raw)], DataError),
        (["--vocab-file", "vocab.json"], SettingsError),
        (["--dropped-output", str(raw)], UsageError),
        (["--on-bad-line", "stop"], DataError),
    ):
        before = os.listdir(tmp_path)
        with pytest.raises(error):
            cleanup_dataset.main([str(raw), str(tmp_path / "other.jsonl"), *flags])
        assert os.listdir(tmp_path) == before
    for files, error in (
        ([out], UsageError),
        ([], UsageError),
        ([out, out], UsageError),
        ([out + "x", out], DataError),
    ):
        with pytest.raises(error):
            cleanup_dataset.main(files)
    with pytest.raises(UsageError, match="archives are not written"):
        cleanup_dataset.main([out, str(tmp_path / "out.tar")])


def test_an_output_is_whole_or_as_it_was(raw, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    out.write_text("earlier\n")
    with line_files.Workspace(str(out)), pytest.raises(Locked, match="another job"):  # flock excludes within a process
        cleanup_dataset.main([str(raw), str(out)])
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(raw.read_bytes())[:-20])
    with pytest.raises(DataError, match="damaged"):
        cleanup_dataset.main([str(broken), str(out), "--workers", "2"])
    assert out.read_text() == "earlier\n" and sorted(os.listdir(tmp_path)) == ["broken.jsonl.gz", "out.jsonl"]


def test_a_full_disk_is_told_and_leaves_the_earlier_output(raw, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    out.write_text("earlier\n")

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(line_files.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        cleanup_dataset.main([str(raw), str(out)])
    assert out.read_text() == "earlier\n" and os.listdir(tmp_path) == ["out.jsonl"]
    with pytest.raises(FileNotFoundError):  # before any work
        cleanup_dataset.main([str(raw), str(out), "--dropped-output", str(tmp_path / "none" / "dropped.jsonl")])


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def runs(pid):
    """Whether a process is there, and no zombie that its new parent has not asked about."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.full
@pytest.mark.parametrize("whom", ["parent", "worker"])
def test_kills(raw, tmp_path, root, whom):
    """kill -9 of the command leaves the earlier output and no process; of a worker, it ends in words. Run again: right."""
    big, out = tmp_path / "big.jsonl", tmp_path / "out.jsonl"
    big.write_bytes(raw.read_bytes() * 60)
    out.write_text("earlier\n")
    words = [sys.executable, "-m", "megatron.tools.openwebtext.cleanup_dataset", str(big), str(out), "--workers", "2"]
    process = subprocess.Popen(words, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while len(workers := children(process.pid)) < 2:
        time.sleep(0.01)
        assert process.poll() is None
    os.kill(process.pid if whom == "parent" else workers[0], signal.SIGKILL)
    told = process.communicate()[1]
    assert process.returncode == (-signal.SIGKILL if whom == "parent" else 1)
    assert whom == "parent" or "a worker was killed" in told
    end = time.time() + 30
    while any(map(runs, workers)) and time.time() < end:
        time.sleep(0.1)
    assert not any(map(runs, workers))
    assert out.read_text() == "earlier\n"
    subprocess.run(words, cwd=root, check=True, capture_output=True)
    assert out.read_text(encoding="utf-8") == expected(raw) * 60 and not os.path.exists(f"{out}.partial")


# ---------------------------------------------------------------------------------------------------- cleanup_fix_dataset


def fix(raw, folder, *words):
    cleanup_fix_dataset.main(["--input-files", str(raw), "--output-path", str(folder), "--tasks", *words])
    return [
        [json.loads(line) for line in open(folder / f"raw_{kind}.jsonl", encoding="utf-8")]
        for kind in ("cleaned", "filtered")
    ]


def test_tasks_compose_and_are_counted(raw, tmp_path, capsys):
    cleaned, filtered = fix(raw, tmp_path, "remove_512", "ftfy_fix_text", "general_cleaning", "--workers", "2")
    texts = [json.loads(line) for line in raw.read_text().splitlines() if '"kind"' in line]
    long = [document for document in texts if len(document["text"]) >= 512]
    assert filtered == [document for document in texts if len(document["text"]) < 512]  # as they were read
    clean = lambda text: re.sub(r"  +|\b\n+ |\b\n+", " ", ftfy.fix_text(text))
    assert cleaned == [{**document, "text": clean(document["text"])} for document in long]
    printed = capsys.readouterr().out
    counts = f"remove_512 {len(filtered)} remove_256_javascript 0 remove_512_non_english 0 ftfy_fix_text {len(long)} "
    assert f"  >> total docs: 240 {counts}general_cleaning {len(long)}\n" in printed
    changed = sum(ftfy.fix_text(document["text"]) != document["text"] for document in long)
    assert f"  >> changed docs: ftfy_fix_text {changed} general_cleaning" in printed
    assert "    processed       100 documents in " in printed and printed.count("    processed ") == 2
    assert (
        printed.startswith("parsing the arguments ...\ncleanup dataset ...\n > working on ") and "done :-)" in printed
    )
    assert "4 lines are no documents" in printed


def test_each_task_alone(raw, tmp_path):
    texts = [json.loads(line) for line in raw.read_text().splitlines() if '"kind"' in line]
    cleaned, filtered = fix(raw, tmp_path / "english", "remove_512_non_english")
    assert {document["kind"] for document in filtered} == {"german"}
    assert filtered == [document for document in texts if document["kind"] == "german" and len(document["text"]) < 512]
    cleaned, filtered = fix(raw, tmp_path / "stories", "stories", "gutenberg", "realnews")
    assert filtered == [] and len(cleaned) == 240


def test_settings_of_cleanup_fix_dataset(raw, tmp_path):
    packed = tmp_path / "a.json.gz"
    packed.write_bytes(gzip.compress(raw.read_bytes()))
    cleanup_fix_dataset.main(["--input-files", str(packed), "--output-path", str(tmp_path / "o"), "--tasks", "stories"])
    assert sorted(os.listdir(tmp_path / "o")) == [
        "a_cleaned.json.gz",
        "a_cleaned.json.gz.rejected.jsonl",
        "a_filtered.json.gz",
    ]
    nothing = (tmp_path / "o" / "a_filtered.json.gz").read_bytes()
    assert nothing and gzip.decompress(nothing) == b""  # of no bytes at all, its name would be a lie
    other = tmp_path / "b" / "a.json.gz"
    other.parent.mkdir()
    other.write_bytes(packed.read_bytes())
    for words, error in (
        ([str(packed), str(other), "--tasks", "stories"], UsageError),
        ([str(packed), "--tasks", "storys"], SettingsError),
        ([str(packed), "--tasks", "stories", "stories"], SettingsError),
        ([str(packed), "--tasks"], (UsageError, SettingsError)),
        ([str(packed)], UsageError),
        ([str(tmp_path / "none"), "--tasks", "stories"], DataError),
    ):
        with pytest.raises(error):
            cleanup_fix_dataset.main(["--input-files", *words, "--output-path", str(tmp_path / "p")])
        assert not (tmp_path / "p").exists()
