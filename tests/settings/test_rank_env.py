# SPDX-License-Identifier: Apache-2.0
"""Where a process learns its rank: torchrun's words, or those of srun."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import PeerLost, SettingsError, UsageError
from megatron.settings.rank_env import Ranks, adopt, adopt_launcher, first_host, hosts, is_started, ranks

STEP = dict(
    SLURM_STEP_ID="3",
    SLURM_JOB_ID="7",
    SLURM_STEP_NUM_TASKS="20",
    SLURM_STEP_TASKS_PER_NODE="8(x2),4",
    SLURM_STEP_NODELIST="gpu-[07,12-13]",
    SLURM_PROCID="17",
    SLURM_NODEID="2",
    SLURM_LOCALID="1",
)


def adopted(**env):
    adopt_launcher(env)
    return env


def test_a_task_of_srun_for_each_rank():
    env = adopted(**STEP)
    assert ranks(env) == Ranks(rank=17, world_size=20, local_rank=1, local_world_size=4)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("gpu-07", str(20000 + 7 * 16 + 3))
    assert ranks(adopted(**STEP | dict(SLURM_NODEID="1"))).local_world_size == 8
    assert ranks(adopted(**STEP | dict(CUDA_VISIBLE_DEVICES="5"))).local_rank == 0  # SLURM gave it one GPU
    assert ranks(adopted(**STEP | dict(CUDA_VISIBLE_DEVICES="0,1,2,3"))).local_rank == 1
    assert adopted(**STEP | dict(MASTER_ADDR="10.0.0.1", MASTER_PORT="5"))["MASTER_ADDR"] == "10.0.0.1"
    assert adopted(**STEP | dict(SLURM_RESTART_COUNT="1"))["MASTER_PORT"] != env["MASTER_PORT"]


@pytest.mark.parametrize(
    "env",
    [
        {},
        STEP | dict(RANK="2", WORLD_SIZE="4", LOCAL_RANK="0"),  # torchrun under srun
        STEP | dict(SLURM_STEP_NUM_TASKS="1"),
        {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"},  # the batch script itself
    ],
)
def test_what_is_no_task_for_each_rank_stays_as_it_is(env):
    assert adopted(**env) == env


OPEN_MPI = {
    f"OMPI_COMM_WORLD_{name}": n for name, n in dict(SIZE="8", RANK="5", LOCAL_RANK="1", LOCAL_SIZE="4").items()
}
MPICH = dict(PMI_SIZE="8", PMI_RANK="5", MPI_LOCALRANKID="1", MPI_LOCALNRANKS="4")


@pytest.mark.parametrize("words", [OPEN_MPI, MPICH, STEP | OPEN_MPI])
def test_a_process_of_mpirun_for_each_rank(words):
    env = adopted(**words)
    assert ranks(env) == Ranks(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert "MASTER_ADDR" not in env  # of several machines: -x MASTER_ADDR
    assert adopted(**words | dict(MASTER_ADDR="h1"))["MASTER_ADDR"] == "h1"
    assert adopted(**words | dict(RANK="0", WORLD_SIZE="1"))["WORLD_SIZE"] == "1"  # torchrun under mpirun


def test_two_words_of_mpirun():
    assert ranks(adopted(**dict(list(OPEN_MPI.items())[:2]))) == Ranks(rank=5, world_size=8)  # never a job of its own
    env = STEP | dict(list(MPICH.items())[:2])  # srun --mpi=pmi2
    assert ranks(adopted(**env)) == ranks(adopted(**STEP))


def test_one_process_of_mpirun_is_alone():
    env = OPEN_MPI | dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), "1")
    assert adopted(**env) == env


def test_ranks_that_have_no_place_to_meet(monkeypatch):
    from megatron.mpu.initialize import join_job
    from megatron.settings.schema import Kernels, Parallel

    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        SettingsError, match="MASTER_ADDR and MASTER_PORT not set(.|\n)*torchrun(.|\n)*unset WORLD_SIZE"
    ):
        join_job(Parallel(), Kernels(device="cpu"))


DLC = dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # of a node, as PAI's DLC numbers them


@pytest.mark.parametrize("node", ["0", "1"])
def test_numbers_of_nodes_make_no_ranks_of_a_tool(node, capsys):
    env = adopted(**DLC | dict(RANK=node))
    assert ranks(env) == Ranks() and not is_started(env)
    told = f"note: RANK={node} and WORLD_SIZE=2 without LOCAL_RANK: no launcher has set them; this process is alone"
    assert told in capsys.readouterr().err


def test_ranks_of_a_launcher_stay_as_they_are(capsys):
    for more in (dict(LOCAL_RANK="0"), dict(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")):
        env = DLC | more
        assert adopted(**env) == env and is_started(env)
    assert adopted(RANK="0", WORLD_SIZE="1") == dict(RANK="0", WORLD_SIZE="1")
    env = adopted(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1")
    assert is_started(env) and ranks(env).rank == 1
    env = {}
    adopt("--rank 1 --world-size 2 --host node0".split(), env)
    assert is_started(env) and adopted(**env) == env
    assert capsys.readouterr().err == ""


def joins(*words, **more):
    raise AssertionError("ranks are joined")


@pytest.mark.sampled(5)
def test_planning_joins_no_ranks(capsys, monkeypatch):
    """In the environment of PAI's DLC each of these commands is alone."""
    from megatron.planner.preflight import run
    from megatron.settings.parse import parse_pretrain
    from megatron.tools import plan, pretrain

    monkeypatch.setattr("torch.distributed.init_process_group", joins)
    for name, value in DLC.items():
        monkeypatch.setenv(name, value)
    model = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --vocab-size 1024".split()
    cluster = "--world-size 16 --local-world-size 8 --device-name A100-80GB".split()
    searched = [*model, *cluster, "--max-global-batch-size", "16"]
    pretrain.main(["--task-type", "llmacc.megatron.GPT", *searched], env=DLC)
    plan.main(searched)
    assert capsys.readouterr().out.count("torchrun --") >= 2
    pretrain.main([*searched, "--dry-run", "--train-iters", "2", "--mock-data", "--lr", "1e-4"], env=DLC)
    monkeypatch.setattr(run, "check_design", lambda *words: None)
    monkeypatch.setattr(run, "together", joins)
    flags = [*model, *cluster, *"--micro-batch-size 1 --global-batch-size 16 --lr 1e-4 --train-iters 2".split()]
    run.preflight(parse_pretrain([*flags, "--mock-data", "--preflight"]), None, env=DLC)
    assert "the machines of the 16 ranks" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("rank, world, others", [(0, 2, "rank 1"), (1, 2, "rank 0"), (0, 3, "some of ranks 1 to 2")])
def test_a_rank_says_whom_it_waited_for(rank, world, others, monkeypatch):
    from megatron.mpu.initialize import dist, join_job
    from megatron.settings.schema import Kernels, Parallel

    def late(*words, timeout, **more):
        raise dist.DistStoreError(
            f"Timed out after {timeout.total_seconds():g} seconds waiting for clients. 1/2 joined."
        )

    monkeypatch.setattr(dist, "init_process_group", late)
    for name, value in (DLC | dict(RANK=str(rank), WORLD_SIZE=str(world))).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        PeerLost, match=f"could not join the job at 127.0.0.1:1(.|\n)*it waited 6 s for {others}: Timed"
    ):
        join_job(Parallel(distributed_timeout_minutes=0.1), Kernels(device="cpu"))


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("n[1-4]", "n1"),
        ("a,b", "a"),
        ("node3", "node3"),
        ("x[2,5]y", "x2y"),
        ("c1-[001-004],d", "c1-001"),
        ("nodeA,nodeB[001,003]", "nodeA"),
        ("gpu-dy-g4-[1-4]", "gpu-dy-g4-1"),
        ("tux[0-3].example.org,b", "tux0.example.org"),
        ("rack[1-2]n[01-02]", "rack1n01"),
        ("r[1,3]i[0-3]n[05-09]-ib", "r1i0n05-ib"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


@st.composite
def host_lists(draw):
    """A SLURM host list, and its hosts from plain loops."""
    text, expanded = [], []
    for _ in range(draw(st.integers(1, 3))):
        name, names = "n", ["n"]
        for _ in range(draw(st.integers(0, 3))):
            ranges, numbers, digits = [], [], draw(st.integers(1, 3))
            for low, more in draw(st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3)), min_size=1, max_size=3)):
                written = [str(low + step).rjust(digits, "0") for step in range(more + 1)]
                ranges.append(written[0] if more == 0 else f"{written[0]}-{written[-1]}")
                numbers += written
            after = draw(st.sampled_from(["", "-ib", ".example.org", "i"]))
            name += "[" + ",".join(ranges) + "]" + after
            names = [before + number + after for before in names for number in numbers]
        text.append(name)
        expanded += names
    return ",".join(text), expanded


@pytest.mark.sampled(2)
@given(host_lists())
def test_the_hosts_of_a_list(case):
    nodes, expanded = case
    assert list(hosts(nodes)) == expanded and first_host(nodes) == expanded[0]


@pytest.mark.parametrize("nodes", ["", "n[1-4", "n1]", "n[4-2]", "n[a-c]"])
def test_what_is_no_list_of_hosts(nodes):
    with pytest.raises(SettingsError, match="SLURM_STEP_NODELIST=.* is not a list of hosts(.|\n)*MASTER_ADDR"):
        first_host(nodes)


BY_HAND = "--rank 1 --lr 1e-4 --world_size=2 --host 10.0.0.1 --port 29511 --local_rank 0"


def test_words_of_a_rank_that_is_started_by_hand():
    """Colossal-AI's: they are torchrun's variables, and no settings."""
    env = {}
    assert adopt(BY_HAND.split(), env) == ["--lr", "1e-4"]
    assert env == dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="10.0.0.1", MASTER_PORT="29511", LOCAL_RANK="0")
    env = {}
    adopt(["--rank=1", "--world-size", "2"], env)
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("1", "2", "localhost")


def test_words_that_leave_the_ranks_to_others():
    """Of a plan, and under a launcher, which has the say."""
    for words, env in (("--world-size 64 --lr 1e-4", {}), (BY_HAND, dict(RANK="0", WORLD_SIZE="4"))):
        before = dict(env)
        assert adopt(words.split(), env) == words.split() and env == before


@pytest.mark.parametrize(
    "words, said",
    [
        ("--rank 0", "--rank 0 needs --world-size.*--world-size N"),
        ("--rank one --world-size 2", "--rank one: expected a number"),
        ("--rank 0 --world-size", "--world-size : expected a number"),
        ("--rank 0 --world-size 2 --port http", "--port http: expected a number"),
    ],
)
def test_words_that_are_no_rank(words, said):
    with pytest.raises(UsageError, match=f"(?s){said}"):
        adopt(words.split(), {})
