# SPDX-License-Identifier: Apache-2.0
"""Compare published speeds and memory peaks of other suites' runs (`published_runs.csv`) with the planner's predictions.

The constants of `reached.py` are fitted to a third of llm-foundry's runs, which a hash selects. All other runs test them;
suites of other kinds are evaluated separately. fp8 runs are listed, not compared: this suite has no fp8.

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
from megatron.planner.device import GIB, Device, find
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import memory_report
from megatron.planner.reached import DATA, MODEL, Accuracy
from megatron.planner.speed import Cluster, step
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
}


@dataclass(frozen=True)
class PublishedRun:
    """A published run. Its fields are the columns of the file; `global` is `batch` here.

    recompute: none, full, core_attn, half (every second layer), op (torchtitan's choice of ops)
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

    @property
    def is_fitted(self) -> bool:
        """Whether constants were fitted to this run: a third of llm-foundry's, by a hash of device and sizes."""
        sizes = (self.gpu, self.gpus, self.layers, self.hidden, self.seq, self.micro, self.recompute)
        return self.source == FITTED and zlib.crc32(" ".join(map(str, sizes)).encode()) % 3 == 0

    @property
    def is_compared(self) -> bool:
        return self.precision == "bf16"

    @property
    def family(self) -> str:
        """The kind of layout, as in `reached.ACCURACY`."""
        return MODEL if self.tp * self.pp * self.cp > 1 else DATA

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def layout(self) -> Layout:
        half = ",".join(str(n) for n in range(1, self.layers, 2)) if self.recompute in ("half", "op") else None
        granularity = dict(none=None, half="full", op="full").get(self.recompute, self.recompute) or None
        return Layout(
            self.tp,
            self.pp,
            self.dp,
            self.micro,
            self.chunks,
            "interleaved" if self.chunks > 1 else "1f1b",
            self.zero,
            self.dp * self.cp if self.zero else 1,
            bool(self.sp),
            Recompute(granularity, no_recompute_layers=half),
            overlap=self.zero > 0,
            cp=self.cp,
            gathers=self.cp > 1 and self.kind in ("eager", "compiled"),  # torchtitan's default; Megatron-LM's is a ring
        )

    @cached_property
    def job(self) -> Job:
        # Only the 2021 and 2022 runs of Megatron-LM have dropout, as their paper's kernels show.
        drops = 0.1 if self.kind == "megatron" else 0.0
        model = Model(
            self.layers,
            self.hidden,
            self.heads,
            self.seq,
            max_position_embeddings=self.seq if self.arch != "llama" else None,
            hidden_dropout=drops,
            attention_dropout=drops,
            **ARCHITECTURES[self.arch],
        )
        model = replace(model, num_query_groups=self.groups, group_query_attention=self.groups is not None)
        model = replace(model, ffn_hidden_size=self.ffn) if self.ffn else model
        backend = "stored" if self.attention == "stored" else "auto"
        others = dict(plain_loss=True, plain_activation=True)  # this suite's kernels keep less
        return Job(GPTFacts(model, self.vocabulary), self.batch, "bf16", backend=backend, **others)

    @property
    def device(self) -> Device:
        name, _, limit = self.gpu.partition("-96GB-")
        if limit:  # torchtitan's H100
            return replace(find("H100-80GB"), name=self.gpu, memory_gb=96 * GIB / 1e9, bandwidth=0.8 * 2.4e12)
        return find(name)

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.device, self.gpus, min(8, self.gpus))

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
        """
        reports = [memory_report(self.job, self.layout, self.device, rank) for rank in {0, self.pp - 1}]
        return max(one.total - _kept_here(one.device) * (self.zero == 3) for one in reports)


def _kept_here(entries: dict[str, int]) -> float:
    return entries.get("weights", 0) + entries.get("gradient buffers", 0) / 2


ARCHITECTURES = {
    "gpt": {},
    "llama": dict(
        disable_bias_linear=True,
        position_embedding_type="rope",
        swiglu=True,
        normalization="RMSNorm",
        untie_embeddings_and_output_weights=True,
    ),
}
FITTED = "llm-foundry"


def runs() -> list[PublishedRun]:
    """All published runs."""
    kinds = {field.name: field.type for field in fields(PublishedRun)}
    names = {"global": "batch"}

    def read(name: str, text: str):
        kind = kinds[name]
        if kind == Optional[int] or kind == Optional[float]:
            return (int if kind == Optional[int] else float)(text) if text else None
        return kind(text)

    with open(FILE, encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    return [PublishedRun(**{names.get(k, k): read(names.get(k, k), text) for k, text in row.items()}) for row in rows]


# Errors of the predictions -------------------------------------------------------------------------------------------


def judges(family: str, gpu: str, all_runs: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The runs of a GPU that test the predictions for a kind of layout. No constant was fitted to them. Layouts with only
    data parallelism are compared with eager FSDP, other layouts with every suite that published such runs.
    """
    return [
        run
        for run in all_runs
        if run.is_compared
        and not run.is_fitted
        and run.family == family
        and run.gpu.startswith(gpu)
        and (run.kind == "eager" or family == MODEL)
    ]


def accuracy_of(chosen: Iterable[PublishedRun]) -> Accuracy:
    """Median and worst error of these runs."""
    errors = [abs(run.error) for run in chosen]
    return Accuracy(round(median(errors), 2), round(max(errors), 2), len(errors))


def summary(all_runs: Sequence[PublishedRun]) -> str:
    """The errors of predicted tokens/s by kind of suite, GPU and kind of layout, as a table in Markdown."""
    groups: dict[tuple, list[PublishedRun]] = {}
    for run in filter(lambda run: run.is_compared, all_runs):
        groups.setdefault((run.kind, run.gpu, run.family, run.source, run.is_fitted), []).append(run)
    rows = []
    for (kind, gpu, family, source, fitted), own in groups.items():
        errors = [run.error for run in own]
        worst, middle = max(map(abs, errors)), median(map(abs, errors))
        rows.append(
            [kind, source, gpu, family, "fitted" if fitted else "held back", len(own)]
            + [f"{middle:.1%}", f"{worst:.1%}", f"{mean(errors):+.1%}"]
        )
    head = ["kind of suite", "source", "GPU", "layouts", "constants", "runs", "median", "worst", "mean"]
    return markdown(sorted(rows), head)


def listing(all_runs: Sequence[PublishedRun]) -> str:
    """Every run, as a table in Markdown."""
    rows = []
    for run in all_runs:
        batch = f"{run.micro} x {run.layout.num_microbatches(run.job)}"
        again = "" if run.recompute == "none" else run.recompute
        speeds = [f"{run.tokens_per_second:,.0f}", "", ""]
        if run.is_compared:
            speeds[1:] = f"{run.predicted:,.0f}", f"{run.error:+.0%}"
        peak = "" if run.memory_gib is None else f"{run.memory_gib:g}"
        own = f"{run.memory() / GIB:.1f}" if run.memory_gib and run.is_compared else ""
        rows.append(
            [f"{run.source}{' *' * run.is_fitted}", run.kind, f"{run.gpus} x {run.gpu}", f"{run.layers} x {run.hidden}"]
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
