# SPDX-License-Identifier: Apache-2.0
"""Log lines at the start of a new or resumed run."""

import math
import platform
import sys
from typing import Any

import torch

from megatron.model.facts import Facts, RankSetup
from megatron.model.recipe import MODEL_TYPES, SCRIPTS, Recipe
from megatron.mpu.cpu_threads import affinity, quota
from megatron.mpu.initialize import RankContext
from megatron.mpu.selection import Selection
from megatron.optimizer.lr_schedule import Lengths, learning_rate
from megatron.pipeline.stages import Pipeline
from megatron.settings import schema
from megatron.settings.batch import batch_size, samples_left_out
from megatron.settings.presets import preset
from megatron.settings.reader import IMPORT
from megatron.training.state import State


def log_notices(log, notices: list[str], warnings: list[str]) -> None:
    """Log notes and warnings, a line each."""
    for notice in notices:
        log(f"note: {notice}")
    for warning in warnings:
        log(f"warning: {warning}")


def random_weights(config: schema.Config, recipe: Recipe) -> tuple[list[str], list[str]]:
    """(notes, warnings) on a model that starts with random weights, where published or trained ones may be expected."""
    named, named_shape = config.given("model_name_or_path"), []
    published = f"published ones: {IMPORT.format('ORG/NAME')}"
    if named and named.flag == "--model-name-or-path" and preset(str(named.value)):
        named_shape = [f"{named.words} is a shape, and its weights are random; {published}"]
    tasks = set(SCRIPTS).issuperset(recipe.starts_from)  # which begin with a model like this one: it needs no other
    if recipe.model_type in MODEL_TYPES or tasks or config.batch.skip_train:
        return named_shape, []
    load = config.checkpoint.load
    found = f"--load {load} holds no checkpoint" if load else "there is no --load"
    return [], [f"{found}: fine-tuning starts with random weights; {published}"]


def summary(
    config: schema.Config,
    context: RankContext,
    facts: Facts,
    state: State,
    stages: list[torch.nn.Module],
    pipeline: Pipeline,
    loaded: bool,
) -> str:
    """The layout, model, batch and device of the run, in a few lines. loaded: whether a checkpoint was loaded."""
    mesh, batch = context.mesh, config.batch
    size, num_microbatches = batch_size(batch, mesh.dp.size, state.consumed_samples)
    full_batch = batch.global_batch_size // batch.micro_batch_size // mesh.dp.size
    described = len(pipeline.stages) > 1 or pipeline.turns
    return "\n".join(
        [
            f"using world size: {mesh.world_size}, data-parallel size: {mesh.dp.size}, "
            f"{f'context-parallel size: {mesh.cp.size}, ' * (mesh.cp.size > 1)}"
            f"tensor-model-parallel size: {mesh.tp.size}, pipeline-model-parallel size: {mesh.pp.size}"
            + f", expert-model-parallel size: {mesh.ep.size}, expert-tensor-parallel size: {mesh.etp.size}"
            * mesh.folded,
            f" > {facts.describe(f'{facts.parameters:,}')}",
            *frozen_line(config, facts),
            *model_parallel_sizes(context, stages),
            f" > {config.precision.precision} on {context.device.type}, torch {torch.__version__}, "
            f"Python {sys.version.split()[0]}",
            *([f" > {context.described}"] if context.described else []),
            *kernel_instead(config, context, facts),
            f" > global batch {size} = micro batch {batch.micro_batch_size} x data parallel {mesh.dp.size} x "
            f"{num_microbatches} micro-batches; iterations {state.iteration} to {state.train_iters(batch, mesh.dp.size)}",
            *([loaded_line(config, mesh, state)] if loaded else []),
            *([f" > {pipeline.describe(full_batch)}"] if described and context.is_rank_zero else []),
        ]
    )


def frozen_line(config: schema.Config, facts: Facts) -> list[str]:
    """A line with the numbers of trained and frozen parameters, if any are frozen."""
    trained, frozen = Selection.of(config.optimizer).sizes(facts.weights)
    return [f" > {trained:,} parameters are trained, {frozen:,} are frozen"] if frozen else []


def model_parallel_sizes(context: RankContext, stages: list[torch.nn.Module]) -> list[str]:
    """Megatron-LM's lines about the parameters of each model parallel rank. All ranks call it."""
    mesh, parameters = context.mesh, {p for stage in stages for p in stage.parameters()}
    first_copy = mesh.dp.rank == mesh.cp.rank == 0
    own = (mesh.pp.rank, mesh.tp.rank, sum(parameter.numel() for parameter in parameters)) if first_copy else None
    return [
        f" > number of parameters on (tensor, pipeline) model parallel rank ({tp}, {pp}): {count}"
        for pp, tp, count in sorted(entry for entry in context.all_gather_object(own) if entry)
    ]


def loaded_line(config: schema.Config, mesh, state: State) -> str:
    """Megatron-LM's line about a loaded checkpoint."""
    place = f"[ t {mesh.tp.rank + 1}/{mesh.tp.size}, p {mesh.pp.rank + 1}/{mesh.pp.size} ]"
    return f"  successfully loaded checkpoint from {config.checkpoint.load} {place} at iteration {state.iteration}"


def kernel_instead(config: schema.Config, context: RankContext, facts: Facts) -> list[str]:
    """A note if --attention-backend is not available on this device, with the kernel that replaces it."""
    if context.device.type == "cuda" or config.kernels.attention_backend != "flash":
        return []
    setup = RankSetup(device="cpu", precision=config.precision.precision, backend="flash")
    names = {"flash": "torch's scaled_dot_product_attention", "reference": "the reference kernel"}
    kernel = facts.attention_kernel(setup)
    name = kernel and names.get(kernel, f"the {kernel} kernel")
    return [f"note: --attention-backend flash is for CUDA: {name or 'another kernel'} computes attention on this CPU"]


def resumed(config: schema.Config, record: dict[str, Any], state: State, lengths: Lengths, now: dict[str, int]) -> str:
    """A line about the point from which a run resumes. now: mesh axis -> its size in this job."""
    rate = learning_rate(config.optimizer, lengths, state.scheduled_samples)
    then = record.get("mesh") or {}
    layouts = " and ".join(dict.fromkeys(f"{_layout(sizes)} {word}" for sizes, word in ((then, "then"), (now, "now"))))
    if then == now:
        layouts = f"{_layout(now)} then and now"
    return (
        f" > resuming at iteration {state.iteration}, {state.consumed_samples:,} samples consumed, "
        f"learning rate {rate:.6E}; layout {layouts}"
    )


def _layout(sizes: dict[str, int]) -> str:
    dp = sizes.get("replicate", 1) * sizes.get("shard", 1)
    experts = "".join(f" {name} {sizes[name]}" for name in ("ep", "etp") if name in sizes)
    return f"tp {sizes.get('tp', 1)} pp {sizes.get('pp', 1)} cp {sizes.get('cp', 1)} dp {dp}{experts}"


def end_of_document(config: schema.Config, recipe: Recipe, tokenizer, vocab_size: int) -> list[str]:
    """A note about the end-of-document token that a vocabulary of numbers has in addition to --vocab-size."""
    if not (recipe.own_data and tokenizer and vocab_size == (config.tokenizer.vocab_size or 0) + 1):
        return []
    return [f"the vocabulary has {vocab_size} tokens: --vocab-size, and {vocab_size - 1} for the end of a document"]


def nothing_left(batch: schema.Batch, state: State, dp: int) -> list[str]:
    """A note if a run resumes at its last step."""
    end = state.train_iters(batch, dp)
    done = state.iteration >= end and not batch.skip_train
    return [f"training ends at iteration {end}: nothing is left to train"] if done else []


def crowded(context: RankContext) -> list[str]:
    """A note if a node has more ranks on CPUs than usable cores. All ranks call it."""
    if context.device.type != "cpu":
        return []
    nodes: dict[str, list[set[int]]] = {}
    for node, usable in context.all_gather_object((platform.node(), affinity())):
        nodes.setdefault(node, []).append(usable)
    limit = quota() or math.inf
    most, least = max((len(ranks), min(len(set().union(*ranks)), limit)) for ranks in nodes.values())
    if most <= least:
        return []
    return [
        f"{most} ranks of a node share {least:g} {'core' if least == 1 else 'cores'}: they take turns, and are not faster "
        "than one rank per core (--nproc-per-node)"
    ]


def left_out(batch: schema.Batch, state: State, dp: int) -> list[str]:
    """A note about the last samples of --train-samples or --train-epochs, which fill no batch."""
    if batch.train_samples is None or batch.skip_train:
        return []
    rest = samples_left_out(batch, dp, state.consumed_samples)
    return [f"the last {rest} of {batch.train_samples:,} samples fill no batch, and are left out"] * (rest > 0)
