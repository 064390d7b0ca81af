# SPDX-License-Identifier: Apache-2.0
"""The steps of D_wiki.sh from a dump, as they are printed, by bash, with this suite's programs."""

import bz2
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import merge_datasets
from megatron.tools import translate

pytest.importorskip("mwparserfromhell", reason="pip install '.[corpus]'")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TEXTS = ["The quick brown fox.", "A stitch in time", "To be or not to be?"]
SHIM = """#!/bin/bash
for word in "$@"; do case $word in
    -m) ;;
    wikiextractor.WikiExtractor) program="-m megatron.tools.wiki" ;;
    */preprocess_data.py | */merge_datasets.py) program=@ROOT@/${word##*/} ;;
    *) [[ $program ]] && words+=("$word") ;;
esac; done
PYTHONPATH=@ROOT@ exec @PYTHON@ $program "${words[@]}"
"""


def shown(byte: int) -> str:
    """GPT-2's letter for a byte."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [one for one in range(256) if one not in printing]
    return chr(byte) if byte in printing else chr(256 + others.index(byte))


@pytest.mark.sampled(2)
def test_as_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vocabulary = {letter: number for number, letter in enumerate([*map(shown, range(256)), "zz", "<|endoftext|>"])}
    Path("gpt2-vocab.json").write_text(json.dumps(vocabulary))
    Path("gpt2-merges.txt").write_text("#version: 0.2\nz z\n")
    pages = "".join(
        f"<page><title>{n}</title><ns>0</ns><id>{n}</id><revision><text>'''{text}'''{{{{x}}}}</text></revision></page>"
        for n, text in enumerate(TEXTS)
    )
    dump = f"<mediawiki><siteinfo><base>https://en.wikipedia.org/wiki/M</base></siteinfo>{pages}</mediawiki>"
    Path("enwiki-latest-pages-articles.xml.bz2").write_bytes(bz2.compress(dump.encode()))
    Path("bin").mkdir()
    Path("bin/python").write_text(SHIM.replace("@PYTHON@", shlex.quote(sys.executable)).replace("@ROOT@", str(ROOT)))
    Path("bin/python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(HERE / "D_wiki.sh")], capture_output=True, text=True, env=environment, timeout=120
    )
    expected = [number for text in TEXTS for number in [*text.encode(), 257]]
    assert np.fromfile("datasets/text/AA/wiki_00_text_document.bin", np.uint16).tolist() == expected, done.stderr
    # The fifth step copies from folders that are not there; merging takes the folders of the fourth.
    merge_datasets.main(["--output-prefix", "./enwiki-latest-pages-articles", "--input", "datasets/"])
    assert np.fromfile("enwiki-latest-pages-articles.bin", np.uint16).tolist() == expected


def test_the_extractor_is_translated(capsys):
    translate.main(["--from", "llmacc", str(HERE / "D_wiki.sh")])
    said = capsys.readouterr().out
    assert "python -m megatron.tools.wiki --json ./enwiki-latest-pages-articles.xml.bz2" in said
