# SPDX-License-Identifier: Apache-2.0
"""Choose tensor and pipeline parallel sizes for generation: the memory of weights and of the cache of keys and values, the
time to the first token, and the time per token.

A token of n texts reads all weights of a rank once, and the keys and values of all its texts. A product takes as long as
its arithmetic or the reading of its weights, whichever is longer. Weights and cache are exact (a test compares them with
the tensors of an engine); workspaces are an estimate, and times are predictions.

Legend: n texts that a replica continues at the same time, h hidden, v vocabulary, e bytes per element.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron.errors import SettingsError
from megatron.inference.scheduler import SNAPSHOTS
from megatron.inference.stage_layers import decoder_layers
from megatron.model.facts import Facts
from megatron.model.layer_ops import Collective, CoreAttention, Kernel, LayerOp, Product, RankSetup
from megatron.model.linear_kinds import chosen_layers, quantized_bytes
from megatron.model.quantization import PLAIN, QuantizeOptions
from megatron.mpu.placement import Placement
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import rank_units
from megatron.planner.search import divisors
from megatron.planner.speed import arithmetic_seconds
from megatron.settings.schema import Model

BLOCK = 16  # tokens of a block of the cache
PROMPT, OUTPUT = 512, 128  # tokens of a text whose lengths are not given
MOST_TEXTS = 256  # of a replica, unless --max-batch-size says how many
CHUNK = 512  # tokens of prompts in a pass
TOLERANCE = 0.1  # predictions that differ by less are equal: then the fewest ranks share a copy of the model
ATTENTION_STARTS = 4  # more kernels of attention with a cache: two writes, and gathering of keys and values


@dataclass(frozen=True)
class Requests:
    """The texts to continue: tokens of a prompt and of its continuation, and texts at a time, if that is known."""

    prompt: int
    output: int
    texts: int | None = None

    @property
    def length(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True)
class ServingPlan:
    """A layout: each of `replicas` copies of the model is shared by tp x pp ranks.

    weights, workspace:  bytes of the fullest rank
    cache:               bytes of a text's keys, values and states there
    texts:               texts at a time of a replica; room: those that would fit
    first, token:        seconds from a prompt to its first token (alone), and from token to token
    prompt:              seconds for which a prompt occupies the slowest stage
    output:              tokens of a continuation
    parts:               seconds of a token by part
    """

    tp: int
    pp: int
    replicas: int
    weights: int
    workspace: int
    cache: int
    texts: int
    room: int
    first: float
    token: float
    prompt: float
    output: int
    parts: dict[str, float]

    @property
    def fits(self) -> bool:
        return self.room >= max(1, self.texts)

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    @property
    def bytes(self) -> int:
        """Bytes of the fullest rank with all its texts."""
        return self.weights + self.workspace + self.cache * self.texts

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all replicas; the passes over prompts take their time, too."""
        return self.replicas * self.texts * self.output / (self.output * self.token + self.texts * self.prompt)

    @property
    def flags(self) -> list[str]:
        sizes = {"--tensor-model-parallel-size": self.tp, "--pipeline-model-parallel-size": self.pp}
        return [word for flag, size in sizes.items() if size > 1 for word in (flag, str(size))]

    def short(self) -> str:
        """The layout in a word: `tp2-pp2 x 4`."""
        name = "-".join(f"{axis}{size}" for axis, size in (("tp", self.tp), ("pp", self.pp)) if size > 1) or "one rank"
        return f"{name} x {self.replicas}" if self.replicas > 1 else name


def plans(
    job: Job, cluster: Cluster, requests: Requests, *, latency: bool = False, quantize: QuantizeOptions = PLAIN
) -> list[ServingPlan]:
    """All layouts of the cluster's ranks: first those that fit, the best one first. latency: by the time per token instead
    of by tokens per second. quantize: format of linear layers, whose times are those of plain ones.

    Raises SettingsError for a model that continues no texts.
    """
    check(job.facts, requests)
    found = [
        plan_of(job, cluster, requests, tp, pp, quantize)
        for tp in divisors(min(cluster.world_size, cluster.local_size))
        for pp in divisors(cluster.world_size // tp if cluster.world_size % tp == 0 else 1)
        if possible(job.facts, tp, pp) and groups_fit(job.facts, tp, quantize) and cluster.world_size % (tp * pp) == 0
    ]
    cost = (lambda plan: plan.token) if latency else (lambda plan: 1 / plan.tokens_per_second)
    fit = sorted((plan for plan in found if plan.fits), key=cost)
    alike = [plan for plan in fit if cost(plan) <= (1 + TOLERANCE) * cost(fit[0])]
    alike.sort(key=lambda plan: (plan.ranks, plan.pp, cost(plan)))
    others = sorted((plan for plan in found if not plan.fits), key=lambda plan: plan.weights + plan.cache)
    return alike + fit[len(alike) :] + others


def requests_for(m: Model, prompt: int | None, output: int | None, texts: int | None) -> Requests:
    """The requests of these lengths; those that are not given are 512 and 128, or 4/5 and 1/5 of a short context.

    >>> short = Model(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=100)
    >>> requests_for(short, None, None, None), requests_for(short, 40, None, 8)
    (Requests(prompt=80, output=20, texts=None), Requests(prompt=40, output=20, texts=8))
    """
    room = m.position_table if m.position_embedding_type == "learned_absolute" else PROMPT + OUTPUT
    if output is None:
        output = min(OUTPUT, max(1, room // 5))
        if prompt is not None and prompt < room:
            output = min(output, room - prompt)
    prompt = min(PROMPT, max(1, room - output)) if prompt is None else prompt
    return Requests(prompt, output, texts)


def check(facts: Facts, requests: Requests) -> None:
    """Raise SettingsError if the model continues no texts, or none as long."""
    if facts.encoder_layers is not None or not any(
        isinstance(op, CoreAttention) and op.causal
        for kind in facts.layer_kinds
        for op in facts.layer_ops(RankSetup(), kind)
    ):
        raise SettingsError(f"--mode inference plans models that continue texts, and {facts.name} is none")
    m = facts.settings
    if m.position_embedding_type == "learned_absolute" and requests.length > m.position_table:
        raise SettingsError(
            f"--prompt-length {requests.prompt} and --output-length {requests.output} are more than the "
            f"{m.position_table} positions of the model",
            do="shorter ones, whose sum it has; without the flags it chooses them",
        )


def possible(facts: Facts, tp: int, pp: int) -> bool:
    """Whether so many ranks can share the model."""
    return pp <= facts.num_layers and all(number % tp == 0 for number in facts.divisible_by_tp().values())


def groups_fit(facts: Facts, tp: int, how: QuantizeOptions) -> bool:
    """Whether groups of inputs divide those of a rank."""
    size = how.quantize_group_size
    return how.quantize != "int4" or all(
        placed.local_shape({"tp": tp})[-1] % size == 0 for _, placed in quantized_weights(facts, how)
    )


def quantized_weights(facts: Facts, how: QuantizeOptions) -> list[tuple[int, Placement]]:
    """(layer, placement) of the weights that a format rounds."""
    named = [name.split(".", 2)[1:] for name in chosen_layers(facts, how)] if how.quantize else []
    return [
        (int(layer), facts.layer_weights(facts.layer_kind(int(layer)), False)[f"{name}.weight"])
        for layer, name in named
    ]


def plan_of(
    job: Job, cluster: Cluster, requests: Requests, tp: int, pp: int, quantize: QuantizeOptions = PLAIN
) -> ServingPlan:
    """Memory and times of one layout."""
    replicas, device, ranks = cluster.world_size // (tp * pp), cluster.device, range(pp)
    share = ServingShare(job, cluster, tp, pp, quantize)
    weights, length = [share.weight_bytes(rank) for rank in ranks], -(-requests.length // BLOCK) * BLOCK
    # Of a text
    cache = [max(1, length * share.cache_bytes(rank) + (1 + SNAPSHOTS) * share.state_bytes(rank)) for rank in ranks]
    asked = -(-requests.texts // replicas) if requests.texts else None
    workspace = share.workspace_bytes(asked or MOST_TEXTS)
    room = min((device.usable_bytes - workspace - w) // c for w, c in zip(weights, cache))
    texts = asked or max(1, min(MOST_TEXTS, room))
    fullest = max(ranks, key=lambda rank: weights[rank] + cache[rank] * texts)
    token, parts = share.token_seconds(texts, requests.prompt + requests.output // 2)
    first, prompt = share.prompt_seconds(requests.prompt)
    return ServingPlan(
        *(tp, pp, replicas, weights[fullest], workspace, cache[fullest], texts, max(0, room)),
        *(first, token, prompt, requests.output, parts),
    )


@dataclass(frozen=True)
class ServingShare:
    """The work of the ranks that share a copy of the model."""

    job: Job
    cluster: Cluster
    tp: int
    pp: int
    quantize: QuantizeOptions = PLAIN

    @cached_property
    def layout(self) -> Layout:
        """The stages of `inference.stages`."""
        counts = decoder_layers(self.job.facts, self.pp)
        return Layout(tp=self.tp, pp=self.pp, stage_layers=",".join(map(str, counts)) if self.pp > 1 else None)

    def weight_bytes(self, rank: int) -> int:
        """Bytes of the weights of a pipeline rank, as `inference.load` allocates them, and of constants beside them."""
        units = rank_units(self.job, self.layout, rank)
        sizes, element, layers = self.layout.data_sizes, self.job.element, self._layers(rank)
        plain = (
            units.bytes_of(lambda unit: unit.padded(sizes) + unit.padded_frozen(sizes), element) + units.buffers // 2
        )
        if not self.quantize.quantize:
            return plain
        plain = units.bytes_of(lambda unit: unit.elements, element) + units.buffers // 2  # each has its own memory
        weights = [placed for layer, placed in quantized_weights(self.job.facts, self.quantize) if layer in layers]
        saved = sum(math.prod(placed.local_shape({"tp": self.tp})) * element for placed in weights)
        return plain - saved + sum(quantized_bytes(self.quantize, placed, self.tp, element) for placed in weights)

    def cache_bytes(self, rank: int) -> int:
        """Bytes of a token's keys and values on a pipeline rank; in fp32 on a CPU (`model.cache.stored_dtype`)."""
        element = 4 if self.job.device == "cpu" else self.job.element
        return self.job.facts.cached_numbers(self._layers(rank), self.tp) * element

    def state_bytes(self, rank: int) -> int:
        """Bytes of a text's states on a pipeline rank, without snapshots."""
        return self.job.facts.state_bytes(self._layers(rank), self.tp, self.job.element)

    def workspace_bytes(self, texts: int) -> int:
        """An estimate of everything else: the driver and libraries, buffers of collectives, the tensors of a pass."""
        m, device = self.job.facts.settings, self.cluster.device
        of_layers = [kind.settings(m) for kind in self.job.facts.layer_kinds]  # of which the widest needs most
        width = max(3 * own.ffn_size + 3 * own.num_attention_heads * own.head_dim for own in of_layers) // self.tp
        width += 4 * m.hidden_size
        logits = 3 * 4 * texts * self.job.facts.vocabulary_rows(1)
        axes = (self.tp > 1) + (self.pp > 1)
        return device.context_bytes + axes * device.communication_bytes + CHUNK * width * self.job.element + logits

    def _layers(self, rank: int) -> Sequence[int]:
        pipeline = self.layout.pipeline(self.job.facts.num_layers)
        return [layer for stage in pipeline.stages_of(rank) for layer in pipeline.layers[stage]]

    # ---- time -------------------------------------------------------------------------------------------------------

    def token_seconds(self, texts: int, length: int) -> tuple[float, dict[str, float]]:
        """(seconds from one token to the next of `texts` texts with `length` tokens before it, the same by part).

        With several stages the texts are divided into as many groups, which follow each other through the stages.
        """
        groups = min(self.pp, texts)
        each = -(-texts // groups)
        stages = [self._stage(rank, 1, each, length) for rank in range(self.pp)]
        message = self._message(each)
        through = [sum(stage.values()) + message for stage in stages]
        slowest = max(stages, key=lambda stage: sum(stage.values()))
        parts = {part: sum(stage[part] for stage in stages) for part in slowest}
        parts["pipeline messages"] = self.pp * message
        parts["waiting for other texts"] = max(0.0, groups * max(through) - sum(through))
        return sum(parts.values()), {part: value for part, value in parts.items() if value > 1e-9}

    def prompt_seconds(self, prompt: int) -> tuple[float, float]:
        """(seconds of the pass over a prompt through all stages, of that through the slowest one)."""
        stages = [sum(self._stage(rank, prompt, 1, 0).values()) + self._message(prompt) for rank in range(self.pp)]
        return sum(stages), max(stages)

    def _message(self, tokens: int) -> float:
        """Seconds of a message to the next stage."""
        size = tokens * self.job.facts.settings.hidden_size * self.job.element
        return self.cluster.seconds("send", size, 1, self.pp, self.tp)

    def _stage(self, rank: int, s: int, texts: int, cached: int) -> dict[str, float]:
        """Seconds of a pass of a stage over s tokens of each text, by part. cached: tokens before them."""
        facts = self.job.facts
        own = dict(seq_length=s, max_position_embeddings=None, hidden_dropout=0.0, attention_dropout=0.0)
        facts = replace(facts, settings=replace(facts.settings, **own))
        job, device = replace(self.job, facts=facts), self.cluster.device
        ops = list(self._ops(job, rank, texts))
        element, bandwidth = job.element, device.bandwidth
        products = [op for op in ops if isinstance(op, Product)]
        kernels = [op for op in ops if isinstance(op, Kernel)]
        collectives = [op for op in ops if isinstance(op, Collective)]
        arithmetic = [max(arithmetic_seconds(job, op, device), _weights(op) * element / bandwidth) for op in products]
        moved = device.unfused * sum(op.moved for op in kernels) * element
        starts = sum(op.starts + ATTENTION_STARTS * isinstance(op, CoreAttention) for op in kernels)
        sums = (self.cluster.seconds(c, op.size, 1, op.ranks, 1) for op in collectives for c in op.ahead)
        core = sum(arithmetic_seconds(job, op, device) for op in kernels) if s > 1 else 0.0
        return {
            "weights and arithmetic": sum(arithmetic) + core,
            "keys and values": texts * cached * self.cache_bytes(rank) / bandwidth,
            "states": 2 * texts * self.state_bytes(rank) / bandwidth,  # they are read and written
            "other kernels": moved / bandwidth,
            "starting kernels": starts * device.launch,
            "tensor parallel": sum(sums),
        }

    def _ops(self, job: Job, rank: int, texts: int) -> Iterator[LayerOp]:
        """The ops of a stage; the last one has the output layer, of the last token of each text."""
        facts, share = job.facts, job.rank_setup(self.tp, micro_batch_size=texts)
        for layer in self._layers(rank):
            yield from facts.layer_ops(share, facts.layer_kind(layer))
        if rank == self.pp - 1:
            rows = facts.vocabulary_rows(self.tp)
            yield Product("output layer", rows=texts, inputs=facts.settings.hidden_size, outputs=rows)
            size = texts * rows * self.tp * 4
            yield Collective("logits", axis="tp", ranks=self.tp, size=size, ahead=("all_gather",) * (self.tp > 1))


def _weights(op: Product) -> int:
    return op.inputs * op.outputs * op.times
