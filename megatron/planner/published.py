# SPDX-License-Identifier: Apache-2.0
"""Compare published speeds and memory peaks of other suites' runs (`published_runs.csv`) with the planner's predictions.

The constants of `reached_speed.py` are fitted to a third of llm-foundry's runs, which a hash selects. All other runs test
them; suites of other kinds are evaluated separately. fp8 runs are listed, not compared: this suite has no fp8.

    >>> run = runs()[0]
    >>> run.source, run.gpu, run.gpus, run.measured
    ('llm-foundry', 'A100-40GB', 8, 156735.0)
"""

import csv
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple, Optional

from megatron.model.gpt.facts import GPTFacts
from megatron.model.layer_ops import CORE, MODULES
from megatron.planner.cluster import Cluster
from megatron.planner.device import GIB, Device, find
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import memory_report
from megatron.planner.reached_speed import Accuracy
from megatron.planner.speed import step
from megatron.settings.schema import Model, Recompute

FILE = Path(__file__).with_name("published_runs.csv")


class PublishedSource(NamedTuple):
    address: str
    version: str
    what: str


GITHUB = "github.com"
SOURCES = {
    "llm-foundry": PublishedSource(
        f"{GITHUB}/mosaicml/llm-foundry/scripts/train/benchmarking/README.md",
        "061f2c7",
        "MPT of 125M to 70B; PyTorch FSDP, eager, Triton FlashAttention",
    ),
    "torchtitan-a100": PublishedSource(
        f"{GITHUB}/pytorch/torchtitan/docs/performance.md", "0413364", "Llama 2 and 3; FSDP2 on 64 A100"
    ),
    "torchtitan-h100": PublishedSource(
        f"{GITHUB}/pytorch/torchtitan/benchmarks/llama3_h100_202412_torchtitan.md",
        "31a17bf (December 2024)",
        "Llama 3.1; H100 of 96 GB HBM2e at 500 W",
    ),
    "torchtitan-async-tp": PublishedSource(
        f"{GITHUB}/pytorch/torchtitan/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
        "2887250 (June 2025)",
        "Llama 3.1; FSDP2 and tensor parallelism, without asynchronous TP; the same H100",
    ),
    "torchtitan-h200": PublishedSource(
        f"{GITHUB}/pytorch/torchtitan/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md",
        "1af2937 (June 2025)",
        "Llama 3.1 8B on H200",
    ),
    "megatron-2021": PublishedSource(
        "arxiv.org/abs/2104.04473, tables 1 and 2",
        "2021",
        "GPT of 1.7B to 1T on A100; hardware FLOP/s, with recomputation; micro-batches of table 1 are not published",
    ),
    "megatron-2022": PublishedSource("arxiv.org/abs/2205.05198, table 5", "2022", "GPT of 22B to 1T on A100"),
    "llm.c": PublishedSource(
        f"{GITHUB}/karpathy/llm.c/scripts/run_gpt2_*.sh", "039904e, 100bba0", "GPT-2 in C and CUDA, cuDNN attention"
    ),
    "megatron-bridge-25.11": PublishedSource(
        f"{GITHUB}/NVIDIA-NeMo/Megatron-Bridge/docs/performance-summary.md", "00b7660 (25.11)", "Llama 3, fp8"
    ),
    "megatron-bridge-26.02": PublishedSource(
        f"{GITHUB}/NVIDIA-NeMo/Megatron-Bridge/docs/performance-summary-archive.md", "0a25f91 (26.02)", "Llama 3, fp8"
    ),
    "megatron-bridge-moe": PublishedSource(
        f"{GITHUB}/NVIDIA-NeMo/Megatron-Bridge/docs/performance-summary-archive.md, with its recipes",
        "067f987 (25.11 to 26.04.01)",
        "gpt-oss 120B, balanced routing",
    ),
    "megatron-bridge-qwen3": PublishedSource(
        f"{GITHUB}/NVIDIA-NeMo/Megatron-Bridge/docs/training/moe-optimization.md, skills/nemo-mbridge-perf-*",
        "067f987",
        "Qwen3 30B-A3B, balanced routing, gradients in bf16; HybridEP without overlap, with it, tuned, and all-to-all",
    ),
    "automodel": PublishedSource(
        f"{GITHUB}/NVIDIA-NeMo/Automodel/docs/performance-summary.mdx, with its recipes",
        "36044ad",
        "Qwen3 30B-A3B, gpt-oss; FSDP2 with DeepEP, balanced routing",
    ),
    "automodel-dispatchers": PublishedSource(
        f"{GITHUB}/NVIDIA-NeMo/Automodel/docs/deepep_vs_hybridep_benchmark.md",
        "1800766",
        "Qwen3 30B-A3B; DeepEP, then HybridEP",
    ),
    "moe-model-zoo": PublishedSource(
        f"{GITHUB}/yanring/Megatron-MoE-ModelZoo/best_practice/qwen3/readme.md",
        "e865051",
        "Qwen3 235B-A22B, Megatron-Core",
    ),
    "pai-megatron": PublishedSource(
        f"{GITHUB}/alibaba/Pai-Megatron-Patch, issue 658", "2b201af", "Qwen3 235B-A22B, Megatron-Core, balanced routing"
    ),
}


@dataclass(frozen=True)
class PublishedRun:
    """A published run. Its fields are the columns of the file; `global` is `batch` here.

    recompute: none, full, core_attn, half (every second layer), op (torchtitan's choice of ops), or --recompute-modules
    experts, topk, ep: of a mixture, whose `ffn` is the width of an expert and whose experts have no tensor parallelism
    dispatch:  to each expert of a token (all-to-all), or once to each node with some of them (DeepEP, HybridEP)
    turns:     whether exchanges overlap with another micro-batch
    reduce:    precision of the gradients' reduction
    unit:      of `measured`: tokens/s/GPU, s/step or TFLOP/s/GPU
    """

    source: str
    kind: str
    gpu: str
    gpus: int
    layers: int
    hidden: int
    heads: int
    groups: Optional[int]
    ffn: Optional[int]
    seq: int
    vocabulary: int
    arch: str
    micro: int
    batch: int
    tp: int
    pp: int
    chunks: int
    cp: int
    sp: int
    zero: int
    recompute: str
    attention: str
    reduce: str
    precision: str
    measured: float
    unit: str
    memory_gib: Optional[float]
    parameters: Optional[int]
    experts: Optional[int] = None
    topk: Optional[int] = None
    ep: Optional[int] = None
    dispatch: str = ""
    turns: Optional[int] = None

    @property
    def is_kept_back(self) -> bool:
        """Whether it is one of the mixtures, by a hash of model, GPUs and layout, whose predictions were first looked at
        when all changes for mixtures were made.
        """
        parts = (self.hidden, self.gpu, self.gpus, self.micro, self.tp, self.pp, self.ep, self.recompute, self.dispatch)
        return self.experts is not None and zlib.crc32(" ".join(map(str, parts)).encode()) % 3 == 0

    @property
    def is_fitted(self) -> bool:
        """Whether constants were fitted to this run: a third of llm-foundry's, by a hash of device and sizes."""
        sizes = (self.gpu, self.gpus, self.layers, self.hidden, self.seq, self.micro, self.recompute)
        return self.source == FITTED and zlib.crc32(" ".join(map(str, sizes)).encode()) % 3 == 0

    @property
    def share(self) -> str:
        """The part of the runs that it belongs to."""
        if self.experts is not None:
            return "kept back" if self.is_kept_back else "seen"
        return "fitted" if self.is_fitted else "held back"

    @property
    def is_compared(self) -> bool:
        return self.precision == "bf16"

    @property
    def features(self) -> str:
        """The features of its layout, as in `reached_speed.ACCURACY`."""
        return self.layout.features(self.cluster.local_size, self.experts is not None)

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def layout(self) -> Layout:
        half = ",".join(str(n) for n in range(1, self.layers, 2)) if self.recompute in ("half", "op") else None
        granularity = dict(none=None, half="full", op="full").get(self.recompute, self.recompute) or None
        recompute = Recompute(granularity, no_recompute_layers=half)
        if modules := set(self.recompute.split()) & set(MODULES) - {CORE}:
            recompute = Recompute(CORE, recompute_modules=sorted(modules))
        layout = Layout(
            self.tp,
            self.pp,
            self.dp,
            self.micro,
            self.chunks,
            "interleaved" if self.chunks > 1 else "1f1b",
            self.zero,
            self.dp * self.cp if self.zero else 1,
            bool(self.sp),
            recompute,
            self._stage_layers,
            overlap=self.zero > 0,
            cp=self.cp,
            gathers=self.cp > 1 and self.kind in ("eager", "compiled"),  # torchtitan's default; Megatron-LM's is a ring
            ep=self.ep or 1,
            etp=1 if self.experts else None,
        )
        if not self.turns:
            return layout
        return replace(layout, parallel=replace(layout._parallel(), overlap_moe_expert_parallel_comm=True))

    @property
    def _stage_layers(self) -> Optional[str]:
        """Stages in which embedding and loss count as layers, if the layers alone do not fill them evenly."""
        stages = self.pp * self.chunks
        if self.layers % stages == 0:
            return None
        each = (self.layers + 2) // stages
        return ",".join(map(str, [each - 1, *[each] * (stages - 2), each - 1]))

    @cached_property
    def job(self) -> Job:
        # Only the 2021 and 2022 runs of Megatron-LM have dropout, as their paper's kernels show.
        drops = 0.1 if self.kind == "megatron" else 0.0
        model = Model(
            self.layers,
            self.hidden,
            self.heads,
            self.seq,
            max_position_embeddings=self.seq if self.arch == "gpt" else None,
            hidden_dropout=drops,
            attention_dropout=drops,
            **ARCHITECTURES[self.arch],
        )
        model = replace(model, num_query_groups=self.groups, group_query_attention=self.groups is not None)
        model = replace(model, ffn_hidden_size=self.ffn) if self.ffn else model
        if self.experts:
            sizes = dict(num_experts=self.experts, moe_router_topk=self.topk, moe_ffn_hidden_size=self.ffn)
            model = replace(model, **sizes, moe_router_load_balancing_type=["none"])
        backend = "stored" if self.attention == "stored" else "auto"
        others = dict(plain_loss=True, plain_activation=True)  # this suite's kernels keep less
        if self.kind == "transformer-engine":  # fused, too
            others = dict(gradients=2 if self.reduce == "bf16" else 4)
        return Job(GPTFacts(model, self.vocabulary), self.batch, "bf16", backend=backend, **others)

    @property
    def device(self) -> Device:
        name, _, limit = self.gpu.partition("-96GB-")
        if limit:  # torchtitan's H100
            return replace(find("H100-80GB"), name=self.gpu, memory_gb=96 * GIB / 1e9, bandwidth=0.8 * 2.4e12)
        return find(name)

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.device, self.gpus, min(8, self.gpus), self.topk if self.dispatch == "once" else None)

    @property
    def tokens_per_second(self) -> float:
        """Measured tokens per second of a GPU."""
        tokens = self.batch * self.seq
        if self.unit == "tokens/s/GPU":
            return self.measured
        if self.unit == "s/step":
            return tokens / self.measured / self.gpus
        h, l = self.hidden, self.layers  # arXiv:2104.04473, equation 3
        each = 96 * l * h**2 * (1 + self.seq / (6 * h) + self.vocabulary / (16 * l * h))
        return self.measured * 1e12 / each

    def tokens_on(self, device: Device) -> float:
        """Predicted tokens per second of a GPU with these speeds."""
        return step(self.job, self.layout, replace(self.cluster, device=device)).tokens_per_second(self.job) / self.gpus

    @cached_property
    def predicted(self) -> float:
        """Predicted tokens per second of a GPU."""
        return self.tokens_on(self.device)

    @property
    def error(self) -> float:
        """Predicted over measured tokens per second, less 1."""
        return self.predicted / self.tokens_per_second - 1

    def memory(self) -> float:
        """Predicted bytes of the fullest rank if state is kept as in FSDP. FSDP casts a shard of fp32 weights before each
        gather, while this suite keeps a copy in bf16. Its gradients arrive in bf16, while they arrive in fp32 here.
        Of mixtures, peaks of the allocator were published.
        """
        reports = [memory_report(self.job, self.layout, self.device, rank) for rank in {0, self.pp - 1}]
        if self.kind == "transformer-engine" and self.experts and self.pp == 1:
            return reports[0].total - sum(reports[0].device[name] for name in NOT_ALLOCATED)
        return max(one.total - _kept_here(one.device) * (self.zero == 3) for one in reports)


NOT_ALLOCATED = ("fragmentation", "communication buffers", "device context")  # by torch's allocator


def _kept_here(entries: dict[str, int]) -> float:
    return entries.get("weights", 0) + entries.get("gradient buffers", 0) / 2


LLAMA = dict(
    disable_bias_linear=True,
    position_embedding_type="rope",
    swiglu=True,
    normalization="RMSNorm",
    untie_embeddings_and_output_weights=True,
)
ARCHITECTURES = {
    "gpt": {},
    "llama": LLAMA,
    "qwen3-moe": dict(LLAMA, qk_layernorm=True, kv_channels=128),
    "gpt-oss": dict(
        LLAMA,
        swiglu=False,
        quick_geglu=True,
        glu_linear_offset=1.0,
        disable_bias_linear=False,
        kv_channels=64,
        softmax_type="learnable",
        window_size="127,0",
        window_attn_skip_freq=2,
    ),
}
FITTED = "llm-foundry"
PLAIN = ("one node", "dp over nodes")  # features of layouts with only data parallelism


def runs() -> list[PublishedRun]:
    """All published runs."""
    kinds = {field.name: field.type for field in fields(PublishedRun)}
    names = {"global": "batch"}

    def read(name: str, text: str):
        kind = kinds[name]
        if kind in (Optional[int], Optional[float]):
            return (int if kind == Optional[int] else float)(text) if text else None
        return kind(text)

    with open(FILE, encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [PublishedRun(**{names.get(k, k): read(names.get(k, k), text) for k, text in row.items()}) for row in rows]


# Errors of the predictions -------------------------------------------------------------------------------------------


def judges(features: str, gpu: str, all_runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs of a GPU that test the predictions for layouts with these features. No constant was fitted to them. Layouts
    with only data parallelism are compared with eager FSDP, other layouts with every suite that published such runs.
    """
    return [
        run
        for run in all_runs
        if run.is_compared
        and not run.is_fitted
        and run.features == features
        and run.gpu.startswith(gpu)
        and (run.kind == "eager" or features not in PLAIN)
    ]


def accuracy_of(chosen: Iterable[PublishedRun]) -> Accuracy:
    """Median and worst error of these runs."""
    errors = [abs(run.error) for run in chosen]
    return Accuracy(round(median(errors), 2), round(max(errors), 2), len(errors))


def summary(all_runs: Sequence[PublishedRun]) -> str:
    """The errors of predicted tokens/s by kind of suite, GPU and kind of layout, as a table in Markdown."""
    groups: dict[tuple, list[PublishedRun]] = {}
    for run in filter(lambda run: run.is_compared, all_runs):
        groups.setdefault((run.kind, run.gpu, run.features, run.source, run.share), []).append(run)
    rows = []
    for (kind, gpu, features, source, share), own in groups.items():
        errors = [run.error for run in own]
        worst, middle = max(map(abs, errors)), median(map(abs, errors))
        rows.append(
            [kind, source, gpu, features, share, len(own)] + [f"{middle:.1%}", f"{worst:.1%}", f"{mean(errors):+.1%}"]
        )
    head = ["kind of suite", "source", "GPU", "features", "share", "runs", "median", "worst", "mean"]
    return markdown(sorted(rows), head)


def listing(all_runs: Sequence[PublishedRun]) -> str:
    """Every run, as a table in Markdown."""
    rows = []
    for run in all_runs:
        batch = f"{run.micro} x {run.layout.num_microbatches(run.job)}"
        again = "" if run.recompute == "none" else run.recompute + ", overlap" * bool(run.turns)
        speeds = [f"{run.tokens_per_second:,.0f}", "", ""]
        if run.is_compared:
            speeds[1:] = f"{run.predicted:,.0f}", f"{run.error:+.0%}"
        peak = "" if run.memory_gib is None else f"{run.memory_gib:g}"
        own = f"{run.memory() / GIB:.1f}" if run.memory_gib and run.is_compared else ""
        rows.append(
            [
                f"{run.source}{' *' * run.is_fitted}{' +' * run.is_kept_back}",
                run.kind,
                f"{run.gpus} x {run.gpu}",
                f"{run.layers} x {run.hidden}",
            ]
            + [run.seq, batch, run.layout.short(), again, run.precision, *speeds, peak, own]
        )
    head = ["source", "kind", "GPUs", "layers x width", "tokens", "micro-batch", "layout", "recompute", "precision"]
    return markdown(rows, [*head, "tokens/s/GPU", "predicted", "error", "peak GiB", "predicted GiB"])


def report() -> str:
    """All tables."""
    published = runs()
    return "\n\n".join([summary(published), sources(), listing(published)])


def sources() -> str:
    """The sources, as a table in Markdown."""
    return markdown([[name, *source] for name, source in SOURCES.items()], ["source", "where", "version", "what"])


def markdown(rows: Sequence[Sequence], head: Sequence[str]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
