# SPDX-License-Identifier: Apache-2.0
"""Token files in an object store: each machine copies them once and memory-maps the copy, or reads them by ranges.

    --data-path s3://bucket/corpus_text_document --data-cache-path /local/cache

    /local/cache/fetched/corpus_text_document-0f3a.../
        corpus_text_document.bin  .idx              and .sums.json, .stats.json if the store has them
        fetched.json                                source, sizes and marks (ETags); written last

One process fetches while the others wait for a file, as for index maps. A copy is valid while the store's objects keep
their sizes and marks; if there is a manifest, all bytes of the copy are compared with it.

    --data-path s3://bucket/corpus_text_document --object-storage-cache-path /local/cache

Here the .bin is not copied: `bin_readers.RangedBin` reads what samples need, and keeps it in /local/cache/ranges/. Samples
are a few KB at random positions, and a request takes tens of milliseconds: loader threads (--num-workers) hide it.
"""

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Optional

from megatron.data import manifest
from megatron.data.bin_readers import MARKS, FileBin, RangedBin, make_sparse, marks_size
from megatron.data.blend import parse_blend
from megatron.data.formats import LAYOUTS, open_tokens
from megatron.data.indexed import ENDINGS, TokenFiles, bare_prefix
from megatron.errors import DataError, SettingsError
from megatron.settings.schema import Data
from megatron.storage.durable import (
    Damaged,
    read_sealed,
    replace_file,
    require_space,
    seal,
    storage_errors,
    sync_folder,
    wait_for_lock,
)
from megatron.storage.urls import Stat, UrlPath, location
from megatron.telemetry.figures import size as in_units

OPTIONAL = (".sums.json", ".stats.json")
RECEIPT = "fetched.json"
_TRIES = 2  # of a copy that differs from the store

Say = Callable[[str], None]


def open_files(prefix: str, data: Data, log: Say = lambda text: None) -> TokenFiles:
    """Open the token files of a path or URL as the settings say: mapped, by `pread`, or by ranges of an object.

    Raises what `nearby` and `open_tokens` raise.
    """
    copy, source = local_prefix(prefix, data, log), location(bare_prefix(prefix))
    if isinstance(source, Path) or not data.object_storage_cache_path:
        return open_tokens(copy, None if data.mmap_bin_files else FileBin)
    bin = source.parent / f"{source.name}.bin"
    mark = read_sealed(Path(copy).with_name(RECEIPT))[1]["files"][".bin"]["mark"]
    return open_tokens(copy, partial(RangedBin, source=bin, mark=mark, log=log))


def local_prefix(prefix: str, data: Data, log: Say = lambda text: None) -> str:
    """`nearby` as the settings say. With --object-storage-cache-path the .bin there has only what was read of it."""
    if data.object_storage_cache_path:
        return nearby(prefix, data.object_storage_cache_path, log, ranged=True)
    return nearby(prefix, data.data_cache_path, log)


def nearby(prefix: str, cache: Optional[str], log: Say = lambda text: None, *, ranged: bool = False) -> str:
    """The local prefix for `prefix`: itself, or for a URL that of a copy in `cache`.

    ranged: the copy has everything but the tokens; its .bin is the sparse file of a `RangedBin`
    Raises SettingsError for a URL without a cache, DataError for missing or damaged objects, StorageError if the store or
    the cache's disk fails.
    """
    source = location(bare_prefix(prefix))
    if isinstance(source, Path):
        return str(source) if "://" in prefix else prefix
    if cache is None:
        raise SettingsError(
            f"--data-path {source} needs --data-cache-path or --object-storage-cache-path",
            "token files are read from this machine's disk",
            "--data-cache-path FOLDER: there each machine keeps one copy; --object-storage-cache-path FOLDER: only what "
            "its samples need",
        )
    there = _objects(source)
    if ranged and ".bin" not in there:
        raise DataError(
            f"{source}: only .bin/.idx are read by ranges, and these are files of PaddlePaddle's format",
            do="give --data-cache-path alone: there each machine keeps a copy",
        )
    name = f"{source.name}-{hashlib.sha256(str(source).encode()).hexdigest()[:16]}"
    folder = Path(cache) / ("ranges" if ranged else "fetched") / name
    copy = folder / source.name
    if not _is_copy(copy, source, there, ranged):
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with storage_errors(folder / ".lock"), open(folder / ".lock", "a+") as lock:
            wait_for_lock(lock, lambda: f"{source} to be fetched by another process", log)
            if not _is_copy(copy, source, there, ranged):
                _fetch(copy, source, there, log, ranged)
    return str(copy)


def _objects(source: UrlPath) -> dict[str, Stat]:
    """The objects of a prefix: ending -> size and mark."""

    def look(ending: str) -> Optional[Stat]:
        with contextlib.suppress(FileNotFoundError):
            return (source.parent / f"{source.name}{ending}").stat()
        return None

    endings = (*ENDINGS, *OPTIONAL)
    with ThreadPoolExecutor(len(endings)) as pool:
        stats = {ending: stat for ending, stat in zip(endings, pool.map(look, endings)) if stat}
    needed = next((endings for endings in LAYOUTS if endings[-1] in stats), LAYOUTS[0])
    for ending in reversed(needed):
        if ending not in stats:
            raise DataError(f"{source}{ending}: no such object", do="give the whole prefix, up to _document")
    return {ending: stats[ending] for ending in (*reversed(needed), *OPTIONAL) if ending in stats}


def _receipt(source: UrlPath, there: dict[str, Stat]) -> dict[str, Any]:
    return dict(source=str(source), files={e: dict(bytes=s.st_size, mark=s.mark) for e, s in there.items()})


def _is_copy(copy: Path, source: UrlPath, there: dict[str, Stat], ranged: bool) -> bool:
    """Whether the copy is complete and up to date."""
    try:
        return read_sealed(copy.with_name(RECEIPT))[1] == _receipt(source, there) and all(
            os.path.getsize(f"{copy}{ending}") == size for ending, size in _sizes(there, ranged).items()
        )
    except (Damaged, OSError):
        return False


def _sizes(there: dict[str, Stat], ranged: bool) -> dict[str, int]:
    """The files of a copy: ending -> bytes."""
    sizes = {ending: stat.st_size for ending, stat in there.items()}
    return sizes | {f".bin{MARKS}": marks_size(sizes[".bin"])} if ranged else sizes


def _fetch(copy: Path, source: UrlPath, there: dict[str, Stat], log: Say, ranged: bool) -> None:
    """Fetch all objects to a temporary folder, compare them, and rename them into place; write the receipt last."""
    fetched = [ending for ending in there if not (ranged and ending == ".bin")]
    size, started = sum(there[ending].st_size for ending in fetched), time.monotonic()
    aside = copy.with_name(".fetching")
    shutil.rmtree(aside, ignore_errors=True)  # from a process that died: this one has the lock
    require_space(copy.parent, size)
    log(f"fetching {source}{' without its tokens' * ranged}: {in_units(size)} to {copy.parent}")
    with storage_errors(copy, size):
        aside.mkdir()
        if ranged:
            make_sparse(aside / f"{copy.name}.bin", there[".bin"].st_size)
        for number in range(1, _TRIES + 1):
            for ending in fetched:
                (source.parent / f"{source.name}{ending}").download(aside / f"{copy.name}{ending}")
            problems = _differences(aside / copy.name, source, there, fetched)
            if not problems:
                break
            if number == _TRIES:
                raise DataError(
                    f"{source} does not arrive as it was written",
                    "\n  ".join(problems[:8]),
                    "copy it to the store again, or preprocess again",
                )
        copy.with_name(RECEIPT).unlink(missing_ok=True)
        for ending in _sizes(there, ranged):
            os.replace(aside / f"{copy.name}{ending}", f"{copy}{ending}")
        sync_folder(copy.parent)
        replace_file(copy.with_name(RECEIPT), seal(_receipt(source, there))[1])
        shutil.rmtree(aside, ignore_errors=True)
    unknown = "" if ".sums.json" in there else "; without .sums.json there, its size alone was compared"
    log(f"fetched {source} in {time.monotonic() - started:.1f} s{unknown}")


def _differences(copy: Path, source: UrlPath, there: dict[str, Stat], fetched: Collection[str]) -> list[str]:
    """The problems with a copy: wrong sizes, objects that changed during the copy, bytes that differ from the manifest."""
    problems = [
        f"{source}{ending}: {os.path.getsize(f'{copy}{ending}'):,} bytes arrived of {there[ending].st_size:,}"
        for ending in fetched
        if os.path.getsize(f"{copy}{ending}") != there[ending].st_size
    ]
    if not problems and _objects(source) != there:
        problems.append(f"{source}: the objects were rewritten while they were read")
    if not problems and ".sums.json" in there:
        problems += manifest.verify(str(copy), endings=fetched)
    return problems


def all_paths(data: Data, log) -> list[str]:
    """Every prefix that is read, on this machine."""
    lists = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    blends = [parse_blend(words, "--data-path") for words in lists if words]
    return [local_prefix(prefix, data, log) for blend in blends for prefix in blend.prefixes]
