# SPDX-License-Identifier: Apache-2.0
"""Folders that a command writes as a whole: they appear at the end, and an error leaves none."""

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from megatron.errors import SettingsError
from megatron.storage.durable import storage_errors, sync_folder


def check_free(out: Path, said: str = "") -> None:
    """Raise SettingsError if `out` exists and is not an empty folder. said: the flag with its value, if it has one"""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        flag = f": {said.split()[0]} FOLDER" if said else ""
        raise SettingsError(f"{said or out} is there already", do=f"give a new folder{flag}")


@contextlib.contextmanager
def removed_after_error(out: Path) -> Iterator[None]:
    """Write to a new folder `out`, which is removed after an error. Raises SettingsError if it is not free."""
    check_free(out)
    new = not out.exists()
    try:
        yield
    except BaseException:
        if new:
            shutil.rmtree(out, ignore_errors=True)
        raise


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
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
