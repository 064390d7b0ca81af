# SPDX-License-Identifier: Apache-2.0
"""Shrink a training to one CPU: the same command with every parallel feature enabled, on a tiny model and few ranks.

    175 B on 128 ranks, tp 8 pp 16, 96 layers x 12288   ->   16 thousand parameters on 4 ranks, tp 2 pp 2, 4 layers x 32

An axis of more than one rank keeps two. Layers, widths, batch and steps shrink to the minimum that still covers every
branch of the code of the real job: several layers per stage, groups of recomputed layers, uneven stages, heads that share
keys, padded vocabulary rows, more micro-batches than stages. Data are synthetic, and nothing is saved. Pure.

    >>> from megatron.settings.schema import GROUPS, Config, Model
    >>> config = Config(**{name: group() for name, group in GROUPS.items() if name != "model"}, model=Model(96, 12288, 96))
    >>> config = replace(config, parallel=replace(config.parallel, tensor_model_parallel_size=8))
    >>> shrunk = shrunk_job_of(config, world_size=16)
    >>> shrunk.world_size, shrunk.config.model.num_layers, shrunk.config.model.hidden_size
    (4, 2, 32)
"""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Optional

from megatron.model.recipe import facts_of
from megatron.mpu.axis_sizes import lacking_ranks
from megatron.pipeline.stages import Pipeline
from megatron.settings.schema import (
    GROUPS,
    Batch,
    Checkpoint,
    Config,
    Data,
    Distillation,
    Guard,
    Logging,
    Model,
    Optimizer,
    Parallel,
    Planner,
    Precision,
    Profiling,
    Recompute,
    TokenizerSettings,
)
from megatron.training.rules import layout_is_open, resolve

RANKS = 8  # limit for a shrunk job: four axes of two would need 16, five 32
VOCABULARY = 125  # odd, so that every tensor parallel size pads it
PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
LEARNING_RATE = 1e-3  # minimum: with less, a wrong gradient hardly changes a weight in a few steps


@dataclass(frozen=True)
class ShrunkJob:
    """A shrunk job: unresolved settings, ranks, and the features of the original that it does not cover, in words."""

    config: Config
    world_size: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The sizes of a shrunk job: ranks of each axis, stages of the pipeline, layers of the fullest stage."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    stages: int = 1
    layers: int = 2


def shrunk_job_of(config: Config, world_size: int, steps: int = 3, limit: int = RANKS) -> ShrunkJob:
    """The shrunk job of a valid job (`rules.check`) of `world_size` ranks, with resolved or unresolved settings."""
    p = config.parallel
    pipeline = Pipeline.of(p, config.model.num_layers)
    pp, schedule, lost = min(p.pipeline_model_parallel_size, 2), p.pipeline_schedule, []
    if pipeline.custom and p.pipeline_model_parallel_size <= limit:
        pp = p.pipeline_model_parallel_size
    elif pipeline.custom:
        schedule = "interleaved" if pipeline.chunks > 1 else "1f1b"
        ranks = p.pipeline_model_parallel_size
        lost.append(f"--pipeline-schedule {p.pipeline_schedule} is for {ranks} ranks; the shrunk job runs {schedule}")
    dp = max(1, world_size // (p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size))
    num_microbatches = config.batch.full_size(dp) // (config.batch.micro_batch_size * dp)
    few, (ep, etp), more = _few_ranks(p, dp, pp, limit)
    lost += more
    chunks = pipeline.chunks if pipeline.custom else min(pipeline.chunks, 2)
    sizes = Sizes(
        few["tp"],
        few["pp"],
        few["shard"] * few["replicate"],
        few["cp"],
        few["pp"] * chunks,
        min(_layers_of_all_kinds(config, few["pp"] * chunks), max(map(len, pipeline.layers))),
    )
    parallel, num_layers = _stages(p, pipeline, sizes, chunks)
    parallel = replace(
        parallel,
        tensor_model_parallel_size=sizes.tp,
        context_parallel_size=sizes.cp,
        cp_comm_type=_of_layers(p.cp_comm_type, num_layers),
        hierarchical_context_parallel_sizes=_few_levels(p),
        pipeline_model_parallel_size=sizes.pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        moe_flex_dispatcher_backend=None,
        moe_deepep_num_sms=None,
        moe_hybridep_num_sms=None,
        moe_ranks_per_node=1 if p.moe_token_dispatcher_type == "flex" and ep > 1 else None,
        data_parallel_size=None,
        dp_degree=None,
        pipeline_schedule=schedule,
        sharding_degree=few["shard"] if p.sharding_stage and few["replicate"] > 1 else None,
        pipeline_timeline=None,
        distributed_backend=None,
        print_topology=False,
    )
    number = _num_microbatches(num_microbatches, pipeline, sizes.pp)
    small = narrowed(config, sizes, num_microbatches=number, steps=steps, num_layers=num_layers)
    recompute = _recompute(config.recompute, max(map(len, pipeline.layers)), num_layers, sizes.layers)
    return ShrunkJob(replace(small, parallel=parallel, recompute=recompute), math.prod(few.values()), tuple(lost))


def _layers_of_all_kinds(config: Config, stages: int) -> int:
    """Layers of a stage of the shrunk job: two, or as many as it takes to have every kind in one."""
    return max(2, -(-len(set(config.model.letters)) // stages))


def _few_ranks(
    p: Parallel, dp: int, pp: int, limit: int
) -> tuple[dict[str, int], tuple[int, Optional[int]], list[str]]:
    """Ranks of each axis of a shrunk job, of ep and etp, and the features that would need more than `limit` ranks.

    dp: data parallel size of the job. pp: pipeline stages of the shrunk one
    """
    shard, lost = (p.sharding_degree or dp) if p.sharding_stage else 1, []
    few = dict(
        tp=min(p.tensor_model_parallel_size, 2),
        cp=math.prod(_few_levels(p) or [min(p.context_parallel_size, 2)]),
        pp=pp,
        shard=min(shard, 2),
        replicate=min(dp // shard, 2),
    )
    ep, etp = (
        min(p.expert_model_parallel_size, 2),
        p.expert_tensor_parallel_size and min(p.expert_tensor_parallel_size, 2),
    )
    lacking = lambda: lacking_ranks(math.prod(few.values()) // few["pp"], ep, few["tp"] if etp is None else etp)
    few["shard" if shard > 1 else "replicate"] *= lacking()
    copies = "copies of sets of shards (--sharding-degree below the data parallel size)"
    for axis, words in (
        ("replicate", copies if shard > 1 else "data parallelism"),
        ("shard", "data parallelism"),
        ("tp", "tensor parallelism"),
    ):
        if math.prod(few.values()) > limit and few[axis] > 1:
            few[axis] = 1
            lost.append(f"{words}: the shrunk job would need more than {limit} ranks")
    if lacking() > 1:
        ep = etp = 1
        lost.append(f"ranks for experts: the shrunk job would need more than {limit}")
    return few, (ep, etp), lost


def _few_levels(p: Parallel) -> Optional[list[int]]:
    """The sizes of the levels of context parallelism (--hierarchical-context-parallel-sizes) of a shrunk job."""
    return p.cp_levels and [min(size, 2) for size in p.cp_levels]


def shrunk_jobs_of(config: Config, world_size: int, steps: int = 3) -> list[ShrunkJob]:
    """The shrunk job; if it cannot have all axes, also one without tensor parallelism, which has the others."""
    shrunk, p = shrunk_job_of(config, world_size, steps), config.parallel
    tp = p.tensor_model_parallel_size
    if not shrunk.lost or tp == 1:
        return [shrunk]
    others = replace(p, tensor_model_parallel_size=1, sequence_parallel=False, data_parallel_size=None, dp_degree=None)
    return [replace(shrunk, lost=()), shrunk_job_of(replace(config, parallel=others), world_size // tp, steps)]


def narrowed(
    config: Config,
    sizes: Sizes,
    num_microbatches: Optional[int] = None,
    steps: int = 10,
    num_layers: Optional[int] = None,
) -> Config:
    """The same kind of model, batch and schedules with the least work that `sizes` allow, on synthetic data and the CPU.

    num_layers: default: as many in each stage
    """
    num_layers = num_layers or sizes.stages * sizes.layers
    batch = _batch(config.batch, sizes, num_microbatches or max(2, sizes.pp), steps)
    guard, facts = config.guard, facts_of(config, VOCABULARY)
    model = facts.shrunk(num_layers, sizes.tp * sizes.cp)
    return replace(
        config,
        model=_with_near_blocks(replace(model, kd_hidden_projections=None)),
        extra=facts.shrunk_groups(config.extra, model),
        batch=batch,
        parallel=replace(config.parallel, cp_comm_type=_of_layers(config.parallel.cp_comm_type, num_layers)),
        optimizer=_optimizer(config.optimizer, batch, steps),
        recompute=_recompute(config.recompute, config.model.num_layers, num_layers, sizes.layers),
        tokenizer=TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY),
        data=replace(
            config.data,
            mock_data=True,
            num_workers=0,
            verify_data=False,
            split=Data.split,
            data_cache_path=None,
            object_storage_cache_path=None,
            mmap_bin_files=True,
            **dict.fromkeys(PATHS),
        ),
        precision=replace(gentle(config.precision), fp8_format=None),  # its layers are larger
        kernels=replace(
            config.kernels,
            device="cpu",
            torch_compile=False,
            dump_graph=None,
            cross_entropy_chunk=config.kernels.cross_entropy_chunk and 8,
        ),
        checkpoint=Checkpoint(),
        guard=replace(without_traces(guard), check_replicas_interval=guard.check_replicas_interval and 1),
        distillation=Distillation(),  # the teacher has another vocabulary
        logging=Logging(log_interval=1, seed=config.logging.seed, debug=config.logging.debug),
        planner=Planner(),
        profiling=Profiling(),
        statements={},  # the remaining settings were not given by the user: no messages about them
    )


def reduced(before: Config, after: Config) -> list[str]:
    """The changes of a shrunk job, a line per group of settings: `model: num_layers 96 -> 4, ...`."""
    lines = []
    for group, kind in GROUPS.items():
        pairs = [
            (f.name, getattr(getattr(before, group), f.name), getattr(getattr(after, group), f.name))
            for f in fields(kind)
        ]
        changes = [f"{name} {_word(old)} -> {_word(new)}" for name, old, new in pairs if old != new]
        lines += [f"{group}: {', '.join(changes)}"] if changes and group != "planner" else []
    return lines


def _word(value) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else "off" if value is False else "on" if value is True else str(value)


def _of_layers(words: Optional[list[str]], num_layers: int) -> Optional[list[str]]:
    """Shrink a setting with one word for all layers or one per layer. All words still occur if there are enough layers."""
    if words is None or len(words) == 1:
        return words
    different = list(dict.fromkeys(words))
    return [different[n % len(different)] for n in range(num_layers)]


# Layers and stages ----------------------------------------------------------------------------------------------------


def _stages(p: Parallel, pipeline: Pipeline, sizes: Sizes, chunks: int) -> tuple[Parallel, int]:
    """The settings for layers and stages, with the same flags as the original, and the number of layers."""
    each, number = sizes.layers, sizes.stages
    virtual = replace(
        p,
        num_layers_per_virtual_pipeline_stage=each if p.num_layers_per_virtual_pipeline_stage else None,
        num_virtual_stages_per_pipeline_rank=chunks if p.num_virtual_stages_per_pipeline_rank else None,
    )
    if p.pipeline_stage_layers:
        counts = _like(list(map(len, pipeline.layers)), number)
        return replace(virtual, pipeline_stage_layers=",".join(map(str, counts))), sum(counts)
    first, last = p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers
    if (first or last) and sizes.pp > 1:
        of_rank = [sum(map(len, pipeline.layers_of(rank))) for rank in range(pipeline.pp)]
        counts = [chunks * n for n in _like(of_rank, sizes.pp)]
        ends = dict(
            decoder_first_pipeline_num_layers=first and counts[0], decoder_last_pipeline_num_layers=last and counts[-1]
        )
        return replace(virtual, **ends), sum(counts)
    embedding, loss = p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split
    each = max(each, 2) if embedding or loss else each  # every stage that had layers keeps some
    if virtual.num_layers_per_virtual_pipeline_stage:
        virtual = replace(virtual, num_layers_per_virtual_pipeline_stage=each)
    return virtual, max(1, number * each - embedding - loss)


def _like(counts: list[int], number: int) -> list[int]:
    """Shrink a list of counts to `number` small ones with the same order of sizes.

    >>> _like([5, 6, 6, 6, 6, 6, 6, 3], 4), _like([1, 2, 2, 1], 2), _like([0, 4, 4, 4], 2)
    ([2, 3, 3, 1], [1, 2], [0, 2])
    """
    chosen = [counts[round(place * (len(counts) - 1) / max(1, number - 1))] for place in range(number)]
    if len(set(chosen)) == 1 < len(set(counts)) and number > 1:  # uneven ones stay uneven
        chosen[-1] = min(set(counts) - set(chosen), key=lambda n: (n == 0, n))
    levels = sorted(set(chosen) - {0})
    small = {n: at + 1 for at, n in enumerate(levels)} | {0: 0}
    result = [small[n] for n in chosen]
    return [2 * n for n in result] if max(result) == 1 < max(counts) else result


def _recompute(r: Recompute, stage: int, num_layers: int, each: int) -> Recompute:
    """The settings of recomputation. stage: layers of the original's fullest stage; num_layers, each: the shrunk job's
    layers, in total and per stage.
    """
    size, exempt = r.recompute_num_layers, r.exempt_layers
    if size:
        size = (each if size >= stage else max(1, each - 1)) if r.recompute_method == "block" else min(size, each)
    kept = "0" if exempt and num_layers > 1 else None
    return replace(r, recompute_num_layers=size, no_recompute_layers=kept)


def _with_near_blocks(model: Model) -> Model:
    """The model with its patterns of linear layers: those of blocks that it has not are for its last block."""
    near = lambda block: f"blocks.{min(int(block[1]), model.num_layers - 1)}."
    names = "linear quantization_layers quantization_skip sparsity_layers sparsity_skip lora_target".split()
    given = {name: text for name in names if "blocks." in (text := getattr(model, name) or "")}
    words = {name: re.sub(r"\bblocks\.(\d+)\.", near, text).replace(",", " ").split() for name, text in given.items()}
    return replace(model, **{name: ",".join(dict.fromkeys(each)) for name, each in words.items()})


# Model, batch and curves ----------------------------------------------------------------------------------------------


def _num_microbatches(num_microbatches: int, pipeline: Pipeline, pp: int) -> int:
    """Micro-batches per step and rank: fewer than pipeline ranks, as many, or more, as in the original."""
    if pipeline.custom and pp == pipeline.pp:
        return pipeline.custom.num_microbatches
    if pipeline.pp == 1:
        return min(num_microbatches, 2)
    if num_microbatches < pipeline.pp:
        return max(1, pp - 1)
    return pp if num_microbatches == pipeline.pp else 2 * pp - (num_microbatches % pipeline.pp > 0)


def _batch(b: Batch, sizes: Sizes, num_microbatches: int, steps: int) -> Batch:
    micro = min(b.smallest().micro_batch_size, 2)
    least = micro * sizes.dp
    ramp = bool(b.size_flag) and num_microbatches > 1
    counted = b.train_samples is not None or ramp
    full = least * num_microbatches
    return replace(
        b,
        micro_batch_size=micro,
        global_batch_size=full,
        local_batch_size=None,
        gradient_accumulation_steps=None,
        step_batch_size_schedule=None,
        rampup_batch_size=[least, full - least, least] if ramp else None,  # full from the second step on
        train_iters=None if counted else steps,
        train_samples=(least * ramp + (steps - ramp) * full) if counted else None,
        eval_interval=steps,
        eval_iters=min(b.eval_iters, 1),
        test_iters=b.test_iters and min(b.test_iters, 1),
        exit_interval=None,
        exit_duration_in_mins=None,
    )


def without_traces(guard: Guard) -> Guard:
    """The guard settings without files of the real run."""
    on_spike = "continue" if guard.on_spike == "rollback" else guard.on_spike
    return replace(
        guard, kill_switch_file=None, heartbeat_dir=None, on_spike=on_spike, iterations_to_skip=None, override=None
    )


def gentle(p: Precision) -> Precision:
    """Start fp16 with a loss scale that does not overflow in the first steps."""
    if p.precision != "fp16":
        return p
    return replace(p, initial_loss_scale=min(p.initial_loss_scale, 256.0), min_loss_scale=min(p.min_loss_scale, 1.0))


def _optimizer(o: Optimizer, batch: Batch, steps: int) -> Optimizer:
    samples = batch.train_samples is not None
    unit = batch.global_batch_size if samples else 1
    warm = bool(o.lr_warmup_iters or o.lr_warmup_samples or o.lr_warmup_fraction) and steps > 2
    anneal = unit if o.lr_decay_style == "WSD" else None
    return replace(
        o,
        lr=o.lr and max(o.lr, LEARNING_RATE),
        lr_decay_iters=None,
        lr_decay_samples=None,
        lr_warmup_iters=unit if warm and not samples else 0,
        lr_warmup_samples=unit if warm and samples else 0,
        lr_warmup_fraction=None,
        lr_wsd_decay_iters=None if samples else anneal,
        lr_wsd_decay_samples=anneal if samples else None,
    )


# The original ---------------------------------------------------------------------------------------------------------


def original(config: Config, log) -> tuple[Config, int]:
    """The command to shrink, and its number of ranks. It has the layout that --auto-parallel finds, and needs no files.

    Raises SettingsError with all problems.
    """
    world_size = asked_ranks(config)
    config = without_files(config)
    if layout_is_open(config):
        from megatron.planner.choose import automatic

        planner = replace(config.planner, world_size=world_size)
        config, _, _ = automatic(replace(config, planner=planner), log)
    resolve(config, world_size)
    return config, world_size


def asked_ranks(config: Config) -> int:
    """Ranks of the real job: --world-size, else from the asserted data parallel size, else the smallest possible number."""
    p = config.parallel
    least = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    dp = p.asserted_data_parallel or p.sharding_degree or (2 if p.sharding_stage else 1)
    etp = p.expert_tensor_parallel_size or p.tensor_model_parallel_size
    dp *= lacking_ranks(least // p.pipeline_model_parallel_size * dp, p.expert_model_parallel_size, etp)
    return config.planner.world_size or least * dp


def without_files(config: Config) -> Config:
    """The settings with synthetic data and no tokenizer if they name none: a shrunk job needs no files."""
    data, t, batch = config.data, config.tokenizer, config.batch
    if not (data.mock_data or any(getattr(data, name) for name in PATHS)):
        data = replace(data, mock_data=True)
    if not (t.tokenizer_type or t.tokenizer_model or (t.vocab_file and t.merge_file)):
        t = replace(t, tokenizer_type="NullTokenizer", vocab_size=t.vocab_size or VOCABULARY)
    if not batch.has_length:
        batch = replace(batch, train_iters=1000)
    return replace(config, data=data, tokenizer=t, batch=batch)
