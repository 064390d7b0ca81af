# SPDX-License-Identifier: Apache-2.0
"""Shingles against sets of Python, signatures against exact Jaccard similarities and against datasketch."""

import hashlib
import random
import re
from importlib.util import find_spec

import numpy as np
import pytest

from megatron.corpus.duplicates import shingles
from megatron.corpus.duplicates.signatures import Signing, band_keys, sign_texts
from megatron.errors import SettingsError

needs_rensa = pytest.mark.skipif(find_spec("rensa") is None, reason="the package rensa is missing")

TEXTS = [
    "abcd",
    "bcd",
    "",
    "ab",
    "Hello, World foo_bar 12",
    "hello world",
    "x" * 40,
    "a b c d e f g",
    " , ",
    "foo BAR baz qux one two three",
    "\ud800 half",
    "caf\u00e9 na\u00efve",
    "\u4f60\u597d\u4e16\u754c and more",
    "\u597d\u4e16",
]


def plain_shingles(text: str, kind: str, width: int) -> set:
    unspaced = r"[\u3400-\u9fff]"
    units = list(text) if kind == "characters" else re.findall(rf"{unspaced}|(?:(?!{unspaced})[^\W_])+", text.lower())
    return {tuple(units[at : at + width]) for at in range(max(1, len(units) - width + 1))} if units else set()


@pytest.mark.parametrize("kind, width", [(k, w) for k in ("characters", "words") for w in (1, 2, 3, 5, 24)])
def test_shingles_are_those_of_python(kind, width):
    hashes, ends = shingles.shingles(TEXTS, kind, width)
    ours = [set(hashes[start:end].tolist()) for start, end in zip(ends, ends[1:], strict=False)]
    plain = [plain_shingles(text, kind, width) for text in TEXTS]
    for one, a in zip(ours, plain, strict=True):
        for other, b in zip(ours, plain, strict=True):
            assert (len(one), len(one & other)) == (len(a), len(a & b))


@needs_rensa
def test_many_texts_at_once_are_signed_as_each_alone():
    """Longer together than what is hashed in one piece."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdef ", k=rng.randrange(9000))) for _ in range(30)] + TEXTS
    for how in (Signing(), Signing("words", 3), Signing(kind="one_permutation")):
        together, full = sign_texts(texts, how)
        assert full.tolist() == [bool(plain_shingles(text, how.shingle, how.width)) for text in texts]
        for text, signature in zip(texts, together, strict=True):
            assert (sign_texts([text], how)[0][0] == signature).all()


@pytest.mark.parametrize("over", ["union", "min", "max"])
def test_jaccard(over):
    for one in TEXTS:
        for other in TEXTS:
            a, b = set(plain_shingles(one, "characters", 2)), set(plain_shingles(other, "characters", 2))
            below = dict(union=len(a | b), min=min(len(a), len(b)), max=max(len(a), len(b)))[over]
            found = shingles.jaccard(*(shingles.shingle_set(text, "characters", 2) for text in (one, other)), over)
            assert found == (len(a & b) / below if below and a and b else 0.0)


GOLDEN = "The quick brown fox jumps over the lazy dog. \u4f60\u597d\u4e16\u754c 0123456789"


@needs_rensa
@pytest.mark.parametrize(
    "how, digest",
    [
        (Signing(), "28f2c3a8ad78fae8"),
        (Signing("words", 5, 14, 8), "aa65ca3b2afae2b5"),
        (Signing("characters", 24, 20, 13), "375a76548001fd57"),
        (Signing(kind="one_permutation"), "4ff7eab3fa2c350c"),
    ],
)
def test_golden_digests(how, digest):
    """Fingerprints are kept for years: a change of these numbers needs another FORMAT, or a pinned rensa."""
    signatures, _ = sign_texts([GOLDEN, GOLDEN[:20]], how)
    keys = np.stack(list(band_keys(signatures, how)))
    assert hashlib.sha256(signatures.tobytes() + keys.tobytes()).hexdigest()[:16] == digest
    assert how.facts()["algorithm"] in ("rensa.RMinHash 2", "one_permutation 1")


def planted(rng: random.Random, words: int, shared: int) -> tuple[str, str]:
    """Two texts of so many words, each once, `shared` of which they have in common."""
    drawn = [f"w{number}" for number in rng.sample(range(10**9), 2 * words - shared)]
    return " ".join(drawn[:words]), " ".join(drawn[words - shared :])


@pytest.mark.parametrize("kind", [pytest.param("minhash", marks=needs_rensa), "one_permutation"])
def test_estimates_are_as_good_as_theory_and_datasketch(kind):
    datasketch = pytest.importorskip("datasketch", reason="the package datasketch is missing")
    rng = random.Random(1)
    how = Signing("words", 1, 16, 8, kind=kind)
    for shared in (40, 60, 75):
        pairs = [planted(rng, 80, shared) for _ in range(150)]
        true = shared / (160 - shared)
        signatures, _ = sign_texts([text for pair in pairs for text in pair], how)
        ours = (signatures[::2] == signatures[1::2]).mean(1)
        theirs = []
        for pair in pairs[:40]:
            one, other = (datasketch.MinHash(how.numbers, seed=1) for _ in pair)
            one.update_batch([word.encode() for word in pair[0].split()])
            other.update_batch([word.encode() for word in pair[1].split()])
            theirs.append(one.jaccard(other))
        error = (true * (1 - true) / how.numbers) ** 0.5
        assert abs(ours.mean() - true) < 4 * error / len(pairs) ** 0.5
        assert abs(ours.mean() - np.mean(theirs)) < 4 * error / 40**0.5
        assert ours.std() < 1.3 * error


def test_wrong_parameters():
    for wrong in (dict(width=0), dict(bands=True), dict(rows="8"), dict(kind="simhash"), dict(shingle="lines")):
        with pytest.raises(SettingsError):
            Signing(**wrong)
