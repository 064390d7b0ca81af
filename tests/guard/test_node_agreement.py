# SPDX-License-Identifier: Apache-2.0
"""Supervisors of nodes without SLURM agree on who takes part: by the deciding function alone, and as threads that share a
folder, die, come back and join late."""

import itertools
import os
import socket
import threading
import time

import pytest

from megatron.errors import PeerLost, SettingsError
from megatron.guard import node_agreement
from megatron.guard.command import value_of
from megatron.guard.node_agreement import AttemptNodes, Member, NodeAgreement, decide, own_address
from megatron.guard.nodes import Nodes
from megatron.guard.supervisor_mark import SUPERVISOR
from megatron.planner.replan import JobPlacement
from megatron.tools import supervise

# ---- who takes part


def members(names):
    return [Member(name, name, int(name), f"10.0.0.{name}", 0.0) for name in names]


def test_every_loss_of_nodes_of_a_job_with_spares():
    """4 nodes and 2 spares: whoever is lost, those that stay keep their places, and as many as possible are used."""
    before = AttemptNodes(1, tuple((name, name, name, int(name)) for name in "0123"))
    for count in range(7):
        for there in itertools.combinations("012345", count):
            chosen = decide(members(there), before, 4, lambda n: n - n % 2, may_shrink=True)
            if count < 2:
                assert chosen is None
                continue
            names = [member.name for member in chosen]
            assert len(names) == (4 if count >= 4 else 2) and len(set(names)) == len(names) and set(names) <= set(there)
            if count >= 4:
                assert all(names[int(name)] == name for name in there if name in "0123")
                gaps = [names[place] for place in range(4) if str(place) not in there]
                assert gaps == sorted(gaps)  # the spares, the first ones first
            else:  # known ones before spares, in the order that they had
                assert names == [name for name in there if name in "0123"][:2] + [n for n in there if n in "45"][: 2 - sum(
                    name in "0123" for name in there
                )]  # fmt: skip


def test_fewer_nodes_only_if_they_may_be():
    three, before = members("013"), AttemptNodes(1, tuple((name, name, name, int(name)) for name in "0123"))
    assert decide(three, before, 4) is None
    assert decide(three, before, 4, lambda n: n, may_shrink=False) is None
    assert decide(three, before, 4, lambda n: 0, may_shrink=True) is None
    assert [member.name for member in decide(three, before, 4, lambda n: n, may_shrink=True)] == ["0", "1", "3"]


def test_a_node_that_comes_back_takes_its_old_place_and_two_of_a_name_are_two_nodes():
    before = AttemptNodes(3, (("x", "b", "-", 1), ("y", "a", "-", 0)))
    back = [Member("new", "a", 7, "-", 5.0), Member("x", "b", 1, "-", 1.0)]
    assert [member.id for member in decide(back, before, 2)] == ["x", "new"]
    twice = [Member("first", "a", 0, "-", 5.0), Member("later", "a", 0, "-", 9.0), Member("x", "b", 1, "-", 1.0)]
    assert [member.id for member in decide(twice, before, 2)] == ["x", "later"]
    twins = [Member("one", "a", 0, "-", 1.0), Member("two", "a", 1, "-", 2.0)]  # containers of one host
    assert sorted(member.id for member in decide(twins, AttemptNodes(), 2)) == ["one", "two"]
    assert [
        member.id for member in decide(twins, AttemptNodes(1, (("one", "a", "-", 0), ("two", "a", "-", 1))), 2)
    ] == ["one", "two"]


# ---- nodes that share a folder


class Node:
    """A supervisor as a thread: it meets, works until it is told to end its attempt, and meets again."""

    def __init__(self, folder, number, wanted=3, usable=lambda count: 0, name=None, timeout=1.5, patience=60.0):
        self.places, self.ending, self.dead, self.said, self.error = [], threading.Event(), False, [], None
        name = name or f"n{number}"
        self.agreement = NodeAgreement(
            folder, number, wanted, usable, timeout, patience, self.said.append, name, lambda: f"at-{name}"
        )
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def work(self):
        try:
            while (place := self.agreement.meet(lambda: self.dead)) is not None:
                self.places.append(place)
                while not self.ending.wait(0.01) and not self.dead and not (why := self.agreement.lost()):
                    pass
                self.said.append("" if self.ending.is_set() or self.dead else why)
                self.ending.clear()
                if self.dead:
                    return
        except PeerLost as lost:
            self.error = lost

    def die(self):
        """As a host without power: it writes nothing any more."""
        self.dead = True
        self.agreement.over.set()
        self.thread.join(5)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(node_agreement, "LOOK", 0.05)
    monkeypatch.setattr(node_agreement, "POLL", 0.02)
    monkeypatch.setattr(node_agreement, "FIRST_NOTE", 0.3)
    nodes = []

    def start(number, **given):
        nodes.append(Node(tmp_path, number, **given))
        return nodes[-1]

    yield start
    for node in nodes:
        node.die()


def wait_for(condition, seconds=40.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def places(*nodes):
    return [(node.places[-1].rank, node.places[-1].nodes, node.places[-1].address) for node in nodes]


def test_a_spare_takes_the_place_of_a_node_that_dies_and_the_attempt_is_ended(start):
    nodes = [start(number) for number in (2, 0, 3, 1)]
    two, zero, spare, one = nodes
    wait_for(lambda: all(node.places for node in (zero, one, two)))
    assert places(zero, one, two) == [(0, 3, "at-n0"), (1, 3, "at-n0"), (2, 3, "at-n0")] and not spare.places
    zero.die()
    wait_for(lambda: all(len(node.places) == 2 for node in (one, two)) and spare.places)
    assert places(spare, one, two) == [(0, 3, "at-n3"), (1, 3, "at-n3"), (2, 3, "at-n3")]
    assert "node 0 (n0): its supervisor gave no sign for" in "".join(one.said)
    assert one.places[-1].change == "without n0, with n3" and not one.places[-1].is_first


def test_a_spare_that_is_faster_waits_for_the_others_and_takes_the_place_of_one_that_does_not_come(start):
    spare, zero, two = (start(number, timeout=3.0) for number in (3, 0, 2))
    time.sleep(0.2)
    assert not zero.places
    wait_for(lambda: all(node.places for node in (zero, spare, two)))
    assert places(zero, two, spare) == [(0, 3, "at-n0"), (1, 3, "at-n0"), (2, 3, "at-n0")]


def test_a_node_that_is_started_again_ends_the_attempt_of_the_others_at_once(start):
    nodes = [start(number, timeout=30.0) for number in range(3)]
    wait_for(lambda: all(node.places for node in nodes))
    began = time.monotonic()
    nodes[1].die()
    again = start(1, timeout=30.0)
    wait_for(lambda: again.places and len(nodes[0].places) == len(nodes[2].places) == 2)
    assert time.monotonic() - began < 25 and places(nodes[0], again, nodes[2])[1] == (1, 3, "at-n0")
    assert "node 1 (n1): it was started again" in nodes[0].said + nodes[2].said


def test_fewer_nodes_go_on_and_more_again_when_there_are_more(start):
    nodes = [start(number, wanted=3, usable=lambda count: count) for number in range(3)]
    wait_for(lambda: all(node.places for node in nodes))
    nodes[2].die()
    wait_for(lambda: len(nodes[0].places) == len(nodes[1].places) == 2)
    assert places(*nodes[:2]) == [(0, 2, "at-n0"), (1, 2, "at-n0")]
    assert nodes[0].places[-1].change == "without n2, on 2 nodes"
    late = start(5, usable=lambda count: count)
    time.sleep(0.3)
    assert not late.places  # the others are at work
    for node in nodes[:2]:
        node.ending.set()
    wait_for(lambda: late.places and all(len(node.places) == 3 for node in nodes[:2]))
    assert places(*nodes[:2], late)[2] == (2, 3, "at-n0")


def test_nobody_begins_with_fewer_before_all_had_time_to_come(start):
    nodes = [start(number, usable=lambda count: count, patience=2.5) for number in range(2)]
    time.sleep(0.2)
    assert not nodes[0].places
    wait_for(lambda: nodes[0].places and nodes[1].places)
    assert places(*nodes) == [(0, 2, "at-n0"), (1, 2, "at-n0")]


def test_too_few_nodes_end_with_what_is_missing(start):
    nodes = [start(number, patience=0.3) for number in range(2)]
    wait_for(lambda: all(node.error for node in nodes))
    assert str(nodes[0].error).startswith("3 nodes wanted, and after 0 s there are: n0, n1")


def test_those_who_wait_learn_how_the_job_ended(start, tmp_path):
    nodes = [start(number) for number in range(4)]
    wait_for(lambda: all(node.places for node in nodes[:3]))
    nodes[1].agreement.leave("stopped: data: a.bin is missing", 4)
    nodes[0].ending.set()
    wait_for(lambda: not nodes[0].thread.is_alive() and not nodes[3].thread.is_alive())
    assert nodes[0].agreement.outcome == nodes[3].agreement.outcome == ("n1: stopped: data: a.bin is missing", 4)


def test_a_node_that_leaves_alone_is_replaced_and_a_bad_one_is_not_taken_again(start):
    nodes = [start(number) for number in range(4)]
    wait_for(lambda: all(node.places for node in nodes[:3]))
    nodes[1].agreement.leave("given up on this node", 11, alone=True)
    nodes[0].agreement.excluded = ("n1",)
    for node in (nodes[0], nodes[2]):
        node.ending.set()
    wait_for(lambda: nodes[3].places and len(nodes[0].places) == 2)
    assert places(nodes[0], nodes[3], nodes[2]) == [(0, 3, "at-n0"), (1, 3, "at-n0"), (2, 3, "at-n0")]
    nodes[1].die()
    back = start(1)  # its host has not been repaired
    nodes[2].die()
    wait_for(lambda: any("waiting for" in text for text in nodes[0].said) or back.places)
    assert not back.places


def test_a_job_in_the_folder_of_one_that_has_ended_or_was_killed_begins_anew(start):
    first = [start(number) for number in range(4)]
    wait_for(lambda: all(node.places for node in first[:3]))
    first[1].die()
    wait_for(lambda: first[3].places)
    first[0].agreement.leave("finished", 0)
    for node in first:
        node.die()
    second = [start(number) for number in (3, 2, 1, 0)][::-1]
    wait_for(lambda: all(node.places for node in second[:3]))
    assert places(*second[:3]) == [(rank, 3, "at-n0") for rank in range(3)] and not second[3].places
    assert second[0].agreement.outcome == ("", 0) and second[0].places[0].change == ""


def test_the_first_agreement_of_a_number_counts(tmp_path):
    """Two nodes that both think that it is for them to choose."""
    one, two = (NodeAgreement(tmp_path, n, 1, lambda n: 0, 60, 60, name=f"n{n}", address=lambda: "x") for n in (0, 1))
    one._write([one.own])
    two._write([two.own])
    assert two._place_in(two._newest()) is None and two.own.waits == 2
    assert one._place_in(one._newest()).rank == 0
    for node in (one, two):
        node.over.set()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_node_that_the_others_gave_up_ends_its_attempt(tmp_path):
    one, two = (NodeAgreement(tmp_path, n, 1, lambda n: 0, 60, 60, name=f"n{n}", address=lambda: "x") for n in (0, 1))
    one._write([one.own])
    assert one._place_in(one._newest()) is not None and one.lost() == ""
    two.agreed = one.agreed
    two._write([two.own])
    one.next_look = 0.0
    assert one.lost() == "the others gave this node up, and went on without it"
    for node in (one, two):
        node.over.set()


def test_a_look_at_the_others_is_rare(tmp_path, monkeypatch):
    """128 nodes that each look at 128 files: four times a minute."""
    node = NodeAgreement(tmp_path, 0, 1, lambda n: 0, 60, 60, name="n0", address=lambda: "x")
    looks, clock = [], [1000.0]
    monkeypatch.setattr(node_agreement.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(NodeAgreement, "_members", lambda self: looks.append(clock[0]) or [])
    for _ in range(240):
        clock[0] += 0.5
        assert node.lost() == ""
    assert len(looks) == 8


def test_an_address_by_which_others_reach_this_machine():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("no.such.name.invalid") == socket.gethostname()


# ---- the supervisor of a node

LAUNCH = "torchrun --nnodes 4 --node-rank {} --master-addr n0 --nproc-per-node 2 pretrain_gpt.py"
FLAGS = """--num-layers 2 --hidden-size 8 --num-attention-heads 2 --mock-data --vocab-size 9 --micro-batch-size 1 --lr 1
    --tensor-model-parallel-size 2 --global-batch-size 24 --train-iters 3"""


def placement(rank=0, words=LAUNCH, **given):
    words = words.format(rank).split()
    at = words.index("pretrain_gpt.py") + 1
    command = [*words[:at], *FLAGS.split(), *words[at:]]
    said = []
    return JobPlacement(command, Nodes(), given.get("min_world_size"), given.get("min_nodes"),
                        given.get("spare_nodes", 0), log=said.append), said  # fmt: skip


def test_the_command_of_a_place():
    """24 samples are shared by 4, 3, 2 and 1 data parallel ranks of two ranks each."""
    place, _ = placement(3, min_nodes=2)
    assert [place.usable_nodes(count) for count in (3, 2, 1)] == [3, 2, 0]
    place.take(0, 4, None)
    assert " ".join(place.command).startswith("torchrun --nnodes=4 --node-rank=0 --master-addr n0 --nproc-per-node 2")
    place.take(1, 3, "10.0.0.7")
    words = place.command
    assert [value_of(words, flag) for flag in ("--nnodes", "--node-rank", "--master-addr")] == ["3", "1", "10.0.0.7"]
    assert value_of(words, "--global-batch-size") == "24" and place.ranks == 6
    place.take(5, 4, "10.0.0.8")
    assert place.ranks == 8 and value_of(place.command, "--nnodes") == "4"


def test_nodes_that_cannot_share_the_batch_are_left_out():
    """Three nodes of two ranks with pp 2: two of them make whole pipelines, three with another layout, which is the last
    choice, and with 8 samples of a batch there is none."""
    words = f"{LAUNCH} --pipeline-model-parallel-size 2"
    place, said = placement(words=words, min_nodes=1)
    assert [place.usable_nodes(count) for count in (3, 2)] == [2, 2]
    assert placement(words=words, min_nodes=3)[0].usable_nodes(3) == 3
    place, said = placement(words=f"{words} --global-batch-size 8 --num-layers 2", min_nodes=3)
    assert place.usable_nodes(3) == 0 and "no fewer nodes: " in said[0]


@pytest.mark.parametrize(
    "words, given, text",
    [
        ("torchrun --nnodes 4 --nproc-per-node 2 pretrain_gpt.py", {}, "has no --node-rank and no --master-addr"),
        ("torchrun --nproc-per-node 2 pretrain_gpt.py", {}, "the command has no --nnodes and no --node-rank and no"),
        (LAUNCH.replace("{}", "5"), {}, "--node-rank 5: the job has 4 nodes and 1 spare ones"),
        (LAUNCH.replace("nnodes 4", "nnodes 2:4"), {}, "--nnodes 2:4: --spare-nodes and --min-nodes need a number"),
        (LAUNCH, dict(min_nodes=5), "--min-nodes 5 is more than --nnodes 4"),
    ],
)
def test_commands_that_do_not_say_which_node_this_is(words, given, text):
    with pytest.raises(SettingsError) as refused:
        placement(words=words, **dict(spare_nodes=1) | given)
    assert text in str(refused.value)


@pytest.mark.parametrize("folder", [None, "/dev/shm/beats-of-a-test"])
def test_the_folder_has_to_be_one_that_all_nodes_see(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(SUPERVISOR, "")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "torchrun").touch(mode=0o755)
    settings = supervise.SuperviseOptions(log_dir=str(tmp_path), heartbeat_dir=folder, spare_nodes=1)
    with pytest.raises(SettingsError, match="need a folder that all nodes see"):
        supervise.Supervisor(settings, [*LAUNCH.format(0).split(), *FLAGS.split()])
