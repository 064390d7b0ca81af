# SPDX-License-Identifier: Apache-2.0
"""Parity files of a checkpoint (--save-parity N): each lets one lost or damaged file of N be rebuilt.

    iter_0000100/shard_00000.safetensors ... shard_00003.safetensors
                 parity_00000.bin          their bytes, XORed; shorter files count as if zeros followed
                 copy_of_index.json        of index.json; copy_of_state.json ... of the other small files

Byte b of a file is byte b of the parity XOR those of all other files of its group. All ranks of a group write it, each a
range of blocks, so each reads about as many bytes as it wrote. The index has the checksums of its blocks.
What was rebuilt has to match the checksums of the file that was lost before it takes its name; nothing else is trusted.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.checkpoint.backends import INDEX
from megatron.checkpoint.index import Index, ParityFile, ShardFile, differing_blocks, read_index
from megatron.checkpoint.store import BLOCK, COPY
from megatron.errors import Failure
from megatron.storage.durable import Damaged, checksum, read_sealed, require_space, storage_errors, whole_file


class ParityRange(NamedTuple):
    """The blocks of a parity file that one rank has written: the checksums from block `first` on."""

    name: str
    first: int
    checksums: list[str]


def write_range(folder: Path, files: Sequence[tuple[str, int]], rank: int, number: int) -> ParityRange:
    """Write this rank's range of its group's parity file, durably. All ranks call it after all have written their files.

    files: name and bytes of the file of each rank; number: of ranks in a group
    """
    group = rank // number
    members = files[group * number : (group + 1) * number]
    blocks = -(-max(size for _, size in members) // BLOCK)
    each = -(-blocks // len(members))
    first = min((rank % number) * each, blocks)
    path, sums = folder / _name(group), []
    with storage_errors(path):
        handle = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
        try:
            for block in range(first, min(first + each, blocks)):
                data = _xor_of_block(folder, members, block)
                sums.append(checksum(data))
                if os.pwrite(handle, data, block * BLOCK) != len(data):
                    raise OSError(28, "No space left on device")
            os.fsync(handle)
        finally:
            os.close(handle)
    return ParityRange(path.name, first, sums)


def entries_of(ranges: Iterable[ParityRange], files: Sequence[tuple[str, int]], number: int) -> dict[str, dict]:
    """The entries of all parity files for the index."""
    found: dict[str, dict] = {}
    for name, _, sums in sorted(ranges):
        members = files[(group := int(re.search(r"\d+", name)[0])) * number : (group + 1) * number]
        size = max(size for _, size in members)
        found.setdefault(name, dict(bytes=size, checksums=[], of=[file for file, _ in members]))["checksums"] += sums
    return found


def _name(group: int) -> str:
    return f"parity_{group:05d}.bin"


def _xor_of_block(folder: Path, files: Iterable[tuple[str, int]], block: int) -> memoryview:
    """The bytes of a block, XORed over the files; as many as the longest of them has there."""
    total, longest = np.zeros(BLOCK, np.uint8), 0
    for name, size in files:
        if block * BLOCK >= size:
            continue
        wanted = min(BLOCK, size - block * BLOCK)
        with open(folder / name, "rb", buffering=0) as file:
            data = np.frombuffer(os.pread(file.fileno(), wanted, block * BLOCK), np.uint8)
        if len(data) != wanted:
            raise OSError(5, f"{name} ends early")
        total[:wanted] ^= data
        longest = max(longest, wanted)
    return memoryview(total[:longest])


def repair(folder: Path) -> list[str]:
    """Rebuild the damaged and missing files of a checkpoint; returns their names. Reads every byte.

    Raises Damaged, with what is the matter, if a file cannot be rebuilt: then nothing is changed but what could be. Raises
    StorageError if the folder cannot be written.
    """
    repaired = _repair_small(folder)
    index = read_index(folder)
    if not index.parity:
        raise Damaged(f"{folder} has no parity files (--save-parity)")
    sums = _sums(index)
    bad = {name: problem for name in index.files if (problem := _problem(folder / name, index, name, sums[name]))}
    for name, problem in bad.items():
        parity = next((item for item in index.parity.items() if name in item[1].of), None)
        if parity is None:
            raise Damaged(f"{problem}; no parity file is of it")
        others = [other for other in parity[1].of if other in bad and other != name]
        if others:
            raise Damaged(f"{problem}; {', '.join(others)} of the same parity file is lost, too")
        _rebuild(folder, index, name, sums[name], *parity)
        repaired.append(name)
    for name, parity in index.parity.items():
        if parity_problem(folder, name, parity):
            sizes = [(one, index.files[one][0]) for one in parity.of]
            _rebuild_parity(folder, name, parity, sizes)
            repaired.append(name)
    return repaired


def _repair_small(folder: Path) -> list[str]:
    """Restore index.json, state.json and the parts of the index from their copies, and the other way round."""
    repaired = _restore(folder, INDEX, None)
    index = read_index(folder)
    marks = {index.state_file: index.state_checksum, **{name: table.checksum for name, table in index.tables.items()}}
    return repaired + [name for file, mark in marks.items() for name in _restore(folder, file, mark)]


def _restore(folder: Path, name: str, mark: str | None) -> list[str]:
    """Restore one of two sealed files, if only one is whole. mark: the checksum that it has to have"""
    places = (folder / name, folder / (COPY + name))
    good = [_has_seal(path, mark) for path in places]
    if any(good) and not all(good) and (good[1] or read_index(folder).parity):
        source, target = places if good[0] else places[::-1]
        with whole_file(target) as file:
            file.write(source.read_bytes())
        return [target.name]
    return []


def _has_seal(path: Path, mark: str | None) -> bool:
    try:
        return mark in (None, read_sealed(path)[0])
    except Failure:
        return False


def _problem(path: Path, index: Index, name: str, sums: Mapping[str, list[str]]) -> str:
    """What is wrong with a file as `name` of the index; "" if every byte has its checksum."""
    try:
        file = ShardFile(path, *index.files[name])
        return next(differing_blocks(file, index.block, sums, 1, 0), "")
    except Damaged as problem:
        return str(problem)


def _sums(index: Index) -> dict[str, dict[str, list[str]]]:
    """File -> name in it -> checksums of blocks."""
    found: dict[str, dict[str, list[str]]] = {name: {} for name in index.files}
    for tensor in index.tensors.values():
        for stored in tensor.stored:
            found[stored.file][stored.key] = stored.checksums
    return found


def parity_problem(folder: Path, name: str, parity: ParityFile) -> str:
    """What is wrong with a parity file; "" if every byte has its checksum."""
    try:
        with open(folder / name, "rb", buffering=0) as file:
            for number, mark in enumerate(parity.checksums):
                if checksum(os.pread(file.fileno(), BLOCK, number * BLOCK)) != mark:
                    return f"{folder / name}: block {number} differs"
            return "" if os.fstat(file.fileno()).st_size == parity.bytes else f"{folder / name} has another size"
    except OSError as error:
        return f"{folder / name}: {error.strerror}"


def _rebuild(
    folder: Path, index: Index, name: str, sums: Mapping[str, list[str]], parity_name: str, parity: ParityFile
) -> None:
    """Rebuild a file from its parity and the other files, and give it its name once it has its checksums."""
    if problem := parity_problem(folder, parity_name, parity):
        raise Damaged(f"{name} cannot be rebuilt: {problem}")
    size = index.files[name][0]
    sources = [(parity_name, parity.bytes), *((one, index.files[one][0]) for one in parity.of if one != name)]
    require_space(folder, size)
    with whole_file(folder / name) as file:
        for block in range(-(-size // BLOCK)):
            file.write(_xor_of_block(folder, sources, block)[: size - block * BLOCK])
        file.flush()
        if problem := _problem(Path(file.name), index, name, sums):
            raise Damaged(f"{name} cannot be rebuilt: {problem}")


def _rebuild_parity(folder: Path, name: str, parity: ParityFile, files: list[tuple[str, int]]) -> None:
    with whole_file(folder / name) as file:
        for block in range(len(parity.checksums)):
            file.write(_xor_of_block(folder, files, block))
