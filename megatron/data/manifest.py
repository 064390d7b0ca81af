# SPDX-License-Identifier: Apache-2.0
"""Checksums of token files: `<prefix>.sums.json` covers .bin and .idx (or _ids.npy and _idx.npz).

A flipped bit in a .bin is another token, which training would not notice. The manifest has one checksum per block of
64 MiB, so that damage can be located and several ranks can share the reading.
"""

import mmap
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from megatron.data.formats import LAYOUTS, endings_of
from megatron.errors import DataError
from megatron.storage.durable import Damaged, checksum, read_sealed, seal, unreadable, write_synced

BLOCK = 1 << 26
_FORMAT = "checksums of token files"


def manifest_path(prefix: str) -> str:
    return f"{prefix}.sums.json"


def checksums(path: str, part: int = 0, parts: int = 1, block: int = BLOCK) -> list[str]:
    """Checksums of every `parts`-th block of a file, from block `part` on."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            return [checksum(view[at : at + block]) for at in range(part * block, size, parts * block)]


def write_manifest(prefix: str, path: str | None = None) -> None:
    """Read the token files of a prefix and write their manifest (default: next to them). It is synced to disk on return."""
    endings = endings_of(prefix)
    files = {s: dict(bytes=os.path.getsize(prefix + s), sums=checksums(prefix + s)) for s in endings}
    _, content = seal(dict(format=_FORMAT, block=BLOCK, files=files))
    write_synced(Path(path or manifest_path(prefix)), content)


def verify(prefix: str, part: int = 0, parts: int = 1, endings: Collection[str] | None = None) -> list[str]:
    """Compare token files with their manifest. Returns a sentence for each difference.

    part, parts: read only this rank's share of the blocks; endings: of the files that are here (default: all)
    Raises DataError if there is no manifest, StorageError if this process lacks file handles or memory.
    """
    manifest, problems = read_manifest(prefix), []
    block = manifest["block"]
    for suffix, entry in manifest["files"].items():
        if endings is not None and suffix not in endings:
            continue
        path = prefix + suffix
        try:
            size = os.path.getsize(path)
            if size != entry["bytes"]:
                problems.append(f"{path} has {size:,} bytes instead of {entry['bytes']:,}")
                continue
            actual = checksums(path, part, parts, block)
        except OSError as error:
            failure = unreadable(Path(path), error)
            if not isinstance(failure, Damaged):  # a problem of this process, not of the file
                raise failure from error
            problems.append(failure.what)
            continue
        for number, (got, wanted) in enumerate(zip(actual, entry["sums"][part::parts])):
            if got != wanted:
                at = (part + number * parts) * block
                problems.append(f"{path} is damaged between bytes {at:,} and {min(at + block, size):,}")
    return problems


def read_manifest(prefix: str) -> dict[str, Any]:
    """The checked content of a manifest. Raises DataError if it is missing, damaged or not a manifest."""
    path = manifest_path(prefix)
    if not os.path.exists(path):
        do = f"python -m megatron.tools.verify_data {prefix} --write takes the files as they are now"
        raise DataError(f"{path}: no such file, so {prefix} cannot be verified", "preprocessing writes it", do)
    try:
        _, content = read_sealed(Path(path))
        block, files = content["block"], content["files"]
        if content["format"] != _FORMAT or type(block) is not int or block < 4096:
            raise ValueError("not a manifest")
        if tuple(files) not in LAYOUTS:
            raise ValueError("its files are none of a dataset")
        for entry in files.values():
            size, sums = entry["bytes"], entry["sums"]
            if type(size) is not int or type(sums) is not list or len(sums) != -(-size // block):
                raise ValueError("checksums are missing")
    except Damaged as problem:
        raise DataError(problem.what) from None
    except (KeyError, TypeError, ValueError) as problem:
        raise DataError(f"{path} is not a manifest of token files: {problem}") from None
    return content
