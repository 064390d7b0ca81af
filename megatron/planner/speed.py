# SPDX-License-Identifier: Apache-2.0
"""Estimate the time of a step: arithmetic at the device's speed, memory traffic, messages, and gaps of the schedule.

The pass of a layer is the sum of its matrix products (slower if the smallest dim is small), its attention core,
its elementwise work (bytes over bandwidth), kernel launches, and tensor parallel collectives. Stages sum passes.
The schedule is simulated with the data parallel all-gathers and reductions as ops; the update follows it.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import add
from typing import NamedTuple

from megatron.model.facts import OUTPUT, Facts, LayerDesign
from megatron.model.layer_ops import (
    LAYER,
    Collective,
    CoreAttention,
    Kernel,
    LargestScores,
    LayerOp,
    Product,
    RankSetup,
    Scan,
    ops_again,
)
from megatron.model.recompute_plan import last_modules
from megatron.pipeline.stages import Pipeline
from megatron.planner import activations
from megatron.planner.cluster import Cluster
from megatron.planner.device import Device
from megatron.planner.layout import Job, Layout
from megatron.planner.schedule_time import ShardingTimes, sharded_span, unequal_span
from megatron.planner.step_communication import StepCommunication, step_communication
from megatron.settings.hashed_once import hashed_once
from megatron.settings.schema import Recompute

# Constants, each with its source. Device speeds: `device.py`. Measured step times: docs/proof/planner.md.
CPU_BLOCKS = 1.2  # time of block-causal attention on a CPU, relative to half of the pairs at full speed: assumed
EMBEDDING_MOVES = 4  # elements per embedded element, in either direction (row, position, dropout): estimated
LOSS_BYTES = 4 * 4  # per logit, 4 moves in fp32: estimated
DIVERGENCE_BYTES = 20 * 4  # per logit of a teacher: the ops of mpu/distillation_loss.py, in fp32: counted
SCORE_MOVES, DROPOUT_MOVES = 4, 2  # per stored attention score, and of its dropout, in either direction: estimated
EXCHANGED = "ep", "ep_inner", "ep_outer"  # axes over which experts' tokens are sent


@dataclass(frozen=True)
class StepTime:
    """Seconds of one iteration, and its parts; passes are the mean over pipeline ranks."""

    seconds: float
    parts: dict[str, float]
    bubble: float  # fraction of the pipeline's time in which ranks wait, for the schedule and for slower stages
    flops: float  # model FLOPs of all ranks, attention over whole sequences
    seen_flops: float = 0.0  # with only the seen pairs of causal attention (`Facts.flops`)

    def tokens_per_second(self, job: Job) -> float:
        return job.global_batch * job.facts.sample_tokens / self.seconds

    def tflops_per_rank(self, world_size: int, seen: bool = False) -> float:
        return (self.seen_flops if seen else self.flops) / self.seconds / world_size / 1e12


class Pass(NamedTuple):
    """Seconds of one micro-batch: forward, backward, and communication over tp (`waiting`) and other axes (`sharing`).

    ahead, back: the parts of forward and backward that are exchanges of experts' tokens, and that turns can hide
    """

    forward: float = 0.0
    backward: float = 0.0
    waiting: float = 0.0
    sharing: float = 0.0
    ahead: float = 0.0
    back: float = 0.0

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*map(add, self, other))

    def times(self, count: float) -> "Pass":
        """The sum of `count` equal passes."""
        return Pass(*[count * seconds for seconds in self])

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Work:
    """The passes of a step if all chunks were as slow as the chunks of the slowest rank: seconds of a chunk's passes, with
    the message to the next stage, and the length of all passes.
    """

    forward: float
    backward: float
    length: float


def step(job: Job, layout: Layout, cluster: Cluster) -> StepTime:
    """The time of one iteration: a simulation of the schedule with each stage's own times."""
    stages, message = _stage_passes(job, layout, cluster), _message(job, layout, cluster)
    num_microbatches, own = layout.num_microbatches(job), step_communication(job, layout, cluster)
    times = [(one.forward + message, one.backward + message) for one in stages]
    exchanges = [(one.ahead, one.back) for one in stages] if layout.turns else []
    clock = lambda sharding, exchanges=exchanges: unequal_span(
        layout.order, layout.pp, num_microbatches, layout.chunks, times, sharding, exchanges
    )
    length = clock(ShardingTimes(0))
    hidden = clock(ShardingTimes(0), ()) - length if exchanges else 0.0
    total = max(length, clock(own.sharding)) + own.after_reductions
    each = sum(stages, Pass()).times(num_microbatches / layout.pp)  # mean over ranks
    messages = 2 * num_microbatches * layout.chunks * message
    waiting = length + hidden - each.both - messages
    parts = {
        "compute": each.both - each.waiting - each.sharing,
        "tensor parallel": each.waiting,
        "context parallel" if layout.cp > 1 else "expert parallel": each.sharing - hidden,
        "pipeline messages": messages,
        "bubble": waiting,
        "data parallel": total - length - own.sharding.update,
        "update": own.sharding.update,
    }
    parts = {name: value for name, value in parts.items() if value > 1e-9}
    return StepTime(total, parts, max(0.0, waiting / length), useful_flops(job), useful_flops(job, seen=True))


def seconds(work: Work, layout: Layout, num_microbatches: int, own: StepCommunication) -> float:
    """The time of a step with these passes and messages, estimated by `schedule_time.sharded_span`."""
    span = sharded_span(
        layout.schedule,
        layout.pp,
        num_microbatches,
        layout.chunks,
        forward=work.forward,
        backward=work.backward,
        sharding=own.sharding,
    )
    return max(work.length, span) + own.after_reductions


@lru_cache(maxsize=1024)
def useful_flops(job: Job, seen: bool = False) -> float:
    """Model FLOPs of an iteration, of all ranks. seen: as in `Facts.flops`."""
    return job.facts.trained_flops(job.selection, seen) * job.global_batch * job.facts.sample_tokens


def layer_costs(job: Job, layout: Layout, cluster: Cluster) -> list[float]:
    """Seconds of a micro-batch through each layer, forward and backward."""
    facts, modules, share = job.facts, layout.recompute.modules, layout.rank_setup(job)
    one = lambda layer: _stage(job, share, _one(facts.design_of(layer), modules), False, False, cluster).both
    return [one(layer) for layer in range(facts.num_layers)]


def end_costs(job: Job, layout: Layout, cluster: Cluster) -> tuple[float, float]:
    """Seconds of a micro-batch in the first and in the last stage, without their layers."""
    share = layout.rank_setup(job)
    none = StageLayers()
    return _stage(job, share, none, True, False, cluster).both, _stage(job, share, none, False, True, cluster).both


def stage_seconds(job: Job, layout: Layout, cluster: Cluster, first: bool, last: bool) -> float:
    """Seconds of a micro-batch through one layer, forward and backward, with the ends of the first or last stage."""
    layer = _one(job.facts.design_of(0), layout.recompute.modules)
    return _stage(job, layout.rank_setup(job), layer, first, last, cluster).both


def passes(job: Job, layout: Layout, cluster: Cluster) -> Work:
    """The passes of a step, with all stages as slow as the slowest, and without data parallel messages.

    A search compares thousands of layouts by this slightly pessimistic estimate, before it times the best ones with `step`.
    """
    slow = _slowest(job, layout, cluster)
    message = _message(job, layout, cluster)
    forward, backward = slow.forward + message, slow.backward + message
    length = sharded_span(
        layout.schedule,
        layout.pp,
        layout.num_microbatches(job),
        layout.chunks,
        forward=forward,
        backward=backward,
        sharding=ShardingTimes(0),
    )
    return Work(forward, backward, length)


def least_seconds(job: Job, layout: Layout, cluster: Cluster) -> float:
    """A time that no sharding of this layout goes below: `passes` with the work of all stages divided evenly, without
    bubbles and messages. A search leaves out what is too slow by this alone.
    """
    whole = _layers(job.facts, layout.recompute, range(job.facts.num_layers))
    work = _stage(job, layout.rank_setup(job), whole, True, True, cluster).both
    return layout.num_microbatches(job) * work / layout.pp


def _stage_passes(job: Job, layout: Layout, cluster: Cluster) -> list[Pass]:
    """A micro-batch through each stage, without messages between stages."""
    share, facts = layout.rank_setup(job), job.facts
    cut = layout.pipeline(facts.num_layers).layers
    kinds = [(_layers(facts, layout.recompute, layers), n == 0, n == len(cut) - 1) for n, layers in enumerate(cut)]
    took = {kind: _stage(job, share, *kind, cluster) for kind in set(kinds)}
    return [took[kind] for kind in kinds]


def _slowest(job: Job, layout: Layout, cluster: Cluster) -> Pass:
    """The mean chunk of the slowest rank, which limits the speed of all."""
    share = layout.rank_setup(job)
    of_ranks = _stages(job.facts, layout.pipeline(job.facts.num_layers), layout.recompute)
    took = {stage: _stage(job, share, *stage, cluster) for stage in set(chain.from_iterable(of_ranks))}
    slow = max((sum(map(took.__getitem__, stages), Pass()) for stages in of_ranks), key=lambda one: one.both)
    return slow.times(1 / layout.chunks)


@lru_cache(maxsize=4096)
def _stages(facts: Facts, pipeline: Pipeline, settings: Recompute) -> frozenset[tuple]:
    """The stages of each different pipeline rank: (layers by kind and recomputation, whether it is the first, the last)."""
    last = len(pipeline.stages) - 1
    kinds = [(_layers(facts, settings, layers), n == 0, n == last) for n, layers in enumerate(pipeline.layers)]
    return frozenset(tuple(sorted(map(kinds.__getitem__, pipeline.stages_of(rank)))) for rank in range(pipeline.pp))


@hashed_once
@dataclass(frozen=True, order=True)
class StageLayers:
    """The layers of a stage: ((design, recomputed modules), count), ...

    after: the modules that depths of multi-token prediction recompute after them
    """

    counts: tuple[tuple[tuple[LayerDesign, tuple[str, ...]], int], ...] = ()
    after: tuple[str, ...] = ()


def _one(design: LayerDesign, modules: tuple[str, ...]) -> StageLayers:
    return StageLayers((((design, modules), 1),), modules)


@lru_cache(maxsize=65536)
def _layers(facts: Facts, settings: Recompute, layers: range) -> StageLayers:
    after = last_modules(layers, settings) if facts.settings.depths else ()
    return StageLayers(tuple(sorted(activations.repeated(facts, settings, layers).items())), after)


@lru_cache(maxsize=65536)
def _stage(job: Job, share: RankSetup, layers: StageLayers, first: bool, last: bool, cluster: Cluster) -> Pass:
    total, sp = Pass(), share.sp
    for (design, modules), count in layers.counts:
        total += _layer(job, design.share(share), design.kind, modules, cluster).times(count)
    facts, h, e, d = job.facts, job.facts.settings.hidden_size, job.element, cluster.device
    if first:
        n = facts.embedded_tokens(share)
        tp_seconds = _tensor_parallel_seconds(job, share, cluster, n)
        total += Pass(
            EMBEDDING_MOVES * n * h * e / d.bandwidth + tp_seconds,
            EMBEDDING_MOVES * n * h * e / d.bandwidth + tp_seconds * sp,
            tp_seconds * (1 + sp),
        )
    if last and facts.score_sums(share) is None:  # the cost of a few scores is ignored
        n, rows = facts.loss_tokens(share), facts.vocabulary_rows(share.tp)
        tp_seconds = _tensor_parallel_seconds(job, share, cluster, n)
        product = 2 * n * h * rows / d.reached(job.precision, min(n, h, rows))
        softmax = LOSS_BYTES * n * rows * d.unfused / d.bandwidth
        # The loss computes its gradients in the forward pass, except the weight's.
        of_weight = 0.0 if OUTPUT in share.frozen else product
        losses = Pass(2 * product + softmax + tp_seconds * sp, of_weight + tp_seconds, tp_seconds * (1 + sp))
        total += losses.times(1 + facts.settings.depths)
        if facts.settings.depths:
            total += _depth(job, share, layers.after, cluster).times(facts.settings.depths)
        total += _teacher(job.teacher, share, cluster) if job.teacher else Pass()
    return total


def _depth(job: Job, share: RankSetup, modules: tuple[str, ...], cluster: Cluster) -> Pass:
    """A micro-batch through a depth of multi-token prediction, without its loss."""
    total = Pass()
    for design in job.facts.designs_ahead:
        total += _layer(job, design.share(share), design.kind, modules, cluster)
    ops, d = job.facts.depth_ops(share), cluster.device
    seconds = sum(arithmetic_seconds(job, op, d) for op in ops)
    moved = d.unfused * sum(op.moved for op in ops if isinstance(op, Kernel)) * job.element / d.bandwidth
    return total + Pass(seconds + moved, 2 * seconds + moved)


def _teacher(job: Job, share: RankSetup, cluster: Cluster) -> Pass:
    """A micro-batch through a teacher, forward alone, and the loss on its logits, in the forward pass of the last stage.

    share: of the student on this rank
    """
    facts, d = job.facts, cluster.device
    share = replace(share, frozen=frozenset(), pairs=(), largest_scores=False)
    kinds = Counter(facts.layer_kind(layer) for layer in range(facts.num_layers))
    total = Pass()
    for kind, count in kinds.items():
        one = _layer(job, share, kind, (), cluster)
        total += Pass(one.forward, 0.0, one.waiting / 2, one.sharing / 2).times(count)
    n, rows, h = facts.loss_tokens(share), facts.vocabulary_rows(share.tp), facts.settings.hidden_size
    product = 2 * n * h * rows / d.reached(job.precision, min(n, h, rows))
    return total + Pass(product + DIVERGENCE_BYTES * n * rows * d.unfused / d.bandwidth)


def layer_seconds(job: Job, cluster: Cluster) -> float:
    """Seconds of the forward pass of one layer on one rank, with a micro-batch of one."""
    return _layer(job, job.rank_setup(), job.facts.layer_kind(0), (), cluster).forward


@lru_cache(maxsize=65536)
def _layer(job: Job, share: RankSetup, kind: str, modules: tuple[str, ...], cluster: Cluster) -> Pass:
    """A micro-batch through a layer: its ops one after another, and recomputed ones again."""
    ops, d = job.facts.layer_ops(share, kind), cluster.device
    kernels = [op for op in ops if isinstance(op, (Kernel, Product))]
    elementwise = lambda kernels: d.unfused * sum(op.moved for op in kernels) * job.element / d.bandwidth
    work = (
        sum(arithmetic_seconds(job, op, d) for op in ops)
        + elementwise(kernels)
        + sum(op.starts for op in kernels) * d.launch
    )
    flash = [op for op in ops if isinstance(op, CoreAttention) and op.kernel == "flash"]
    longer = (d.attention_backward - 2) * sum(_core(job, op, d) for op in flash)  # other ops: two products for one
    still_plain = [op for op in ops if isinstance(op, Product) and op.fp8 and not (op.wgrad or op.frozen)]
    longer += sum(
        arithmetic_seconds(job, replace(op, fp8=""), d) - arithmetic_seconds(job, op, d) for op in still_plain
    )
    again = [op for op in ops if op.runs_again(modules)]
    between = [op for op in again if isinstance(op, (Kernel, Product)) and not isinstance(op, CoreAttention)]
    repeated = work if LAYER in modules else sum(arithmetic_seconds(job, op, d) for op in again) + elementwise(between)
    sums, each = _tensor_parallel_sums(job, share, ops, cluster)
    messages = sum(len(op.ahead) for op in again if isinstance(op, Collective) and op.axis == "tp")
    if LAYER in modules:  # a sum of two halves counts as one
        messages = sums
    others = [op for op in ops if isinstance(op, Collective) and op.axis != "tp"]
    stride = dict.fromkeys(("ep", "ep_counts", "ep_inner"), share.etp)  # of other axes: tp
    stride |= dict(etp=1, ep_outer=share.etp * share.ep_inner, cp_outer=share.tp * share.cp_heads)
    sent = lambda op, calls: sum(
        cluster.seconds(call, op.size, 1, op.ranks, stride.get(op.axis, share.tp)) for call in calls
    )
    rings = [op for op in others if op.in_ring]
    core = sum(_core(job, op, d) for op in ops if isinstance(op, CoreAttention))
    beside = 1 - 1 / share.cp_rows  # the share of attention that overlaps: no message follows the last step
    exposed = lambda seconds, work: max(seconds - work * beside, seconds * d.exposed)
    ahead = exposed(sum(sent(op, op.ahead) for op in rings), core)
    back = exposed(sum(sent(op, op.back) for op in rings), d.attention_backward * core)
    back += ahead * any(op.runs_again(modules) for op in rings)
    others_again = [op for op in ops_again(ops, modules) if isinstance(op, Collective) and op.axis != "tp"]
    exchanges, repeats = ([op for op in one if op.axis in EXCHANGED and op.back] for one in (others, others_again))
    moved = sum(sent(op, op.ahead) for op in exchanges)  # by exchanges whose gradients are exchanged, too
    moved_back = sum(sent(op, op.back) for op in exchanges) + sum(sent(op, op.ahead) for op in repeats)
    # A backward pass has turns for those that run again, too, and the forward pass beside it has not as many.
    moved_back *= len(exchanges) / max(1, len(exchanges) + len(repeats))
    ahead += sum(sent(op, op.ahead) for op in others if not op.in_ring)
    back += sum(sent(op, op.back) for op in others if not op.in_ring)
    back += sum(sent(op, op.ahead) for op in others_again if not op.in_ring)
    pairs = [sum(of_pass) for of_pass in zip(*(_pair(job, op, d) for op in ops if isinstance(op, Product)), (0.0, 0.0))]
    still = sum(arithmetic_seconds(job, op, d) for op in ops if isinstance(op, Product) and op.frozen)
    ahead_alone = [op for op in ops if isinstance(op, LargestScores)]
    still += 2 * (sum(arithmetic_seconds(job, op, d) for op in ahead_alone) + elementwise(ahead_alone))
    return Pass(
        work + pairs[0] + sums * each + ahead,
        2 * work + pairs[1] - still + longer + sums * each + repeated + messages * each + back,
        (2 * sums + messages) * each,
        ahead + back,
        moved,
        moved_back,
    )


def arithmetic_seconds(job: Job, op: LayerOp, d: Device) -> float:
    """Seconds of a product, of attention, or of the products of a scan or of scores."""
    if isinstance(op, Product):
        smallest = max(1, min(op.rows, op.inputs, op.outputs))
        if op.fp8:
            return op.flops / d.reached_in_fp8(op.fp8, job.precision, smallest)
        return op.flops / d.reached(job.precision, smallest)
    if isinstance(op, (Scan, LargestScores)):
        return op.products / d.reached(job.precision, op.smallest)
    return _core(job, op, d) if isinstance(op, CoreAttention) else 0.0


def slower_in_fp8(job: Job, layout: Layout, cluster: Cluster) -> list[str]:
    """The linear layers, as --fp8-skip names them, whose products take longer in fp8, with the casts of their operands."""
    share, facts = layout.rank_setup(job), job.facts

    def seconds(design: LayerDesign, *in_fp8: str) -> float:
        own = design._replace(in_fp8=in_fp8)
        return _layer(job, own.share(share), own.kind, (), cluster).both

    designs = dict.fromkeys(map(facts.design_of, range(facts.num_layers)))
    losing = (name for one in designs for name in one.in_fp8 if seconds(one, name) > seconds(one))
    return list(dict.fromkeys(losing))


def _pair(job: Job, op: Product, d: Device) -> tuple[float, float]:
    """Seconds of the products of a LoRA pair in the forward pass, and in the backward pass (`model/lora_product.py`).

    They are narrow, and so limited by memory: forward they read the input and add to the output, backward they add to the
    gradient of the input, and read the input twice and the gradient of the output three times.
    """
    inputs, outputs = op.inputs * op.stacks, op.outputs * op.times
    arithmetic = (
        2.0 * op.pair * (inputs + outputs) / d.reached(job.precision, max(1, min(op.rows, op.inputs, op.outputs)))
    )
    moved = job.element / d.bandwidth * (op.pair > 0)
    return op.rows * (arithmetic + (inputs + 2 * outputs) * moved), op.rows * (
        3 * arithmetic + (4 * inputs + 3 * outputs) * moved
    )


def _tensor_parallel_sums(job: Job, share: RankSetup, ops, cluster: Cluster) -> tuple[int, float]:
    """Tensor parallel sums of a layer in each direction, and seconds of one, for the mean of their tokens. The all-gather
    for a weight's gradient overlaps with another product.
    """
    collectives = [op for op in ops if isinstance(op, Collective) and op.axis == "tp"]
    sums = max(1, sum(call != "all_gather" for op in collectives for call in op.ahead))
    row = job.facts.settings.hidden_size * job.element
    tokens = sum(op.size for op in collectives) // (2 * sums * row)
    return sums, _tensor_parallel_seconds(job, share, cluster, tokens)


def _tensor_parallel_seconds(job: Job, share: RankSetup, cluster: Cluster, tokens: int) -> float:
    """Seconds of one tensor parallel sum of the hidden states of these tokens."""
    size = tokens * job.facts.settings.hidden_size * job.element
    # With sequence parallelism a sum has two halves (reduce-scatter and all-gather), which are counted as one each.
    op = "all_gather" if share.sp else "all_reduce"
    return cluster.seconds(op, (2 if share.sp else 1) * size, 2 if share.sp else 1, share.tp, 1)


def _core(job: Job, core: CoreAttention, device: Device) -> float:
    """Seconds of attention without its linear layers."""
    best = device.attention.get(job.precision) or min(device.attention.values())
    reached = best / (1 + device.attention_tokens / job.facts.seq_length)
    work = 2.0 * core.pairs * sum(core.widths)
    if core.kernel == "flash":
        return work / (2 if core.causal else 1) / reached
    half = core.kernel == "block-causal"  # half of the scores are not computed
    if half and job.device == "cpu" and not core.dropout:
        return work / 2 / reached * CPU_BLOCKS
    moves = SCORE_MOVES + DROPOUT_MOVES * core.dropout
    moved = device.unfused * int(core.pairs) * job.element * moves / device.bandwidth
    return (work / device.reached(job.precision, min(core.widths)) + moved) / (2 if half else 1)


def _message(job: Job, layout: Layout, cluster: Cluster) -> float:
    """Seconds of a message to the next stage. Neighbouring stages are tp x cp x dp ranks apart."""
    if layout.pp == 1:
        return 0.0
    size, apart = job.facts.message_bytes(layout.rank_setup(job)), layout.tp * layout.weight_ranks
    return cluster.seconds("send", size, 1, layout.pp, apart)


def split_even(costs: list[float], layers: int) -> list[int]:
    """Layers of each stage that minimize the time of the slowest stage. costs: of each stage's ends, in layers.

    >>> split_even([0.0, 0.0, 0.0, 1.4], 8)
    [2, 3, 2, 1]
    """
    counts = [0] * len(costs)
    for _ in range(layers):
        counts[min(range(len(costs)), key=lambda n: (counts[n] + costs[n], n in (0, len(costs) - 1)))] += 1
    return counts
