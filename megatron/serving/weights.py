# SPDX-License-Identifier: Apache-2.0
"""Load models for the server, and take newer checkpoints while it runs. All ranks of a job that share a model do both.

Rank 0 serves. The others compute what its engine plans, and load what it names:

    rank 0                                     others
    engine = weights.engine()                  weights.take_part()
    ...                                            engine.follow()
    close, announce the checkpoint, load           load it, too
    ...
    weights.end()                                  return
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any, Optional

from megatron.errors import Failure, SettingsError
from megatron.serving.errors import in_one_line
from megatron.serving.served_model import ServedModel
from megatron.telemetry.run_folder import unique_names

LOOK = 2.0  # seconds between checks for a newer checkpoint
log = logging.getLogger("megatron.serving")


@dataclass
class Weights:
    """The weights of one model on this rank. engine_of(loaded): a new engine; load(folder): `inference.load.load_model`."""

    load: Callable[[str], Any]
    engine_of: Callable[[Any], Any]
    loaded: Any
    world: Any = None  # the axis of all ranks; None: this process has the whole model

    @property
    def version(self) -> str:
        return f"iteration {self.loaded.iteration}"

    def engine(self):
        return self.engine_of(self.loaded)

    def take_part(self) -> None:
        """On all ranks but the first: compute with it until it ends."""
        from megatron.mpu.collectives import broadcast_object

        while True:
            self.engine().follow()
            folder = broadcast_object(None, self.world)
            if folder is None:
                return
            self._try(folder)

    def end(self) -> None:
        """On rank 0, after its engine was closed: let the other ranks end."""
        from megatron.mpu.collectives import broadcast_object

        if self.world is not None:
            broadcast_object(None, self.world)

    def renewed(self, folder: str) -> Optional[Failure]:
        """Load another checkpoint on all ranks. Returns why that was not possible; the weights are the old ones then."""
        from megatron.mpu.collectives import broadcast_object

        if self.world is not None:
            broadcast_object(folder, self.world)
        return self._try(folder)

    def _try(self, folder: str) -> Optional[Failure]:
        try:
            loaded = self.load(folder)
            refuse_another_model(self.loaded, loaded)
            self.loaded = loaded
        except Failure as failure:
            return failure
        return None


def refuse_another_model(present, other) -> None:
    """Raise SettingsError if a checkpoint is not of the model that is served."""
    for what, one, two in (
        ("vocabulary", present.record.get("vocabulary"), other.record.get("vocabulary")),
        ("vocabulary of another size", present.vocab_size, other.vocab_size),
        ("context length", present.longest, other.longest),
    ):
        if one != two:
            raise SettingsError(f"{other.path} has another {what.removeprefix('another ')} than {present.path}")


def follow(folder: str, model: ServedModel, weights: Weights) -> Callable[[], AsyncIterator[None]]:
    """A task that takes each newer checkpoint of a folder.

    One process loads it while it serves. Running texts end with the old weights, and later ones wait for the new.
    """

    async def watch() -> None:
        refused, said = "", set()
        while True:
            await asyncio.sleep(LOOK)
            newest, problems = await asyncio.to_thread(_newest, folder)
            for problem in problems.difference(said):
                log.warning("not taken: %s", problem)
            said |= problems
            if newest in (None, str(weights.loaded.path), refused):
                continue
            refused = newest  # until it is taken
            if weights.world is None:
                failure = await asyncio.to_thread(weights.renewed, newest)
                if not failure:
                    await model.thread.replaced(lambda: (weights.engine(), weights.version, None))
            else:
                failure = await model.thread.replaced(partial(_renew_all, weights, newest))
            if failure:
                log.warning("%s is not taken: %s", newest, in_one_line(failure))
            else:
                model.thread.meter.iteration(weights.loaded.iteration)
                log.info("%s answers from now on: %s", model.name, weights.loaded.path)

    return watch


def _renew_all(weights: Weights, newest: str):
    failure = weights.renewed(newest)
    return weights.engine(), weights.version, failure


def _newest(folder: str) -> tuple[Optional[str], set[str]]:
    """(the newest checkpoint without visible damage, what is wrong with newer ones)"""
    from megatron.checkpoint.choose import choose
    from megatron.storage.urls import location

    try:
        choice = choose(location(folder))
        return str(choice.paths[0]), {why for _, why in choice.damaged}
    except (Failure, OSError):  # it may be written or deleted at this moment
        return None, set()


def names_of(folders: list[str]) -> list[str]:
    """Names of models for clients, from their folders.

    >>> names_of(["runs/345M/checkpoints", "runs/tuned/checkpoints/iter_0000100"]), names_of(["a/x", "b/x"])
    (['345M', 'tuned'], ['a/x', 'b/x'])
    """
    places = []
    for folder in folders:
        parts = list(PurePosixPath(folder.rstrip("/") or "/").parts)
        while len(parts) > 1 and re.fullmatch(r"checkpoints?|iter_\d+|\.", parts[-1]):
            parts.pop()
        places.append("/".join(parts))
    return unique_names(places)
