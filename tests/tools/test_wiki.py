# SPDX-License-Identifier: Apache-2.0
"""Dumps of wikis to folders of texts: real forms of dumps, damaged ones, and ones that want to do harm."""

import bz2
import gzip
import json
import os
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

pytest.importorskip("mwparserfromhell", reason="pip install '.[corpus]'")

from megatron.corpus import lines, wikidump  # noqa: E402
from megatron.errors import DataError, SettingsError, UsageError  # noqa: E402
from megatron.tools import wiki  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="{lang}">
  <siteinfo>
    <sitename>W</sitename>
    <base>https://{lang}.wikipedia.org/wiki/Main_Page</base>
    <namespaces><namespace key="6" case="first-letter">File</namespace></namespaces>
  </siteinfo>
"""
TAIL = "</mediawiki>\n"


def page(number: int, title: str, text: str, ns: int = 0, more: str = "") -> str:
    return f"""  <page>
    <title>{escape(title)}</title>
    <ns>{ns}</ns>
    <id>{number}</id>{more}
    <revision>
      <id>{number + 1000}</id>
      <contributor><username>somebody</username><id>77</id></contributor>
      <comment>/* a &lt;/page&gt; */</comment>
      <text bytes="{len(text)}" xml:space="preserve">{escape(text)}</text>
    </revision>
  </page>
"""


PAGES = [
    page(1, "Alpha & Omega", "'''Alpha''' is <!-- c --> a [[letter]]; 1 < 2 &amp; 3.\n\n== See also ==\n* [[Beta]]\n"),
    page(2, "Moved", "#REDIRECT [[Alpha & Omega]]", more='\n    <redirect title="Alpha &amp; Omega" />'),
    page(3, "Talk:Alpha", "Talk.", ns=1),
    page(4, "Empty", "{{stub}}"),
    page(5, "Beta", "Beta comes second, <nowiki></page></nowiki> <ref>note</ref>or so."),
]
ALPHA = dict(
    id="1",
    revid="1001",
    url="https://en.wikipedia.org/wiki?curid=1",
    title="Alpha & Omega",
    text="Alpha is a letter; 1 < 2 & 3.",
)


def dump(path: Path, pages: list[str] = PAGES, lang: str = "en", tail: str = TAIL) -> Path:
    """A dump, packed as its name says: `.multi.bz2` has a stream for the head, for each two pages, and for the end."""
    head = HEAD.format(lang=lang)
    if path.name.endswith(".multi.bz2"):
        pairs = ["".join(pages[at : at + 2]) for at in range(0, len(pages), 2)]
        path.write_bytes(b"".join(bz2.compress(part.encode()) for part in [head, *pairs, tail]))
        return path
    packers = {".bz2": bz2.compress, ".gz": gzip.compress}
    path.write_bytes(packers.get(path.suffix, bytes)("".join([head, *pages, tail]).encode()))
    return path


def run(source: Path, output: Path, *flags: str) -> list[dict]:
    wiki.main([str(source), "--output", str(output), "--workers", "1", *flags])
    files = sorted(output.rglob("wiki_*"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_a_dump_however_it_is_packed(tmp_path, capsys):
    names = ("a.xml", "a.xml.bz2", "a.multi.bz2", "a.xml.gz")
    found = [run(dump(tmp_path / name), tmp_path / f"out-{name}") for name in names[:1]]
    assert found[0][0] == ALPHA and [article["title"] for article in found[0]] == ["Alpha & Omega", "Beta"]
    assert found[0][1]["text"] == "Beta comes second, </page> or so."
    assert "2 articles" in (said := capsys.readouterr().out) and "redirects: 1 | namespace: 1 | empty: 1" in said
    from megatron.corpus.wikidump import WikiDump, pages_of

    def articles(name):
        source = WikiDump(dump(tmp_path / name))
        pages = [page for piece in source.pieces() for page in pages_of(piece)]
        return pages, source.site

    assert [articles(name) for name in names[1:]] == [articles(names[0])] * 3
    assert articles(names[0])[1].language == "en" and len(articles(names[0])[0]) == 5


def test_wiki_extractors_words_and_files(tmp_path, monkeypatch):
    """Its documented command, the folder's default name, and its other forms."""
    monkeypatch.chdir(tmp_path)
    many = [page(number, f"T{number}", "A text of some length. " * 10) for number in range(105)]
    dump(Path("dump.xml.bz2"), many)
    wiki.main(["--json", "./dump.xml.bz2", "--processes", "1", "-b", "0", "-q"])
    assert sorted(os.listdir("text")) == ["AA", "AB"] and len(os.listdir("text/AA")) == 100
    assert json.loads(Path("text/AB/wiki_04").read_text())["id"] == "104"
    wiki.main("dump.xml.bz2 -o two --no-json -b 10K -c --workers 1 --no-templates".split())
    texts = [bz2.open(path, "rt").read() for path in sorted(Path("two").rglob("*.bz2"))]
    assert len(texts) > 2 and all(len(text.encode()) <= 10 << 10 for text in texts)
    assert texts[0].startswith('<doc id="0" url="https://en.wikipedia.org/wiki?curid=0" title="T0">\nT0\n\nA text of')


def test_a_chinese_dump(tmp_path):
    text = (
        "{{NoteTA|G1=IT}}'''\u8ba1\u7b97\u673a'''\uff08{{lang-en|computer}}\uff09"
        "\u4fd7\u79f0-{zh-hans:\u7535\u8111; zh-hant:\u96fb\u8166}-\u3002"
        "[[File:x.jpg|thumb|\u56fe]]\n\n== \u5386\u53f2 ==\n\u89c1{{le|\u7b97\u76d8|abacus}}\u3002\n\n"
        "== \u53c2\u8003\u6587\u732e ==\n{{Reflist}}\n[[Category:\u8ba1\u7b97\u673a]]"
    )
    [found] = run(dump(tmp_path / "zh.xml.bz2", [page(7, "\u8ba1\u7b97\u673a", text)], lang="zh"), tmp_path / "out")
    assert found["url"] == "https://zh.wikipedia.org/wiki?curid=7" and found["title"] == "\u8ba1\u7b97\u673a"
    assert found["text"] == (
        "\u8ba1\u7b97\u673a\uff08computer\uff09\u4fd7\u79f0\u7535\u8111\u3002\n\n\u5386\u53f2\n\n\u89c1\u7b97\u76d8\u3002"
    )


def test_a_german_dump(tmp_path):
    """Its own name for files, and its own way to write numbers."""
    text = "Der Berg ist {{formatnum:3003}}&nbsp;m hoch.[[Datei:x.jpg|mini|Bild]][[Kategorie:Berg]] {{PAGENAME}}."
    source = dump(tmp_path / "de.xml", [page(7, "Tahat", text)], lang="de")
    own = '<namespace key="6" case="first-letter">Datei</namespace><namespace key="14">Kategorie</namespace>'
    source.write_text(source.read_text().replace('<namespace key="6" case="first-letter">File</namespace>', own))
    [found] = run(source, tmp_path / "out")
    assert found["text"] == "Der Berg ist 3.003 m hoch. Tahat."


BILLION = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'


def test_damage_and_harm_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    whole = dump(tmp_path / "whole.xml.bz2", [page(n, f"T{n}", os.urandom(3000).hex()) for n in range(60)])
    cases = {
        "cut.bz2": (whole.read_bytes()[: whole.stat().st_size // 2], "damaged or cut short"),
        "short.xml": (
            dump(tmp_path / "x.xml", tail="  <page>\n <title>Last", lang="en").read_bytes(),
            "truncated.*\n.*'Last'",
        ),
        "no_end.xml": (dump(tmp_path / "x.xml", tail="").read_bytes(), "truncated"),
        "empty.xml": (b"", "is empty"),
        "text.xml": (b"just text\n" * 100, "is no dump of a wiki"),
        "bomb.xml": ((BILLION + HEAD + "".join(PAGES) + TAIL).encode(), "declares entities"),
        "noise.bz2": (b"BZh9" + os.urandom(500), "damaged"),
    }
    monkeypatch.setattr(wikidump, "LARGEST", 1 << 20)
    for name, begins in (("head.bz2", HEAD), ("page.bz2", HEAD + "<page><title>Bomb</title>")):
        data = bz2.compress(begins.encode() + bytes(4 << 20))  # in full, these would be gigabytes
        cases[name] = data, "holds no pages" if begins == HEAD else "a page is larger than 1 MB\n.*'Bomb'"
    for name, (data, reason) in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match=reason):
            run(tmp_path / name, tmp_path / "out")
        assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()


def test_pages_that_cannot_be_read_are_set_aside_by_name(tmp_path, capsys):
    """No XML inside a page, and a declaration inside one: the others' texts are there."""
    broken = page(8, "Broken", "x").replace("</title>", "</titel>")
    entity = page(9, "Entity", "x").replace("<text", "<!DOCTYPE x><text")
    found = run(dump(tmp_path / "a.xml", [PAGES[0], broken, entity, PAGES[4]]), tmp_path / "one")
    assert [article["title"] for article in found] == ["Alpha & Omega", "Beta"]
    said = capsys.readouterr()
    assert "unparsed: 2" in said.out and "set aside: Broken" in said.err and "set aside: Entity" in said.err


@pytest.mark.full
def test_a_page_that_takes_too_long_is_set_aside(tmp_path, capsys):
    pages = [PAGES[0], page(10, "Endless", "<div {{" * 200_000), PAGES[4]]
    found = run(dump(tmp_path / "a.xml", pages), tmp_path / "out")
    assert [article["title"] for article in found] == ["Alpha & Omega", "Beta"]
    assert "set aside: Endless: it took too long" in capsys.readouterr().err


@pytest.mark.sampled(2)
def test_the_same_files_for_any_workers_and_what_was_there_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(wikidump, "PIECE", 20_000)
    monkeypatch.setattr(lines, "BLOCK", 5_000)
    many = [page(number, f"T{number}", f"Text {number}. " * 500) for number in range(40)]
    source = dump(tmp_path / "a.xml", many)
    one = run(source, tmp_path / "one")
    three = run(source, tmp_path / "three", "--workers", "3")
    assert one == three and [article["id"] for article in one] == [str(number) for number in range(40)]
    with pytest.raises(SettingsError, match="is there and not empty"):
        run(source, tmp_path / "one")
    (tmp_path / ".four.partial" / "AA").mkdir(parents=True)  # of a killed run
    (tmp_path / ".four.partial" / "AA" / "wiki_99").write_text("old")
    assert run(source, tmp_path / "four") == one and not (tmp_path / ".four.partial").exists()


@pytest.mark.parametrize(
    "flags, error, text",
    [
        ("--bytes 1T", SettingsError, "--bytes 1T"),
        ("--workers 0", SettingsError, "--workers"),
        ("--namespaces Talk", SettingsError, "numbers"),
        ("another.xml", UsageError, "1 file is wanted"),
    ],
)
def test_wrong_settings(tmp_path, monkeypatch, flags, error, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        wiki.main([str(dump(tmp_path / "a.xml")), *flags.split()])
    with pytest.raises(DataError, match="no such file"):
        wiki.main([str(tmp_path / "none.xml")])
