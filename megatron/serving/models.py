# SPDX-License-Identifier: Apache-2.0
"""Load models from checkpoints, and make a service of them."""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.errors import SettingsError
from megatron.inference import generation_config
from megatron.serving.openai_requests import DEFAULTS
from megatron.serving.settings import ServeLimits, ServeOptions, bound_kernel_caches, log_to_stderr, parsed, read_keys
from megatron.serving.weights import Weights, follow, names_of
from megatron.settings.schema import Kernels, Parallel, TokenizerSettings
from megatron.settings.statements import given_values


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
    """The weights of a model, with the ways to load others and to make an engine.

    Raises SettingsError if it does not continue texts.
    """
    from megatron.inference.load import load_model
    from megatron.inference.searches import SearchingEngine

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
        return SearchingEngine(loaded.model, longest=loaded.longest, max_batch=limits.max_batch, memory=size)

    return Weights(load, engine_of, loaded, mesh.world if mesh.world_size > 1 else None)


def service_of(settings: ServeOptions, limits: ServeLimits, whole: list[Weights], tokenizer: Mapping[str, Any]):
    """What the server serves (`serving.server.Service`). tokenizer: settings that replace those of the checkpoints."""
    from megatron.inference.load import open_tokenizer
    from megatron.serving.engine_thread import EngineThread
    from megatron.serving.metrics import ServeMetrics
    from megatron.serving.served_model import ServedModel
    from megatron.serving.server import Service
    from megatron.tokenizer.chat_template import find_template

    metrics, models, background = ServeMetrics(), {}, []
    names = settings.served_model_name or names_of(settings.folders)
    for name, folder, weights in zip(names, settings.folders, whole):
        meter, opened = metrics.of(name), open_tokenizer(weights.loaded, tokenizer)
        meter.iteration(weights.loaded.iteration)
        thread = EngineThread(weights.engine(), room=limits.room, version=weights.version, meter=meter)
        template = find_template(folders_of(folder, weights.loaded, tokenizer), opened, settings.chat_template)
        more = dict(template=template, defaults=recommended(folder))
        models[name] = ServedModel(name, opened, weights.loaded.longest, thread, **more)
        if folder == settings.follow:
            background.append(follow(folder, models[name], weights))
    return Service(models, metrics, limits, read_keys(settings.api_key_file), background)


def recommended(folder: str) -> dict[str, Any]:
    """Values of the generation_config.json beside a model, for requests that have none."""
    found = generation_config.read(folder)
    settings = dict(temperature=0.0) if found.settings.pop("greedy", False) else {}
    settings |= {name: found.settings.pop(name) for name in DEFAULTS if name in found.settings}
    if left_out := [*found.settings, *found.unknown]:
        print(f"note: {folder}/{generation_config.NAME}: {', '.join(left_out)}: requests decide", file=sys.stderr)
    return settings


def application_of(argv: list[str]):
    """The application of a command line, for a replica in a process of its own."""
    from megatron.mpu.initialize import join_job
    from megatron.serving.server import app

    bound_kernel_caches()
    settings, limits, given = parsed(argv)
    log_to_stderr(settings.access_log)
    whole = load_all(settings, limits, join_job(Parallel(), Kernels(device=settings.device)))
    service = service_of(settings, limits, whole, given_values(TokenizerSettings, given))
    service.stop = partial(os._exit, 1)  # its engine has failed: another replica is started
    return app(service, local=False)


def folders_of(folder: str, loaded, tokenizer: Mapping[str, Any]) -> list[Path]:
    """Where a chat template may be: in the model's folder, or beside the tokenizer."""
    own = replace(loaded.config.tokenizer, **tokenizer)
    files = [Path(name) for name in (own.tokenizer_model, own.vocab_file) if name]
    places = [place if place.is_dir() else place.parent for place in files]
    return [Path(folder), Path(str(loaded.path)), *places]
