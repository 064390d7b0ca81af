# SPDX-License-Identifier: Apache-2.0
"""Load models from checkpoints, and make a service of them."""

import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.errors import SettingsError
from megatron.serving.settings import ServeLimits, ServeOptions, read_keys
from megatron.serving.weights import Weights, follow, names_of


def load_all(settings: ServeOptions, limits: ServeLimits, context) -> list[Weights]:
    """The weights of each model on this rank. context: `mpu.initialize.RankContext`.

    Ranks but the first ignore signals from now on: the first one ends them, after the last answer.
    """
    whole = [weights_of(settings, limits, folder, context) for folder in settings.folders]
    if context.is_rank_zero:
        for note in (note for weights in whole for note in weights.loaded.notices):
            print(f"note: {note}", file=sys.stderr)
    else:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return whole


def weights_of(settings: ServeOptions, limits: ServeLimits, folder: str, context) -> Weights:
    """The weights of a model, with the ways to load others and to make an engine. Raises SettingsError if it is no GPT."""
    from megatron.inference.engine import Engine
    from megatron.inference.load import load_model

    mesh, memory = context.mesh, settings.cache_gigabytes
    load = partial(load_model, device=context.device, precision=settings.precision, mesh=mesh)
    loaded = load(folder, step=settings.ckpt_step if folder in (settings.load or ()) else None)
    loaded.check_words()
    if not loaded.continues_texts:
        raise SettingsError(
            f"{folder} holds a model of type {loaded.config.model.model_type}, which does not continue texts",
            do="encoder-decoders answer in python -m megatron.tools.generate",
        )
    size = None if memory is None else int(memory * 1e9)

    def engine_of(loaded):
        return Engine(loaded.model, longest=loaded.longest, max_batch=limits.max_batch, memory=size)

    return Weights(load, engine_of, loaded, mesh.world if mesh.world_size > 1 else None)


def service_of(settings: ServeOptions, limits: ServeLimits, whole: list[Weights], tokenizer: Mapping[str, Any]):
    """What the server serves (`serving.server.Service`). tokenizer: settings that replace those of the checkpoints."""
    from megatron.inference.load import open_tokenizer
    from megatron.serving.chat_template import find_template
    from megatron.serving.engine_thread import EngineThread
    from megatron.serving.metrics import ServeMetrics
    from megatron.serving.served_model import ServedModel
    from megatron.serving.server import Service

    metrics, models, background = ServeMetrics(), {}, []
    names = settings.served_model_name or names_of(settings.folders)
    for name, folder, weights in zip(names, settings.folders, whole):
        meter, opened = metrics.of(name), open_tokenizer(weights.loaded, tokenizer)
        meter.iteration(weights.loaded.iteration)
        thread = EngineThread(weights.engine(), room=limits.room, version=weights.version, meter=meter)
        template = find_template(folders_of(folder, weights.loaded, tokenizer), opened, settings.chat_template)
        models[name] = ServedModel(name, opened, weights.loaded.longest, thread, template)
        if folder == settings.follow:
            background.append(follow(folder, models[name], weights))
    return Service(models, metrics, limits, read_keys(settings.api_key_file), background)


def folders_of(folder: str, loaded, tokenizer: Mapping[str, Any]) -> list[Path]:
    """Where a chat template may be: beside the tokenizer, and in the model's folder."""
    own = replace(loaded.config.tokenizer, **tokenizer)
    files = [Path(name) for name in (own.tokenizer_model, own.vocab_file) if name]
    places = [place if place.is_dir() else place.parent for place in files]
    return [*places, Path(folder), Path(str(loaded.path))]
