# SPDX-License-Identifier: Apache-2.0
"""Input files of all kinds become the same documents; what is none is set aside with its reason, in bounded memory."""

import bz2
import gzip
import io
import json
import lzma
import os
import random
import resource
import tarfile
from functools import partial
from pathlib import Path

import pytest
import zstandard

from megatron.corpus.documents import ShardWriter, join_shards, read_documents, write_documents
from megatron.corpus.driver import counts_by_phase, run
from megatron.corpus.plan import make_plan
from megatron.corpus.recipe import parse_recipe
from megatron.corpus.runners.local import run_local
from megatron.corpus.shards import InputPiece, lines_of, pieces_of, split_lines
from megatron.data.json_input import find_sources
from megatron.errors import DataError
from tests.corpus.conftest import final_texts

KEEP_ALL = "stages: [{filter: ['tests.corpus.toy_stages:Upper']}]\n"


def lines(first: int, last: int) -> bytes:
    return b"".join(json.dumps(dict(text=f"text {n} " * 20, n=n)).encode() + b"\n" for n in range(first, last))


def in_tar(**members: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("__", "."))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def go(folder: Path, output: Path, head: str = "", shard_mb: float = 0.01):
    recipe = parse_recipe(f"input: {folder}\nshard-mb: {shard_mb}\n{head}{KEEP_ALL}")
    plan = make_plan(recipe, output)
    run(plan, output, partial(run_local, workers=1))
    return plan, counts_by_phase(plan, output)["00-shards"]


def test_every_kind_of_file_gives_its_documents_in_order(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(0, 100))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(100, 300)))
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines(300, 310)) + zstandard.compress(lines(310, 320)))
    (folder / "d.jsonl.bz2").write_bytes(bz2.compress(lines(320, 330)[:-1]))
    (folder / "e.jsonl.xz").write_bytes(lzma.compress(lines(330, 340)))
    (folder / "f.tar").write_bytes(in_tar(x__jsonl=lines(340, 400), y__txt=b"no", z__jsonl=lines(400, 500)))
    plan, counts = go(folder, tmp_path / "out")
    found = final_texts(tmp_path / "out")
    assert [text.split()[1] for text in found] == [str(n) for n in range(500)]
    assert counts["documents"] == 500 and counts["damaged"] == {} and counts["rejected"] == {}
    assert len(plan.final) > len(plan.tasks) // 3
    sizes = [sum(len(d["text"]) for d in read_documents(tmp_path / "out/tasks" / shard)) for shard in plan.final]
    assert max(sizes) < 10 * 10_000  # cut by what was read of a packed file: about the size, not exactly


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_ranges_of_a_file_have_each_line_once(tmp_path, size):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + lines(0, 30) + b"x" * 300 + b"\n" + b"no end")
    rows = (
        pieces_of(find_sources([str(path)]), size)
        if size > 3
        else [[InputPiece(str(path), s, s + 1)] for s in range(900)]
    )
    found = [line.data for row in rows for piece in row for line in lines_of(piece, 1 << 20)]
    wanted = path.read_bytes().split(b"\n")
    assert found == wanted[: len(found)] and (size < 4 or len(found) == len(wanted))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 1 << 18])
@pytest.mark.parametrize("most", [3, 5, 100])
def test_long_lines_are_cut_off(monkeypatch, chunk, most):
    monkeypatch.setattr("megatron.corpus.shards.CHUNK", chunk)
    data = b"ab\nabcd\n\n" + b"0123456789" * 5 + b"\nxy\n" + b"z" * 9
    found = list(split_lines(io.BytesIO(data).read, most))
    wanted = data.split(b"\n")
    assert [line for line, _, long in found if not long] == [line for line in wanted if len(line) <= most]
    assert [size for _, size, _ in found] == [len(line) + 1 for line in wanted[:-1]] + [len(wanted[-1])]
    assert [long for _, _, long in found] == [len(line) > most for line in wanted]


def test_lines_that_are_no_documents_are_set_aside_with_their_reasons(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    bad = {
        b'{"text": ': "not JSON",
        b'{"text": "\xff"}': "not UTF-8",
        b'{"text": 7}': "'text' is a number, not text",
        b'{"text": ["a", "b"]}': "a list of texts",
        b'["text"]': "a list instead of an object",
        b'{"txt": "a"}': "no key 'text'",
        b'{"text": "\\ud800"}': "'text' holds half of a surrogate pair, which is no text",
        b'{"text": "' + b"long " * 2000 + b'"}': "too long",
        b"[" * 5000: "not JSON",
        b"null": "null instead of an object",
    }
    good = [
        b'{"text": "good", "score": NaN}',
        b'{"text": "huge", "n": 123456789012345678901234567890}',
        b'{"text": ""}',
    ]
    (folder / "a.jsonl").write_bytes(b"\n".join([*bad, *good]))
    plan, counts = go(folder, tmp_path / "out", "max-document-mb: 0.009\n")
    wanted: dict[str, int] = {}
    for reason in bad.values():
        wanted[reason] = wanted.get(reason, 0) + 1
    assert counts["rejected"] == wanted
    assert final_texts(tmp_path / "out") == ["good", "huge", ""]
    told = [json.loads(line) for path in tmp_path.glob("out/tasks/00*/*/rejected.jsonl") for line in path.open()]
    assert len(told) == len(bad) and all(len(one["begins"]) <= 400 for one in told)
    by_reason = {one["reason"].partition(":")[0].partition(" (")[0]: one["bytes"] for one in told}
    assert by_reason["too long"] == max(len(line) for line in bad) + 1


def test_damaged_files_are_set_aside_as_a_whole(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(0, 3))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"no json\n" + lines(3, 900))[:-9])
    (folder / "c.jsonl.zst").write_bytes(zstandard.compress(lines(900, 903))[:-5])
    (folder / "d.jsonl").write_bytes(b"PK\x03\x04" + bytes(60))
    (folder / "e.jsonl").write_bytes(b"")
    (folder / "f.jsonl").write_bytes(lines(903, 906))
    (folder / "g.jsonl.gz").write_bytes(gzip.compress(lines(3, 5000))[:-9])
    (folder / "loop").symlink_to(folder)
    plan, counts = go(folder, tmp_path / "out")
    assert [text.split()[1] for text in final_texts(tmp_path / "out")] == ["0", "1", "2", "903", "904", "905"]
    assert {Path(path).name for path in counts["damaged"]} == {"b.jsonl.gz", "c.jsonl.zst", "g.jsonl.gz"}
    assert all("damaged or cut short" in reason for reason in counts["damaged"].values())
    assert {Path(path).name for path, _ in plan.set_aside} == {"d.jsonl", "e.jsonl"}
    assert counts["documents"] == 6 and counts["lines"] == 6 and counts["rejected"] == {}
    with pytest.raises(DataError, match=r"d\.jsonl"):
        go(folder, tmp_path / "stops", "on-damaged: stop\n")


def test_a_bomb_is_set_aside_in_bounded_memory(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(0, 3))
    packed = zstandard.ZstdCompressor(level=1).compressobj()
    with open(folder / "b.jsonl.zst", "wb") as file:
        for _ in range(400):
            file.write(packed.compress(b"a" * (1 << 18)))
        file.write(packed.flush())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, counts = go(folder, tmp_path / "out", "max-document-mb: 0.1\n")
    assert [*counts["damaged"].values()][0].startswith("a bomb") and counts["documents"] == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB; the bomb has 100 MB


def test_another_key_holds_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "one", "text": "old", "url": "u"}\n')
    go(tmp_path / "a.jsonl", tmp_path / "out", "text-key: content\n")
    [shard] = (tmp_path / "out/final").glob("*.zst")
    assert list(read_documents(shard)) == [dict(url="u", text="one")]


def test_no_input_is_told(tmp_path):
    with pytest.raises(DataError, match="input: .*no such file"):
        go(tmp_path / "nothing.jsonl", tmp_path / "out")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="no input"):
        go(tmp_path / "empty.jsonl", tmp_path / "out")


def test_shards_are_joined_in_the_order_of_their_names(tmp_path):
    assert write_documents(tmp_path / "b.jsonl.zst", [dict(text="2")]) == 1
    with ShardWriter(tmp_path / "a.jsonl.zst") as writer:
        writer.write(dict(text="1"))
    join_shards(tmp_path)
    [path] = tmp_path.iterdir()
    assert path.name == "documents.jsonl.zst" and [d["text"] for d in read_documents(path)] == ["1", "2"]
    path.unlink()
    join_shards(tmp_path)
    assert list(read_documents(path)) == []
    assert zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read() == b""


def hostile(rng: random.Random, number: int) -> tuple[str, bytes]:
    """Name and bytes of a file that wants to do harm."""
    good = lines(number, number + 3)
    packers = dict(gz=gzip.compress, zst=zstandard.compress, bz2=bz2.compress, xz=lzma.compress)
    ending, pack = rng.choice(list(packers.items()))
    packed = pack(good)
    at = rng.randrange(len(packed))
    entities = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    name, content = rng.choice(
        [
            ("jsonl", bytes(rng.randrange(256) for _ in range(rng.randrange(300)))),
            ("jsonl", good[: rng.randrange(len(good))] + b"\xff\xfe\n" + good),
            ("jsonl", b"[" * rng.randrange(1, 20000) + b"\n" + good),
            ("jsonl", b'{"text": "' + b"\\ud800" * 9 + b'"}\n' + good),
            ("jsonl", b'{"text": ' + b"9" * rng.randrange(1, 9000) + b"}\n" + good),
            ("jsonl", b"x" * 300_000 + b"\n" + good),
            ("jsonl", b""),
            ("jsonl", f'<!DOCTYPE l [<!ENTITY l0 "lol">{entities}]><l>&l9;</l>'.encode()),
            ("jsonl", b"PK\x03\x04" + bytes(rng.randrange(256) for _ in range(50))),
            ("jsonl", b"\0" * rng.randrange(1, 5000)),
            (f"jsonl.{ending}", packed[:at]),
            (f"jsonl.{ending}", packed[:at] + bytes([packed[at] ^ (1 << rng.randrange(8))]) + packed[at + 1 :]),
            (f"jsonl.{ending}", good),
            (f"jsonl.{ending}", b""),
            ("jsonl.gz", gzip.compress(b"a" * 3_000_000)),
            ("tar", in_tar(**{"../../../escaped__jsonl": good, "/etc/absolute__jsonl": good, "a__txt": b"x"})),
            ("tar", in_tar(x__jsonl=good)[: rng.randrange(1, 1500)]),
        ]
    )
    return f"{number:05}.{name}", content


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_thousand_hostile_files_beside_good_ones(memory_folder):
    """Each is read or set aside with a reason, the good ones are all there, and nothing is written elsewhere."""
    folder, rng = memory_folder / "in", random.Random(11)
    folder.mkdir()
    for number in range(2000):
        name, content = hostile(rng, number)
        (folder / name).write_bytes(content)
        if number % 100 == 0:
            (folder / f"{number:05}-good.jsonl").write_bytes(lines(10_000 + number, 10_005 + number))
            (folder / f"link-{number}").symlink_to(folder)
            (folder / f"gone-{number}.jsonl").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.jsonl")
    before = {path for path in memory_folder.rglob("*")}
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan, counts = go(folder, memory_folder / "out", "max-document-mb: 0.2\n", shard_mb=0.2)
    found = {int(text.split()[1]) for text in final_texts(memory_folder / "out") if text.startswith("text ")}
    assert {10_000 + n + m for n in range(0, 2000, 100) for m in range(5)} <= found
    assert len(plan.set_aside) > 300 and len(counts["damaged"]) > 300 and sum(counts["rejected"].values()) > 300
    assert all(reason for _, reason in plan.set_aside) and all(counts["damaged"].values())
    outside = {path for path in memory_folder.rglob("*") if not path.is_relative_to(memory_folder / "out")}
    assert outside == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 300_000  # KB
