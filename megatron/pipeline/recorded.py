# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a run from its metrics: the schedule in words, and a step as it was planned as a picture."""

from pathlib import Path
from typing import NamedTuple, Optional

from megatron.errors import Failure
from megatron.pipeline.draw import svg
from megatron.pipeline.schedule import default_chunks, stage_map
from megatron.pipeline.simulate import bubble_of, make_rank_schedules, simulate
from megatron.telemetry.curves import data_url
from megatron.telemetry.figures import several
from megatron.telemetry.history import History

WIDEST = 16  # maximal number of pipeline ranks that are drawn


class RecordedPipeline(NamedTuple):
    """The schedule of a run with a pipeline."""

    schedule: str
    pp: int
    num_microbatches: int  # of a step
    chunks: int

    def __str__(self) -> str:
        of = f" of {self.chunks} chunks" * (self.chunks > 1)
        return f"{self.schedule} over {self.pp} ranks{of}, {self.num_microbatches} micro-batches a step"


def pipeline_of(history: History) -> Optional[RecordedPipeline]:
    """The pipeline of the newest launch; None without one."""
    p, b, mesh = history.group("parallel"), history.group("batch"), history.run.get("mesh") or {}
    pp, micro, whole = mesh.get("pp") or 1, b.get("micro_batch_size"), b.get("global_batch_size")
    if pp == 1 or not isinstance(micro, int) or not whole:
        return None
    dp = (mesh.get("replicate") or 1) * (mesh.get("shard") or 1)
    layers, each = history.group("model").get("num_layers"), p.get("num_layers_per_virtual_pipeline_stage")
    chunks = p.get("num_virtual_stages_per_pipeline_rank") or (layers // (pp * each) if layers and each else None)
    name = p.get("pipeline_schedule") or "1f1b"
    name = "interleaved" if name == "1f1b" and (chunks or 1) > 1 else name
    return RecordedPipeline(name, pp, whole // micro // dp, chunks or default_chunks(name))


def pictures_of(history: History, folder: Path) -> list[tuple[str, str]]:
    """(caption, data URL) of a run's pipeline: as planned, and as --profile measured it. folder: the run's"""
    profile = history.group("profiling").get("profile_dir")
    for place in dict.fromkeys([Path(profile) if profile else folder / "profile", folder / "profile"]):
        if (place / "timeline.svg").is_file():
            caption = "Steps as they were measured (--profile): passes, messages, and in red the waits for them"
            return [*planned(history), (caption, data_url((place / "timeline.svg").read_text(encoding="utf-8")))]
    return planned(history)


def planned(history: History) -> list[tuple[str, str]]:
    """The simulated passes of a step: (caption, picture). Empty without a pipeline, or for a schedule from a file."""
    pipeline = pipeline_of(history)
    if not pipeline or pipeline.pp > WIDEST:
        return []
    name, pp, num_microbatches, chunks = pipeline
    drawn = max(1, min(num_microbatches, 2 * pp))
    try:
        times = simulate(make_rank_schedules(name, pp, drawn, chunks), stage_map(name, pp, chunks))
    except (Failure, ValueError, KeyError):
        return []
    short = {key: (start / chunks, end / chunks) for key, (start, end) in times.items()}
    of = (
        f"{drawn} of {num_microbatches} micro-batches"
        if drawn < num_microbatches
        else several(num_microbatches, "micro-batch", "micro-batches")
    )
    caption = f"A step as it was planned, {of}: {bubble_of(times, pp):.0%} waiting (simulated, not measured)"
    return [(caption, data_url(svg({name: short}, "time: 1 is the forward pass of a rank's layers")))]
