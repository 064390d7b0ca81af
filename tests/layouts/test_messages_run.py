# SPDX-License-Identifier: Apache-2.0
"""What ranks send for data parallelism is the list that was proved, in its order: whole training steps on real ranks, of
which the calls of collectives and the passes of layers are noted.
"""

import pytest
import torch

import pretrain_gpt
from megatron.errors import SettingsError
from megatron.mpu import collectives
from megatron.optimizer.messages import Messages
from megatron.pipeline import execute as executor
from megatron.pipeline.data_parallel_messages import ChunkPieces, Sharding, group_of, list_messages
from megatron.pipeline.schedule import parse_op
from megatron.training import loop

pytestmark = pytest.mark.sampled(10)

LAYERS = 4
TINY = (
    f"--num-layers {LAYERS} --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 "
    "--lr 1e-2 --micro-batch-size 1 --global-batch-size 8 --train-iters 2 --eval-iters 0 --device cpu --num-workers 0"
)
BESIDE = "--overlap-grad-reduce --overlap-param-gather"
STAGES = {  # of ZeRO: flags
    "0": "",
    "0, overlapped": "--overlap-grad-reduce",
    "1, overlapped": f"--sharding-stage 1 {BESIDE}",
    "2": "--sharding-stage 2",
    "2, overlapped": f"--sharding-stage 2 {BESIDE}",
    "3": "--sharding-stage 3",
    "3, overlapped": f"--sharding-stage 3 {BESIDE}",
}
SCHEDULES = {
    "one stage": (2, ""),
    "zb-h1 alone": (2, "--pipeline-schedule zb-h1"),
    "1f1b": (4, "--pipeline-model-parallel-size 2"),
    "zb-h1": (4, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "zb-v": (4, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v"),
    "interleaved": (4, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}


class Noted:
    """What a rank does, in order: "all_gather 640", "wait 3" (for the message of that number), "F0.0:1" and "B0.0:1"."""

    def __init__(self):
        self.events, self.sent, self.op, self.run, self.plans = [], 0, None, None, []

    def start(self, kind, start):
        def noted(*args):
            work, number = start(*args), self.sent
            self.sent += 1
            self.events.append(f"{kind} {(args[1] if kind == 'reduce_scatter' else args[0]).numel()}")

            class Work:
                wait = staticmethod(lambda: (self.events.append(f"wait {number}"), work.wait()))

            return Work

        return noted

    def watch(self, run):
        """Look at the layers of a run, from its first step on."""
        self.run, self.sent, self.events[:] = run, 0, []
        for number, stage in enumerate(run.stages):
            for layer, block in enumerate(stage.blocks.values()):
                block.register_forward_pre_hook(lambda *_, at=(number, layer): self.layer("F", *at))
                block.register_forward_hook(lambda _, __, y, at=(number, layer): self.output(y, at))

    def layer(self, kinds, chunk, layer):
        if self.op.kind in kinds:
            self.events.append(f"{self.op.kind}{self.op.micro}.{chunk}:{layer}")

    def output(self, y, at):
        if y.requires_grad:
            y.register_hook(lambda gradient: self.layer("BI", *at))


def _noted(rank, flags):
    """(what two steps did; what their lists say; their losses)."""
    torch.set_num_threads(1)
    noted, losses, real, do, plan = Noted(), [], loop.train_step, executor._OpRunner.do, Messages.plan
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(collectives, f"start_{kind}", noted.start(kind, getattr(collectives, f"start_{kind}")))

    def train_step(run):
        noted.run or noted.watch(run)
        step = real(run)
        losses.append(next(iter(step.losses.values())))
        return step

    def listed(messages, ops, learns=None):
        found = plan(messages, ops, learns)
        noted.plans.append(messages.listed)
        return found

    def pass_(runner, op, arrived):
        noted.op = op
        do(runner, op, arrived)

    loop.train_step, Messages.plan, executor._OpRunner.do = train_step, listed, pass_
    pretrain_gpt.main([*TINY.split(), *flags.split()])
    return noted.events, _expected(noted.run.optimizer, noted.plans[-len(losses) :]), losses


def _expected(optimizer, plans):
    """The events of steps with these lists. The first step's weights are there from the start, if they are kept."""
    messages, events, sent, number = optimizer.messages, [], {}, 0
    ready = set(messages.units) if optimizer.weights.keep else set()
    reduction = "all_reduce" if optimizer.gradients.in_place else "reduce_scatter"
    for listed in plans:
        for op in [*listed.ops, *listed.after, None, *listed.before]:
            if op is None or op.piece == "all":  # the update changes all weights
                ready = set(messages.units) if op is None and not messages.how.sharded else set()
            elif op.kind in "GHR":
                units = messages.units[group_of(op)] if op.kind == "R" or group_of(op) not in ready else []
                for unit in (unit for unit in units if op.kind != "R" or not unit.frozen):
                    sent[op, unit.name], number = number, number + 1
                    events.append(f"{'all_gather' if op.kind != 'R' else reduction} {unit.size}")
                ready |= {group_of(op)} if op.kind != "R" else set()
            elif op.kind in "ghr":
                start = op._replace(kind=op.kind.upper())
                units = [unit.name for unit in messages.units[group_of(op)] if (start, unit.name) in sent]
                events += [f"wait {sent.pop((start, name))}" for name in units]
            elif op.kind in "DE":
                ready -= {group_of(op)}
            elif op.kind in "FBI":
                names = messages.chunks[op.chunk].pieces[:: 1 if op.kind == "F" else -1]
                layers = [name for name in ([op.piece] if op.piece else names) if name.isdigit()]
                events += [f"{op.kind}{op.micro}.{op.chunk}:{name}" for name in layers]
    return events


@pytest.mark.sampled(10)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_does_what_was_proved(stage, schedule, run_ranks):
    world, flags = SCHEDULES[schedule]
    for events, expected, _ in run_ranks(world, _noted, f"{STAGES[stage]} {flags}"):
        assert events == expected


@pytest.mark.parametrize("flags", ["", "--gradient-accumulation-fusion", "--recompute-granularity full"])
@pytest.mark.parametrize("frozen", ["", "--freeze embedding.* blocks.0.* blocks.2.mlp.*"])
def test_so_it_is_with_frozen_weights_fusion_and_recomputation(flags, frozen, run_ranks):
    words = f"{STAGES['3, overlapped']} {SCHEDULES['zb-h1'][1]} {flags} {frozen}"
    for events, expected, _ in run_ranks(4, _noted, words):
        if "full" in flags:  # layers run twice
            events, expected = ([one for one in found if one[0] not in "FBI"] for found in (events, expected))
        assert events == expected


# ---- a list of one's own -----------------------------------------------------------------------------------------------


def _file(folder, text):
    (folder / "own.txt").write_text(text)
    return f"--global-batch-size 4 --num-layers 2 --pipeline-schedule {folder / 'own.txt'} "


def _own(zero):
    """The list of F0 F1 B0 B1 with two layers, nothing beside anything."""
    held = ("in", "0", "1", "out")
    passes = [parse_op(word) for word in ("F0", "F1", "B0", "B1")]
    listed = list_messages(passes, [ChunkPieces(2, held, held)], Sharding(zero))
    return " ".join(map(str, [*listed.ops, *listed.after[:-1]]))


MOVED = {  # ZeRO stage: what is moved in its list
    # Gradients of the first micro-batch arrive beside products of the second.
    2: [
        ("R0:in r0:in", "R0:in"),
        ("B1:1 R1:1", "B1:1 r0:in R1:1"),
        ("R1:out r1:out", "R1:out"),
        ("r0:in R1:1", "r0:in r1:out R1:1"),
    ],
    # Weights for the second forward pass are gathered beside the last layer of the first, and so on the way back.
    3: [("G1:0 g1:0", "g1:0"), ("F0:1", "G1:0 F0:1"), ("H1:1 h1:1", "h1:1"), ("B0:0", "H1:1 B0:0")],
}


@pytest.mark.parametrize("zero", MOVED)
def test_messages_of_a_micro_batch_beside_products_of_another(zero, tmp_path, run_ranks):
    """They run where the file says, and the training is the same to the bit."""
    flags, plain = f"--sharding-stage {zero} ", _own(zero)
    text = plain
    for was, now in MOVED[zero]:
        assert text.count(was) == 1
        text = text.replace(was, now)
    usual = run_ranks(2, _noted, flags + _file(tmp_path, "F0 F1 B0 B1"))
    moved = run_ranks(2, _noted, flags + _file(tmp_path, text))
    for (events, expected, losses), (others, same, known) in zip(moved, usual, strict=True):
        assert events == expected and others == same
        assert losses == known and len(losses) == 2
        assert events != others and len(events) == len(others)
        # A gather starts while the last layer of another micro-batch is computed, and is waited for later
        if zero == 3:
            started = events.index("F0.0:1") - 1
            assert events[started].startswith("all_gather")
            number = sum(event.startswith(("all_gather", "reduce")) for event in events[:started])
            assert events.index(f"wait {number}") > events.index("F0.0:1")
        else:
            step = events[: events.index("B1.0:0")]
            last = max(place for place, event in enumerate(step[: step.index("B1.0:1")]) if event.startswith("reduce"))
            assert step[last - 1].startswith("reduce")  # that of B0's embedding is under way when B1's head is reduced


@pytest.mark.parametrize(
    "was, now, words",
    [
        ("R0:0 r0:0", "R0:0 r0:0 R0:0 r0:0", "R0:0 is there twice"),
        ("G0:1 g0:1 F0:1", "F0:1 G0:1 g0:1", "F0:1 uses the weights of chunk 0, layer 1, which are not there"),
        ("B0:1", "E0:in B0:1", "B0:1 uses the weights of chunk 0, in, which are not there"),
    ],
)
def test_a_mistake_in_a_file_is_named_before_anything_runs(was, now, words, tmp_path, run_ranks):
    def body(rank):
        with pytest.raises(SettingsError) as refused:
            _noted(rank, "--sharding-stage 3 " + _file(tmp_path, _own(3).replace(was, now)))
        return str(refused.value)

    for told in run_ranks(2, body):
        assert "rank 0 of the pipeline cannot run its list" in told and words in told
