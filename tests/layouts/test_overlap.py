# SPDX-License-Identifier: Apache-2.0
"""What is sent runs beside what is computed: whole training steps on real ranks, played on the streams of a device.

A product takes 1, a message 0.9: a message is hidden if one product lies between its launch and its wait, and if its stream
has nothing else to do first. What has to be exposed is counted from the model: L layers, two pairs of linear layers each.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.pipeline import execute as executor
from megatron.pipeline import wire
from megatron.training import loop
from tests.layouts.device_streams import Device

L = 3  # layers
ROOTS = 3  # units that are no layer: the table, positions, the last norm
TINY = (
    f"--num-layers {L} --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 1 --train-iters 2 --eval-iters 0 --device cpu --num-workers 0"
)
COST = 0.9  # of a message, in products


def _played(rank, flags, steps=1, cost=COST):
    """The messages of the last steps of a run, and for how long the device had no product to do in them."""
    torch.set_num_threads(1)
    device, done, real = Device(cost), [], loop.train_step

    def train_step(run):
        if len(done) == 2 - steps:
            device.forget()
            device.start = device.now, device.products
        done.append(None)
        with device.watched():
            return real(run)

    loop.train_step = train_step
    pretrain_gpt.main([*TINY.split(), *flags.split()])
    idle = device.now - device.start[0] - (device.products - device.start[1])
    assert idle == pytest.approx(sum(message.exposed for message in device.messages))
    return device.messages


def _counted(messages, group):
    """{(kind, exposed): how many} of the messages of groups of one name."""
    return Counter((message.kind, message.exposed > 1e-9) for message in messages if message.group.startswith(group))


TENSOR_PARALLEL = {  # flags: exposed and hidden messages of a micro-batch
    "": {
        # forward: the table, two row layers a layer, the loss's targets
        ("all_reduce", True): 1 + 2 * L + 1,
        ("all_gather", True): 1,  # the loss's statistics
        # backward: two column layers a layer, the output layer
        ("all_reduce", False): 2 * L + 1,
    },
    "--sequence-parallel": {
        # forward: two column layers a layer, the output layer, the loss's statistics; backward: two row layers, the table
        ("all_gather", True): 2 * L + 1 + 1 + 2 * L + 1,
        ("reduce_scatter", True): 1 + 2 * L,  # forward: the table, two row layers a layer
        ("all_reduce", True): 1 + 1,  # the loss's targets; once a step, the gradients of norms
        # backward: two column layers a layer gather, and scatter; the output layer scatters
        ("all_gather", False): 2 * L,
        ("reduce_scatter", False): 2 * L + 1,
    },
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("fusion", ["", "--gradient-accumulation-fusion"], ids=["", "fused"])
@pytest.mark.parametrize("flags", TENSOR_PARALLEL, ids=["tp", "tp, sp"])
def test_tensor_parallel_messages_of_a_backward_pass_are_hidden(flags, fusion, run_ranks):
    for messages in run_ranks(2, _played, f"--tensor-model-parallel-size 2 --global-batch-size 1 {flags} {fusion}"):
        assert _counted(messages, "tp") == TENSOR_PARALLEL[flags]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("stage, kind", [(0, "all_reduce"), (1, "reduce_scatter"), (2, "reduce_scatter")])
def test_reductions_begin_while_earlier_layers_have_their_backward_pass(stage, kind, run_ranks):
    """Of the units those of the norm and of all layers but the first have products behind them."""
    flags = f"--sharding-stage {stage} --overlap-grad-reduce --global-batch-size 4"
    for messages in run_ranks(2, _played, flags):
        reductions = [message for message in messages if message.kind == kind and message.group.startswith("dp")]
        assert len(reductions) == (L + ROOTS) * (2 if stage == 2 else 1)
        between = [one.launched - other.launched for other, one in zip(reductions, reductions[1:], strict=False)]
        assert between.count(8) >= L - 1
        beside = 2 * L if stage == 2 else L
        assert sum(message.exposed == 0 for message in reductions) >= beside


def test_gathers_behind_an_update_are_waited_for_in_the_order_of_their_launch(run_ranks):
    """The last norm is asked for at the start, with the table: that must not be a wait for all layers."""
    flags = "--sharding-stage 1 --overlap-param-gather --global-batch-size 2"
    for messages in run_ranks(2, lambda rank: _played(rank, flags, steps=2)):
        gathers = [message for message in messages if message.kind == "all_gather"][: L + ROOTS]
        assert all(message.waited_behind >= message.launched for message in gathers)
        assert sum(message.exposed for message in gathers) == pytest.approx(COST * (ROOTS + 1))
        assert [message.exposed for message in gathers[-(L - 1) :]] == [0.0] * (L - 1)


def test_stage_3_gathers_each_layer_beside_another_one(run_ranks):
    flags = "--sharding-stage 3 --overlap-grad-reduce --overlap-param-gather --global-batch-size 2"
    for messages in run_ranks(2, _played, flags):
        gathers = [message for message in messages if message.kind == "all_gather"]
        forward, backward = gathers[: ROOTS + L], gathers[ROOTS + L :]
        assert len(backward) == L  # the last one beside the output layer
        assert [message.exposed > 0 for message in forward] == [True] * (ROOTS + 1) + [False] * (L - 1)
        assert not any(message.exposed for message in backward)
        reductions = [message for message in messages if message.kind == "reduce_scatter"]
        assert sum(message.exposed == 0 for message in reductions) >= L


# ---- rings ---------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize("cp, flags", [(2, ""), (4, ""), (4, "a2a+p2p --hierarchical-context-parallel-sizes 2 2")])
def test_messages_of_a_ring_are_hidden(cp, flags, run_ranks):
    """Each beside the attention of a step, but for the last gradients of a layer, which no step comes after. A message
    takes less than half of a step: keys and values, and gradients, leave beside the same one.
    """
    words = f"--context-parallel-size {cp} --cp-comm-type {flags or 'p2p'} --global-batch-size 1 --attention-dropout 0"
    size = 2 if flags else cp
    for messages in run_ranks(cp, lambda rank: _played(rank, words, cost=0.45)):
        shifts = [message for message in messages if message.kind == "shift"]
        ahead, back = (size - 1) * L, (size - 1 + size) * L
        assert len(shifts) == ahead + back
        assert [message.exposed > 1e-9 for message in shifts].count(True) == L
        forward, backward = shifts[:ahead], shifts[ahead:]
        assert not any(message.exposed for message in forward)
        for message in shifts:
            assert message.waited_behind - message.launched == (0 if message.exposed else 1), message
        last = backward[2 * size - 2 :: 2 * size - 1]  # of each layer
        assert [message.exposed for message in last] == pytest.approx([0.45] * L)


# ---- experts -------------------------------------------------------------------------------------------------------------

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2 --global-batch-size 8 "
    "--expert-model-parallel-size 2"
)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("flags", ["", "--sharding-stage 3 --overlap-param-gather"], ids=["", "zero3"])
def test_turns_hide_the_exchanges_of_experts(flags, run_ranks):
    """All, but for those of the first forward pass and of the last backward pass, which run alone. Rows and weights, which
    are sent together, take as long as a product.
    """
    m, exchanges = 4, 6 * L  # of a micro-batch: in each pass of a layer rows and their weights, and rows back
    hidden = exchanges * (m - 1)
    wanted = {
        "": {("all_to_all", True): exchanges * m},
        "--overlap-moe-expert-parallel-comm": {("all_to_all", True): exchanges, ("all_to_all", False): hidden},
    }
    for turns, counts in wanted.items():
        for messages in run_ranks(2, lambda rank, turns=turns: _played(rank, f"{EXPERTS} {flags} {turns}", cost=0.45)):
            assert _counted(messages, "ep group") == counts


# ---- pipelines -----------------------------------------------------------------------------------------------------------


def _pipelined(rank, flags):
    """In order, of a step: "F0" (a pass), "post 1" (of the second receive), "wait 1", "send 1"."""
    torch.set_num_threads(1)
    events, steps = [], []

    class Work:
        def __init__(self, kind, work):
            self.name, self.work = f"{kind} {sum(event.startswith(kind) for event in events)}", work
            events.append(self.name)

        def wait(self):
            events.append(self.name.replace("post", "wait").replace("send", "sent"))
            self.work.wait()

        def is_completed(self):
            return self.work.is_completed()

    class Watched:
        isend = staticmethod(lambda *args, **kwargs: Work("send", dist.isend(*args, **kwargs)))
        irecv = staticmethod(lambda *args, **kwargs: Work("post", dist.irecv(*args, **kwargs)))

    wire.dist = Watched
    done = executor._OpRunner.do

    def do(self, op, arrived):
        events.append(str(op))
        done(self, op, arrived)

    executor._OpRunner.do, real = do, loop.train_step

    def train_step(run):
        events.clear()
        result = real(run)
        steps.append(list(events))
        return result

    loop.train_step = train_step
    pretrain_gpt.main([*TINY.split(), *flags.split()])
    return steps[-1]


def _passes(events):
    return [event for event in events if event[0] in "FBIW"]


PIPELINES = ["1f1b", "zb-h1", "zb-v"]


@pytest.fixture(scope="module")
def pipelined(run_ranks) -> dict[str, list[list[str]]]:
    """Schedule -> events of each of two ranks."""
    found = {}
    for name in PIPELINES:
        flags = f"--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-schedule {name} --global-batch-size 4"
        found[name] = run_ranks(2, _pipelined, flags)
    return found


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_receive_is_posted_before_all_that_is_computed_meanwhile(name, pipelined):
    """Right behind the message before it was asked for: before the pass that uses that one, and passes that use none."""
    for events in pipelined[name]:
        posts = [number for number, event in enumerate(events) if event.startswith("post")]
        waits = [number for number, event in enumerate(events) if event.startswith("wait")]
        assert len(posts) == len(waits) > 0
        assert posts[0] < events.index(_passes(events)[0])  # before anything is computed
        for post, wait in zip(posts[1:], waits, strict=False):
            assert not set(_passes(events[post:wait]))  # posted, then the rank waits for the one before
            assert post < wait
        ahead = 0  # at most one lies ready beside the one that is waited for
        for event in events:
            ahead += event.startswith("post") - event.startswith("wait")
            assert 0 <= ahead <= 2
    beside = [
        len(_passes(events[events.index(f"post {number}") : events.index(f"wait {number}")]))
        for events in pipelined[name]
        for number in range(sum(event.startswith("post") for event in events))
    ]
    assert sum(count > 0 for count in beside) >= len(beside) - 2  # the first of a rank has nothing beside it, perhaps
    if name.startswith("zb"):
        assert max(beside) > 1  # a pass W needs no message and delays none


@pytest.mark.parametrize("name", PIPELINES)
def test_a_message_leaves_behind_its_pass_and_nobody_waits_for_it(name, pipelined):
    for events in pipelined[name]:
        for number, event in enumerate(events):
            if event.startswith("send"):
                assert events[number - 1] in _passes(events) or events[number - 1].startswith("sent"), events[
                    number - 1
                ]
        # That a message has left is looked at when an answer to it has come, or at the end of the step.
        last = max(number for number, event in enumerate(events) if event in _passes(events))
        for number, event in enumerate(events):
            if event.startswith("sent") and number < last:
                sent = events.index(event.replace("sent", "send"))
                assert any(other.startswith("wait") for other in events[sent:number])


def test_products_that_wait_gather_ahead(run_ranks):
    """In a pass W an input is gathered while the product before it is made: that of a row layer, or of the output layer."""
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    flags = f"{layout} --num-layers 4 --pipeline-schedule zb-h1 --global-batch-size 2"
    layers, micro_batches = 2, 2
    for messages in run_ranks(4, _played, flags):
        gathers = [message for message in messages if message.kind == "all_gather" and message.group.startswith("tp")]
        assert sum(message.exposed == 0 for message in gathers) == micro_batches * 2 * layers
