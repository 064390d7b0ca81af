# SPDX-License-Identifier: Apache-2.0
"""Compare layouts: train a few steps in a layout and in one process, and compare losses, gradient norms and weights.

Every layout starts from the same weights and uses the same samples and dropout masks (mpu/random.py), so the remaining
differences are rounding. `trace` runs a layout on forked gloo ranks of this machine; `compare` returns the differences of
two traces: in loss, in gradient norm and in every logical parameter.
"""

import contextlib
import importlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Optional

import torch

from megatron.model.kinds.experts.replay import Choices, RoutingRecord, attach
from megatron.model.recipe import Recipe, recipe_of
from megatron.mpu.axis_sizes import lacking_ranks
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.optimizer.kinds import knows_matrices
from megatron.pipeline.stages import chunks_of
from megatron.planner.collective_check import SumRecord, problems_of
from megatron.planner.shrink import gentle, without_traces
from megatron.settings import schema
from megatron.settings.schema import Precision, Profiling
from megatron.training.rules import resolve

# The largest relative differences after ten AdamW steps that count as rounding. bf16 rounds activations to 3 digits, and
# sums in another order round differently. fp16 rounds less, yet its weights differed by 0.14 (loss 2e-3, norm 6e-2) at a
# learning rate of 1e-2 with dropout. fp8: of products (--fp8-format), in any format of --precision.
TOLERANCE = dict(  # choices: the share of tokens whose router prefers other experts than in one process
    fp32=dict(loss=1e-5, norm=1e-3, weight=1e-4, choices=0.02),
    bf16=dict(loss=5e-3, norm=1e-1, weight=3e-1, choices=0.3),
    fp16=dict(loss=5e-3, norm=1e-1, weight=3e-1, choices=0.3),
    fp8=dict(loss=1e-2, norm=2e-1, weight=6e-1, choices=0.5),
)


@dataclass(frozen=True)
class TestedLayout:
    """A layout in short form, such as `tp2sp-pp2vp2-dp2-zero1`; tokens in any order, hyphens optional.

    >>> parse_layout("pp2-tp2sp").world_size
    4
    """

    text: str
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    zero: int = 0
    ep: int = 1
    etp: int = 0  # as tp
    sp: bool = False
    a2a: int = 0  # ranks that exchange rows for heads
    gather: bool = False
    schedule: str = ""
    own: bool = False  # from the command's flags, which may be more detailed

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def stages(self) -> int:
        """Number of pipeline stages; the V-shaped schedules have two on each rank."""
        return self.pp * (2 if self.schedule in ("zb-v", "v-half") else self.vp)


SCHEDULE_TOKENS = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "interleaved",
    "zbh1": "zb-h1",
    "zbv": "zb-v",
    "vhalf": "v-half",
}
ALONE = "one process"
ZERO_STAGES = (0, 1, 2, 3)
TOKENS = re.compile(rf"(tp|cp|pp|vp|dp|ep|etp|zero|a2a)(\d+)|(sp|a2a|gather)|({'|'.join(SCHEDULE_TOKENS)})|-")


def parse_layout(text: str) -> TestedLayout:
    """Parse a layout; without dpN, dp is what epN and etpN need. Raises ValueError for unknown or repeated tokens."""
    at, fields = 0, {}
    while at < len(text):
        match = TOKENS.match(text, at)
        if not match:
            raise ValueError(
                f"'{text[at:]}' in layout '{text}' is none of tpN cpN ppN vpN dpN epN etpN zeroN sp a2a a2aN gather, "
                + " ".join(SCHEDULE_TOKENS)
            )
        name, number, sequence, schedule = match.groups()
        key, value = (name, int(number)) if name else (sequence, True) if sequence else ("schedule", schedule)
        if match[0] != "-":
            if key in fields:
                raise ValueError(f"layout '{text}' has {key} twice")
            fields[key] = SCHEDULE_TOKENS.get(value, value)
        at = match.end()
    if fields.get("zero", 0) not in ZERO_STAGES:
        raise ValueError(f"zero{fields['zero']} in layout '{text}': the stages are {', '.join(map(str, ZERO_STAGES))}")
    if fields.get("a2a") is True:
        fields["a2a"] = fields.get("cp", 1)
    layout = TestedLayout(text, **fields)
    experts = lacking_ranks(layout.tp * layout.cp, layout.ep, layout.etp or layout.tp)
    return layout if "dp" in fields else replace(layout, dp=experts)


def layout_of(config: schema.Config, world_size: int) -> TestedLayout:
    """The layout of a training command on this many ranks."""
    p = config.parallel
    tp, cp, pp = p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size
    layout = TestedLayout(
        "",
        tp,
        cp,
        pp,
        chunks_of(p, config.model.num_layers),
        world_size // (tp * cp * pp),
        p.sharding_stage,
        p.expert_model_parallel_size,
        p.expert_tensor_parallel_size or 0,
        p.sequence_parallel,
        *_context_tokens(p),
        p.pipeline_schedule,
        own=True,
    )
    parts = [f"{name}{value}" for name in ("tp", "cp", "pp", "vp", "dp", "ep") if (value := getattr(layout, name)) > 1]
    parts += [f"etp{layout.etp}"] * (layout.etp not in (0, tp))
    parts += ["a2a" + f"{layout.a2a}" * (layout.a2a < layout.cp)] * bool(layout.a2a) + ["gather"] * layout.gather
    parts += ["sp"] * layout.sp + [f"zero{layout.zero}"] * bool(layout.zero)
    return replace(layout, text="-".join(parts) or ALONE)


def laid_out(config: schema.Config, layout: TestedLayout) -> schema.Config:
    """Unresolved settings of a run -> resolved settings of the same run in this layout.

    Raises SettingsError with all problems of the layout.
    """
    parallel = config.parallel if layout.own else _parallel(config, layout)
    parallel = replace(parallel, data_parallel_size=None, dp_degree=None, pipeline_timeline=None)
    # Otherwise Muon's products would differ by rounding to bf16.
    exact = dict(muon_fp32_matmul_prec="highest") if knows_matrices(config.optimizer) else {}
    if config.precision.precision == "fp32":  # gradients that are added in another order and rounded would differ too
        exact |= dict(exp_avg_dtype="fp32", exp_avg_sq_dtype="fp32", grad_reduce_in_bf16=False, main_grads_dtype="fp32")
    quiet = dict(
        checkpoint=schema.Checkpoint(),
        optimizer=replace(
            config.optimizer,
            param_cpu_offload=config.optimizer.param_cpu_offload and parallel.sharding_stage == 3,
            **exact,
        ),
        precision=gentle(config.precision),
        data=replace(config.data, num_workers=0),
        kernels=replace(config.kernels, device="cpu"),
        guard=without_traces(config.guard),
        profiling=Profiling(),
        logging=schema.Logging(log_interval=10**9, seed=config.logging.seed, debug=config.logging.debug),
        statements={},
    )
    return resolve(replace(config, parallel=parallel, **quiet), layout.world_size)


def one_process(config: schema.Config) -> schema.Config:
    """Unresolved settings of a run -> resolved settings of the same run in one process."""
    return laid_out(config, TestedLayout(ALONE))


def one_batch(config: schema.Config, layouts: Sequence[TestedLayout]) -> schema.Config:
    """The settings with a global batch for all of these layouts, if its size would depend on the ranks."""
    batch, sizes = config.batch, {layout.dp for layout in layouts}
    if batch.micro_batch_size != schema.AUTO:
        whole = batch.global_batch_size or math.lcm(*(batch.full_size(dp) for dp in sizes))
        batch = replace(batch, global_batch_size=whole, local_batch_size=None, gradient_accumulation_steps=None)
    return replace(config, batch=batch)


def _parallel(config: schema.Config, layout: TestedLayout) -> schema.Parallel:
    """The settings of the tokens; layers are split evenly, even if the flags set other stages."""
    return replace(
        config.parallel,
        tensor_model_parallel_size=layout.tp,
        context_parallel_size=layout.cp,
        **_context_words(config, layout),
        pipeline_model_parallel_size=layout.pp,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=layout.vp if layout.vp != 1 else None,
        pipeline_stage_layers=None,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_schedule=layout.schedule or ("1f1b" if layout.pp == 1 else config.parallel.pipeline_schedule),
        sharding_stage=layout.zero,
        sharding_degree=None,
        sequence_parallel=layout.sp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp or None,
    )


def _context_tokens(p: schema.Parallel) -> tuple[int, bool]:
    """`TestedLayout.a2a` and `gather` of settings."""
    cp, kinds = p.context_parallel_size, set(p.cp_comm_types)
    exchange = cp if kinds == {"a2a"} else p.cp_levels[0] if kinds == {"a2a+p2p"} and p.cp_levels else 0
    return (exchange if cp > 1 else 0), cp > 1 and kinds == {"allgather"}


def _context_words(config: schema.Config, layout: TestedLayout) -> dict[str, object]:
    """The settings of how ranks of cp share attention: those of the tokens; without a token those of the flags."""
    p, sizes = config.parallel, None
    if layout.gather:
        kinds = ["allgather"]
    elif layout.a2a and layout.a2a != layout.cp:
        kinds, sizes = ["a2a+p2p"], [layout.a2a, layout.cp // layout.a2a]
    elif layout.a2a:
        kinds = ["a2a"]
    else:
        kinds, sizes = p.cp_comm_type, p.hierarchical_context_parallel_sizes
    return dict(cp_comm_type=kinds, hierarchical_context_parallel_sizes=sizes)


def replaced(config: schema.Config, layouts: Sequence[TestedLayout]) -> list[str]:
    """The layout flags, as the user gave them, whose values differ in some of these layouts."""
    own, words = config.parallel, []
    others = [replace(_parallel(config, layout), data_parallel_size=layout.dp, dp_degree=None) for layout in layouts]
    for name, value in vars(own).items():
        given = config.given(name)
        if given and given.is_request and any(getattr(other, name) != value for other in others):
            words.append(given.words)
    return words


@dataclass(frozen=True)
class Trace:
    """The results of a few steps of training.

    losses:  for each step every sum of the recipe, as a mean over tokens
    weights: logical parameters after the last step, fp32
    choices: the experts of all tokens, for other layouts to replay; empty without experts, or over ranks
    changed: the share of tokens that would have chosen other experts than those they replayed
    problems: of sums over ranks, where they were checked (`collective_check`); sums: what one process recorded for that
    """

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    seconds: float
    choices: Choices = field(default_factory=dict)
    changed: float = 0.0
    problems: tuple[str, ...] = ()
    sums: Optional[SumRecord] = None


def trace(
    config: schema.Config,
    recipe: Recipe,
    world_size: int,
    steps: int,
    timeout: float = 600,
    replayed: Optional[Choices] = None,
    check_sums: bool = False,
    alone: Optional["Trace"] = None,
) -> Trace:
    """Train `steps` steps of resolved settings on forked ranks of this machine, over gloo.

    replayed: the experts that tokens go to, from a trace of one process. A token that prefers two experts almost equally
    would choose by rounding, which is another one in another layout.
    check_sums: also check the sums over ranks, against `alone`, the trace of one process, if it is given
    """
    preload(config)
    answers = run_ranks(
        world_size, _train_on_rank, config, recipe, steps, replayed or None, check_sums, timeout=timeout
    )
    weights: dict[str, torch.Tensor] = {}
    for _, pieces, *_ in answers:
        for name, shape, box, tensor in pieces:
            weights.setdefault(name, torch.full(shape, math.nan))[box.slices()] = tensor
    losses, norms, seconds = zip(*answers[0][0])
    changed, seen = (sum(answer[3][n] for answer in answers) for n in (0, 1))
    choices = answers[0][2] if world_size == 1 else {}
    every = [value for step in losses for value in step]
    sums = [answer[4] for answer in answers]
    problems = problems_of(sums, alone and alone.sums, rounding_of(config.precision)) if check_sums else ()
    own = sums[0] if world_size == 1 else None
    again = changed / seen if seen else 0.0
    return Trace(every, list(norms), weights, sum(seconds), choices, again, tuple(problems), own)


def preload(config: schema.Config) -> None:
    """Import modules that torch loads on first use, before forking, instead of once per rank."""
    recipe = recipe_of(config)
    recipe.build_model(config, Mesh(), 8, layers=range(0), dtype=torch.float32, device="meta")
    late = [
        "megatron.training.build",
        "megatron.training.step",
        "megatron.data.gpt_dataset",
        "megatron.data.mock",
        "numpy.random",
    ]
    late += ["torch.fx.experimental.symbolic_shapes"]  # torch's meta device
    late += ["torch._dynamo"] * bool(config.recompute.recompute_granularity)  # its checkpoint()
    for name in late:
        importlib.import_module(name)


def _train_on_rank(
    rank: int, config: schema.Config, recipe: Recipe, steps: int, replayed: Optional[Choices], check_sums
):
    """([(loss, norm, seconds) of each step], this rank's pieces of the weights, choices of experts, (tokens whose own
    choice is not that of `replayed`, tokens), what was recorded of sums).
    """
    import time

    from megatron.training.build import build_run
    from megatron.training.step import train_step

    results = []
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run = build_run(config, recipe)
        run.pending.defers_host_sync = False  # each step ends before the next
        record = RoutingRecord(replayed)
        attach(run.stages, record)
        for stage in run.stages:
            stage.train()
        sums, watching = SumRecord(), contextlib.nullcontext()
        if check_sums:
            watching = sums.watching(run.stages, run.context.mesh, config.parallel.sequence_parallel)
        for number in range(steps):
            start = time.perf_counter()
            with watching if number == 0 else contextlib.nullcontext():
                step = train_step(run)
            if check_sums:
                sums.after_step(run.optimizer, number + 1)
            results.append((tuple(step.losses.values()), step.grad_norm, time.perf_counter() - start))
        pieces = [piece._replace(tensor=piece.tensor.clone()) for piece in run.optimizer.pieces(moments=False)]
        run.close()
    return results, pieces, record.choices, (record.changed, record.seen), sums


def rounding_of(precision: Precision) -> str:
    """The format whose `TOLERANCE` is that of a run."""
    return "fp8" if precision.fp8_format else precision.precision


@dataclass(frozen=True)
class LayoutDifference:
    """The difference of a layout from the reference: largest relative differences, the parameter that differs most, and the
    share of tokens that would have chosen other experts.
    """

    loss: float
    norm: float
    weight: float
    worst: str
    choices: float = 0.0

    def passes(self, precision: str) -> bool:
        """Whether the differences are rounding. Written so that NaN fails."""
        limits = TOLERANCE[precision]
        return all(getattr(self, name) <= limit for name, limit in limits.items())


def compare(reference: Trace, other: Trace) -> LayoutDifference:
    """The differences from the reference, relative to it. For a parameter: the RMS of its error over its own RMS, or over
    the RMS of all parameters if that is larger. Adam moves a parameter by the learning rate even if its gradient is tiny.
    So a parameter whose gradient is only rounding (a key's bias, which softmax ignores) has noise of that size.
    """
    assert set(reference.weights) == set(other.weights), set(reference.weights) ^ set(other.weights)
    everything = _rms(torch.cat([weight.flatten() for weight in reference.weights.values()]))
    errors = {}
    for name, weight in reference.weights.items():
        error = _rms(other.weights[name] - weight) / max(_rms(weight), everything)
        errors[name] = math.inf if math.isnan(error) else error
    worst = max(errors, key=errors.get)
    return LayoutDifference(
        _largest(reference.losses, other.losses),
        _largest(reference.norms, other.norms),
        errors[worst],
        worst,
        other.changed,
    )


def _rms(x: torch.Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def _largest(reference: list[float], other: list[float]) -> float:
    # Both may overflow, in fp16
    errors = [0.0 if a == b else abs(b - a) / abs(a) if a else math.inf for a, b in zip(reference, other)]
    return math.inf if any(map(math.isnan, errors)) else max(errors)
