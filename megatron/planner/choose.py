# SPDX-License-Identifier: Apache-2.0
"""Choose the best layout for the settings of a training: for the planner's command, --auto-parallel and
--micro-batch-size auto.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Optional

from megatron.errors import SettingsError
from megatron.model.hybrid import cut_by_pattern
from megatron.model.recipe import recipe_of
from megatron.optimizer import ordered_rules
from megatron.optimizer.kinds import knows_matrices
from megatron.pipeline import stages
from megatron.planner import target
from megatron.planner.arithmetic import least_devices
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.plans import Plan, SearchedPlans
from megatron.planner.problems import inspect, memory_problems, refusal
from megatron.planner.reached_speed import FEW
from megatron.planner.search import NOT_OFFLOADED, Space, divisors, search
from megatron.planner.text import choice, far, parts, plans, sizes, speeds_note, trust
from megatron.settings import batch, schema
from megatron.settings.plan_file import LAYOUT
from megatron.settings.rules import out_of_range
from megatron.telemetry.figures import WIDE, WIDTH, seconds, sentence
from megatron.training import rules


@dataclass(frozen=True)
class SearchResult:
    """The plans of a search, and its inputs."""

    config: schema.Config
    searched: SearchedPlans
    job: Job
    cluster: Cluster
    parameters: int
    source: str  # of the cluster's speeds
    remarks: list[str]
    seconds: float
    kept: list[str]  # flags of the user that the search kept


def search_layouts(config: schema.Config) -> SearchResult:
    """Search the layouts that the settings leave open, on the cluster that they describe. Raises SettingsError."""
    sized, given = replace(config, batch=config.batch.smallest()), config.given_words
    if wrong := [words for name in schema.GROUPS for words in out_of_range(getattr(sized, name), given).values()]:
        raise refusal(wrong)
    cluster, source = target.cluster_of(config, ask=True)
    space = replace(space_of(config, cluster), tolerance=tolerance(cluster))
    return _searched(config, with_margin(config, cluster), source, space, kept(config))


MARGIN = 0.08  # share of the memory that a searched plan leaves free: about the error of predicted peaks


def with_margin(config: schema.Config, cluster: Cluster) -> Cluster:
    """The cluster with the memory that a searched plan may use."""
    if config.planner.memory_margin is not None:
        return cluster
    return replace(cluster, device=replace(cluster.device, margin=MARGIN))


def tolerance(cluster: Cluster) -> float:
    """The relative difference below which two times count as equal: the error of predictions in published runs."""
    if not cluster.device.assumed:
        return 0.05  # of calibrated CPUs: docs/proof/planner.md
    return max((one.median for one in cluster.device.accuracies.values() if one.runs >= FEW), default=0.1)


def search_micro_batch(config: schema.Config) -> SearchResult:
    """Evaluate every size for --micro-batch-size auto in the layout of the other settings.

    Raises SettingsError with all problems of the settings.
    """
    cluster, source = target.cluster_of(config)
    if problems := rules.check(config, cluster.world_size):
        raise refusal(problems)
    settings = rules.filled(replace(config, batch=config.batch.smallest()), cluster.world_size)
    layout = Layout.of(settings, cluster.world_size)
    if config.batch.local_batch_size and not config.batch.global_batch_size:
        config = replace(config, batch=replace(config.batch, global_batch_size=settings.batch.global_batch_size))
    global_batch = _global_batch(config)
    own = layout.pipeline(config.model.num_layers).custom  # a schedule file is for one number of micro-batches
    each = (config.batch.global_batch_size or config.planner.max_global_batch_size) // layout.dp
    only = tuple(
        replace(layout, micro_batch_size=size)
        for size in ([1] if config.parallel.batch_invariant_mode else divisors(each))
        if not batch.problems(replace(config.batch, micro_batch_size=size), layout.dp)
        and (own is None or each // size == own.num_microbatches)
    )
    if not only:
        number = config.batch.gradient_accumulation_steps or (own.num_microbatches if own else 1)
        raise SettingsError(
            f"--micro-batch-size auto: no size gives {number} micro-batch{'es' * (number > 1)} of "
            f"{each} samples for each of {layout.dp} data parallel ranks",
            do="change the global batch, or leave out --gradient-accumulation-steps or a --pipeline-schedule file",
        )
    return _searched(settings, with_margin(config, cluster), source, Space(**global_batch, only=only))


def _searched(
    config: schema.Config, cluster: Cluster, source: str, space: Space, held: Sequence[str] = ()
) -> SearchResult:
    job, remark = target.job_of(config, cluster)
    if space.stage_layers and (wrong := stages.problems_of_list(space.stage_layers, job.facts.num_layers)):
        raise SettingsError(wrong[0])
    started = time.perf_counter()
    searched = search(job, cluster, space)
    count = job.facts.parameters
    remarks = [words for words in (remark, _long(config)) if words] + list(_cheaper(job, cluster))
    if cluster.device.assumed:
        remarks.append("speeds are assumed; --calibrate on the machine itself measures them")
    if searched.plans:
        remarks += [words for words in (choice(searched, space.tolerance), trust(searched.plans[0], cluster)) if words]
        remarks += far(searched.plans[0].layout, cluster)
    return SearchResult(
        config, searched, job, cluster, count, source, remarks, time.perf_counter() - started, list(held)
    )


LONG = 8192  # tokens of a sample, up to which models are usually pretrained, whatever their context


def _long(config: schema.Config) -> str:
    """A note on samples as long as the context of a named shape, whose length no flag has set; "" for others."""
    model = config.model
    if config.given("seq_length") or not model.published_shape or model.seq_length <= LONG:
        return ""
    context = f"sequence {model.seq_length} is the context of {model.published_shape}"
    return f"{context}; --seq-length {LONG} is a usual length of samples in pretraining, and much faster"


def _cheaper(job: Job, cluster: Cluster) -> Iterator[str]:
    """Notes on defaults of Megatron-LM that cost more on a GPU than any layout can save."""
    speeds = cluster.device.flops
    if job.device == "cuda" and job.precision == "fp32" and "bf16" in speeds and "fp32" in speeds:
        times = f"{speeds['bf16'] / speeds['fp32']:.0f} times as fast with --bf16"
        yield f"fp32, the default: products are {times}{' (assumed)' * cluster.device.assumed}"
    dropout = job.facts.settings.attention_dropout
    if job.device == "cuda" and dropout:
        yield (
            f"attention with dropout ({dropout:g}) keeps its weights; with --attention-dropout 0 a flash kernel needs less "
            "memory and time"
        )


# Setting of a layout -> field of the search space that it fixes to its value.
AXES = dict(
    tensor_model_parallel_size="tp",
    pipeline_model_parallel_size="pp",
    expert_model_parallel_size="ep",
    expert_tensor_parallel_size="etp",
    data_parallel_size="dp",
    dp_degree="replicas",
    sequence_parallel="sp",
    sharding_stage="zero",
    sharding_degree="shard",
    pipeline_schedule="schedule",
    num_virtual_stages_per_pipeline_rank="chunks",
    num_layers_per_virtual_pipeline_stage="chunk_layers",
    pipeline_stage_layers="stage_layers",
)
OFFLOADS = ("optimizer_cpu_offload", "optimizer_offload_fraction", "nvme_offload_fraction", "param_cpu_offload")
RECOMPUTE = tuple(one.name for one in fields(schema.Recompute))
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
NARROWING = {*AXES, *OFFLOADS, *RECOMPUTE, *OVERLAPS}
NARROWING |= {"context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes"}
NARROWING |= {"micro_batch_size", "global_batch_size", "moe_token_dispatcher_type", "moe_ranks_per_node"}
NARROWING |= {"moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms", "batch_invariant_mode"}


def kept(config: schema.Config) -> list[str]:
    """The layout flags that the user gave, which a search keeps. Raises SettingsError for flags that it cannot keep."""
    given = [one for name in sorted(LAYOUT) if (one := config.given(name))]
    if odd := [one.words for one in given if one.name not in NARROWING and one.is_request]:
        raise SettingsError(
            f"{', '.join(odd)}: a search of layouts does not support {'it' if len(odd) == 1 else 'them'}",
            do="leave that out, or give the whole layout instead of --auto-parallel",
        )
    open_size = lambda one: one.name == "micro_batch_size" and one.value == schema.AUTO
    return [one.words for one in given if not open_size(one) and one.name != "global_batch_size"]


def space_of(config: schema.Config, cluster: Cluster) -> Space:
    """The search space of the settings: layout settings that the user gave are fixed, even at their defaults."""
    p, b, o = config.parallel, config.batch, config.optimizer
    if b.size_flag:
        raise SettingsError(
            f"{b.size_flag} changes the batch while training, and a layout is searched for one size",
            do="search for the full size, then add the flag to the command line",
        )

    def given(*names: str) -> bool:
        return any(config.given(name) is not None for name in names)

    cp = p.context_parallel_size if given("context_parallel_size") else None
    offload = (o.host_share, o.nvme_offload_fraction, o.param_cpu_offload)
    if not given(*OFFLOADS):
        offload = None if cluster.device.kind == "cuda" and not knows_matrices(o) else NOT_OFFLOADED
    micro = b.micro_batch_size if given("micro_batch_size") and b.micro_batch_size != schema.AUTO else None
    ordered = p.batch_invariant_mode  # which has a sample a pass
    return Space(
        **_global_batch(config, _replicas_given(config, cluster)),
        **{axis: getattr(p, name) for name, axis in AXES.items() if given(name)},
        **({"stage_layers": p.pipeline_stage_layers} if cut_by_pattern(config) else {}),
        cp=cp if recipe_of(config).shares_sequences else 1,
        cp_comm=None if p.cp_comm_type is None else _comm_type(p),
        cp_levels=p.cp_levels,
        ranks_per_node=(p.moe_ranks_per_node or cluster.local_size) if p.moe_token_dispatcher_type == "flex" else 0,
        library=(p.moe_flex_dispatcher_backend, config.model.expert_hidden_size),
        micro_batch_size=1 if ordered else micro,
        refusal=(lambda layout: ordered_rules.refusal(layout.applied(config, 1), cluster.world_size))
        if ordered
        else None,
        recompute=config.recompute if given(*RECOMPUTE) else None,
        offload=offload,
        overlap=p.overlap_grad_reduce or p.overlap_param_gather if given(*OVERLAPS) else None,
    )


def _comm_type(p: schema.Parallel) -> str:
    """--cp-comm-type of all layers; if they differ, that which the planner assumes (`Layout.gathers`)."""
    first, *others = set(p.cp_comm_types)
    return first if not others else "allgather" if "allgather" in p.cp_comm_types else "p2p"


def _replicas_given(config: schema.Config, cluster: Cluster) -> Optional[int]:
    """The data parallel size that the given settings leave no choice of; None if they do."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    model = math.prod(getattr(config.parallel, name) for name in (*sizes, "context_parallel_size"))
    if config.parallel.asserted_data_parallel or not all(map(config.given, sizes)) or cluster.world_size % model:
        return config.parallel.asserted_data_parallel
    return cluster.world_size // model


def _global_batch(config: schema.Config, dp: Optional[int] = None) -> dict[str, Optional[int]]:
    """The part of a `Space` with the samples per step. dp: the data parallel size, if it is no part of the search"""
    given = dict(global_batch=config.batch.global_batch_size, max_global_batch=config.planner.max_global_batch_size)
    if not any(given.values()) and dp and config.batch.local_batch_size:
        return given | dict(global_batch=config.batch.full_size(dp))
    if not any(given.values()):
        raise SettingsError(
            "a search needs to know the batch", do="--global-batch-size N, or --max-global-batch-size N"
        )
    if all(given.values()):
        raise SettingsError("--global-batch-size and --max-global-batch-size: give one of them")
    return given


def nothing_fits(outcome: SearchResult) -> SettingsError:
    """The error for a search without a plan: how much memory is missing, and what would help."""
    searched, cluster = outcome.searched, outcome.cluster
    held = f" with {', '.join(outcome.kept)}" if outcome.kept else ""
    if not searched.rejected:
        return SettingsError(
            f"no layout of {cluster.world_size} ranks is possible{held}",
            "; ".join(searched.impossible[:5]),
            f"choose another number of ranks or another batch{', or leave out some of these flags' if held else ''}",
        )
    each = 18 if outcome.job.element == 2 else 16
    least, power = least_devices(each * outcome.parameters * 1.1, cluster.device.memory_bytes * 0.85)
    closest = searched.rejected[0]
    return SettingsError(
        f"none of {searched.num_layouts:,} layouts{held} fits {cluster.world_size} x {cluster.device.memory_gb:g} GB",
        f"the closest, {closest.layout.short()} with recomputation of "
        f"{closest.layout.recompute.words or 'nothing'}, is {closest.why()}",
        f"state alone, {each} bytes a parameter, needs about {max(least, cluster.world_size + 1)} such devices "
        f"({max(power, 2 * cluster.world_size)} as a power of two); or a smaller model, or shorter sequences",
    )


def plan_problems(config: schema.Config, plan: Plan, cluster: Cluster) -> list[str]:
    """The rules of a training that a plan violates, except rules about data and length."""
    data = schema.Data(mock_data=True)
    tokenizer = schema.TokenizerSettings(tokenizer_type="NullTokenizer", vocab_size=plan.job.facts.vocab_size)
    settings = replace(
        plan.layout.applied(config, plan.job.global_batch),
        data=data,
        tokenizer=tokenizer,
        checkpoint=schema.Checkpoint(),
        optimizer=replace(schema.Optimizer(), lr=1.0),
    )
    if not settings.batch.has_length:
        settings = replace(settings, batch=replace(settings.batch, train_iters=1))
    return rules.check(settings, cluster.world_size)


def automatic(config: schema.Config, log) -> tuple[schema.Config, list[Plan], SearchResult]:
    """Choose the open settings: (settings, the best plans, the search). Logs the reasons.

    --auto-parallel leaves the layout open, --micro-batch-size auto only the micro-batch.
    """
    if not config.planner.auto_parallel:
        return _micro_batch(config, log)
    outcome = search_layouts(config)
    searched, cluster = outcome.searched, outcome.cluster
    if not searched.plans:
        raise nothing_fits(outcome)
    best, width, speeds = searched.plans[0], _width(config), speeds_note(cluster, searched.plans[0].layout)
    log(
        sentence(
            f"--auto-parallel: {searched.num_layouts:,} layouts of {cluster.world_size} ranks ({cluster.device.name}, "
            f"{cluster.device.memory_gb:.1f} GB, {outcome.source}), of "
            f"{searched.evaluated:,} evaluated {searched.too_large:,} do not fit; in {outcome.seconds:.2f} s",
            width,
        )
    )
    log(plans(searched, cluster, 5, width))
    if outcome.kept:
        log(sentence(f"kept as given: {', '.join(outcome.kept)}", width))
    log(sentence(f"chosen: {chosen_flags(config, best.layout, best.job.global_batch)}", width))
    why = choice(searched, tolerance(cluster)) or "because it is expected to be the fastest"
    log(sentence(why, width))
    log(f"{seconds(best.step.seconds)} a step {speeds}")
    log(parts(best.step, cluster, width))
    return in_layout(config, best.layout, best.job.global_batch), searched.plans, outcome


def _micro_batch(config: schema.Config, log) -> tuple[schema.Config, list[Plan], SearchResult]:
    outcome = search_micro_batch(config)
    searched, cluster = outcome.searched, outcome.cluster
    if not searched.plans:
        least = min((one.layout for one in searched.rejected), key=lambda layout: layout.micro_batch_size)
        [problem] = memory_problems(
            replace(outcome.job, global_batch=least.micro_batch_size * least.dp), least, cluster
        )
        raise SettingsError(f"--micro-batch-size auto: even {least.micro_batch_size} is {problem}")
    best, width = searched.plans[0], _width(config)
    log(f"--micro-batch-size auto: {best.layout.micro_batch_size} is expected to be the fastest {speeds_note(cluster)}")
    log(
        sentence(
            f"  of the divisors of {best.job.global_batch // best.layout.dp} samples per rank that fit in "
            f"{best.layout.short()} on {cluster.device.name} ({cluster.device.memory_gb:.1f} GB, {outcome.source})",
            width,
        )
    )
    log(sizes(searched, cluster, width))
    return in_layout(config, best.layout, best.job.global_batch), searched.plans, outcome


def _width(config: schema.Config) -> int:
    return WIDE if config.planner.wide else WIDTH


def in_layout(config: schema.Config, layout: Layout, global_batch: int) -> schema.Config:
    """The settings of a training with the search result for the open ones."""
    if config.planner.auto_parallel:
        return layout.applied(config, global_batch)
    sizes = dict(micro_batch_size=layout.micro_batch_size, global_batch_size=global_batch)
    return config.derive("--micro-batch-size auto", **sizes)


def chosen_flags(config: schema.Config, layout: Layout, global_batch: int) -> str:
    """The flags of the search result."""
    words = layout.flags() if config.planner.auto_parallel else ["--micro-batch-size", str(layout.micro_batch_size)]
    return " ".join([*words, "--global-batch-size", str(global_batch)])


def resolve_open_settings(config: schema.Config, log) -> tuple[schema.Config, list[str]]:
    """Choose open settings for a report: (config, problems that prevent the choice).

    If no micro-batch size can be chosen, it is 1; the report gives the reason with all other problems.
    """
    if not rules.layout_is_open(config):
        return config, []
    try:
        chosen = automatic(config, log)[0]
        log("")
        return chosen, []
    except SettingsError as error:
        if config.planner.auto_parallel:
            raise
        one = replace(config, batch=config.batch.smallest())
        cluster = target.cluster_of(config)[0]
        reported = inspect(one, cluster).problems
        others = [words for words in rules.check(config, cluster.world_size) if words not in reported]
        return one, others or ([] if reported else [str(error)])
