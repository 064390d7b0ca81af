# SPDX-License-Identifier: Apache-2.0
"""`prepare_enwiki.sh` from a small dump to token files, and again."""

import bz2
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mwparserfromhell", "ftfy"))), reason="pip install '.[openwebtext]'"
)
TEXTS = {  # source -> what is left of it
    "'''Alpha''' is a [[letter]].<ref>x</ref> It\u00e2\u20ac\u2122s first.": "Alpha is a letter. It's first.",
    "Beta.\n\n== History ==\n{| \n| x\n|}\nLong ago.": "Beta.\n\nHistory\n\nLong ago.",
}


def call(output: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "prepare_enwiki.sh"), "--output", str(output), "--workers", "1", *words],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.sampled(2)
def test_from_a_dump_to_tokens_and_again(tmp_path):
    pages = "".join(
        f"<page><title>T{n}</title><ns>0</ns><id>{n}</id><revision><id>9</id><text>{source.replace('<', '&lt;')}</text>"
        "</revision></page>\n"
        for n, source in enumerate(TEXTS)
    )
    head = "<mediawiki><siteinfo><base>https://en.wikipedia.org/wiki/Main</base></siteinfo>\n"
    (tmp_path / "dump.xml.bz2").write_bytes(bz2.compress(f"{head}{pages}</mediawiki>\n".encode()))
    vocabulary = {letter: number for number, letter in enumerate([*map(_shown, range(256)), "zz", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nz z\n")
    flags = ["--dump", str(tmp_path / "dump.xml.bz2"), "--tokenizer-type", "GPT2BPETokenizer"]
    flags += ["--vocab-file", str(tmp_path / "vocab.json"), "--merge-file", str(tmp_path / "merges.txt")]
    out = tmp_path / "out"
    done = call(out, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [number for text in TEXTS.values() for number in [*text.encode(), 257]]
    assert np.fromfile(out / "enwiki_text_document.bin", np.uint16).tolist() == expected
    again = call(out, *flags)
    assert again.returncode == 0 and again.stdout.count("already there") == 4
    assert f"Train with: --data-path {out}/enwiki_text_document" in again.stdout


def _shown(byte: int) -> str:
    """GPT-2's letter for a byte."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [one for one in range(256) if one not in printing]
    return chr(byte) if byte in printing else chr(256 + others.index(byte))


@pytest.mark.parametrize(
    "words, said",
    [
        (["--dump"], "--dump needs a value"),
        (["--dump", "none"], "no such file"),
        (["--language", "../x"], "is no name"),
        (["--workers", "two"], "is no number of processes"),
    ],
)
def test_it_says_what_is_wrong(tmp_path, words, said):
    done = call(tmp_path / "out", *words)
    assert done.returncode == 2 and said in done.stderr and done.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def network(tmp_path) -> dict[str, str]:
    """A PATH whose curl writes down how it is called; asked for a head it fails as without a network."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "curl").write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/curl.txt\necho "curl: (6) Could not resolve host" >&2\nexit 6\n'
    )
    (tmp_path / "bin" / "curl").chmod(0o755)
    return dict(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", TMPDIR=str(tmp_path / "temporary"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "flags, code, said",
    [
        (["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "none.json", "--merge-file", "none.txt"], 4, "none."),
        (["--tokenizer-type", "GPT2BPETokenizer"], 3, "--vocab-file"),
        (["--no-such-flag", "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], 2, "--no-such-flag"),
        (["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], 4, "pages-articles.xml.bz2 cannot be had"),
    ],
)
def test_nothing_is_downloaded_before_all_is_known_to_be_there(tmp_path, network, flags, code, said):
    (tmp_path / "temporary").mkdir()
    done = call(tmp_path / "out", *flags, **network)
    assert done.returncode == code and said in done.stderr, done.stderr
    calls = (tmp_path / "curl.txt").read_text().splitlines() if (tmp_path / "curl.txt").exists() else []
    assert len(calls) == (said.endswith("cannot be had")) and all("--head" in one for one in calls)
    assert not (tmp_path / "out").exists() and not list((tmp_path / "temporary").iterdir())


def test_missing_packages_are_told_first(tmp_path, network):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name in ('ftfy', 'mwparserfromhell') else find(name, *more)\n"
    )
    done = call(tmp_path / "out", "--tokenizer-type", "NullTokenizer", **network, PYTHONPATH=str(tmp_path))
    assert done.returncode == 3 and "missing packages: mwparserfromhell ftfy" in done.stderr
    done = call(tmp_path / "out", "--no-clean", **network, PYTHONPATH=str(tmp_path))
    assert "missing packages: mwparserfromhell\n" in done.stderr and not (tmp_path / "curl.txt").exists()
