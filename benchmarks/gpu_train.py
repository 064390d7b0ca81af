# SPDX-License-Identifier: Apache-2.0
"""bf16 training on one GPU beside torch's own best: tokens/s, MFU and peak memory, and what the planner said of both.

    python benchmarks/gpu_train.py                                   # 124M, 1.3B, 6.7B and experts, about fifteen minutes
    python benchmarks/gpu_train.py --models 345M:16 --contenders suite-compiled torch-compiled --output runs/gpu-345M
    python benchmarks/gpu_train.py --models 1.3B:8 llama-3-8b:1 --contenders suite suite-fp8-tensorwise suite-fp8-blockwise
    python benchmarks/gpu_train.py --models 6.7B:4 --micro-batches 8 --contenders suite     # of one step
    python benchmarks/gpu_train.py --device cpu --models 124M:1 --layers 1 --steps 2    # to see that it runs

MODEL:N is a shape of `megatron/settings/presets.py` and its micro-batch. A model too large for the device is trained with
as many of its layers as the planner says fit, whoever trains it. Contenders, each in a process of its own: the suite as
it trains (synthetic samples, data loading, clipping, AdamW with fp32 main weights), and `gpu_peer.py` (FSDP2, SDPA,
fused AdamW), eager and compiled; a mixture of experts has no peer. Steps are timed five at a time, with a wait for the
device before and behind the five alone, as a run would do them, and the median of these means is taken. The machine is
calibrated first, so that predictions are those of `plan --calibration`.

The folder of --output gets results.json, results.md, calibration.json, and a profile of two steps of each contender.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

VOCABULARY = 50256  # tokens; with the end of a document 50257, padded to 50304
MODELS = ["124M:32", "1.3B:8", "6.7B:4", "olmoe-1b-7b:4"]
CONTENDERS = ["suite", "suite-compiled", "torch", "torch-compiled"]
IN_FP8 = {
    "suite-fp8-tensorwise": "--fp8-format hybrid",
    "suite-fp8-blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
}
SHAPES = {"124M": "gpt2-small"}  # names that presets.py does not have
WINDOW = 5  # steps that are timed together
COLUMNS = ["ms a step", "tokens/s", "TFLOP/s", "MFU", "peak GiB", "planned ms", "planned GiB"]
TARGETS = {"124M": 0.60, "1.3B": 0.50, "6.7B": 0.50}  # MFU of the suite's better mode on an H100 or H200


@dataclass(frozen=True)
class Measured:
    """One contender on one model. mfu and peak_bytes: None on a CPU; planned: None of torch's."""

    model: str
    contender: str
    layers: int
    micro_batch: int
    seconds: float  # of a step
    tokens_per_second: float
    tflops: float
    mfu: float | None
    peak_bytes: int | None
    planned_seconds: float | None = None
    planned_bytes: int | None = None
    device: str = ""
    torch: str = ""


def main() -> None:
    asked = read_flags()
    if asked.one:
        Path(asked.one).write_text(json.dumps(asdict(measure(asked))))
        return
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no GPU here: nothing to measure\n  -> --device cpu shows that the benchmark runs")
    started, folder = time.time(), Path(asked.output)
    folder.mkdir(parents=True, exist_ok=True)
    calibration = folder / "calibration.json"
    if not asked.skip_calibration:
        print("the machine is measured: calibration.json", flush=True)
        module = "megatron.tools.plan"
        subprocess.run(
            [sys.executable, "-m", module, "--calibrate", calibration], check=True, stdout=subprocess.DEVNULL
        )
    rows, failed = [], []
    for model in asked.models:
        name, _, micro = model.partition(":")
        layers = asked.layers or layers_that_fit(name, int(micro or 8), asked.device, calibration)
        for contender in contenders_of(name, asked.contenders, asked.micro_batches):
            row = in_a_process(asked, name, int(micro or 8), layers, contender, folder)
            if row is None:
                failed.append(f"{name} {contender}")
            else:
                rows.append(row)
                print(line(row), flush=True)
            (folder / "results.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
            (folder / "results.md").write_text(page(rows, failed, time.time() - started))
    print(f"{time.time() - started:.0f} s; {folder / 'results.md'}")
    if failed:
        sys.exit(
            f"error: {len(failed)} of {len(rows) + len(failed)} did not run: {', '.join(failed)} (see *.log in {folder})"
        )


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="MODEL:MICRO_BATCH")
    parser.add_argument("--contenders", nargs="+", choices=[*CONTENDERS, *IN_FP8], default=CONTENDERS)
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step; torch's contenders have one alone")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--layers", type=int, help="of every model (default: as many as fit)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", default="runs/gpu", help="folder")
    parser.add_argument(
        "--skip-calibration", action="store_true", help="the device's assumed speeds, or calibration.json"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the file of a contender's result: what a process does
    return parser.parse_args()


def contenders_of(name: str, asked: list[str], micro_batches: int = 1) -> list[str]:
    """Those of `asked` that can train a model: `gpu_peer.py` has no experts, and one micro-batch a step."""
    no_peer = micro_batches > 1 or settings(name, 1, None, "cpu").model.mixture
    return [contender for contender in asked if contender.startswith("suite") or not no_peer]


def in_a_process(asked, name: str, micro: int, layers: int, contender: str, folder: Path) -> Measured | None:
    """Measure a contender where nobody else's memory and caches are."""
    result, log = (folder / f"{name}-{contender}.{kind}" for kind in ("json", "log"))
    command = [sys.executable, __file__, "--one", result, "--models", f"{name}:{micro}", "--contenders", contender]
    command += [
        "--micro-batches",
        asked.micro_batches,
        "--layers",
        layers,
        "--steps",
        asked.steps,
        "--warmup",
        asked.warmup,
        "--device",
        asked.device,
    ]
    with open(log, "w") as said:
        done = subprocess.run([*map(str, command), "--output", folder], stdout=said, stderr=subprocess.STDOUT)
    if done.returncode:
        last = log.read_text().strip().splitlines()[-1:]
        print(f"{name} {contender} ended with {done.returncode}: {' '.join(last)}", flush=True)
        return None
    row = Measured(**json.loads(result.read_text()))
    result.unlink()
    return row


# ---- one contender ---------------------------------------------------------------------------------------------------


def measure(asked) -> Measured:
    import torch

    (contender,), ((name, _, micro),) = asked.contenders, (model.partition(":") for model in asked.models)
    micro, compiled, ours = int(micro), contender.endswith("compiled"), contender.startswith("suite")
    more = f"{IN_FP8.get(contender, '')} --global-batch-size {micro * asked.micro_batches}"
    config = settings(name, micro, asked.layers, asked.device, compiled, more)
    job, layout, cluster = planned(config, asked.device, Path(asked.output) / "calibration.json")
    if ours:
        step, close = suite_step(config)
    else:
        import gpu_peer

        step, close = gpu_peer.make_step(config.model, 50304, micro, asked.device, compiled), dist_end
    times = timed(step, asked.steps, asked.warmup, asked.device)
    peak = torch.cuda.max_memory_allocated() if asked.device == "cuda" else None
    profile(step, Path(asked.output) / f"{name}-{contender}-trace.json.gz")
    close()
    seconds = statistics.median(times)
    tokens = asked.micro_batches * micro * config.model.seq_length / seconds
    rate = tokens * job.facts.flops()
    from megatron.planner.speed import step as step_time

    return Measured(
        name,
        contender,
        asked.layers,
        micro,
        seconds,
        tokens,
        rate / 1e12,
        rate / cluster.device.peak("bf16") if asked.device == "cuda" else None,
        peak,
        step_time(job, layout, cluster).seconds if ours else None,
        allocated(job, layout, cluster.device) if ours else None,
        cluster.device.name,
        torch.__version__,
    )


def settings(name: str, micro: int, layers: int | None, device: str, compiled: bool = False, more: str = ""):
    """Resolved settings of the suite for a model."""
    from megatron.settings.parse import parse_pretrain
    from megatron.training.rules import resolve

    flags = f"""--model-name-or-path {SHAPES.get(name, name)} --mock-data --vocab-size {VOCABULARY} --device {device}
        --micro-batch-size {micro} --train-iters 100000 --lr 1e-4 --hidden-dropout 0 --attention-dropout 0 --bf16
        --eval-iters 0 --log-interval 1000000"""
    flags += f" --num-layers {layers}" * bool(layers) + " --torch-compile" * compiled
    return resolve(parse_pretrain([*flags.split(), *more.split()]), 1)


def planned(config, device: str, calibration: Path):
    """The planner's job, layout and cluster: this machine as it was measured, or as it is assumed."""
    from megatron.planner import target
    from megatron.planner.layout import Layout

    if calibration.exists():
        config = replace(config, planner=replace(config.planner, calibration=str(calibration)))
    cluster, _ = target.cluster_of(config, {})
    return target.job_of(config, cluster)[0], Layout.of(config, 1), cluster


def allocated(job, layout, device) -> int:
    """Bytes of tensors that the planner expects at the fullest moment: its ledger without what torch does not allocate."""
    from megatron.planner.memory import memory_report

    entries = memory_report(job, layout, device).device
    return sum(size for name, size in entries.items() if name not in ("device context", "fragmentation"))


def layers_that_fit(name: str, micro: int, device: str, calibration: Path) -> int:
    """The model's layers, or as many as the planner puts on this device."""
    from megatron.planner.memory import memory_report

    config = settings(name, micro, None, device)
    for layers in range(config.model.num_layers, 0, -1):
        smaller = replace(config, model=replace(config.model, num_layers=layers))
        job, layout, cluster = planned(smaller, device, calibration)
        if memory_report(job, layout, cluster.device).total <= 0.92 * cluster.device.memory_bytes:  # peers take more
            return layers
    sys.exit(f"error: not one layer of {name} with micro-batch {micro} fits {cluster.device.memory_gb:.0f} GB")


def suite_step(config):
    """(a step of the suite as pretrain_gpt.py does it, what ends the run)."""
    import pretrain_gpt
    from megatron.training.build import build_run
    from megatron.training.step import train_step

    run = build_run(config, pretrain_gpt.recipe())
    for stage in run.stages:
        stage.train()
    return lambda: train_step(run), run.close


def dist_end() -> None:
    import torch.distributed

    torch.distributed.destroy_process_group()


def timed(step, steps: int, warmup: int, device: str) -> list[float]:
    """Seconds of a step behind the warm-up, each the mean of up to `WINDOW` steps that nobody waits between."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(warmup):
        step()
    wait()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()  # compiling takes memory of its own
    times = []
    for done in range(0, steps, WINDOW):
        count, start = min(WINDOW, steps - done), time.perf_counter()
        for _ in range(count):
            step()
        wait()
        times.append((time.perf_counter() - start) / count)
    return times


def profile(step, path: Path) -> None:
    """A trace of two steps, for chrome://tracing or Perfetto."""
    import torch

    with torch.profiler.profile() as record:
        step()
        step()
    record.export_chrome_trace(str(path))


# ---- what is told ----------------------------------------------------------------------------------------------------


def line(row: Measured) -> str:
    words = [f"{row.model} ({row.layers} layers) x {row.micro_batch}, {row.contender}: {row.seconds * 1e3:.1f} ms"]
    words += [f"{row.tokens_per_second:,.0f} tokens/s", f"{row.tflops:.1f} TFLOP/s"]
    if row.mfu is not None and row.peak_bytes is not None:
        words += [f"MFU {row.mfu:.1%}", f"{row.peak_bytes / 2**30:.1f} GiB"]
    return ", ".join(words)


def page(rows: list[Measured], failed: list[str], seconds: float) -> str:
    """The results as Markdown: a table, then what was promised and whether it was kept."""
    first = rows[0] if rows else None
    lines = [
        "# One GPU",
        "",
        f"{first.device if first else 'no device'}, torch {first.torch if first else '-'}, bf16, no dropout; "
        f"`python benchmarks/gpu_train.py`, {seconds:.0f} s.",
        "",
        f"| model | layers | micro-batch | contender | {' | '.join(COLUMNS)} |",
        f"|{'---|' * (4 + len(COLUMNS))}",
    ]
    for row in rows:
        cells = [row.model, row.layers, row.micro_batch, row.contender, f"{row.seconds * 1e3:.1f}"]
        cells += [f"{row.tokens_per_second:,.0f}", f"{row.tflops:.1f}", share(row.mfu), gib(row.peak_bytes)]
        cells += ["-" if row.planned_seconds is None else f"{row.planned_seconds * 1e3:.1f}", gib(row.planned_bytes)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| promised | measured | kept |", "|---|---|---|"]
    lines += [f"| {what} | {found} | {'yes' if kept else '**no**'} |" for what, found, kept in promises(rows)]
    lines += ["", *(f"- did not run: {name}" for name in failed)]
    return "\n".join(lines).rstrip() + "\n"


def promises(rows: list[Measured]) -> list[tuple[str, str, bool]]:
    """(what, what was measured, whether it is enough) of each model: MFU, torch beaten, memory and time as planned."""
    found = []
    for model in dict.fromkeys(row.model for row in rows):
        of = {row.contender: row for row in rows if row.model == model}
        suite = [of[name] for name in ("suite", "suite-compiled") if name in of]
        torchs = [of[name] for name in ("torch", "torch-compiled") if name in of]
        best = max(suite, key=lambda row: row.tokens_per_second, default=None)
        peer = max(torchs, key=lambda row: row.tokens_per_second, default=None)
        if best and best.mfu is not None and model in TARGETS:
            found.append((f"{model}: MFU {TARGETS[model]:.0%}", share(best.mfu), best.mfu >= TARGETS[model]))
        if best and peer:
            ratio = best.tokens_per_second / peer.tokens_per_second
            found.append((f"{model}: as fast as torch's best", f"{ratio:.2f} x {peer.contender}", ratio >= 1))
        eager = of.get("suite")
        if eager and eager.peak_bytes:
            ratio = eager.planned_bytes / eager.peak_bytes
            found.append((f"{model}: planned memory within 5 %", f"{ratio:.3f}", abs(ratio - 1) <= 0.05))
        if eager:
            ratio = eager.planned_seconds / eager.seconds
            found.append((f"{model}: planned time within 10 %", f"{ratio:.2f}", abs(ratio - 1) <= 0.10))
    return found


def share(mfu: float | None) -> str:
    return "-" if mfu is None else f"{mfu:.1%}"


def gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f}"


if __name__ == "__main__":
    main()
