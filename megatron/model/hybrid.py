# SPDX-License-Identifier: Apache-2.0
"""What --hybrid-layer-pattern says about layers and pipeline stages: its characters are the layers of the model, its cuts
are layout. Needs no torch.

    python pretrain_hybrid.py --hybrid-layer-pattern "*-*-|*E*E" --pipeline-model-parallel-size 2 ...

The model's record keeps the characters alone; the cuts become --pipeline-stage-layers and
--num-virtual-stages-per-pipeline-rank. So a run may go on with other cuts, and not with other characters.
"""

from collections.abc import Mapping
from typing import Any, Optional

from megatron.errors import SettingsError, UsageError
from megatron.model.kinds.mixer import Mixer
from megatron.model.kinds.table import KINDS, listed, words_of
from megatron.model.layer_rules import RULES as OF_LAYERS
from megatron.model.layer_rules import with_blocks
from megatron.pipeline.custom_schedule import is_file
from megatron.pipeline.schedule import TRAINING, default_chunks
from megatron.settings.declare import dashed
from megatron.settings.hybrid_pattern import AHEAD, CUT, FLAG, LayerPattern, read_pattern, spread_evenly
from megatron.settings.rules import Rule
from megatron.settings.schema import Config
from megatron.settings.stage_layout import LAYOUT, PARTS, read_layout

# Settings that set the stages, or the number of a rank's, without --hybrid-layer-pattern
OTHER_CUTS = (
    "pipeline_stage_layers num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split "
    "account_for_loss_in_pipeline_split"
).split()


def with_pattern(config: Config) -> Config:
    """`Recipe.normalize_config` of models whose layers a pattern may list. Raises SettingsError."""
    config = with_stage_layout(_spread(config))
    if config.model.heterogeneous_layers_config_path or config.model.heterogeneous_layers_config_encoded_json:
        config = with_blocks(config)
    text = config.model.hybrid_layer_pattern
    if text is None:
        return config
    pattern = read_pattern(text, words_of(kinds_of(config)))
    if config.model.depths and not pattern.depths:
        raise SettingsError(
            f"{FLAG} {text} lists no layers of the depths of --mtp-num-layers {config.model.depths}",
            f"each depth is a {AHEAD} and its layers",
            f"add them, as in {text.rstrip(AHEAD)}{f'{AHEAD}*-' * config.model.depths}, or leave --mtp-num-layers out",
        )
    layers = dict(hybrid_layer_pattern=pattern.uncut, num_layers=len(pattern.letters))
    if pattern.depths:
        layers |= dict(mtp_num_layers=pattern.depths)
    for kind in listed(kinds_of(config), pattern.letters + pattern.ahead):
        layers |= dict(kind.listed)
    return config.derive(FLAG, **layers, **_stages(config, pattern))


def _spread(config: Config) -> Config:
    """The pattern that --hybrid-attention-ratio and --hybrid-mlp-ratio stand for."""
    m, shares = config.model, (config.model.hybrid_attention_ratio, config.model.hybrid_mlp_ratio)
    if not any(shares) or not all(0 <= share <= 1 for share in shares):  # what is out of range, the rules report
        return config
    given = (config.given(name) for name in ("hybrid_attention_ratio", "hybrid_mlp_ratio"))
    words = " and ".join(one.words for one in given if one)
    if m.hybrid_layer_pattern is not None:
        raise SettingsError(
            f"{FLAG} {m.hybrid_layer_pattern} and {words} both say what the layers are", do="give the pattern alone"
        )
    if sum(shares) > 1:
        raise SettingsError(f"{words}: together they are more than all layers", do="lower one of them")
    pattern = spread_evenly(m.num_layers, *shares)
    return config.derive(words, hybrid_layer_pattern=pattern, hybrid_attention_ratio=0.0, hybrid_mlp_ratio=0.0)


def kinds_of(config: Config) -> Mapping[str, Mixer]:
    """The kinds that a model's layers may have, a recipe's own included."""
    return {**KINDS, **config.model.own_kinds}


def _stages(config: Config, pattern: LayerPattern) -> dict[str, Any]:
    """The settings of the stages that the cuts make. On one pipeline rank, they have no effect."""
    if len(pattern.stages) == 1:
        return {}
    if others := [one.words for name in OTHER_CUTS if (one := config.given(name)) and one.is_request]:
        raise SettingsError(
            f"{FLAG} {config.model.hybrid_layer_pattern} and {', '.join(others)} both cut the layers into stages",
            do=f"leave out {', '.join(dashed(name) for name in OTHER_CUTS if config.given(name))}, or every {CUT}",
        )
    return cut(config, FLAG, pattern.stage_layers)


def with_stage_layout(config: Config) -> Config:
    """The settings of the stages that --pipeline-model-parallel-layout lists. Raises SettingsError."""
    text = config.parallel.pipeline_stage_layers
    if not PARTS & set(text or ""):
        return config
    layers = ",".join(map(str, read_layout(text).counts))
    return config.derive(LAYOUT, **dict(pipeline_stage_layers=None) | cut(config, LAYOUT, layers))


def cut(config: Config, flag: str, layers: str) -> dict[str, Any]:
    """The settings of the stages that a flag lists: model chunks follow from their number. layers: of each, as 2,1,1,1"""
    if config.planner.auto_parallel:
        return dict(pipeline_stage_layers=layers)
    p, stages = config.parallel, 1 + layers.count(",")
    pp = p.pipeline_model_parallel_size
    if pp == 1:
        return {}
    if stages % pp:
        fits = [n for n in range(2, stages + 1) if stages % n == 0]
        raise SettingsError(
            f"{flag} has {stages} stages, and --pipeline-model-parallel-size is {pp}",
            f"each rank has equally many of the parts between its {CUT}",
            f"--pipeline-model-parallel-size {' or '.join(map(str, fits))}, or cut it into a multiple of {pp}",
        )
    chunks, schedule = stages // pp, p.pipeline_schedule
    usual = None if is_file(schedule) or schedule not in TRAINING else default_chunks(schedule)
    own = chunks if usual is not None and chunks != usual else None  # a file has the number itself
    return dict(pipeline_stage_layers=layers, num_virtual_stages_per_pipeline_rank=own)


def required_pattern(config: Config) -> Config:
    """`with_pattern`, for a script that trains nothing else."""
    m = config.model
    if m.hybrid_layer_pattern is None and not m.hybrid_attention_ratio and not m.hybrid_mlp_ratio:
        raise UsageError(
            f"{FLAG} is missing: the kind of each layer",
            do=f'give it, as in {FLAG} "*-*-" for attention and an MLP in turn',
        )
    return with_pattern(config)


def cut_by_pattern(config: Config) -> Optional[str]:
    """The given pattern, if it has cuts."""
    given = config.given("hybrid_layer_pattern")
    return str(given.value) if given and CUT in str(given.value) else None


def _unlisted(s) -> list[Mixer]:
    """The kinds that other settings ask for, and that the pattern does not list."""
    model = s.settings.model
    kinds = kinds_of(s.settings) if model.letters else {}
    there = listed(kinds, model.all_letters)
    return [kind for kind in kinds.values() if kind.symbol and kind not in there and kind.asked(model)]


RULES = (
    *OF_LAYERS,
    Rule(
        _unlisted,
        lambda s: "; ".join(
            f"{kind.asked(s.settings.model)}: {FLAG} {s.settings.model.hybrid_layer_pattern} lists no layer of {kind.name} "
            f"({kind.symbol}); add one, or leave out {kind.asked(s.settings.model).split()[0]}"
            for kind in _unlisted(s)
        ),
    ),
)
