# SPDX-License-Identifier: Apache-2.0
"""Documents in tar archives, and inputs whose bytes are not what their names say."""

import bz2
import gzip
import io
import lzma
import tarfile

import numpy as np
import pytest
import zstandard

import preprocess_data
from megatron.data.json_input import find_sources, read_blocks
from megatron.errors import DataError

PACK = dict(gz=gzip.compress, bz2=bz2.compress, xz=lzma.compress, zst=zstandard.ZstdCompressor().compress)
NUMBERS = "--tokenizer-type NullTokenizer --vocab-size 1000 --append-eod".split()


def lines(first: int, last: int) -> bytes:
    return b"".join(b'{"text": "%d %d"}\n' % (i, i + 1) for i in range(first, last))


def archive(members: dict[str, bytes], form=tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def header_by_hand(name: bytes, size: int) -> bytes:
    """A header as POSIX.1-1988 describes it, without tarfile: its sum counts its own place as blanks."""
    head = bytearray(512)
    head[0 : len(name)] = name
    head[100:108], head[124:136], head[156:157] = b"0000644\0", b"%011o\0" % size, b"0"
    head[257:265] = b"ustar\x0000"
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def documents(path, block=1 << 16) -> bytes:
    [source] = find_sources([str(path)])
    return b"".join(data if data.endswith(b"\n") else data + b"\n" for data, _ in read_blocks(source, block))


@pytest.mark.parametrize("block", [100, 1 << 20])
def test_an_archive_made_by_hand(tmp_path, block):
    """The format's own layout: 512 bytes of header, the bytes, zeros up to 512, and two blocks of zeros at the end."""
    parts = [lines(0, 300), lines(300, 301)[:-1], lines(301, 900)]  # the second has no newline at its end
    whole = b""
    for number, part in enumerate(parts):
        whole += header_by_hand(b"part_%d.jsonl" % number, len(part)) + part + bytes(-len(part) % 512)
    (tmp_path / "a.tar").write_bytes(whole + bytes(1024))
    assert documents(tmp_path / "a.tar", block) == lines(0, 900)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_are_those_that_a_folder_would_give(tmp_path, form, capsys):
    long = "x" * 90 + "/deep/" + "y" * 60 + ".jsonl" if form != tarfile.USTAR_FORMAT else "long.jsonl"
    members = {
        "data/a.jsonl.zst": PACK["zst"](lines(0, 5)),
        "data/wiki_00": b"\xef\xbb\xbf" + lines(5, 9),
        "data/README.txt": b"not a document\n",
        "data/._a.jsonl": b"\0\1",
        "inner.tar": archive({"b.jsonl": lines(99, 100)}),
        long: lines(9, 12),
        "old.rejected.jsonl": b"{}\n",
    }
    (tmp_path / "a.tar").write_bytes(archive(members, form))
    assert documents(tmp_path / "a.tar") == lines(0, 12)
    told = capsys.readouterr().err
    assert "2 of its 5 files are no JSON lines by their names: data/README.txt" in told


@pytest.mark.sampled(5)
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    "name", ["o.jsonl.zst.tar", "o.tar.gz", "o.tgz", "o.tar.zst", "o.tar.bz2", "o.tar.xz", "o.tar"]
)
def test_the_same_token_files_as_of_plain_text(tmp_path, name, workers):
    (tmp_path / "plain.jsonl").write_bytes(lines(0, 700))
    members = {f"2020-{i:02}.jsonl.zst": PACK["zst"](lines(i * 100, i * 100 + 100)) for i in range(7)}
    data, last = archive(members), name.rpartition(".")[2]
    (tmp_path / name).write_bytes(PACK[dict(tgz="gz").get(last, last)](data) if last != "tar" else data)
    for source, prefix in (("plain.jsonl", "plain"), (name, "packed")):
        given = ["--input", str(tmp_path / source), "--output-prefix", str(tmp_path / prefix), "--workers", workers]
        preprocess_data.main([*given, *NUMBERS])
    ids = np.fromfile(tmp_path / "packed_text_document.bin", np.uint16)
    assert ids.tolist() == [word for i in range(700) for word in (i, i + 1, 1000)]
    for end in ("bin", "idx"):
        made = [(tmp_path / f"{prefix}_text_document.{end}").read_bytes() for prefix in ("plain", "packed")]
        assert made[0] == made[1]


def test_an_archive_in_a_folder_and_through_a_pipe(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.tar").write_bytes(archive({"x.jsonl": lines(2, 4)}))
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(0, 2))
    sources = find_sources([str(tmp_path / "in")])
    assert b"".join(data for source in sources for data, _ in read_blocks(source, 999)) == lines(0, 4)
    with open(tmp_path / "in" / "b.tar", "rb") as file:
        monkeypatch.setattr("sys.stdin", file)
        assert documents("-") == lines(2, 4)


@pytest.mark.parametrize("pack", ["", "gz", "zst"])
def test_an_archive_that_is_cut_anywhere_is_an_error(tmp_path, pack):
    """Also between two members, where tarfile by itself takes it for a whole one."""
    data = archive({f"{i}.jsonl": lines(100 * i, 100 * i + 90) for i in range(3)})
    sizes = [len(lines(100 * i, 100 * i + 90)) for i in range(3)]
    ends = [sum(512 + -(-size // 512) * 512 for size in sizes[:i]) for i in range(4)]
    path = tmp_path / (f"a.tar.{pack}" if pack else "a.tar")
    for cut in (*ends[1:], ends[1] + 100, ends[1] + 700):
        path.write_bytes(PACK[pack](data[:cut]) if pack else data[:cut])
        with pytest.raises(DataError, match="archive is damaged or cut short"):
            documents(path)
    damaged = bytearray(data)
    damaged[ends[1] + 3] ^= 1  # a name: the sum of the header no longer fits
    path.write_bytes(PACK[pack](damaged) if pack else damaged)
    with pytest.raises(DataError, match="archive is damaged"):
        documents(path)


WRONG = {
    "a.jsonl.gz": (lines(0, 3), "its name says gzip, its bytes are lines of text"),
    "b.jsonl.gz": (PACK["zst"](lines(0, 3)), "its name says gzip, its bytes are zstd"),
    "c.jsonl": (PACK["gz"](lines(0, 3)), "its name says lines of text, its bytes are gzip"),
    "d.tar": (lines(0, 3), "its name says a tar archive, its bytes are lines of text"),
    "e.tar": (PACK["gz"](archive({"a.jsonl": lines(0, 3)})), "its name says a tar archive, its bytes are gzip"),
    "f.tar.gz": (PACK["gz"](lines(0, 3)), "its name says a tar archive inside gzip, its bytes are lines of text"),
    "g.jsonl.gz": (PACK["gz"](archive({"a.jsonl": b""})), "lines of text inside gzip, its bytes are a tar archive"),
    "h.json": (archive({"a.jsonl": lines(0, 3)}), "its name says lines of text, its bytes are a tar archive"),
    "i.jsonl": (b"PK\x03\x04" + bytes(600), "holds a zip archive, not JSON lines"),
    "wiki.jsonl": (b"PAR1" + bytes(600), "holds Parquet, not JSON lines"),
    "j.gz": (PACK["gz"](PACK["gz"](lines(0, 3))), "holds gzip inside gzip"),
    "k.tar": (archive({"notes.md": b"x\n"}), "the archive holds no JSON lines"),
    "l.tar": (bytes(10240), "the archive holds no JSON lines"),
    "m.tar": (archive({"a.jsonl.gz": lines(0, 3)}), "m.tar:a.jsonl.gz is not what its name says"),
    "n.jsonl.gz": (b"", "its name says gzip"),
    "o.tar": (archive({"a.jsonl": b"PK\x03\x04"}), "o.tar:a.jsonl holds a zip archive"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_what_its_name_says(tmp_path, name):
    """Refused with exit code 4, and nothing is written."""
    data, told = WRONG[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as error:
        preprocess_data.main(["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "out"), *NUMBERS])
    assert told in str(error.value) and error.value.code == 4
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_name_without_suffix_claims_nothing(tmp_path):
    """A file without a suffix says nothing of itself, and text is text."""
    (tmp_path / "BZ_00").write_bytes(lines(0, 2))
    assert documents(tmp_path / "BZ_00") == lines(0, 2)
