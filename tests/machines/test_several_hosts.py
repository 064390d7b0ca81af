# SPDX-License-Identifier: Apache-2.0
"""Jobs over four hosts: every launcher trains what one host trains, to the bit, over links of any kind, and a host that
dies, is cut off, or comes back under another address costs the steps since the last checkpoint and nothing else.

Hosts are network namespaces (`hosts.py`). Messages go by gloo; NCCL has not been tried over several machines.
"""

import json
import re
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.reader import Reader
from megatron.telemetry.events import read_events
from tests.inference.test_evaluate import write_tokens
from tests.machines.hosts import Host, Hosts, ended, has_qdisc, lacking

pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(lacking()), reason=lacking() or "there are hosts")]

ROOT = Path(__file__).resolve().parents[2]
STEPS, PORT = 30, "29511"
LINE = f"""--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 100 --lr 1e-2
    --tokenizer-type NullTokenizer --micro-batch-size 2 --global-batch-size 8 --train-iters {STEPS} --eval-iters 0
    --device cpu --num-workers 0 --log-interval 1 --precision fp32 --hidden-dropout 0.1 --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2 --use-distributed-optimizer --data-path ../shared/text_document --save-interval 2
    --distributed-timeout-minutes 0.25"""
ENVIRONMENT = dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
LAUNCH, TORCHRUN = "-m megatron.tools.launch".split(), "-m torch.distributed.run".split()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder with the tokens of a text."""
    folder = tmp_path_factory.mktemp("hosts") / "shared"
    folder.mkdir()
    dice = np.random.default_rng(7)
    write_tokens(folder / "text_document", [dice.integers(0, 100, length) for length in dice.integers(20, 90, 200)])
    return folder


@pytest.fixture
def hosts(shared):
    with Hosts(4, shared.parent) as hosts:
        yield hosts
    for host in hosts:
        shutil.rmtree(host.folder)
    shutil.rmtree(shared / "run", ignore_errors=True)


@pytest.fixture(scope="module")
def one_host(shared):
    """The weights that eight ranks of one host train."""
    with Hosts(1, shared.parent) as [host]:
        words = ["--standalone", "--nproc-per-node", "8", str(ROOT / "pretrain_gpt.py"), *LINE.split()]
        done = host.start([sys.executable, *LAUNCH, *words, "--save", "../shared/one"], **ENVIRONMENT)
        assert ended([done], 120) == [0], host.log()
        shutil.rmtree(host.folder)
    return weights(shared / "one")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    with Reader(folder / f"iter_{STEPS:07d}") as reader:
        return {name: reader.read(name) for name in reader.tensors}


def assert_same(hosts: Hosts, one_host) -> None:
    found = weights(hosts.folder / "shared" / "run")
    assert found.keys() == one_host.keys()
    assert [name for name, values in one_host.items() if not torch.equal(values, found[name])] == []


def command(host: Host, launcher=LAUNCH, address="host0", port=PORT, nodes=4, number=None) -> list[str]:
    words = ["--nnodes", str(nodes), "--node-rank", str(host.number if number is None else number)]
    words += ["--nproc-per-node", "2", "--master-addr", address, "--master-port", port]
    return [sys.executable, *launcher, *words, str(ROOT / "pretrain_gpt.py"), *LINE.split(), "--save", "../shared/run"]


def start(hosts, **given) -> list:
    return [host.start(command(host, **given), **ENVIRONMENT) for host in hosts]


def supervised(host: Host, *more: str, flags: str = "", **given):
    supervise = "-m megatron.tools.supervise --heartbeat-dir ../shared/beats --hang-timeout 20 --log-dir logs"
    words = [sys.executable, *supervise.split(), *flags.split(), "--", *command(host, **given), *more]
    return host.start(words, **ENVIRONMENT)


def wait_for_step(host: Host, step: int, seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while f"iteration {step:8d}/" not in host.log():
        assert time.monotonic() < until, host.log()
        time.sleep(0.1)


def logs(hosts) -> str:
    return "\n".join(f"---- {host.name}\n{host.log()}" for host in hosts)


# ---- launchers and links ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN], ids=["launch", "torchrun"])
def test_four_hosts_train_what_one_host_trains(launcher, hosts, one_host):
    assert ended(start(hosts, launcher=launcher), 120) == [0] * 4, logs(hosts)
    assert_same(hosts, one_host)


def test_a_script_trains_on_four_hosts_what_it_trains_on_one(hosts):
    """By the number of nodes in the environment, as clusters of PyTorch jobs set it."""
    script = ["bash", str(ROOT / "scripts" / "pretrain_gpt_125M_single.sh"), *LINE.split(), "--save"]
    given = ENVIRONMENT | dict(PYTHON=sys.executable)
    alone = hosts[0].start([*script, "../shared/run/one"], log="alone", NPROC="8", **given)
    assert ended([alone], 120) == [0], hosts[0].log("alone")
    for host in hosts:
        cluster = dict(WORLD_SIZE="4", RANK=str(host.number), MASTER_ADDR="host0", MASTER_PORT=PORT, NPROC="2")
        host.start([*script, "../shared/run"], **given, **cluster)
    assert ended([host.started[-1] for host in hosts], 120) == [0] * 4, logs(hosts)
    assert_same(hosts, weights(hosts.folder / "shared" / "run" / "one"))


LINKS = ["netem delay 5ms 2ms", "netem loss 1%", "netem duplicate 5% reorder 10% delay 2ms"]
LINKS += ["tbf rate 20mbit burst 32kbit latency 400ms"]


@pytest.mark.parametrize("words", LINKS)
def test_what_a_link_does_changes_no_bit(words, hosts, one_host):
    if not has_qdisc(words):
        pytest.skip(f"no kernel module for `tc qdisc ... {words}`")
    for host in hosts:
        host.link(words)
    assert ended(start(hosts), 200) == [0] * 4, logs(hosts)
    assert_same(hosts, one_host)


# ---- folders that each host has for itself -----------------------------------------------------------------------------


def files_of(folder: Path, ends: str = "") -> dict[str, int]:
    """Path in a folder -> when the file was written."""
    files = (path for path in folder.rglob(f"*{ends}") if path.is_file() and path.suffix != ".lock")
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def run_on_two(hosts: Hosts, log: str, *more: str, **environment: str) -> None:
    """A run of four ranks on two hosts; it ends by itself, whatever one host has and the other one has not."""
    pair = hosts.hosts[:2]
    for host in pair:
        own = {name: word.replace("OWN", str(host.folder)) for name, word in environment.items()}
        host.start([*command(host, nodes=2), *more], log=log, **ENVIRONMENT, **own)
    assert ended([host.started[-1] for host in pair], 600) == [0, 0], "\n".join(host.log(log) for host in pair)


def test_each_host_has_index_maps_of_its_own(hosts, half):
    """The first rank builds them, once; a host without them gets them, once, and keeps them for its ranks. A host that has
    lost its folder gets them again; nobody else writes anything, and nothing lies beside the tokens.
    """
    shared, (first, second) = hosts.folder / "shared", (host.folder / "cache" for host in hosts.hosts[:2])
    before = files_of(shared / "index_maps") if (shared / "index_maps").exists() else {}
    beside = {path.name for path in shared.iterdir()} - {"run"}
    flags = ["--data-cache-path", "cache", "--load", "../shared/run"]
    run_on_two(hosts, "new", *flags, "--exit-interval", "10")
    built, sent = files_of(first), files_of(second)
    maps = [name for name in built if name.endswith("index.json")]
    assert maps and {*built} == {*sent}
    said = hosts[0].log("new")
    assert said.count("are sent to 1 rank") == len(maps) and "restart" not in said
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in built)

    shutil.rmtree(second)
    run_on_two(hosts, "lost", *flags, "--exit-interval", "20")
    assert files_of(first) == built and {*files_of(second)} == {*sent}
    assert hosts[0].log("lost").count("are sent to 1 rank") == len(maps)

    sent = files_of(second)
    run_on_two(hosts, "kept", *flags)
    assert (files_of(first), files_of(second)) == (built, sent)
    assert "are sent to" not in hosts[0].log("kept")
    assert {path.name for path in shared.iterdir()} - {"run"} == beside
    assert (files_of(shared / "index_maps") if (shared / "index_maps").exists() else {}) == before
    assert_same(hosts, half)


@pytest.mark.timeout(1500)
def test_each_host_compiles_for_itself(hosts):
    """With --torch-compile: a host whose compiled code is lost compiles again, and the other one waits for it, and compiles
    nothing.
    """
    folders = dict(TORCHINDUCTOR_CACHE_DIR="OWN/inductor", TRITON_CACHE_DIR="OWN/triton")
    folders["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else as many processes a rank as there are cores
    flags = "--torch-compile --distributed-timeout-minutes 8 --load ../shared/run --exit-interval".split()
    run_on_two(hosts, "new", *flags, "2", **folders)
    first, second = (host.folder / "inductor" for host in hosts.hosts[:2])
    compiled = files_of(first, ".so")
    assert compiled and files_of(second, ".so")
    shutil.rmtree(second)
    run_on_two(hosts, "lost", *flags, "4", **folders)
    assert files_of(first, ".so") == compiled and files_of(second, ".so")
    assert "iteration        4/" in hosts[0].log("lost")


# ---- hosts that go, and come back ------------------------------------------------------------------------------------


def ends(processes, hosts, one_host) -> None:
    assert ended(processes, 200) == [0] * 4, logs(hosts)
    assert_same(hosts, one_host)


@pytest.mark.parametrize("number", [3, 0])
@pytest.mark.parametrize("address", [None, "10.79.0.77"], ids=["", "another address"])
def test_a_host_dies_and_comes_back(number, address, hosts, one_host):
    """Node 0, at whose address the others meet, too."""
    processes = [supervised(host) for host in hosts]
    wait_for_step(hosts[0], 6)
    hosts[number].power_off()
    time.sleep(5)
    hosts[number].power_on(address)
    processes[number] = supervised(hosts[number])
    ends(processes, hosts, one_host)
    for other in {0, 1, 2, 3} - {number}:
        left = hosts[other].log()
        assert re.search(rf"no word from host{number} for \d+ s: rank {2 * number}-{2 * number + 1}\n", left), left
        assert re.search(
            rf"attempt 0 ended: host: .*first on rank {2 * number} of host{number}: no word from host", left
        )
        assert "restart 1 of 10" in left and "restart 2" not in left
    assert "restarts within an hour" not in logs(hosts)


def test_a_host_dies_with_its_memory(hosts, one_host):
    """Each host has a memory of its own (a folder), and nothing is on the disk yet: the parts of the host that is lost come
    from the memory of the next one.
    """
    more = "--save-interval 100 --non-persistent-save-interval 2 --replication --non-persistent-local-ckpt-dir memory"
    processes = [supervised(host, *more.split()) for host in hosts]
    wait_for_step(hosts[0], 9)
    assert all(len(list((host.folder / "memory").glob("*/iter_*/held_by_*/*.safetensors"))) >= 4 for host in hosts)
    hosts[2].power_off()
    shutil.rmtree(hosts[2].folder / "memory")
    time.sleep(5)
    hosts[2].power_on()
    processes[2] = supervised(hosts[2], *more.split())
    ends(processes, hosts, one_host)
    events = read_events(hosts.folder / "shared" / "run")
    [loaded] = [event for event in events if event["event"] == "snapshot_loaded"]
    assert loaded["iteration"] >= 8 and loaded["parts"] == 8
    assert not any(list((host.folder / "memory").iterdir()) for host in hosts)


@pytest.fixture(scope="module")
def half(shared):
    """The weights, and the losses, that four ranks of one host train."""
    with Hosts(1, shared.parent) as [host]:
        words = ["--standalone", "--nproc-per-node", "4", str(ROOT / "pretrain_gpt.py"), *LINE.split()]
        done = host.start([sys.executable, *LAUNCH, *words, "--save", "../shared/half"], **ENVIRONMENT)
        assert ended([done], 120) == [0], host.log()
        shutil.rmtree(host.folder)
    return weights(shared / "half")


@pytest.mark.parametrize("number", [1, 0])
def test_a_spare_host_takes_the_place_of_one_that_dies(number, hosts, half):
    """Of the first one, too, at whose address the others meet. The third host waits, and the fourth is not started."""
    processes = [supervised(host, flags="--spare-nodes 1 --node-timeout 6", nodes=2) for host in hosts.hosts[:3]]
    wait_for_step(hosts[0], 6)
    assert "waiting as a spare: host0, host1 are at work" in hosts[2].log()
    hosts[number].power_off()
    left = [processes[other] for other in (1 - number, 2)]
    assert ended(left, 120) == [0, 0], logs(hosts.hosts[:3])
    assert_same(hosts, half)
    said = hosts[1 - number].log()
    order = ["host0 host2", "host2 host1"][number == 0]
    assert f"node {1 - number} of 2: {order}" in said and "restart 2" not in said
    excluded = [one for one in read_events(hosts.folder / "shared" / "run") if one["event"] == "node_excluded"]
    assert [(one["message"], one["action"]) for one in excluded] == [
        (f"the job goes on without host{number}, with host2", "spare")
    ]


def test_fewer_hosts_go_on_where_none_is_left(hosts, one_host):
    """Four hosts, tp 2 and pp 2: three make one whole pipeline of two hosts. The batch stays, and so do the losses."""
    flags = "--min-nodes 2 --node-timeout 6"
    processes = [supervised(host, flags=flags) for host in hosts]
    wait_for_step(hosts[0], 6)
    hosts[3].power_off()
    assert ended(processes[:3], 150) == [0] * 3, logs(hosts)
    assert "node 0 of 2: host0 host1" in hosts[0].log() and "waiting as a spare" in hosts[2].log()
    assert "ended with host" in hosts[2].log()
    found = weights(hosts.folder / "shared" / "run")
    for name, values in one_host.items():
        assert torch.allclose(found[name], values, atol=2e-4), name
    assert losses(hosts.folder / "shared" / "run") == pytest.approx(losses(hosts.folder / "shared" / "one"), abs=1e-4)


def losses(run: Path) -> dict[int, float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {record["iteration"]: record["lm loss"] for record in records if "lm loss" in record}


def test_a_host_is_cut_off_for_a_while(hosts, one_host):
    """All ranks wait for each other, give up after --distributed-timeout-minutes, and meet again."""
    processes = [supervised(host) for host in hosts]
    wait_for_step(hosts[0], 6)
    hosts[3].unplug()
    time.sleep(25)
    hosts[3].plug_back()
    ends(processes, hosts, one_host)
    assert "waited 15 s for another rank" in hosts[0].log() and "restarts within an hour" not in logs(hosts)


def test_without_a_supervisor_the_others_end_and_name_what_they_waited_for(hosts):
    processes = start(hosts)
    wait_for_step(hosts[0], 6)
    hosts[3].power_off()
    began = time.monotonic()
    assert ended(processes[:3], 60) == [7, 7, 7] and time.monotonic() - began < 40
    for host in hosts.hosts[:3]:
        assert re.search(r"error: (rank \d waited 15 s for another rank|another rank is gone or silent)", host.log())
        assert "the last checkpoint is ../shared/run/iter_00000" in host.log()


# ---- hosts that do not find each other -------------------------------------------------------------------------------


def refused(hosts, said: str, code: int = 7, **given) -> None:
    began = time.monotonic()
    assert ended(start(hosts, **given), 60) == [code] * len(list(hosts)), logs(hosts)
    assert time.monotonic() - began < 50
    for host in hosts:
        assert said in host.log(), host.log()
        assert "Traceback" not in host.log() and host.log().count("error: ") == 1


def test_a_name_that_nobody_knows(hosts):
    refused(hosts, "error: --master-addr hsot0 is not known on host", address="hsot0")


def test_a_host_that_does_not_come(hosts):
    refused(hosts.hosts[:3], "error: 1 node of 4 (--node-rank 3) did not come within 15 s")
    assert "here: 0 (host0, process" in hosts[1].log()


def test_the_first_host_does_not_come(hosts):
    refused(hosts.hosts[1:], f"error: node 0 does not answer at host0:{PORT} (connection refused)")


def test_an_address_at_which_there_is_no_host(hosts):
    refused(hosts.hosts[1:], f"error: node 0 does not answer at 10.79.0.200:{PORT} (", address="10.79.0.200")


def test_a_first_host_that_is_not_reached(hosts):
    """Its packets go nowhere, as a firewall drops them."""
    hosts[0].unplug()
    assert ended(start(hosts), 60) == [7] * 4, logs(hosts)
    assert re.search(rf"error: node 0 does not answer at host0:{PORT} \((timed out|no route to host)\)", hosts[2].log())
    assert "error: 3 nodes of 4 (--node-rank 1, 2, 3) did not come within 15 s" in hosts[0].log()


def test_one_number_twice(hosts):
    processes = [host.start(command(host, number=max(0, host.number - 1)), **ENVIRONMENT) for host in hosts]
    codes = ended(processes, 60)
    assert codes == [7] * 4, logs(hosts)
    assert re.search(
        r"--master-port 29511: another process|node 0 .* is there already", hosts[0].log() + hosts[1].log()
    ) or ("error: 1 node of 4 (--node-rank 3)" in hosts[2].log())


def test_hosts_that_disagree_on_how_many_there_are(hosts):
    processes = [host.start(command(host, nodes=4 - (host.number == 2)), **ENVIRONMENT) for host in hosts]
    assert ended(processes, 60) == [7, 7, 3, 7], logs(hosts)
    assert "error: --nnodes 3 on host2, and 4 on host0" in hosts[2].log()
    assert "1 node of 4 (--node-rank 2) did not come within 15 s" in hosts[1].log()


def test_a_second_job_at_the_same_port_does_not_disturb_the_first(hosts, one_host):
    first = start(hosts)
    wait_for_step(hosts[0], 2)
    second = [host.start(command(host), log="second", **ENVIRONMENT) for host in hosts]
    assert ended(second, 60) == [7] * 4, "\n".join(host.log("second") for host in hosts)
    assert f"error: --master-port {PORT}: another process uses this port" in hosts[0].log("second")
    for host in hosts.hosts[1:]:
        assert f"node {host.number} of the job at host0:{PORT} is there already ({host.name}, p" in host.log("second")
    assert ended(first, 120) == [0] * 4, logs(hosts)
    assert_same(hosts, one_host)
