# SPDX-License-Identifier: Apache-2.0
"""Runs the phases of a stage one after the other in this process, and reads and writes shards for tests."""

import json
from pathlib import Path

from megatron.corpus.recipe import StageWanted
from megatron.corpus.registry import load, phase_options, stage_address
from megatron.corpus.stage import flat


def phases_of(name: str, options: dict, shards: int = 1, memory: int = 1 << 30):
    """The phases of a stage that a recipe names, its options checked as the engine does."""
    stage = StageWanted(name, options, "recipe.yaml:3")
    return load(stage_address(stage), stage.where)(phase_options(stage), shards, memory)


def run_phases(phases, documents: list[Path], options: dict, folder: Path) -> tuple[dict[str, list[Path]], dict]:
    """(phase -> folder of each of its tasks, "documents" -> the shards; phase -> counts, numbers added up)."""
    made, counts = dict(documents=documents), {}
    for phase in phases:
        made[phase.name] = [folder / phase.name / str(number) for number in range(len(phase.split(made)))]
    for phase in phases:
        own = phase.own(made) or [{}] * len(made[phase.name])
        for inputs, output, more in zip(phase.split(made), made[phase.name], own, strict=True):
            output.mkdir(parents=True)
            for name, value in phase.run(flat(inputs), output, {**json.loads(json.dumps(options)), **more}).items():
                told = counts.setdefault(phase.name, {})
                told[name] = told[name] + value if name in told and isinstance(value, int) else value
    return made, counts


def write_shards(folder: Path, documents: list[dict], shards: int) -> list[Path]:
    """Documents in order, in so many files of about the same number of lines."""
    folder.mkdir(parents=True)
    paths = [folder / f"{number:03d}.jsonl" for number in range(shards)]
    for number, path in enumerate(paths):
        part = documents[len(documents) * number // shards : len(documents) * (number + 1) // shards]
        path.write_text("".join(json.dumps(document) + "\n" for document in part), encoding="utf-8")
    return paths


def read_shards(folders: list[Path]) -> list[dict]:
    """The documents that a last phase has written."""
    import zstandard

    lines = []
    for folder in folders:
        for path in sorted(folder.glob("*.jsonl.zst")):
            data = zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
            lines += data.decode().splitlines()
    return [json.loads(line) for line in lines]
