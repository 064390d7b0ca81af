# SPDX-License-Identifier: Apache-2.0
"""Nodes that look for each other before their ranks start: all come, or each says what is missing, and where."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron.errors import PeerLost, SettingsError
from megatron.guard import node_rendezvous
from megatron.guard.node_rendezvous import NodeRendezvous
from megatron.tools.launch import patience_of


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setattr(node_rendezvous, "FIRST_NOTE", 0.3)
    monkeypatch.setattr(node_rendezvous, "LINGER", 1.0)
    return free_port()


def joined(*nodes: NodeRendezvous, later: float = 0.0) -> list:
    """The store of each node, or its error. later: seconds until node 0 comes"""

    def join(node):
        time.sleep(later if node.rank == 0 else 0.0)
        try:
            return node.join()
        except (PeerLost, SettingsError) as error:
            return error

    with ThreadPoolExecutor(len(nodes)) as pool:
        return list(pool.map(join, nodes))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("later", [0.0, 1.0])
def test_all_come(later, port):
    notes = []
    nodes = [NodeRendezvous("localhost", port, rank, 3, 20.0, notes.append) for rank in range(3)]
    stores = joined(*nodes, later=later)
    for store in stores:
        assert [store.get(f"{node_rendezvous.KEY}/{node.rank}").decode() for node in nodes] == [
            node.own for node in nodes
        ]
    if later:
        assert any(f"node 0 does not answer at localhost:{port} (connection refused)" in note for note in notes)


@pytest.mark.sampled(5)
def test_who_is_missing_is_named_on_every_node(port):
    notes = []
    nodes = [NodeRendezvous("localhost", port, rank, 5, 2.0, notes.append) for rank in (0, 2, 3)]
    for error in joined(*nodes):
        assert isinstance(error, PeerLost), error
        assert error.what == "2 nodes of 5 (--node-rank 1, 4) did not come within 2 s"
        assert f"0 ({socket.gethostname()}, process" in error.do and f"--master-port {port}" in error.do
    assert len(notes) == 3 and all("waiting for 2 nodes of 5 (--node-rank 1, 4); here: 0 (" in note for note in notes)


def test_a_number_that_two_nodes_have(port):
    """The second one waits, as the first one may be what is left of an attempt before."""
    notes = []  # of the second one
    nodes = [NodeRendezvous("localhost", port, rank, 2, 20.0, print) for rank in range(2)]
    stores = joined(*nodes)
    second = NodeRendezvous("localhost", port, 1, 2, 1.0, notes.append)
    [error] = joined(second)
    assert error.what == f"node 1 of the job at localhost:{port} is there already ({nodes[1].own.partition('|')[0]})"
    assert len(notes) == 1 and "--node-rank" in error.do and f"--master-port (here {port})" in error.do
    assert stores[1].get(f"{node_rendezvous.KEY}/1").decode() == nodes[1].own  # of the job, which goes on


def test_a_number_that_becomes_free(port):
    """A node that comes back before the job of the attempt before has ended joins the next one."""
    stores = joined(*(NodeRendezvous("localhost", port, rank, 2, 20.0, print) for rank in range(2)))
    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(NodeRendezvous("localhost", port, 1, 2, 30.0, print).join)
        time.sleep(1.0)
        assert not back.done()
        del stores  # the job ends, and node 0 starts again
        again = NodeRendezvous("localhost", port, 0, 2, 30.0, print).join()
        assert back.result().get(f"{node_rendezvous.KEY}/0") == again.get(f"{node_rendezvous.KEY}/0")


def test_numbers_of_nodes_that_differ(port):
    first = NodeRendezvous("localhost", port, 0, 3, 1.0, print)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(joined, first)
        [error] = joined(NodeRendezvous("localhost", port, 1, 2, 20.0, print))
        assert isinstance(error, SettingsError) and error.what.startswith("--nnodes 2 on ")
        assert f"and 3 on {first.own.partition('|')[0]}" in error.what
        assert isinstance(waiting.result()[0], PeerLost)


@pytest.mark.parametrize("before", ["set", "compare_set"])
def test_the_first_node_says_how_many_there_are(before, port, monkeypatch):
    """Even if another one is faster than it between the start of its store, the count, and its own number."""
    first, other, make = NodeRendezvous("localhost", port, 0, 3, 1.0, print), [], NodeRendezvous._store

    class Slow:
        """The store of node 0, which the other node overtakes before one of its messages"""

        def __init__(self, store):
            self.store = store

        def __getattr__(self, name):
            if name == before and not other:
                other.append(pool.submit(joined, NodeRendezvous("localhost", port, 1, 2, 20.0, print)))
                time.sleep(0.5)
            return getattr(self.store, name)

    monkeypatch.setattr(NodeRendezvous, "_store", lambda self: make(self) if self.rank else Slow(make(self)))
    with ThreadPoolExecutor(1) as pool:
        assert isinstance(joined(first)[0], PeerLost)
        [error] = other[0].result()
    assert isinstance(error, SettingsError) and error.what.startswith("--nnodes 2 on ")
    assert f"and 3 on {first.own.partition('|')[0]}" in error.what


def test_an_address_that_nobody_knows(port, monkeypatch):
    monkeypatch.setattr(node_rendezvous, "NAME_PATIENCE", 1.0)
    notes = []
    [error] = joined(NodeRendezvous("nowhere.invalid", port, 1, 2, 60.0, notes.append))
    assert isinstance(error, PeerLost) and error.what.startswith("--master-addr nowhere.invalid is not known on ")
    assert len(notes) == 1 and "waiting for at most" in notes[0]


@pytest.mark.parametrize(
    "words, seconds",
    [
        (["--lr", "1"], 600.0),
        (["--distributed-timeout-minutes", "2", "--distributed_timeout_minutes=0.5"], 30.0),
        (["--distributed-timeout-minutes", "soon"], 600.0),
        (["--distributed-timeout-minutes"], 600.0),
    ],
)
def test_how_long_nodes_wait(words, seconds):
    assert patience_of(words) == seconds
