# SPDX-License-Identifier: Apache-2.0
"""All rules about settings, from each package that owns settings and from the recipe.

    resolve(config, world_size) -> config with derived values filled in, or SettingsError with every violation

Pure: it needs no torch.
"""

import math
from collections.abc import Sequence
from types import SimpleNamespace

from megatron.data import data_rules
from megatron.errors import SettingsError, numbered
from megatron.model import fp8, linear_kinds
from megatron.model.layer_ops import ATTENTION, LAYER, MODULES
from megatron.model.layer_rules import layer_problems
from megatron.model.recipe import recipe_of
from megatron.model.weights import Table
from megatron.mpu.axis_sizes import expert_sizes, lacking_ranks, sizes_of
from megatron.mpu.placement import Placement
from megatron.optimizer import lr_schedule, optimizer_rules, ordered_rules
from megatron.optimizer.ordered_rules import VOCABULARY
from megatron.pipeline import pipeline_rules, stages
from megatron.settings import batch, general_rules, rules, schema
from megatron.settings.declare import dashed, declared, without_effect
from megatron.settings.layer_settings import FLAG
from megatron.settings.rules import Rule, divisors, either, said, tokenizer_type
from megatron.settings.schema import default, derived
from megatron.settings.statements import in_users_words

# For recipes that do not divide sequences among ranks.
WHOLE_SEQUENCES = (
    Rule(
        lambda s: s.cp > 1,
        lambda s: (
            f"--context-parallel-size {s.cp}: --model-type {s.model_type} needs whole sequences on each rank; leave "
            "the flag out"
        ),
    ),
)
OWNERS = (data_rules, optimizer_rules, ordered_rules, pipeline_rules)  # of packages with settings of their own


def rules_of(settings: schema.Config) -> tuple[Rule, ...]:
    """The rules of the recipe and of the packages."""
    recipe = recipe_of(settings)
    sources = () if recipe.own_data else data_rules.SOURCE
    sequences = () if recipe.shares_sequences else WHOLE_SEQUENCES
    kinds = (rule for kind in recipe.kinds.values() for rule in kind.rules)
    return (*recipe.rules, *kinds, *sequences, *sources, *(rule for owner in OWNERS for rule in owner.RULES))


def resolve(settings: schema.Config, world_size: int) -> schema.Config:
    """Fill in derived values of the settings. Raises SettingsError with all violations."""
    violations = check(settings, world_size)
    if settings.batch.micro_batch_size == schema.AUTO:
        violations.append("--micro-batch-size auto: nothing chooses it here; give a number")
    if len(violations) == 1:
        raise SettingsError(violations[0])
    if violations:
        raise SettingsError(f"{len(violations)} settings cannot work:{numbered(violations)}")
    return filled(settings, world_size)


def check(settings: schema.Config, world_size: int) -> list[str]:
    """All violations on this many ranks, naming the flags, with nearby values that work.

    If the micro-batch size is open, only violations that hold for every size.
    """
    violations, s = general_rules.violations(settings, world_size, rules_of(settings))
    others = stages.problems(s.settings.parallel, s.num_layers)
    if s.world % s.model_ranks == 0:  # otherwise there is no data parallel size to divide batches by
        others += batch.problems(s.settings.batch, s.dp)
    others += lr_schedule.problems(s.settings.optimizer, s.settings.batch, s.dp)
    violations += general_rules.of_given_values(others, s)
    violations = violations or [
        *linear_kinds.problems(settings.model, lambda: _tables(settings), s.tp),
        *(fp8.problems(settings, _tables_in_fp8(settings), s.tp) if settings.precision.fp8_format else ()),
        *expert_problems(s),
        *ordered_rules.problems(s),
        *own_layer_problems(settings, world_size),
        *logit_problems(settings),
        *recompute_problems(settings),
    ]
    return [in_users_words(sentence, settings.statements) for sentence in violations]


def own_layer_problems(settings: schema.Config, world: int) -> list[str]:
    """The problems of layers with settings of their own."""
    if not settings.model.layer_settings:
        return []
    facts = recipe_of(settings).facts(settings, 1)
    if not facts.branches(0):
        return [f"{FLAG}: --model-type {settings.model.model_type} has layers of its own; leave it out"]
    return layer_problems(settings, facts, world, rules_of(settings))


def logit_problems(settings: schema.Config) -> list[str]:
    """Whether the largest attention logits of a model are asked for that has none."""
    asked = dict(qk_clip=settings.optimizer.qk_clip, log_max_attention_logit=settings.logging.log_max_attention_logit)
    flags = [dashed(name) for name, on in asked.items() if on]
    if not flags:
        return []
    mixers = recipe_of(settings).facts(settings, 1).mixers_of(range(settings.model.num_layers))
    if any(mixer.clipped for _, mixer in mixers):
        return []
    return [f"{' and '.join(flags)}: no layer of this model has attention logits that the suite computes; leave it out"]


def expert_problems(s: SimpleNamespace) -> list[str]:
    """The problems of the sizes of the experts' axes. s: `rules.record` of settings that otherwise work."""
    flags = dict(ep="expert_model_parallel_size", etp="expert_tensor_parallel_size")
    given = {axis: said(s, name) for axis, name in flags.items() if (getattr(s, name) or 1) > 1}
    if not given:
        return []
    experts = _experts(s.settings)
    if not experts:
        return [f"{' and '.join(given.values())}: --model-type {s.model_type} has no experts here; leave the flags out"]
    ep, etp = (getattr(s, name) for name in flags.values())
    try:
        sizes = expert_sizes(sizes_of(s.settings.parallel, s.world), ep, etp, shard_over_cp=s.sharding_stage > 0)
    except SettingsError as error:
        needed = s.world * lacking_ranks(s.world // s.pp, ep, s.tp if etp is None else etp)
        if rules.alone(s):
            return [rules.too_few(s, " x ".join(given.values()), needed)]
        return [f"{error.what} ({error.why}); {error.do}"]
    words = {axis: given.get(axis, f"{dashed(name)} {sizes[axis]}") for axis, name in flags.items()}
    first = {}  # of the weights that have the same problem
    for name, placed in experts.items():
        for dim, axes in placed.cut_dims:
            size, ranks = placed.shape[dim], math.prod(sizes[axis] for axis in axes)
            if size % ranks:
                first.setdefault(
                    (axes, size),
                    f"{' x '.join(words[axis] for axis in axes)} does not divide dim {dim} of {name}, which is "
                    f"{' x '.join(map(str, placed.shape))}; nearest: {either(divisors(size, ranks))}",
                )
    return list(first.values())


def recompute_problems(settings: schema.Config) -> list[str]:
    """The problems of the recomputed parts of layers."""
    again, model_type = settings.recompute, settings.model.model_type
    if not set(again.modules) - {LAYER}:
        return []
    there = recipe_of(settings).facts(settings, 1).recomputes
    flag = "--recompute-modules" if again.recompute_modules else "--recompute-granularity"
    has = [name for name in (*MODULES, ATTENTION) if name in there]
    return [
        f"{flag} {part}: the layers of --model-type {model_type} do not recompute it alone; they have "
        f"{', '.join([*has, LAYER])}"
        for part in again.modules
        if part not in there
    ]


def _vocabulary_multiple(c: schema.Config, world: int, dp: int) -> int:
    """Of the rows of a rank: in --batch-invariant-mode, the padded vocabulary does not depend on tp."""
    given = c.model.make_vocab_size_divisible_by
    return VOCABULARY // c.parallel.tensor_model_parallel_size if c.parallel.batch_invariant_mode else given


def _experts(settings: schema.Config) -> dict[str, Placement]:
    """The weights of experts of a run's model."""
    return recipe_of(settings).facts(settings, 1).experts


def _tables(settings: schema.Config) -> dict[int, Table]:
    return recipe_of(settings).facts(settings, 1).tables


def _tables_in_fp8(settings: schema.Config) -> dict[int, Table]:
    return fp8.tables_of(recipe_of(settings).facts(settings, 1))


def remarks(settings: schema.Config, world_size: int) -> list[str]:
    """Remarks for the log on settings that work but are probably not intended, one sentence each."""
    found = general_rules.remarks(settings, world_size, pipeline_rules.REMARKS) + rotation_remarks(settings)
    found += warmup_remarks(settings, world_size)
    return found + (fp8.remarks(settings, _tables_in_fp8(settings)) if settings.precision.fp8_format else [])


def warmup_remarks(settings: schema.Config, world_size: int) -> list[str]:
    """A remark on a warm-up that the run does not get to the end of, as where a long run is tried for a few steps."""
    s, o = rules.record(settings, world_size), settings.optimizer
    if not s.steps or o.lr is None or s.skip_train:
        return []
    lengths, size = lr_schedule.Lengths.of(o, settings.batch, s.dp), settings.batch.full_size(s.dp)
    if lengths.warmup <= lengths.total:
        return []
    names = ("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_iters")
    name = next(name for name in names if getattr(o, name))
    said = f"{dashed(name)} {getattr(o, name)} is a warm-up of {math.ceil(lengths.warmup / size):,} steps, beyond "
    highest = lr_schedule.learning_rate(o, lengths, lengths.total - size)
    return [
        in_users_words(
            f"{said}{general_rules.last_step(s)}: the learning rate only comes to {highest:.2g}, and not to --lr {o.lr:g}",
            settings.statements,
        )
    ]


def rotation_remarks(settings: schema.Config) -> list[str]:
    """A remark on a --no-rope-freq whose layers have no positions: with a pattern, it counts characters."""
    m = settings.model
    if not (m.letters and m.no_rope_freq and m.position_embedding_type == "rope"):
        return []
    try:
        chosen = [layer for layer in range(m.num_layers) if not m.rotates(layer)]
    except ValueError:  # a rule refuses it
        return []
    if any(mixer.rotated for _, mixer in recipe_of(settings).facts(settings, 1).mixers_of(chosen)):
        return []
    return [
        f"--no-rope-freq {m.no_rope_freq} has no effect: it counts the characters of --hybrid-layer-pattern, and none of "
        "its layers has attention"
    ]


def idle(settings: schema.Config, world_size: int, datasets: Sequence = ()) -> dict[str, str]:
    """Find given settings without effect: name -> sentence. Often another setting was forgotten.

    datasets: (train, valid, test) of the run, which may be None even if --split leaves samples for them
    With --skip-train, settings of the optimizer are not reported: no optimizer setting has an effect then.
    """
    groups = (getattr(settings, name) for name in schema.GROUPS)  # with those of the recipe's own kinds
    general = {name: one for name, one in declared("needs", *groups).items() if not one.of_network}
    of_kinds = optimizer_rules.idle_of(settings.optimizer) | linear_kinds.idle_of(settings.model)
    table = {**general, **of_kinds, **recipe_of(settings).idle}
    if settings.batch.skip_train:
        table = {name: needs for name, needs in table.items() if not hasattr(settings.optimizer, name)}
    found = without_effect(rules.record(settings, world_size), table)
    for name, part, dataset in zip(("eval_iters", "test_iters"), ("validation", "test"), datasets[1:]):
        given = settings.given(name)
        if given and given.value and dataset is None and (name == "test_iters" or datasets[2] is None):
            found.setdefault(name, f"{given.words} has no effect: there are no {part} samples")
    return found


def layout_is_open(settings: schema.Config) -> bool:
    """Whether the planner still has to choose the layout or the micro-batch size."""
    return settings.planner.auto_parallel or settings.batch.micro_batch_size == schema.AUTO


def filled(config: schema.Config, world: int) -> schema.Config:
    """Fill in derived values of valid settings: each field gets the default that its help describes."""
    p = config.parallel
    dp = world // (p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size)
    return derived(config, DEFAULTS, world, dp)


def _compiles(c: schema.Config, world: int, dp: int) -> bool | str:
    return c.kernels.torch_compile and general_rules.can_compile(c, world) and c.kernels.torch_compile


def _expert_ranks(c: schema.Config, world: int, dp: int) -> int | None:
    given = c.parallel.expert_tensor_parallel_size
    return given if given is None or _experts(c) else None  # without experts, 1 has no effect


def _decay_iters(c: schema.Config, world: int, dp: int) -> int | None:
    given = c.optimizer.lr_decay_iters
    return c.batch.train_iters if given is None else given


def _decay_samples(c: schema.Config, world: int, dp: int) -> int | None:
    given, iters = c.optimizer.lr_decay_samples, c.optimizer.lr_decay_iters
    return c.batch.train_samples if given is None and iters is None else given


SIZES = " ".join(rules.LAYOUT)
# Values are computed from a config, the number of ranks and that of data parallel ranks.
DEFAULTS = (
    default("hidden_size swiglu geglu", "ffn_hidden_size", lambda c, world, dp: c.model.ffn_size),
    default("hidden_size num_attention_heads", "kv_channels", lambda c, world, dp: c.model.head_dim),
    default("num_attention_heads", "num_query_groups", lambda c, world, dp: c.model.query_groups),
    default("seq_length", "max_position_embeddings", lambda c, world, dp: c.model.position_table),
    default(SIZES, "data_parallel_size", lambda c, world, dp: dp),
    default(SIZES, "sharding_degree", lambda c, world, dp: c.parallel.sharding_degree or dp),
    default("model_type num_experts", "expert_tensor_parallel_size", _expert_ranks),
    default(
        "tensor_model_parallel_size",
        "sequence_parallel",
        lambda c, world, dp: c.parallel.sequence_parallel and c.parallel.tensor_model_parallel_size > 1,
    ),
    default(
        f"micro_batch_size local_batch_size gradient_accumulation_steps {SIZES}",
        "global_batch_size",
        lambda c, world, dp: c.batch.full_size(dp),
    ),
    default(
        "batch_invariant_mode global_batch_size",
        "micro_batch_size",
        lambda c, world, dp: 1 if c.parallel.batch_invariant_mode else c.batch.micro_batch_size,
    ),
    default("batch_invariant_mode tensor_model_parallel_size", "make_vocab_size_divisible_by", _vocabulary_multiple),
    default(
        "optimizer",
        "optimizer_cpu_offload",
        lambda c, world, dp: c.optimizer.optimizer_cpu_offload or c.optimizer.optimizer == "cpu_adam",
    ),
    default("", "optimizer", lambda c, world, dp: c.optimizer.rule),  # cpu_adam is adam, with --optimizer-cpu-offload
    default("sharding_stage amp_level precision recompute_modules", "torch_compile", _compiles),
    default("train_samples lr_decay_iters", "lr_decay_samples", _decay_samples),
    default("train_iters", "lr_decay_iters", _decay_iters),
    default(
        "vocab_file merge_file vocab_size tokenizer_model mock_data",
        "tokenizer_type",
        lambda c, world, dp: c.tokenizer.tokenizer_type or tokenizer_type(c.tokenizer, c.data),
    ),
)
