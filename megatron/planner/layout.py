# SPDX-License-Identifier: Apache-2.0
"""The input of the planner: a `Job` (model, batch, device type) and a `Layout` (how ranks share it).

Both are small frozen records, so that a search can make a hundred thousand of them. `Layout.of` reads one from the
settings of a run, `Layout.flags` returns its flags. Numbers of tokens, bytes and FLOPs are per rank unless noted otherwise.

    >>> layout = Layout(tp=8, pp=16, micro_batch_size=1, sp=True, recompute=Recompute("core_attn"))
    >>> " ".join(layout.flags())
    '--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --sequence-parallel --micro-batch-size 1 \
--recompute-granularity core_attn'
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Optional

from megatron.errors import SettingsError
from megatron.model.facts import Facts, RankSetup
from megatron.model.fp8 import gathered_in_fp8, layers_in_fp8
from megatron.model.frozen_settings import frozen_record, frozen_settings, layer_pairs
from megatron.model.layer_ops import LAYER, MLP
from megatron.model.recipe import recipe_of
from megatron.mpu.axis_sizes import ep_levels, expert_sizes, library_of
from megatron.mpu.selection import ALL, Selection
from megatron.optimizer.kinds import gradient_bytes, knows_matrices, state_bytes
from megatron.pipeline.custom_schedule import is_file
from megatron.pipeline.schedule import default_chunks, in_turns
from megatron.pipeline.stages import Pipeline, takes_turns
from megatron.planner.reached_speed import EXPERTS
from megatron.settings.hashed_once import hashed_once
from megatron.settings.rank_env import ranks
from megatron.settings.schema import GROUPS, Config, Parallel, Recompute
from megatron.settings.spelling import settings_of


class Cuts(NamedTuple):
    tp: int
    ep: int
    etp: int  # sizes of the axes that cut weights


ELEMENT = dict(fp32=4, bf16=2, fp16=2)  # bytes of a weight or an activation


@hashed_once
@dataclass(frozen=True)
class Job:
    """A training without its layout.

    facts:    the model
    device:   "cuda" or "cpu": selects the kernels, and the tensors that they save
    backend:  --attention-backend
    chunk:    --cross-entropy-chunk
    plain_softmax, plain_loss, plain_activation: --no-masked-softmax-fusion, --no-cross-entropy-loss-fusion,
              --no-bias-swiglu-fusion
    moments:  bytes per weight of each optimizer moment
    matrix_moments: the same for a matrix of a linear layer, if the optimizer treats those separately
    gradients: bytes of a gradient while it is accumulated and reduced
    main_gradients: bytes of a gradient in the shards of ZeRO 2 and 3
    ns_steps: Newton-Schulz steps that orthogonalize matrices
    selection: the trained weights
    fp8, fp8_wgrad: as in `RankSetup`
    library: of --moe-flex-dispatcher-backend, and its multiprocessors (None: its default)
    busiest: --moe-load-imbalance, for times; fullest: --moe-memory-imbalance, for memory
    ordered: --batch-invariant-mode
    """

    facts: Facts
    global_batch: int
    precision: str = "bf16"
    device: str = "cuda"
    backend: str = "auto"
    documents: bool = False  # --reset-attention-mask
    mixed: bool = False  # --amp-level O1: weights in fp32, and here all activations too, which overestimates slightly
    chunk: Optional[int] = None
    moments: tuple[int, ...] = (4, 4)
    matrix_moments: Optional[tuple[int, ...]] = None
    gradients: int = 4
    main_gradients: int = 4
    plain_softmax: bool = False
    plain_loss: bool = False
    plain_activation: bool = False
    selection: Selection = ALL
    ns_steps: int = 0
    frozen: frozenset[str] = frozenset()  # linear layers, as in `RankSetup`
    pairs: tuple[tuple[str, int], ...] = ()
    teacher: Optional["Job"] = None  # passes of --teacher-load
    largest_scores: bool = False  # of heads are kept
    compared: tuple[tuple[int, int], ...] = ()  # (layer, layer of the teacher) of --kd-hidden-layers
    fp8: str = ""  # --fp8-recipe, if the facts have layers with products in fp8
    fp8_wgrad: bool = True
    library: Optional[tuple[str, Optional[int]]] = None
    busiest: float = 1.0
    fullest: float = 1.0
    ordered: bool = False

    @classmethod
    def of(cls, config: Config, facts: Facts, *, dp: int, device: str, alone: bool = False) -> "Job":
        """The job of the settings. Raises SettingsError if they freeze missing weights, or all weights."""
        selection = Selection.of(config.optimizer)
        if selection:
            selection.check(facts.weights)
        precision, in_fp8 = config.precision.precision, () if alone else layers_in_fp8(config, facts)
        if in_fp8:
            gathered = config.precision.fp8_recipe if gathered_in_fp8(config.precision) else ""
            facts = replace(facts, in_fp8=in_fp8, gathered_in_fp8=gathered)
        return cls(
            facts,
            config.batch.full_size(dp),
            ("bf16" if device == "cuda" else "fp32") if precision == "auto" else precision,
            device,
            config.kernels.attention_backend,
            config.data.reset_attention_mask,
            config.precision.amp_level == "O1",
            config.kernels.cross_entropy_chunk,
            state_bytes(config.optimizer),
            state_bytes(config.optimizer, matrix=True) if knows_matrices(config.optimizer) else None,
            *gradient_bytes(config.optimizer, 2),
            plain_softmax=not config.kernels.masked_softmax_fusion,
            plain_loss=not config.kernels.cross_entropy_loss_fusion,
            plain_activation=not config.kernels.bias_swiglu_fusion,
            selection=selection,
            largest_scores=config.optimizer.qk_clip or config.logging.log_max_attention_logit,
            ns_steps=config.optimizer.muon_num_ns_steps if knows_matrices(config.optimizer) else 0,
            library=library_of(config.parallel),
            busiest=config.planner.moe_load_imbalance,
            fullest=config.planner.moe_memory_imbalance or config.planner.moe_load_imbalance,
            ordered=config.parallel.batch_invariant_mode,
            **dict(zip(("frozen", "pairs"), facts.learned(selection))),
            **(dict(fp8=config.precision.fp8_recipe, fp8_wgrad=config.precision.fp8_wgrad) if in_fp8 else {}),
            **({} if alone else teaching(config, facts, dp, device)),
        )

    @property
    def without_fp8(self) -> "Job":
        """The same job with all products in its precision."""
        return replace(self, facts=replace(self.facts, in_fp8=(), gathered_in_fp8=""), fp8="")

    @property
    def at_fullest(self) -> "Job":
        """The same job while the busiest rank of experts has most rows."""
        return self if self.fullest == self.busiest else replace(self, busiest=self.fullest)

    def reducing(self, zero: int) -> int:
        """The ZeRO stage that reduces gradients as this one: with --batch-invariant-mode all do after each pass."""
        return max(zero, 2) if self.ordered else zero

    def shard_gradients(self, zero: int) -> int:
        """Bytes of a gradient in a rank's shard."""
        return self.main_gradients if self.reducing(zero) >= 2 else self.gradients

    @property
    def element(self) -> int:
        """Bytes of a weight and of an activation."""
        return 4 if self.mixed else ELEMENT[self.precision]

    def rank_setup(
        self,
        tp: int = 1,
        sp: bool = False,
        micro_batch_size: int = 1,
        cp: int = 1,
        cp_heads: int = 1,
        gathers: bool = False,
        *experts: int,
    ) -> RankSetup:
        """The sizes and formats of a rank's work in a layout. experts: ep, etp and ep_inner."""
        kernels = (self.backend, self.chunk, self.plain_softmax, self.plain_loss, self.plain_activation)
        shared = (cp, cp_heads, gathers, self.documents, *experts)
        sequences = micro_batch_size * self.facts.sequences
        own = dict(frozen=self.frozen, pairs=self.pairs, pairs_drop=self.facts.settings.lora_dropout > 0)
        own |= dict(largest_scores=self.largest_scores, fp8=self.fp8, fp8_wgrad=self.fp8_wgrad)
        own |= dict(fp8_held=bool(self.facts.gathered_in_fp8), busiest=self.busiest, ordered=self.ordered)
        return RankSetup(tp, sp, sequences, self.device, self.precision, self.element, *kernels, *shared, **own)


def teaching(config: Config, facts: Facts, dp: int, device: str) -> dict[str, object]:
    """The fields of a job about its teacher, or the model of `Recipe.frozen`; none without one.

    facts: of the student. Raises errors about the teacher.
    """
    folder = config.distillation.teacher_load
    asked = recipe_of(config).frozen(config) if folder is None else ("--teacher-load", folder)
    if asked is None:
        return {}
    settings = frozen_settings(*asked, frozen_record(*asked), config, facts.vocab_size)
    no_dropout = replace(settings.model, hidden_dropout=0.0, attention_dropout=0.0, lora_dropout=0.0)
    settings = replace(settings, model=no_dropout, batch=config.batch, data=config.data)
    own = recipe_of(settings).facts(settings, facts.vocab_size)
    job = replace(Job.of(settings, own, dp=dp, device=device, alone=True), selection=ALL, frozen=frozenset(), pairs=())
    return dict(teacher=job, compared=tuple(layer_pairs(config, settings).items()))


@dataclass(frozen=True)
class Layout:
    """How ranks share a job.

    shard:         ranks that share one set of optimizer shards, including those of cp; 1 with ZeRO stage 0
    chunks:        model chunks per rank (virtual pipeline stages)
    stage_layers:  layers of each stage, as in --pipeline-stage-layers; None: even
    offload:       fraction of the optimizer state in host memory
    disk:          fraction in files
    overlap:       data parallel communication overlaps with computation
    cp:            ranks that share each sequence
    cp_heads:      of these, ranks that exchange rows for heads: all with --cp-comm-type a2a, a part with a2a+p2p
    gathers:       the others gather keys and values (allgather); False: these travel round a ring (p2p). If layers differ,
                   the planner assumes that all gather, or if none does, that all are rings
    ep, etp:       ranks that hold different experts, and parts of each; None: as many as tp
    ep_inner:      ranks of ep on a node, if tokens go to experts in hops (flex); 0: a row goes to each expert
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch_size: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    shard: int = 1
    sp: bool = False
    recompute: Recompute = Recompute()
    stage_layers: Optional[str] = None
    offload: float = 0.0
    disk: float = 0.0
    param_offload: bool = False
    overlap: bool = False
    cp: int = 1
    cp_heads: int = 1
    gathers: bool = False
    ep: int = 1
    etp: Optional[int] = None
    ep_inner: int = 0
    parallel: Optional[Parallel] = None  # the settings that this layout was read from; they may be more detailed

    @classmethod
    def of(cls, config: Config, world_size: int) -> "Layout":
        """The layout of resolved settings."""
        p = config.parallel
        tp, pp, cp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
        dp = world_size // (tp * pp * cp)
        chunks = Pipeline.of(p, config.model.num_layers).chunks
        shard = 1 if p.sharding_stage == 0 else (p.sharding_degree or dp) * cp
        o = config.optimizer
        return cls(
            tp,
            pp,
            dp,
            config.batch.micro_batch_size,
            chunks,
            p.pipeline_schedule,
            p.sharding_stage,
            shard,
            p.sequence_parallel and tp > 1,
            config.recompute,
            p.pipeline_stage_layers,
            o.host_share,
            o.nvme_offload_fraction,
            o.param_cpu_offload,
            p.overlap_grad_reduce,
            cp,
            *_context_sharing(p),
            p.expert_model_parallel_size,
            p.expert_tensor_parallel_size,
            (ep_levels(p, config.planner.local_world_size or ranks().local_world_size or 8) or (0,))[0],
            # A list has no hash
            replace(p, **{name: value and tuple(value) for name, value in _context_words(p).items()}),
        )

    @property
    def order(self) -> str:
        """The schedule's name in `pipeline.schedule.SCHEDULES`, or a file: it says whether passes take turns."""
        return in_turns(self.schedule) if self.turns and not is_file(self.schedule) else self.schedule

    @cached_property
    def turns(self) -> bool:
        """Whether forward and backward passes take turns."""
        return bool(self.parallel) and takes_turns(self.parallel)

    @property
    def lags(self) -> bool:
        """Whether a backward pass that takes turns frees fewer layers than the forward pass adds: recomputed experts are
        exchanged twice as often.
        """
        return self.turns and not {MLP, LAYER}.isdisjoint(self.recompute.modules)

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def features(self, local_size: int, mixture: bool) -> str:
        """What the time of a step depends on, other than sizes. local_size: ranks of a node; mixture: whether the model has
        experts.

        >>> Layout(tp=2, pp=4, dp=2).features(8, mixture=False), Layout(dp=16, ep=8).features(8, mixture=True)
        ('tp, pp', 'experts, ep, dp over nodes')
        """
        words = {EXPERTS: mixture, "tp": self.tp > 1, "pp": self.pp > 1, "cp": self.cp > 1, "ep": self.ep > 1}
        words["dp over nodes"] = self.dp > 1 and self.tp * self.weight_ranks > local_size
        return ", ".join(name for name, has in words.items() if has) or "one node"

    @property
    def replicate(self) -> int:
        """Number of ranks with the same shards."""
        return self.weight_ranks // self.shard

    @property
    def weight_ranks(self) -> int:
        """Number of ranks with the same weights and other tokens: the ranks of data and context parallelism."""
        return self.dp * self.cp

    @cached_property
    def cuts(self) -> Cuts:
        """The numbers of ranks that divide weights: (tp, ep, etp)."""
        return Cuts(self.tp, self.ep, self.tp if self.etp is None else self.etp)

    @property
    def folded(self) -> bool:
        """Whether experts are divided in another way than dense weights."""
        return self.cuts != (self.tp, 1, self.tp)

    @property
    def dense_sizes(self) -> dict[str, int]:
        """The sizes of the mesh axes of dense weights, as in `Mesh`."""
        shard = self.shard // self.cp if self.zero else 1
        return dict(pp=self.pp, replicate=self.dp // shard, shard=shard, cp=self.cp, tp=self.tp)

    @cached_property
    def expert_sizes(self) -> dict[str, int]:
        """The sizes of the mesh axes of experts. Raises SettingsError for sizes that do not divide the ranks."""
        return expert_sizes(self.dense_sizes, self.ep, self.etp, shard_over_cp=self.zero > 0)

    @property
    def possible(self) -> bool:
        """Whether ep and etp divide the ranks of a stage."""
        try:
            return bool(self.expert_sizes)
        except SettingsError:
            return False

    @cached_property
    def data_sizes(self) -> dict[str, int]:
        """The sizes of the axes of ranks with other tokens (`Placement.data_axes`), for dense weights including cp."""
        return self.expert_sizes | dict(replicate=self.replicate, shard=self.shard)

    def rank_setup(self, job: Job) -> RankSetup:
        """The sizes and formats of a rank's work on the job's model."""
        last_job, setup = self.__dict__.get("_setup", (None, None))  # each figure of a layout asks for it
        if last_job is not job:
            own = self.tp, self.sp, self.micro_batch_size, self.cp, self.cp_heads, self.gathers
            self.__dict__["_setup"] = job, (setup := _rank_setup(job, *own, *self.cuts[1:], self.ep_inner))
        return setup

    def num_microbatches(self, job: Job) -> int:
        """Micro-batches per step on each rank."""
        return job.global_batch // (self.micro_batch_size * self.dp)

    @property
    def of_teacher(self) -> "Layout":
        """The layout of a teacher, which the ranks of a stage have whole."""
        names = "tp micro_batch_size sp cp cp_heads gathers".split()
        return Layout(**{name: getattr(self, name) for name in names})

    @property
    def teacher_shard(self) -> int:
        """Ranks that share a teacher's layers."""
        return self.shard if self.zero == 3 else 1

    def pipeline(self, num_layers: int) -> Pipeline:
        """The pipeline: the layers of each stage and rank."""
        if self.parallel:
            return Pipeline.of(self.parallel, num_layers)
        last, pipeline = self.__dict__.get("_cut", (None, None))  # many figures ask for it
        if last != num_layers:
            pipeline = _pipeline(self.pp, self.chunks, self.schedule, self.stage_layers, num_layers)
            self.__dict__["_cut"] = num_layers, pipeline
        return pipeline

    def _parallel(self) -> Parallel:
        explicit = self.chunks > 1 and self.chunks != default_chunks(self.schedule)
        return Parallel(
            tensor_model_parallel_size=self.tp,
            context_parallel_size=self.cp,
            cp_comm_type=self._comm_type and [self._comm_type],
            hierarchical_context_parallel_sizes=self.cp_levels and list(self.cp_levels),
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            moe_token_dispatcher_type="flex" if self.ep_inner else "alltoall",
            pipeline_model_parallel_size=self.pp,
            sequence_parallel=self.sp,
            pipeline_schedule=self.schedule,
            num_virtual_stages_per_pipeline_rank=self.chunks if explicit else None,
            pipeline_stage_layers=self.stage_layers,
            sharding_stage=self.zero,
            sharding_degree=self.shard // self.cp if self.zero and self.shard != self.weight_ranks else None,
            overlap_grad_reduce=self.overlap,
            overlap_param_gather=self.overlap and self.zero > 0,
        )

    @property
    def ep_levels(self) -> Optional[tuple[int, int]]:
        """Ranks of ep on a node, and nodes, if tokens go to experts in hops; None: they do not."""
        return (self.ep_inner, self.ep // self.ep_inner) if self.ep_inner else None

    @property
    def cp_levels(self) -> Optional[tuple[int, int]]:
        """--hierarchical-context-parallel-sizes of a2a+p2p; None: cp has one level."""
        return (self.cp_heads, self.cp // self.cp_heads) if 1 < self.cp_heads < self.cp else None

    @property
    def _comm_type(self) -> Optional[str]:
        """--cp-comm-type; None: the default."""
        if self.cp_heads > 1:
            return "a2a" if self.cp_heads == self.cp else "a2a+p2p"
        return "allgather" if self.gathers and self.cp > 1 else None

    @property
    def _comm_token(self) -> str:
        """The same in `short`, as `planner.parity.parse_layout` reads it."""
        if self.cp_heads > 1:
            return f"a2a{self.cp_heads}" if self.cp_heads < self.cp else "a2a"
        return "gather" * self.gathers

    def settings(self) -> dict[str, object]:
        """The settings of a run in this layout, without its global batch."""
        return dict(
            **vars(self._parallel()),
            **vars(self.recompute),
            micro_batch_size=self.micro_batch_size,
            optimizer_cpu_offload=self.offload > 0,
            param_cpu_offload=self.param_offload,
            optimizer_offload_fraction=self.offload or 1.0,
            nvme_offload_fraction=self.disk,
        )

    def applied(self, config: Config, global_batch: Optional[int] = None) -> Config:
        """The settings of a run, with this layout in place of their own."""
        made, own = vars(self._parallel()), config.parallel
        same_way = self.cp > 1 and (self.cp_heads, self.gathers) == _context_sharing(own)  # then keep the given words
        kept = {"batch_invariant_mode", "distributed_backend", "distributed_timeout_minutes", "pipeline_timeline"}
        kept.add("print_topology")
        kept |= _context_words(own).keys() if same_way else set()
        kept |= {name for name in made if config.given(name)}  # the search keeps these, maybe in other words
        if config.given("num_layers_per_virtual_pipeline_stage"):
            kept.add("num_virtual_stages_per_pipeline_rank")
        return config.derive(
            "--auto-parallel",
            **{name: value for name, value in self.settings().items() if name not in kept},
            global_batch_size=global_batch or config.batch.global_batch_size,
            optimizer=config.optimizer.rule,
        )

    def flags(self) -> list[str]:
        """The flags of this layout."""
        made = self.settings()
        known = [one for one in settings_of(GROUPS) if one.name in made]
        chosen = [one for one in known if made[one.name] != one.default or one.name == "micro_batch_size"]
        return [word for one in chosen for word in one.words(made[one.name])]

    def short(self) -> str:
        """A short name for tables, such as tp8sp-pp16vp2-dp4-zero1."""
        parts = [f"tp{self.tp}{'sp' * self.sp}"] * (self.tp > 1)
        parts += [f"cp{self.cp}{self._comm_token}"] * (self.cp > 1)
        parts += [f"ep{self.ep}"] * (self.ep > 1) + [f"etp{self.etp}"] * (self.cuts.etp != self.tp)
        if self.pp > 1:
            plain = self.schedule in ("1f1b", "interleaved")
            parts += [f"pp{self.pp}" + (f"vp{self.chunks}" * (self.chunks > 1) if plain else f"-{self.schedule}")]
        parts += [f"dp{self.dp}"] * (self.dp > 1)
        if self.zero:
            parts += [f"zero{self.zero}" + f"/{self.shard}" * (self.shard != self.weight_ranks)]
        return "-".join(parts) or "one rank"


def _context_words(p: Parallel) -> dict[str, Optional[list]]:
    """The settings that say how ranks of cp share attention."""
    names = "cp_comm_type", "hierarchical_context_parallel_sizes"
    return {name: getattr(p, name) for name in names}


def _context_sharing(p: Parallel) -> tuple[int, bool]:
    """`Layout.cp_heads` and `gathers` of settings."""
    cp, kinds = p.context_parallel_size, set(p.cp_comm_types)
    if cp == 1:
        return 1, False
    if kinds == {"a2a"}:
        return cp, False
    return (p.cp_levels[0] if kinds == {"a2a+p2p"} and p.cp_levels else 1), "allgather" in kinds


@lru_cache(maxsize=65536)
def _rank_setup(job: Job, *sizes: int) -> RankSetup:
    return job.rank_setup(*sizes)


@lru_cache(maxsize=4096)
def _pipeline(pp: int, chunks: int, schedule: str, stage_layers: Optional[str], num_layers: int) -> Pipeline:
    layout = Layout(pp=pp, chunks=chunks, schedule=schedule, stage_layers=stage_layers)
    return Pipeline.of(layout._parallel(), num_layers)
