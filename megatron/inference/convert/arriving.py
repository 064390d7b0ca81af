# SPDX-License-Identifier: Apache-2.0
"""Shared parts of exports and imports: atomic output folders, and required entries of a checkpoint."""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError
from megatron.inference.convert.imported import check_free
from megatron.storage.durable import storage_errors, sync_folder


@contextlib.contextmanager
def arriving(out: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `out` at the end, or removed after an error."""
    check_free(out)
    folder = out.with_name(f".tmp-{out.name}-{secrets.token_hex(4)}")
    with storage_errors(out):
        folder.mkdir(parents=True)
    try:
        yield folder
        with storage_errors(out):
            sync_folder(folder)
            if out.exists():
                out.rmdir()
            folder.rename(out)
            sync_folder(out.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def needed(reader: Reader, key: str) -> Any:
    """The value of `key` in state.json. Raises CheckpointError if there is none."""
    if key not in reader.state:
        raise CheckpointError(f"{reader.folder} does not say what model it is", f"state.json has no {key}")
    return reader.state[key]
