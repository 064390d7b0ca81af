# SPDX-License-Identifier: Apache-2.0
"""Flip one bit in each of many small trainings, and see which check finds it, or what it does to the weights.

    OMP_NUM_THREADS=1 python benchmarks/bit_flips.py --flips 500 --output runs/flips.jsonl
    python benchmarks/bit_flips.py --table runs/flips.jsonl

Each flip is one bit of one fp32 number in one of KINDS, on one rank, at a random moment of a random step: before an op of
the schedule, or after the update (a fifth of those of weights and state). All bits are as likely. The runs have two ranks,
--rerun-mode validate_results --rerun-interval N (default 1), --check-replicas-interval 1, and one of LAYOUTS in turn. A
clean run of each layout says what the weights should be. A flip that no check finds is `no effect` (the weights are those
of the clean run, to the bit), `harmless` (the last loss is within 0.1 % of its) or `missed`.
"""

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import NumericsError
from megatron.mpu import collectives
from megatron.mpu.forked import RankFailed, run_ranks
from megatron.settings.parse import parse_pretrain
from megatron.telemetry.events import read_events
from megatron.training import loop
from megatron.training.drill import flip_bit
from megatron.training.rules import resolve

KINDS = ("weights", "activations", "gradients", "state", "messages")
LAYOUTS = {
    "dp2": "",
    "ZeRO 1, dp2": "--use-distributed-optimizer",
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
}
STEPS, MICRO_BATCHES = 8, {"dp2": 2, "ZeRO 1, dp2": 2, "tp2": 4, "pp2": 4}
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --device cpu --num-workers 0 "
    f"--train-iters {STEPS} --log-interval 1000 --no-progress-bar "
)
CHECKS = "--rerun-mode validate_results --check-replicas-interval 1 --rerun-interval"
AFTER = 0.2  # share of flips in weights and state that happen after the update


class Flip:
    """One flip. The shares of [0, 1) choose among what there is when the time has come."""

    def __init__(self, number: int, seed: int):
        draw = random.Random(f"{seed} {number}")
        self.number, self.kind = number, KINDS[number % len(KINDS)]
        self.layout = [*LAYOUTS][number // len(KINDS) % len(LAYOUTS)]
        self.rank, self.step, self.bit = draw.randrange(2), draw.randrange(3, STEPS), draw.randrange(32)
        self.when, self.which, self.where = draw.random(), draw.random(), draw.random()
        self.done = ""  # what was flipped
        self.calls, self.before = 0, 0  # ops or messages of this step, and of the step before

    def flip(self, name: str, x: torch.Tensor) -> None:
        flip_bit(x.data, int(self.where * x.numel()), self.bit)  # autograd does not see it
        self.done = name

    def of(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Flip in one of these tensors, each of which is chosen by its share of all elements."""
        named = [(name, x) for name, x in named if x is not None and x.numel()]
        at = self.which * sum(x.numel() for _, x in named)
        for name, x in named:
            if at < x.numel():
                return self.flip(name, x)
            at -= x.numel()


def armed(flip: Flip, rank: int) -> None:
    """Let the flip happen in this process."""
    if rank != flip.rank:
        return
    train_step = loop.train_step
    after = flip.kind in ("weights", "state") and flip.when < AFTER
    ops = 2 * MICRO_BATCHES[flip.layout]
    due = int(flip.when * ops)

    def acting(run):
        step = run.state.iteration + 1
        flip.before, flip.calls = flip.calls, 0
        if step == 1:
            watch = run.watch.heartbeat.watch

            def watching(op):
                if flip.kind in ("weights", "gradients", "state") and not after and is_due(run):
                    flip.of(tensors(run, flip.kind))
                flip.calls += flip.kind != "messages"
                watch(op)

            def is_due(run) -> bool:
                return run.state.iteration + 1 == flip.step and flip.calls == due and not flip.done

            run.watch.heartbeat.watch = watching
            if flip.kind == "activations":
                watch_outputs(run, flip)
            if flip.kind == "messages":
                watch_messages(run, flip)
        result = train_step(run)
        if after and step == flip.step and not flip.done:
            flip.of(tensors(run, flip.kind))
        return result

    loop.train_step = acting


def tensors(run, kind: str) -> list[tuple[str, torch.Tensor]]:
    optimizer = run.optimizer
    if kind == "weights":
        return [(slot.name, slot.parameter) for unit in optimizer.units for slot in unit.slots]
    if kind == "state":
        flats = [(name, flat) for state in optimizer.states for name, flat in state.moments.items()]
        return flats + [("main weights", state.main) for state in optimizer.states]
    tallies = optimizer.gradients.tallies.values()
    return [(name, view) for tally in tallies for name, view in tally.views.items()]


def watch_outputs(run, flip: Flip) -> None:
    """Flip in the output of a module of a step, in the order of their forward passes."""
    passes: list[int] = [0, 0]  # of this step, of the step before

    def hook(module, given, output):
        x = output[0] if isinstance(output, tuple) else output
        if not isinstance(x, torch.Tensor) or not x.is_floating_point() or not module.training or x.dim() < 2:
            return
        step = run.state.iteration + 1
        if passes[0] and step != hook.step:
            passes[:] = [0, passes[0]]
        hook.step = step
        # The step before was computed three times, or twice if there is no other rank.
        if step == flip.step and not flip.done and passes[0] == int(flip.which * passes[1] / times(run)):
            flip.flip(type(module).__name__, x)
        passes[0] += 1

    hook.step = 0
    for stage in run.stages:
        for module in stage.modules():
            module.register_forward_hook(hook)


def times(run) -> int:
    """How often a step is computed."""
    if not run.rerun or run.rerun.settings.rerun_interval != 1:
        return 1
    return 3 if run.rerun.places else 2


def watch_messages(run, flip: Flip) -> None:
    """Flip in what a message brings."""

    class Arriving:
        def __init__(self, name, x, work):
            self.name, self.x, self.work = name, x, work

        def wait(self, *args):
            result = self.work.wait(*args)
            arrived(self.name, self.x)
            return result

        def __getattr__(self, name):
            return getattr(self.work, name)

    def arrived(name: str, x: torch.Tensor) -> None:
        wanted = run.state.iteration + 1 == flip.step and flip.calls == int(flip.which * flip.before / times(run))
        flip.calls += 1
        if wanted and not flip.done:
            flip.flip(name, x)

    def around(holder, name: str) -> None:
        call = getattr(holder, name)

        def calling(x, *args, **keys):
            work = call(x, *args, **keys)
            if work is None:
                arrived(name, x)
                return None
            return Arriving(name, x, work)

        setattr(holder, name, calling)

    for holder, name in ((dist, "all_reduce"), (dist, "all_to_all_single"), (dist, "irecv"), (collectives, "_gather")):
        around(holder, name)


def train(rank: int, flags: str, flip: Flip | None) -> str:
    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1), os.dup2(devnull, 2)
    if flip:
        armed(flip, rank)
    from megatron.training.loop import pretrain

    try:
        pretrain(resolve(parse_pretrain(f"{TINY} {flags}".split()), 2), pretrain_gpt.recipe())
    except NumericsError as error:
        return f"{type(error).__name__}: {error}|{flip.done if flip else ''}"
    return f"|{flip.done if flip else ''}"


def end_of(folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    with Reader(folder / f"iter_{STEPS:07d}") as reader:
        weights = {name: reader.read(name) for name in reader.tensors}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return weights, [line for line in lines if line["kind"] == "step"][-1]["lm loss"]


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def tried(flip: Flip, clean: tuple[dict, float], interval: int) -> dict:
    """Run with a flip; the outcome as a record."""
    record = {name: getattr(flip, name) for name in ("number", "kind", "layout", "rank", "step", "bit")}
    with tempfile.TemporaryDirectory(prefix="flip-") as name:
        folder = Path(name)
        try:
            answers = run_ranks(
                2, train, f"--save {folder} {CHECKS} {interval} {LAYOUTS[flip.layout]}", flip, timeout=300
            )
        except RankFailed as failed:
            return record | dict(outcome="crash", what=failed.brief)
        words, what = answers[flip.rank].rsplit("|", 1)
        record |= dict(what=what, said=words[:200])
        if not what:
            return record | dict(outcome="not reached")
        found = [one for one in read_events(folder) if one["event"] == "rerun"]
        if found:
            named = [found[0]["rank"], *found[0]["others"]]
            record |= dict(verdict=found[0]["verdict"], named=named, right=flip.rank in named)
        if "replicas" in words or "hold different bits" in words:
            return record | dict(outcome="replicas")
        if words:
            return record | dict(
                outcome=found[0]["verdict"] if found else "not finite" if "finite" in words else "other"
            )
        weights, loss = end_of(folder)
        equal, change = same(weights, clean[0]), abs(loss - clean[1]) / clean[1]
        record |= dict(equal=equal, change=change)
        if found:
            return record | dict(outcome="transient" if equal else "transient, and other weights")
        return record | dict(outcome="no effect" if equal else "harmless" if change < 1e-3 else "missed")


ROWS = (
    "kind",
    "flips",
    "transient",
    "memory",
    "this device",
    "replicas",
    "not finite",
    "no effect",
    "harmless",
    "missed",
)


def table(records: list[dict]) -> str:
    """The shares of each kind, as a table of a page."""
    lines = ["| " + " | ".join(ROWS) + " | rank named |", "|---" * (len(ROWS) + 1) + "|"]
    for kind in (*KINDS, "all"):
        own = [one for one in records if kind in (one["kind"], "all") and one["outcome"] != "not reached"]
        counts = Counter(one["outcome"] for one in own)
        named = [one["right"] for one in own if "right" in one]
        rest = {name: count for name, count in counts.items() if name not in ROWS}
        cells = [kind, str(len(own)), *(str(counts[name]) for name in ROWS[2:])]
        lines.append("| " + " | ".join(cells) + f" | {sum(named)} of {len(named)} |" + (f" {rest}" if rest else ""))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=500)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--rerun-interval", type=int, default=1)
    parser.add_argument(
        "--output", type=Path, help="write a line of JSON for each flip; what is there is not done again"
    )
    parser.add_argument("--table", type=Path, nargs="+", help="only print the table of these files")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for path in options.table for line in path.read_text().splitlines()]))
        return
    records = []
    if options.output and options.output.exists():
        records = [json.loads(line) for line in options.output.read_text().splitlines()]
    clean = {}
    for layout, flags in LAYOUTS.items():
        with tempfile.TemporaryDirectory(prefix="clean-") as folder:
            assert run_ranks(2, train, f"--save {folder} {flags}", None, timeout=100) == ["|", "|"]
            clean[layout] = end_of(Path(folder))
    for number in range(len(records), options.flips):
        flip = Flip(number, options.seed)
        records.append(tried(flip, clean[flip.layout], options.rerun_interval))
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            with options.output.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
