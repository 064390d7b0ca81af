# SPDX-License-Identifier: Apache-2.0
"""The shuffle of a corpus and of `shuf`: a uniform permutation, the same however documents are cut, in its memory."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import zstandard

from megatron.corpus import shuffle
from megatron.corpus.stage import flat
from megatron.errors import DataError, Locked, SettingsError
from megatron.storage.durable import WriterLock
from megatron.tools import shuf

MEMORY = 1 << 26


def drive(folder: Path, shards: list[Path], options: dict, memory: int = MEMORY) -> list[Path]:
    """All phases, task by task, the last first where a phase has several: the shards that the last one writes."""
    made, counts = dict(documents=shards), defaultdict(Counter)
    for phase in shuffle.phases(options, len(shards), memory):
        inputs = phase.split(made)
        own = phase.own(made) or [{}] * len(inputs)
        made[phase.name] = [folder / f"{phase.name}-{number}" for number in range(len(inputs))]
        for given, output, more in reversed(list(zip(inputs, made[phase.name], own, strict=True))):
            output.mkdir(parents=True)
            counts[phase.name].update(phase.run(flat(given), output, {**options, **more}))
    found = [path for output in made[phase.name] for path in sorted(output.iterdir())]
    texts = [json.loads(line)["text"] for line in content(found)]
    assert counts["gather"]["documents_in"] == counts["gather"]["documents"] == len(texts)
    assert counts["gather"]["bytes_in"] == counts["gather"]["bytes"] == sum(len(text.encode()) for text in texts)
    return found


def cut(folder: Path, lines: list[bytes], sizes: list[int]) -> list[Path]:
    """Shards of so many lines; every other one packed."""
    folder.mkdir()
    rest, shards = iter(lines), []
    for number, size in enumerate(sizes):
        data = b"".join(line + b"\n" for line in itertools.islice(rest, size))
        shards.append(folder / f"{number}.jsonl{'.zst' * (number % 2)}")
        shards[-1].write_bytes(zstandard.compress(data) if number % 2 else data)
    assert not list(rest)
    return shards


def content(paths: list[Path]) -> list[bytes]:
    data = b"".join(zstandard.ZstdDecompressor().stream_reader(path.open("rb")).read() for path in paths)
    assert data.endswith(b"\n")
    return data[:-1].split(b"\n")


LINES = [b'{"text": "%d"}' % number for number in range(300)] + [b'{"text": "twice"}'] * 3


def test_the_same_order_for_any_shards_memory_and_for_shuf(tmp_path, monkeypatch):
    one = drive(tmp_path / "one", cut(tmp_path / "a", LINES, [303]), dict(seed=5))
    many = drive(tmp_path / "many", cut(tmp_path / "b", LINES, [100, 0, 3, 150, 50]), dict(seed=5))
    monkeypatch.setattr(shuffle, "SHARD_BYTES", 4000)
    tight = drive(tmp_path / "tight", cut(tmp_path / "c", LINES, [150, 153]), dict(seed=5), 1 << 14)
    assert (len(one), len(many), len(tight)) == (4, 20, 2)  # of 64 MB a shard in 16 MB each; of 4,000 bytes in 4,096
    assert content(one) == content(many) == content(tight)
    assert Counter(content(one)) == Counter(LINES) and content(one) != LINES
    (tmp_path / "in").write_bytes(b"\n".join(LINES))  # without its last newline
    shuf.main([str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--seed", "5"])
    assert (tmp_path / "out").read_bytes().split(b"\n")[:-1] == content(one)


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_the_same_order_where_a_task_scatters_several_shards(tmp_path, monkeypatch, most):
    shards = cut(tmp_path / "a", LINES, [100, 0, 3, 150, 50])
    monkeypatch.setattr(shuffle, "SHARD_BYTES", 4000)
    one = content(drive(tmp_path / "one", shards, dict(seed=5), 1 << 14))
    monkeypatch.setattr(shuffle, "MOST_SCATTERS", most)
    some = drive(tmp_path / "some", shards, dict(seed=5), 1 << 14)
    assert content(some) == one and len([*(tmp_path / "some").glob("scatter-*")]) == most


def test_every_permutation_is_as_likely():
    """Of 4 lines under 24,000 seeds each of the 24 orders comes about 1,000 times (chi-square, 1 in 10^6)."""
    orders = Counter(tuple(sorted(range(4), key=lambda place: shuffle.key_of(seed, place))) for seed in range(24_000))
    chi_square = sum((found - 1000) ** 2 / 1000 for found in orders.values())
    assert len(orders) == 24 and chi_square < 70.5
    assert shuffle.key_of(1, 7) != shuffle.key_of(1 + 2**63, 7)


def test_equal_lines_do_not_end_up_side_by_side(tmp_path):
    """As in a random order of 200 lines, half of which are equal: about 50 of them follow one another."""
    lines = [b'{"text": "same"}'] * 100 + [b'{"text": "%d"}' % number for number in range(100)]
    [*found] = content(drive(tmp_path / "one", cut(tmp_path / "a", lines, [200]), {}))
    pairs = sum(a == b for a, b in itertools.pairwise(found))
    assert 30 < pairs < 70


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """60 MB of lines through 10 MB: the process grows by less than half of them."""
    with open(tmp_path / "in", "wb") as file:
        for number in range(12_000):
            file.write(b"%06d " % number + bytes([97 + number % 26]) * 4992 + b"\n")
    code = (
        "import resource, sys; from megatron.tools import shuf; import numpy, zstandard, megatron.corpus.shuffle\n"
        "at = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "shuf.main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at)"
    )
    words = ["in", "-o", "out", "--memory-gb", "0.01"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 28_000, "KB"
    with open(tmp_path / "out", "rb") as file:
        places = [int(line[:6]) for line in file]
    assert sorted(places) == list(range(12_000)) != places
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_shuf_of_several_packed_files_onto_itself_and_to_stdout(tmp_path, monkeypatch, capsysbinary):
    (tmp_path / "a").write_bytes(b"1\n\n2\n")
    (tmp_path / "b.zst").write_bytes(zstandard.compress(b"3\n4"))
    monkeypatch.chdir(tmp_path)
    shuf.main(["a", "b.zst", "--seed", "3", "-o", "a"])
    found = Path("a").read_bytes()
    assert sorted(found.split(b"\n")) == [b"", b"", b"1", b"2", b"3", b"4"]
    shuf.main(["-n", "2", "a"])
    assert capsysbinary.readouterr().out.count(b"\n") == 2
    Path("empty").touch()
    shuf.main(["empty", "-o", "none"])
    assert Path("none").read_bytes() == b""


def test_shuf_says_what_is_wrong(tmp_path):
    good, out = tmp_path / "in", tmp_path / "out"
    good.write_bytes(b"a\n")
    with pytest.raises(DataError, match="no such file"):
        shuf.main([str(tmp_path / "none"), "-o", str(out)])
    with pytest.raises(SettingsError, match="--memory-gb starts at"):
        shuf.main([str(good), "--memory-gb", "0"])
    (tmp_path / "cut.zst").write_bytes(zstandard.compress(b"abc\n" * 1000)[:-5])
    with pytest.raises(DataError, match="damaged or cut short"):
        shuf.main([str(tmp_path / "cut.zst"), "-o", str(out)])
    (tmp_path / "long").write_bytes(bytes(3_000_000))
    with pytest.raises(DataError, match="line 1 is longer than 1 MB"):
        shuf.main([str(tmp_path / "long"), "-o", str(out), "--memory-gb", "0.01"])
    assert not out.exists() and not (tmp_path / ".out.shuf").exists()


def test_one_shuffle_at_a_time_writes_a_file(tmp_path):
    (tmp_path / "in").write_bytes(b"a\n")
    (tmp_path / ".out.shuf").mkdir()
    (tmp_path / ".out.shuf" / "pieces.zst").write_bytes(b"left by a killed one")
    held, holder = os.pipe()
    end, ender = os.pipe()
    child = os.fork()
    if not child:
        lock = WriterLock(tmp_path / ".out.shuf")
        os.write(holder, b".")
        os.read(end, 1)
        lock.release()
        os._exit(0)
    os.read(held, 1)
    with pytest.raises(Locked):
        shuf.main([str(tmp_path / "in"), "-o", str(tmp_path / "out")])
    os.write(ender, b".")
    os.waitpid(child, 0)
    shuf.main([str(tmp_path / "in"), "-o", str(tmp_path / "out")])
    assert (tmp_path / "out").read_bytes() == b"a\n"
