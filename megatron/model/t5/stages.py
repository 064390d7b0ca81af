# SPDX-License-Identifier: Apache-2.0
"""Layers and pipeline stages of an encoder-decoder: convert its own flags to the common ones. Pure.

`--num-layers`, which may be the encoder's, becomes the total of both halves, and `--pipeline-model-parallel-split-rank` and
`--encoder-pipeline-model-parallel-size` become `--pipeline-stage-layers`. Without such flags layers are divided among the
stages by their FLOPs: a decoder layer at 512 and 114 tokens is 0.4 of an encoder layer. The planner refines this by time
(`planner/stage_cut.py`).
"""

from dataclasses import replace
from typing import Optional

from megatron.errors import SettingsError
from megatron.model.t5.facts import T5Facts, even
from megatron.model.t5.settings import SHORT, T5Settings, own_settings
from megatron.pipeline.custom_schedule import is_file
from megatron.pipeline.schedule import TRAINING
from megatron.pipeline.stages import LAYERS_EACH, balanced, chunks_of
from megatron.settings.declare import dashed
from megatron.settings.schema import Config, Parallel

SPLIT, OF_ENCODER = "--pipeline-model-parallel-split-rank", "--encoder-pipeline-model-parallel-size"


def normalize_config(config: Config) -> Config:
    """`Recipe.normalize_config` of an encoder-decoder. Raises SettingsError for invalid layers and stages."""
    return _counted(config, *_layers(own_settings(config), config.model.num_layers))


def is_cut_by_work(given: Config, normalized: Config) -> bool:
    """Whether `normalize_config` divided the layers into stages, not the user. normalized: its result for `given`."""
    own = own_settings(given)
    split = own.pipeline_model_parallel_split_rank is not None or own.encoder_pipeline_model_parallel_size
    return not split and given.parallel.pipeline_stage_layers != normalized.parallel.pipeline_stage_layers


def normalize_encoder_config(config: Config) -> Config:
    """`normalize_config` for the encoder alone; the layers of the decoder are left out."""
    own = own_settings(config)
    encoder, _ = _layers(replace(own, decoder_num_layers=own.decoder_num_layers or None), config.model.num_layers)
    return _counted(config, encoder, 0)


def _counted(config: Config, encoder: int, decoder: int) -> Config:
    """The settings with these numbers of layers, divided among the stages."""
    own, model = own_settings(config), config.model
    short = min(SHORT, model.seq_length) if own.decoder_seq_length is None else own.decoder_seq_length
    layers = dict(encoder_num_layers=encoder, decoder_num_layers=decoder, num_layers=encoder + decoder)
    config = config.derive("an encoder-decoder", decoder_seq_length=short, **layers)
    own = own_settings(config)
    if own.pipeline_model_parallel_split_rank is not None or own.encoder_pipeline_model_parallel_size:
        return _split(config, own)
    counts = _by_work(config)
    if counts is None:
        return config
    return config.derive("an encoder-decoder", pipeline_stage_layers=",".join(map(str, counts)))


def _layers(own: T5Settings, given: int) -> tuple[int, int]:
    """(encoder layers, decoder layers). given: --num-layers; 0: not given."""
    encoder = given if own.encoder_num_layers is None else own.encoder_num_layers
    decoder = encoder if own.decoder_num_layers is None else own.decoder_num_layers
    if given == 0 and own.encoder_num_layers is None:
        raise SettingsError(
            "--encoder-num-layers is missing: the number of layers of the encoder",
            do="give it, and --decoder-num-layers if the decoder has another number (default: the same)",
        )
    for name, number, other in (("encoder", encoder, "pretrain_gpt.py"), ("decoder", decoder, "pretrain_bert.py")):
        if number < 1:
            raise SettingsError(
                f"--{name}-num-layers {number}: an encoder-decoder has layers of both kinds",
                do=f"give at least 1; a model without {name} is trained by {other}",
            )
    if given not in (0, encoder, encoder + decoder):
        raise SettingsError(
            f"--num-layers {given} and --encoder-num-layers {encoder} are two numbers of encoder layers",
            do="give one of them",
        )
    return encoder, decoder


def _split(config: Config, own: T5Settings) -> Config:
    """The settings with stages of either encoder or decoder layers, as the flags request them."""
    p, rank, more = config.parallel, own.pipeline_model_parallel_split_rank, own.encoder_pipeline_model_parallel_size
    encoder, decoder = own.encoder_num_layers, own.decoder_num_layers
    if decoder == 0:
        raise SettingsError(
            f"{OF_ENCODER if more else SPLIT}: there is no decoder, only the encoder", do="leave it out"
        )
    if rank is not None and more:
        raise SettingsError(f"{SPLIT} and {OF_ENCODER} set the same thing in two ways", do="give one of them")
    flag, pp = (OF_ENCODER, p.pipeline_model_parallel_size + more) if more else (SPLIT, p.pipeline_model_parallel_size)
    first = more or rank
    if more < 0 or not 0 < first < pp:
        value = f"{flag} {more or rank}"
        raise SettingsError(
            f"{value}: there are {pp} pipeline ranks" if not more else f"{value} is no number of ranks",
            "the first ranks have the encoder, the others the decoder",
            f"give {'1' if pp == 2 else f'1 to {pp - 1}'}"
            if pp > 1
            else "leave it out, or raise --pipeline-model-parallel-size",
        )
    if others := _layer_flags(p):
        raise SettingsError(f"{flag} and {', '.join(others)} both set the layers of stages", do="give one of them")
    if is_file(p.pipeline_schedule) or chunks_of(p, encoder + decoder) > 1:
        raise SettingsError(
            f"{flag}: with several model chunks a rank, a rank may have both kinds of layer",
            do=f"give the layers of each chunk by {LAYERS_EACH}, or leave both out",
        )
    for name, layers, ranks in (("encoder", encoder, first), ("decoder", decoder, pp - first)):
        if layers < ranks:
            raise SettingsError(
                f"{flag} gives {ranks} ranks to {layers} {name} layers", do=f"give the {name} {layers} ranks or fewer"
            )
    layers = ",".join(map(str, [*even(encoder, first), *even(decoder, pp - first)]))
    split = dict(pipeline_model_parallel_split_rank=None, encoder_pipeline_model_parallel_size=0)
    return config.derive(flag, pipeline_model_parallel_size=pp, pipeline_stage_layers=layers, **split)


def _layer_flags(p: Parallel) -> list[str]:
    """The given flags that set the layers of stages."""
    names = "pipeline_stage_layers decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
    names += "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
    names += "num_layers_per_virtual_pipeline_stage"
    return [dashed(name) for name in names.split() if getattr(p, name)]


def _by_work(config: Config) -> Optional[list[int]]:
    """Number of layers of each stage that minimizes the work of the largest stage; None if flags set them."""
    p, layers = config.parallel, config.model.num_layers
    if p.pipeline_model_parallel_size < 2 or _layer_flags(p) or p.pipeline_schedule not in TRAINING:
        return None
    stages = p.pipeline_model_parallel_size * max(1, chunks_of(p, layers))
    facts = T5Facts.of(config, config.tokenizer.vocab_size or 32000)
    if layers < stages:
        raise SettingsError(
            f"{layers} {' and '.join(facts.halves)} layers are fewer than the {stages} stages of the pipeline",
            do="more layers, or a smaller --pipeline-model-parallel-size or fewer chunks",
        )
    if not facts.has_shape or min(facts.source, config.model.hidden_size) < 1 or facts.target < 0:
        return None
    output = 2.0 * facts.target * config.model.hidden_size * facts.vocab_size
    return balanced([facts.layer_flops(n, seen=True) for n in range(layers)], stages, last=output)
