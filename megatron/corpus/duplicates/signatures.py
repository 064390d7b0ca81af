# SPDX-License-Identifier: Apache-2.0
"""MinHash signatures of texts, their bands, and their files: the fingerprints of a shard.

A signature is `bands * rows` numbers of 32 bits. Two texts agree in each with a probability of their Jaccard similarity
J (of their sets of shingles), so the share of equal numbers estimates J with a standard error of at most
sqrt(J (1 - J) / numbers), and all `rows` numbers of a band are equal with probability J^rows: a pair becomes a
candidate in at least one band with probability 1 - (1 - J^rows)^bands.

The folder of a shard's fingerprints:
    facts.json       documents, options of the signatures, versions
    signatures.bin   [documents, bands * rows] uint32
    keys.bin         [bands, signed] uint64: a hash of each document's part of a signature, sorted within a band
    rows.bin         [bands, signed] uint32: their documents; those without a shingle are left out
    sizes.bin        [documents] uint32: bytes of their texts
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np

from megatron.corpus.duplicates import shingles
from megatron.corpus.duplicates.shards import Numbering, blocks_of_lines, encoded, read_facts, text_of, write_facts
from megatron.errors import DataError, MissingPackage, SettingsError

KINDS = ("minhash", "one_permutation")
FORMAT = 1  # of the files of fingerprints
_EMPTY = np.uint32(0xFFFFFFFF)
_KEY_BASE = 0xC2B2AE3D27D4EB4F


@dataclass(frozen=True)
class Signing:
    """Options of signatures. Fingerprints are only comparable with equal options.

    kind: minhash: rensa's, with one random permutation per number; one_permutation: the hashes are divided among the
          numbers, and a number without any takes another's (densification; Shrivastava 2017): faster for long texts
    """

    shingle: Literal["characters", "words"] = "characters"
    width: int = 5
    bands: int = 10
    rows: int = 10
    kind: Literal["minhash", "one_permutation"] = "minhash"
    seed: int = 1234

    def __post_init__(self):
        for name, least, most in (("width", 1, 10_000), ("bands", 1, 1000), ("rows", 1, 1000), ("seed", 0, 2**63 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise SettingsError(f"{name} of near-duplicates is {value!r}: a whole number, {least} to {most}")
        for name, known in (("shingle", shingles.KINDS), ("kind", KINDS)):
            if getattr(self, name) not in known:
                raise SettingsError(f"{name} of near-duplicates is {getattr(self, name)!r}: {' or '.join(known)}")

    @property
    def numbers(self) -> int:
        return self.bands * self.rows

    def facts(self) -> dict[str, Any]:
        """The description in fingerprints: equal for comparable signatures."""
        return dict(asdict(self), format=FORMAT, shingle_format=shingles.FORMAT, algorithm=algorithm(self.kind))


def algorithm(kind: str) -> str:
    """The algorithm of the signatures, with its version."""
    return f"rensa.RMinHash {_rensa().RMinHash.ALGORITHM_VERSION}" if kind == "minhash" else "one_permutation 1"


def _rensa():
    try:
        import rensa
    except ImportError as error:
        do = "pip install '.[corpus]'; in a recipe, kind: one_permutation does not need it"
        raise MissingPackage("signatures of the kind minhash need the package rensa", str(error), do) from None
    return rensa


def sign_texts(texts: Sequence[str], how: Signing) -> tuple[np.ndarray, np.ndarray]:
    """(signatures [texts, numbers] uint32, whether each text has a shingle [texts] bool)."""
    hashes, ends = shingles.shingles(texts, how.shingle, how.width)
    full = np.diff(ends) > 0
    bounds = np.concatenate([[0], ends[1:][full]])
    signatures = np.full((len(texts), how.numbers), _EMPTY, np.uint32)
    if full.any():
        digest = _minhash if how.kind == "minhash" else _one_permutation
        signatures[full] = digest(hashes, bounds, how.numbers, how.seed)
    return signatures, full


def _minhash(hashes: np.ndarray, bounds: np.ndarray, numbers: int, seed: int) -> np.ndarray:
    digest = _rensa().RMinHash.digest_matrix_from_flat_token_hashes
    return np.array(digest(hashes, bounds.astype(np.uint64), num_perm=numbers, seed=seed).to_rows(), np.uint32)


def _one_permutation(hashes: np.ndarray, bounds: np.ndarray, numbers: int, seed: int) -> np.ndarray:
    """The least hash of each of `numbers` classes of hashes. An empty class, which would agree with all other empty ones,
    takes the hash of another class, drawn by its own number ("optimal densification")."""
    texts = len(bounds) - 1
    hashes = hashes * np.uint64((2 * seed + 1) % (1 << 64))
    hashes ^= hashes >> np.uint64(31)
    which = ((hashes >> np.uint64(32)) * np.uint64(numbers)) >> np.uint64(32)
    place = which.astype(np.int64) + np.repeat(np.arange(texts) * numbers, np.diff(bounds))
    none = 1 << 32
    least = np.full(texts * numbers, none, np.uint64)
    np.minimum.at(least, place, hashes & np.uint64(0xFFFFFFFF))
    least = least.reshape(texts, numbers)
    dense = least.copy()
    text, number = np.nonzero(least == none)
    draws = np.random.Generator(np.random.PCG64(numbers)).integers(0, numbers, [64, numbers])
    neighbours = (
        np.arange(numbers) + np.arange(1, numbers + 1)[:, None]
    ) % numbers  # [step, number]: if all draws fail
    for other in (*draws, *neighbours):
        if not len(text):
            break
        dense[text, number] = taken = least[text, other[number]]
        text, number = text[taken == none], number[taken == none]
    return dense.astype(np.uint32)


def band_keys(signatures: np.ndarray, how: Signing) -> Iterator[np.ndarray]:
    """A hash of each document's part of the signature, band by band: [documents] uint64."""
    for band in range(how.bands):
        part = signatures[:, band * how.rows : (band + 1) * how.rows].astype(np.uint64)
        key = np.zeros(len(part), np.uint64)
        for row in range(how.rows):
            key = key * np.uint64(_KEY_BASE) + part[:, row]
            key ^= key >> np.uint64(29)
        yield shingles.mixed(key)


# ------------------------------------------------------------------------------------------------------ fingerprints


def write_fingerprints(shard: Path, folder: Path, how: Signing, text_key: str = "text") -> dict[str, int]:
    """Sign a shard. Returns counts."""
    documents, unreadable, size, full = 0, 0, 0, []
    with open(folder / "signatures.bin", "wb") as file, open(folder / "sizes.bin", "wb") as sizes:
        for lines in blocks_of_lines(shard):
            texts = [text_of(line, text_key) for line in lines]
            lengths = np.array([len(encoded(text or "")) for text in texts], "<u4")
            sizes.write(lengths)
            signatures, signed = sign_texts([text or "" for text in texts], how)
            file.write(signatures.astype("<u4", copy=False))
            full.append(signed)
            documents += len(texts)
            unreadable += texts.count(None)
            size += int(lengths.sum())
    rows = np.flatnonzero(np.concatenate(full)) if full else np.zeros(0, np.int64)
    signatures = _mapped(folder / "signatures.bin", "<u4", (documents, how.numbers))
    with open(folder / "keys.bin", "wb") as keys, open(folder / "rows.bin", "wb") as owners:
        for key in band_keys(signatures[rows], how):
            order = np.argsort(key, kind="stable")
            keys.write(key[order].astype("<u8", copy=False))
            owners.write(rows[order].astype("<u4"))
    write_facts(folder, dict(documents=documents, signed=len(rows), bytes=size, signing=how.facts()))
    return dict(documents=documents, signed=len(rows), without_text=unreadable, bytes=size)


def _mapped(path: Path, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if 0 in shape:  # an empty file cannot be mapped
        return np.zeros(shape, kind)
    if path.stat().st_size != np.dtype(kind).itemsize * int(np.prod(shape)):
        raise DataError(f"{path}: {path.stat().st_size:,} bytes are not {shape} numbers", do="sign this shard again")
    return np.memmap(path, kind, "r", shape=shape)


class Fingerprints:
    """The fingerprints of several shards, in order, read in parts.

    Raises DataError where shards were signed with different options: such signatures cannot be compared.
    """

    def __init__(self, folders: Sequence[Path], how: Signing, counts: Optional[np.ndarray] = None):
        """counts: the `counts` of these folders, where known; then no folder is opened before it is needed"""
        self.folders, self.how = [Path(folder) for folder in folders], how
        self.counts = _checked_counts(self.folders, how) if counts is None else counts
        self.numbering = Numbering.of(self.counts[:, 0])
        self._signed = self.counts[:, 1].tolist()

    def records(self, band: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """(keys uint64, documents int64) of a band with first <= key <= last, shard by shard."""
        keys, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for shard, (start, end) in enumerate(self._ranges(band, first, last)):
            if start < end:
                shape = (self.how.bands, self._signed[shard])
                keys.append(np.array(_mapped(self.folders[shard] / "keys.bin", "<u8", shape)[band, start:end]))
                rows = _mapped(self.folders[shard] / "rows.bin", "<u4", shape)[band, start:end]
                documents.append(rows + self.numbering.starts[shard])
        return np.concatenate(keys), np.concatenate(documents)

    def count(self, band: int, first: int, last: int) -> int:
        """Number of these records."""
        return sum(end - start for start, end in self._ranges(band, first, last))

    def _ranges(self, band: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        for folder, signed in zip(self.folders, self._signed):
            keys = _mapped(folder / "keys.bin", "<u8", (self.how.bands, signed))[band]
            yield int(np.searchsorted(keys, np.uint64(first))), int(np.searchsorted(keys, np.uint64(last), "right"))

    def signatures(self, documents: np.ndarray) -> np.ndarray:
        """[documents, numbers] uint32. Files are opened one by one, so that few of their pages stay in memory."""
        signatures = np.empty((len(documents), self.how.numbers), np.uint32)
        for shard, places, rows in self.numbering.by_shard(documents):
            shape = (int(np.diff(self.numbering.starts[shard : shard + 2])[0]), self.how.numbers)
            signatures[places] = _mapped(self.folders[shard] / "signatures.bin", "<u4", shape)[rows]
        return signatures


def _checked_counts(folders: Sequence[Path], how: Signing) -> np.ndarray:
    """Documents of each shard, and documents with a signature, [shards, 2] int64."""
    counts, wanted = np.zeros((len(folders), 2), np.int64), how.facts()
    for number, folder in enumerate(folders):
        facts = read_facts(folder)
        if differs := _difference(facts.get("signing", {}), wanted):
            raise DataError(f"{folder}: was signed with {differs}", do="sign it again, or use the same options")
        counts[number] = facts["documents"], facts["signed"]
    return counts


def _difference(saved: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The options that differ between fingerprints and now, in words."""
    return ", ".join(
        f"{key} {saved.get(key)} (now {value})" for key, value in wanted.items() if saved.get(key) != value
    )
