# SPDX-License-Identifier: Apache-2.0
"""Load models from checkpoints, and make a service of them."""

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from megatron.convert.given_model import load_one_model
from megatron.errors import SettingsError
from megatron.inference import generation_config
from megatron.mpu.cpu_memory import bound_kernel_caches
from megatron.serving.openai_requests import DEFAULTS
from megatron.serving.settings import ServeOptions, ServeSettings, log_to_stderr, parsed, read_keys
from megatron.serving.weights import Weights, follow, names_of
from megatron.settings.schema import Kernels, Parallel, TokenizerSettings
from megatron.settings.statements import given_values


def load_all(settings: ServeSettings, context) -> list[Weights]:
    """The weights of each model on this rank. context: `mpu.initialize.RankContext`.

    Ranks but the first ignore signals from now on: the first one ends them, after the last answer.
    """
    whole = [weights_of(settings, folder, context) for folder in settings.serve.folders]
    if context.is_rank_zero:
        for note in (note for weights in whole for note in weights.loaded.notices):
            print(f"note: {note}", file=sys.stderr)
    else:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    return whole


def weights_of(settings: ServeSettings, folder: str, context) -> Weights:
    """The weights of a model, with the ways to load others and to make an engine.

    Raises SettingsError if it does not continue texts.
    """
    from megatron.convert.export.load_exported import is_export
    from megatron.inference.load import load_model
    from megatron.inference.searches import SearchingEngine
    from megatron.inference.sequence_engine import SequenceEngine

    options, limits, quantize, _ = settings
    mesh, memory, step = context.mesh, options.cache_gigabytes, options.ckpt_step
    how = dict(device=context.device, precision=options.precision, mesh=mesh, quantize=quantize)
    how |= dict(batch_invariant=options.batch_invariant_mode)
    exported = folder in (options.load_exported or ())
    if folder == options.follow and is_export(Path(folder)):
        raise SettingsError(f"--follow {folder}: it is an export, which has no newer checkpoints", do="--load-exported")
    if step is not None and folder in (options.load or ()) and is_export(Path(folder)):
        raise SettingsError(f"--ckpt-step {step}: {folder} is an export, which has one step", do="leave it out")
    step = step if folder in (options.load or ()) else None
    loaded = load_one_model(None if exported else folder, folder if exported else None, step=step, **how)
    loaded.check_words()
    if getattr(loaded.model, "is_program", False):
        raise SettingsError(
            f"{folder} holds a program, which has no room for several texts at a time",
            do="export with --format hf, or use python -m megatron.tools.generate --load-exported",
        )
    if not (loaded.continues_texts or hasattr(loaded.model, "decode")):
        raise SettingsError(
            f"{folder} holds a model of type {loaded.config.model.model_type}, which generates nothing",
            do="models of texts and encoder-decoders are served",
        )
    size, longest = None if memory is None else int(memory * 1e9), longest_of(loaded, options)

    def engine_of(loaded):
        if hasattr(loaded.model, "decode"):
            return SequenceEngine(loaded.model, max_batch=limits.max_batch, memory=size)
        return SearchingEngine(loaded.model, longest=longest, max_batch=limits.max_batch, memory=size)

    return Weights(partial(load_model, **how), engine_of, loaded, mesh.world if mesh.world_size > 1 else None)


def service_of(settings: ServeSettings, whole: list[Weights]):
    """What the server serves (`serving.server.Service`)."""
    from megatron.inference.load import open_tokenizer
    from megatron.serving.engine_thread import EngineThread
    from megatron.serving.metrics import ServeMetrics
    from megatron.serving.served_model import ServedModel
    from megatron.serving.server import Service
    from megatron.tokenizer.chat_template import find_template, template_folders
    from megatron.tokenizer.embedding_rows import tokenless

    metrics, models, background = ServeMetrics(), {}, []
    options, limits, _, given = settings
    tokenizer = given_values(TokenizerSettings, given)  # settings that replace those of the checkpoints
    names = options.served_model_name or names_of(options.folders)
    for name, folder, weights in zip(names, options.folders, whole):
        meter, opened = metrics.of(name), open_tokenizer(weights.loaded, tokenizer)
        meter.iteration(weights.loaded.iteration)
        if note := tokenless(opened, weights.loaded.vocab_size):
            print(f"note: {name}: {note}", file=sys.stderr, flush=True)
        thread = EngineThread(weights.engine(), room=limits.room, version=weights.version, meter=meter)
        words = weights.loaded.config.tokenizer.overridden(tokenizer)
        places = template_folders([folder, str(weights.loaded.path)], words)
        template = find_template(places, opened, options.chat_template)
        more = dict(template=template, defaults=recommended(folder), targets=targets_of(weights.loaded, opened))
        more |= dict(ends=weights.loaded.ends)
        longest = longest_of(weights.loaded, options)
        models[name] = ServedModel(name, opened, longest, thread, **more)
        if folder == options.follow:
            background.append(follow(folder, models[name], weights))
    return Service(models, metrics, limits, read_keys(options.api_key_file), background)


def longest_of(loaded, options: ServeOptions) -> int:
    """Tokens of a text, or of an encoder-decoder's source. Raises SettingsError for another --max-model-len."""
    asked, longest = options.max_model_len, loaded.longest
    if hasattr(loaded.model, "decode"):
        longest = loaded.model.facts.source
        if asked not in (None, longest):
            what = f"--max-model-len {asked}: an encoder-decoder has {longest} tokens of a prompt"
            raise SettingsError(what, do="leave it out")
    if asked is not None and asked > longest:
        raise SettingsError(f"--max-model-len {asked}: the context of {loaded.path} has {longest} tokens")
    return longest if asked is None else asked


def targets_of(loaded, tokenizer):
    """What the answers of an encoder-decoder are (`served_model.Targets`); None for other models."""
    from megatron.inference.prompts import boundaries
    from megatron.serving.served_model import Targets

    if not hasattr(loaded.model, "decode"):
        return None
    facts = loaded.model.facts
    return Targets(facts.target, *boundaries(tokenizer, facts))


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
    settings = parsed(argv)
    log_to_stderr(settings.serve.access_log)
    service = service_of(settings, load_all(settings, join_job(Parallel(), Kernels(device=settings.serve.device))))
    service.stop = partial(os._exit, 1)  # its engine has failed: another replica is started
    return app(service, local=False)
