# SPDX-License-Identifier: Apache-2.0
"""Addresses that are left out, each for its reason; lists in all their forms; lists that want to do harm."""

import bz2
import gzip
import io
import lzma
import os
import struct
import zipfile

import pytest

from megatron.corpus.registry import build_filter
from megatron.errors import DataError
from megatron.tools.openwebtext import blacklist_urls
from megatron.tools.openwebtext.blacklist_urls import Sift

pytest.importorskip("tld", reason="pip install '.[corpus]'")

CASES = [  # address, why it is left out
    ("https://en.example.org/an/article", ""),
    ("http://www.imgur.com/gallery/1", "listed_domain"),
    ("http://imgur.co.uk/x.jpg", "listed_domain"),  # before the ending
    ("https://imgur.example.org/", ""),  # a host of somebody else's domain
    ("http://x.com/status/1", "listed_domain"),
    ("http://x.org/status/1", ""),
    ("https://example.org/a.7z", "listed_ending"),
    ("https://example.org/a.ai", "listed_ending"),
    ("https://example.org/a.JPG?size=2", "listed_ending"),
    ("https://example.org/?file=a.pdf", "listed_ending"),
    ("https://example.ai", ""),
    ("https://example.org/b.mp3#t=1", "listed_ending"),
    ("a.pdf", "listed_ending"),  # before its length
    ("http://a", "short"),
    ("b.org/", "short"),
    ("example.org/without-a-scheme", "malformed"),
    ("ftp://example.org/x", "malformed"),
    ("https://localhost/x", "malformed"),
    ("https://example.org/two words", "malformed"),
    ("https://-a.org/", "malformed"),
    ("https://[::1/", "malformed"),
    ("https://192.168.0.1:8080/x", ""),
    ("https://b\u00fccher.example/", ""),
    ("https://xn--bcher-kva.xn--p1ai/", ""),
    ("https://en.example.org/an/article", "duplicate"),
    ("http://www.imgur.com/gallery/1", "listed_domain"),  # before duplicates
]


OURS = os.path.join(os.path.dirname(blacklist_urls.__file__), "blacklist.txt")


def sift_of_ours() -> Sift:
    return Sift(OURS)


def run(tmp_path, source, *flags) -> list[str]:
    blacklist_urls.main([str(source), str(tmp_path / "clean.txt"), *flags])
    return (tmp_path / "clean.txt").read_text(encoding="utf-8").splitlines()


def test_each_reason():
    sift = sift_of_ours()
    assert [(address, sift(address)) for address, _ in CASES] == CASES
    assert sift.counts["read"] == len(CASES) == sum(sift.counts.values()) - sift.counts["read"]


def test_the_filter_of_a_recipe_decides_alike():
    """Of single addresses, so that no one was met before."""
    judge = build_filter("url", blacklist=[OURS], missing="drop")
    for address, reason in CASES:
        found = judge(dict(text="x", url=address))
        assert found.reason == reason.replace("duplicate", "") and (found.document is None) == bool(found.reason), (
            address
        )


PAGES = """
sub.example.org   # with all below it
https://www.Site.net/a/
site.net/b?x=1
shop.com:80/
http://[::1/
http://\u2100/
/half.org
"""


@pytest.mark.parametrize("packed", [False, True])
def test_domains_and_pages_of_a_list(tmp_path, packed):
    path = tmp_path / ("list.gz" if packed else "list")
    path.write_bytes(gzip.compress(PAGES.encode()) if packed else PAGES.encode())
    judge = build_filter("url", blacklist=[str(path)])
    for address, reason in [
        ("http://sub.example.org/x", "listed_domain"),
        ("https://a.SUB.example.org:80", "listed_domain"),
        ("https://example.org/", ""),
        ("http://site.net/a", "listed_page"),
        ("http://www.site.net/a/b/c.html?q=1", "listed_page"),
        ("http://site.net/ab", ""),
        ("http://site.net/b?x=1#top", "listed_page"),
        ("http://site.net/b?x=2", ""),
        ("http://site.net/b", ""),
        ("https://shop.com/any/thing", "listed_page"),
        ("https://my.shop.com/any/thing", ""),
        ("shop.com", "short"),
        ("https://" + "a" * 9000 + ".org/", "malformed"),
        ("https://half.org/\ud800", ""),
    ]:
        assert judge(dict(text="x", url=address)).reason == reason, address
    with pytest.raises(DataError, match="cannot be read"):
        build_filter("url", blacklist=[str(tmp_path / "gone.txt")])
    (tmp_path / "latin").write_bytes(b"caf\xe9.org\n")
    with pytest.raises(DataError, match="cannot be read"):
        build_filter("url", blacklist=[str(path), str(tmp_path / "latin")])


def test_what_stays_keeps_its_order_and_counts_are_told(tmp_path, capsys):
    (tmp_path / "list.txt").write_text("\n".join(address for address, _ in CASES) + "\n\n", encoding="utf-8")
    assert run(tmp_path, tmp_path / "list.txt", "--log-interval", "20") == [a for a, reason in CASES if not reason]
    progress, final = capsys.readouterr().out.splitlines()
    assert progress.startswith("PROGRESS | addresses: 20 | ")
    counted = [sum(reason == one for _, reason in CASES) for one in (*blacklist_urls.REASONS, "")]
    assert [int(part.rsplit(": ")[1]) for part in final.split(" | ")[2:]] == counted


def test_the_forms_of_lists(tmp_path, capsys):
    """A folder in order of names, each file packed another way, equals the one list of all."""
    folder = tmp_path / "URLs"
    (folder / "2018").mkdir(parents=True)
    lists = [f"https://example.org/{n}\nhttps://example.org/{n + 1}\n".encode() for n in range(0, 10, 2)]
    (folder / "1.txt").write_bytes(lists[0])
    (folder / "2.txt.xz").write_bytes(lzma.compress(lists[1]))
    (folder / "2018" / "3.bz2").write_bytes(bz2.compress(lists[2]))
    (folder / "4.gz").write_bytes(gzip.compress(lists[3]))
    with zipfile.ZipFile(folder / "5.zip", "w") as archive:
        archive.writestr("URLs/inner.txt", lists[4])
        archive.writestr("../../outside.txt", b"https://example.org/tricky\n")
    os.symlink(folder, folder / "2018" / "circle")
    (folder / "notes.md").write_text("https://example.org/notes\n")
    expected = [f"https://example.org/{n}" for n in [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, "tricky"]]
    assert run(tmp_path, folder) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["URLs", "clean.txt"]
    assert "addresses: 11 |" in capsys.readouterr().out, "each list is read once"


def locked_zip() -> bytes:
    """A zip whose member claims to be encrypted."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", b"https://example.org/locked\n")
    data = bytearray(file.getvalue())
    for at in (6, data.index(b"PK\x01\x02") + 8):
        data[at : at + 2] = struct.pack("<H", 1)
    return bytes(data)


def test_hostile_lists_are_set_aside_each_with_its_reason(tmp_path):
    folder = tmp_path / "URLs"
    folder.mkdir()
    good = lzma.compress(b"".join(b"https://example.org/%d\n" % n for n in range(5000)))
    (folder / "cut.txt.xz").write_bytes(good[: len(good) // 2])
    (folder / "empty.txt").write_bytes(b"")
    (folder / "locked.zip").write_bytes(locked_zip())
    (folder / "bomb.gz").write_bytes(gzip.compress(b"https://example.org/bomb\n" * 200_000))
    (folder / "broken.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    (folder / "long.txt").write_bytes(b"https://example.org/" + b"a" * 300_000 + b"\nhttps://example.org/after\n")
    (folder / "latin.txt").write_bytes(b"https://example.org/caf\xe9\n\0\0\0\n")
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(DataError) as error:
        run(tmp_path, folder, "--max-unpacked-gb", "0.001")
    told = str(error.value)
    assert told.startswith("4 lists could not be read whole")
    for name, reason in [
        ("cut.txt.xz", "damaged"),
        ("locked.zip", "encrypted"),
        ("bomb.gz", "unpacks to more than 0.001 GB"),
    ]:
        assert any(name in line and reason in line for line in told.splitlines()), told
    kept = (tmp_path / "clean.txt").read_text().splitlines()
    assert kept[0] == "https://example.org/bomb" and kept[-1] == "https://example.org/after"
    assert not any("caf" in address for address in kept)


def test_nothing_to_read(tmp_path):
    with pytest.raises(DataError, match="no such list"):
        run(tmp_path, tmp_path / "none")
    with pytest.raises(DataError, match="holds no lists"):
        run(tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []
