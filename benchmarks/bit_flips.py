# SPDX-License-Identifier: Apache-2.0
"""Flip bits in small trainings, one a step, and see which check finds each, or what it does to the weights.

    OMP_NUM_THREADS=1 python benchmarks/bit_flips.py --flips 500 --output runs/flips.jsonl
    python benchmarks/bit_flips.py --table runs/flips.jsonl

Each flip is one bit of one fp32 number in one of KINDS, on one rank, at a random moment of a step of its own: before an op
of the schedule, or after the update (a fifth of those of weights and state). All bits are as likely. The runs have two
ranks, --rerun-mode validate_results --rerun-interval 1, --check-replicas-interval 1, and one of LAYOUTS in turn. Steps from
the third on have a flip each. One in weights or state that is found would end the run: it is flipped back, and the step
begins again. A clean run of each layout says what losses and weights should be. A flip that no check finds is `no effect`
if losses and weights are those of the clean run to the bit, `harmless` if the last loss is within 0.1 % of it, else
`missed`; the flips that follow one of these in its run are not counted.
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
from megatron.errors import NumericsError, SilentError
from megatron.mpu import collectives
from megatron.mpu.forked import run_ranks
from megatron.settings.parse import parse_pretrain
from megatron.telemetry.events import read_events
from megatron.training import loop, rerun
from megatron.training.drill import flip_bit
from megatron.training.rules import resolve

KINDS = ("weights", "activations", "gradients", "state", "messages")
LAYOUTS = {
    "dp2": "",
    "ZeRO 1, dp2": "--use-distributed-optimizer",
    "tp2": "--tensor-model-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2",
}
MICRO_BATCHES = {"dp2": 2, "ZeRO 1, dp2": 2, "tp2": 4, "pp2": 4}
FIRST, GROUP = 3, 25  # the first step with a flip, and the number of flips of a run
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --device cpu --num-workers 0 "
    f"--train-iters {FIRST + GROUP} --log-interval 1000 --no-progress-bar "
)
CHECKS = "--rerun-mode validate_results --rerun-interval 1 --check-replicas-interval 1"
AFTER = 0.2  # share of flips in weights and state that happen after the update


class Flip:
    """One flip. The shares of [0, 1) choose among what there is when the time has come."""

    def __init__(self, number: int, seed: int):
        draw = random.Random(f"{seed} {number}")
        group, place = divmod(number, GROUP)
        self.number, self.kind, self.step = number, KINDS[number % len(KINDS)], FIRST + place
        self.layout = [*LAYOUTS][group % len(LAYOUTS)]
        self.rank, self.bit = draw.randrange(2), draw.randrange(32)
        self.when, self.which, self.where = draw.random(), draw.random(), draw.random()
        self.done = self.found = ""  # what was flipped; by which check it was found
        self.undo = lambda: None

    @property
    def after(self) -> bool:
        return self.kind in ("weights", "state") and self.when < AFTER

    def flip(self, name: str, x: torch.Tensor) -> None:
        x, element = x.data, int(self.where * x.numel())  # autograd does not see it
        flip_bit(x, element, self.bit)
        self.done, self.undo = name, lambda: flip_bit(x, element, self.bit)

    def of(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """Flip in one of these tensors, each of which is chosen by its share of all elements."""
        named = [(name, x) for name, x in named if x is not None and x.numel()]
        at = self.which * sum(x.numel() for _, x in named)
        for name, x in named:
            if at < x.numel():
                return self.flip(name, x)
            at -= x.numel()


class Injector:
    """The flips of a run, on one rank."""

    def __init__(self, flips: list[Flip], rank: int):
        self.flips, self.rank = {flip.step: flip for flip in flips}, rank
        self.run, self.ops = None, 2 * MICRO_BATCHES[flips[0].layout]
        self.calls, self.before = Counter[str](), Counter[str]()  # of this step, and of the step before

    def here(self, kind: str):
        """The flip of the present step, if it is of this kind and rank, and has not happened."""
        flip = self.flips.get(self.run.state.iteration + 1)
        return flip if flip and (flip.kind, flip.rank, flip.done) == (kind, self.rank, "") else None

    def install(self) -> None:
        """Let the flips happen in this process."""
        train_step, check_replicas = loop.train_step, loop.check_replicas
        rerun.MOST_TRANSIENT = 1 << 30

        def acting(run):
            if self.run is None:
                self.run = run
                self.watch(run)
            self.calls, self.before = Counter(), self.calls
            step = run.state.iteration + 1
            try:
                done = train_step(run)
            except SilentError as error:
                self.back(step, "memory" if "nothing wrote" in str(error) else "this device")
                return acting(run)
            flip = self.flips.get(step)
            if flip and flip.after and flip.rank == self.rank:
                flip.of(tensors(run, flip.kind))
            return done

        def checked(optimizer, iteration):
            try:
                check_replicas(optimizer, iteration)
            except NumericsError:
                self.back(iteration, "replicas")

        loop.train_step, loop.check_replicas = acting, checked

    def back(self, step: int, check: str) -> None:
        """Undo the flip that a check has found: that of the step before, if it was after its update, or of this step."""
        before, now = self.flips.get(step - 1), self.flips.get(step)
        flip = before if before and before.after and not before.found else now
        flip.found = check
        if flip.done:  # on its rank
            flip.undo()

    def watch(self, run) -> None:
        watch = run.watch.heartbeat.watch

        def watching(op):
            for kind in ("weights", "gradients", "state"):
                flip = self.here(kind)
                if flip and not flip.after and self.calls["ops"] == int(flip.when * self.ops):
                    flip.of(tensors(run, kind))
            self.calls["ops"] += 1
            watch(op)

        run.watch.heartbeat.watch = watching
        for module in (module for stage in run.stages for module in stage.modules()):
            module.register_forward_hook(self.output)
        names = (dist, "all_reduce"), (dist, "all_to_all_single"), (dist, "irecv"), (collectives, "_gather")
        for holder, name in names:
            self.around(holder, name)

    def counted(self, kind: str, name: str, x: torch.Tensor) -> None:
        """One of the tensors of a step that a flip of this kind may be in; those of the step before were counted."""
        flip = self.here(kind)
        times = 3 if self.run.rerun.places else 2  # how often a step is computed
        if flip and self.calls[kind] == int(flip.which * self.before[kind] / times):
            flip.flip(name, x)
        self.calls[kind] += 1

    def output(self, module, given, output) -> None:
        x = output[0] if isinstance(output, tuple) else output
        if isinstance(x, torch.Tensor) and x.is_floating_point() and module.training and x.dim() > 1:
            self.counted("activations", type(module).__name__, x)

    def around(self, holder, name: str) -> None:
        call = getattr(holder, name)

        def calling(x, *args, **keys):
            work = call(x, *args, **keys)
            if work is None:
                self.counted("messages", name, x)
                return None
            return Arriving(work, lambda: self.counted("messages", name, x))

        setattr(holder, name, calling)


class Arriving:
    """A message that calls a function when it has arrived."""

    def __init__(self, work, arrived):
        self.work, self.arrived = work, arrived

    def wait(self, *args):
        result = self.work.wait(*args)
        self.arrived()
        return result

    def __getattr__(self, name):
        return getattr(self.work, name)


def tensors(run, kind: str) -> list[tuple[str, torch.Tensor]]:
    optimizer = run.optimizer
    if kind == "weights":
        return [(slot.name, slot.parameter) for unit in optimizer.units for slot in unit.slots]
    if kind == "state":
        flats = [(name, flat) for state in optimizer.states for name, flat in state.moments.items()]
        return flats + [("main weights", state.main) for state in optimizer.states]
    tallies = optimizer.gradients.tallies.values()
    return [(name, view) for tally in tallies for name, view in tally.views.items()]


def train(rank: int, flags: str, flips: list[Flip]) -> list[tuple[str, str]]:
    """(what was flipped, by what it was found) of each flip, as this rank knows it."""
    torch.set_num_threads(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1), os.dup2(null, 2)
    if flips:
        Injector(flips, rank).install()
    loop.pretrain(resolve(parse_pretrain(f"{TINY} {flags}".split()), 2), pretrain_gpt.recipe())
    return [(flip.done, flip.found) for flip in flips]


def end_of(folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and moments at the end, and the loss of each step."""
    with Reader(folder / f"iter_{FIRST + GROUP:07d}") as reader:
        weights = {name: reader.read(name) for name in reader.tensors}
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return weights, [line["lm loss"] for line in lines if line["kind"] == "step"]


def tried(flips: list[Flip], clean: tuple[dict, list[float]]) -> list[dict]:
    """Run with a group of flips; the outcomes."""
    with tempfile.TemporaryDirectory(prefix="flips-") as name:
        folder = Path(name)
        answers = run_ranks(2, train, f"--save {folder} {CHECKS} {LAYOUTS[flips[0].layout]}", flips, timeout=900)
        events = [one for one in read_events(folder) if one["event"] == "rerun"]
        weights, losses = end_of(folder)
    equal = all(torch.equal(weights[name], clean[0][name]) for name in clean[0])
    change, records = abs(losses[-1] - clean[1][-1]) / clean[1][-1], []
    for place, flip in enumerate(flips):
        (what, found), steps = answers[flip.rank][place], (flip.step, flip.step + flip.after)
        record = {name: getattr(flip, name) for name in ("number", "kind", "layout", "rank", "step", "bit")}
        mine = [one for one in events if one["iteration"] in steps and (not found or one["verdict"] == found)]
        outcome = found or (mine[0]["verdict"] if mine and not flip.after else "no effect")
        if mine and outcome == mine[0]["verdict"]:
            record["right"] = flip.rank in (mine[0]["rank"], *mine[0]["others"])
        if not what:
            outcome = "not reached"
        elif outcome == "memory" and not found:  # its step began again, because of the flip before
            outcome = "not counted"
        elif losses[: flip.step] != clean[1][: flip.step]:
            outcome = "not counted"
        elif outcome == "no effect" and not equal and losses[flip.step :] != clean[1][flip.step :]:
            outcome = "harmless" if change < 1e-3 else "missed"
        records.append(record | dict(what=what, outcome=outcome, equal=equal))
    return records


ROWS = ("kind", "flips", "transient", "memory", "this device", "replicas", "no effect", "harmless", "missed")
LEFT_OUT = ("not reached", "not counted")


def table(records: list[dict]) -> str:
    """The outcomes of each kind, as a table of a page."""
    lines = ["| " + " | ".join(ROWS) + " | rank named |", "|---" * (len(ROWS) + 1) + "|"]
    for kind in (*KINDS, "all"):
        own = [one for one in records if kind in (one["kind"], "all") and one["outcome"] not in LEFT_OUT]
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
    for first in range(len(records), options.flips, GROUP):
        flips = [Flip(number, options.seed) for number in range(first, first + GROUP)]
        layout = flips[0].layout
        if layout not in clean:
            with tempfile.TemporaryDirectory(prefix="clean-") as folder:
                run_ranks(2, train, f"--save {folder} {LAYOUTS[layout]}", [], timeout=900)
                clean[layout] = end_of(Path(folder))
        records += tried(flips, clean[layout])
        if options.output:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(table(records))


if __name__ == "__main__":
    main()
