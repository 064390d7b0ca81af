# SPDX-License-Identifier: Apache-2.0
"""The models that a checkpoint comes from, as entries of state.json:

origin         of an import: the other library, and the folder
source         of an import: {name, license} of the model, as its hub has them
started_from   of a run that began with the weights of a checkpoint: its path and iteration, and these entries of it
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Optional

from megatron.checkpoint.base_checkpoint import BASE
from megatron.storage.urls import UrlPath, location

ENTRIES = ("origin", "source", "started_from")
# Entries of an imported config.json that an export of the model, or of one trained from it, has again.
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_KEPT = (*IDS, "initializer_range")


class Ancestor(NamedTuple):
    """A model whose weights a run began with. name: of the model, or of the folder of its run; license: None if unknown"""

    name: str
    license: Optional[str]
    imported: bool


def lineage(record: Optional[Mapping[str, Any]], begins_with: Optional[str]) -> dict[str, Any]:
    """The entries for the checkpoints of a run.

    record: state.json of the checkpoint that it loads. begins_with: the folder, of a run that takes the weights alone and
    does not resume
    """
    if record is None:
        return {}
    own = {name: record[name] for name in ENTRIES if record.get(name)}
    if begins_with is None:
        return own
    place = location(begins_with)
    path = str(place) if isinstance(place, UrlPath) else os.path.abspath(place)
    return dict(started_from=dict(path=path, iteration=(record.get("state") or {}).get("iteration"), **own))


def source_config(config: Mapping[str, Any], vocabulary: Optional[str]) -> dict[str, Any]:
    """The entries of `source`, of an import, that an export needs. config: config.json; vocabulary: the fingerprint of the
    tokenizer, to which the ids belong
    """
    return dict(config={name: config[name] for name in _KEPT if name in config}, vocabulary=vocabulary)


def imported_config(record: Mapping[str, Any], vocabulary: Optional[str]) -> dict[str, Any]:
    """The entries of the config.json that a model, or the nearest one it was trained from, was imported with.

    vocabulary: the fingerprint of the tokenizer now; special ids of another tokenizer are left out. Empty without an import
    """
    start: Mapping[str, Any] = record
    while start and "config" not in (start.get("source") or {}):
        start = start.get("started_from") or {}
    source = start["source"] if start else dict(config={}, vocabulary=None)
    same = source["vocabulary"] == vocabulary
    return {name: value for name, value in source["config"].items() if same or name not in IDS}


def ancestors(record: Mapping[str, Any]) -> Iterator[Ancestor]:
    """The models that a checkpoint comes from, the nearest first: of an import that is the imported model itself."""
    start, source = record.get("started_from") or _of_earlier_versions(record), record.get("source") or {}
    if source or record.get("origin"):
        named = source.get("name") or PurePosixPath(str(record.get("origin")).partition(" in ")[2]).name
        yield Ancestor(named, source.get("license"), imported=True)
    if start and not (start.get("source") or start.get("origin")):
        yield Ancestor(run_name(start["path"]), None, imported=False)
    if start:
        yield from ancestors(start)


def model_name(record: Mapping[str, Any], checkpoint: Any) -> str:
    """The name of the model in a checkpoint: of an import that of its source, else that of the run's folder.

    >>> model_name(dict(source=dict(name="Qwen/Qwen3-0.6B")), "runs/qwen/iter_0000000")
    'Qwen3-0.6B'
    >>> model_name({}, "runs/mine/iter_0000007")
    'mine'
    """
    path = str(checkpoint) if isinstance(checkpoint, UrlPath) else os.path.abspath(checkpoint)
    named = (record.get("source") or {}).get("name") or run_name(path)
    return PurePosixPath(named).name


def _of_earlier_versions(record: Mapping[str, Any]) -> Optional[dict[str, Any]]:
    """The beginning of a run that did not record it: the base of adapters, or --load with --finetune."""
    settings = (record.get("config") or {}).get("checkpoint") or {}
    path = (record.get(BASE) or {}).get("path") or (settings.get("load") if settings.get("finetune") else None)
    return dict(path=path) if path else None


def run_name(path: str) -> str:
    """The name of a run by the path of its checkpoints.

    >>> run_name("runs/mine/checkpoints/iter_0000007")
    'mine'
    """
    parts = [part for part in PurePosixPath(path).parts if not re.fullmatch(r"checkpoints?|iter_\d+|release", part)]
    return parts[-1] if parts else path
