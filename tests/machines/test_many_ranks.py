# SPDX-License-Identifier: Apache-2.0
"""64 ranks on a few cores: what a start, a save and a resume ask of the machine, against the model of a larger job."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import folder as saving
from megatron.checkpoint import store
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece, commit, merge_group, write_shard
from megatron.planner.layout import Layout
from tests.machines import job_model
from tests.machines.job_model import MESSAGE, NODE, Job, Saved

# ---- jobs that nobody starts here


def test_the_numbers_of_1024_ranks():
    """tp 8, pp 4, dp 32: groups of tp, pp, the ends of pipelines, and data parallelism, beside that of all ranks."""
    job = Job.of(Layout(tp=8, pp=4, dp=32, zero=1, shard=32), 32)
    assert [job.opened_groups(stage) for stage in range(4)] == [5, 4, 4, 5]
    assert job.store_keys == 1 + 256 * (5 + 4 + 4 + 5)
    assert (job.leaders, job.gathers_of_save, job.parts_read_by_first_rank) == (32, 4, 64)
    assert job.files_of_save(16) == 1042


def test_the_numbers_of_16384_ranks():
    """tp 8, pp 16, dp 128, experts over 64 ranks: 16 ranks shard the state of an expert; counts have a group."""
    job = Job.of(Layout(tp=8, pp=16, dp=128, zero=1, shard=128, ep=64, etp=1), 96)
    assert [job.opened_groups(stage) for stage in (0, 1, 15)] == [8, 7, 8]
    assert job.store_keys == 1 + 16384 * 7 + 2 * 1024
    assert (job.leaders, job.parts_read_by_first_rank) == (512, 544)


def test_small_jobs_have_no_leaders():
    job = Job.of(Layout(dp=8), 2)
    assert (job.leaders, job.gathers_of_save, job.parts_read_by_first_rank, job.files_of_save(0)) == (0, 3, 8, 10)


# ---- saves of many writers


def saved_by(writers, layers, folder, monkeypatch):
    """A checkpoint of `layers` tensors of one row of each writer, and the parts of the index that the first one read."""
    draft, final = folder / ".tmp-0", folder / "iter_0000001"
    draft.mkdir()
    monkeypatch.setattr(os, "fsync", lambda file: None)
    for writer in range(writers):
        row = torch.full((1, 4), float(writer))
        shape, box = (writers, 4), Box((writer, 0), (1, 4))
        write_shard(draft, writer, [Piece(f"blocks.{layer}.weight", shape, box, row) for layer in range(layers)])
    read, real = [], store.read_sealed
    monkeypatch.setattr(store, "read_sealed", lambda path: read.append(path.name) or real(path))
    in_groups = writers > store.FAN
    for writer in range(writers) if in_groups else ():
        merge_group(draft, writer, writers)
        if writer == 0:
            by_first = len(read)
    if in_groups:
        del read[by_first:]
    commit(draft, final, writers, {"iteration": 1}, in_groups)
    return final, len(read)


@pytest.mark.parametrize("writers, layers", [(8, 2), (100, 12), pytest.param(1024, 40, marks=pytest.mark.full)])
def test_files_and_index_of_a_save(writers, layers, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PART", 1 << 16)
    path, parts_read = saved_by(writers, layers, tmp_path, monkeypatch)
    job = Job.of(Layout(dp=writers), 2)
    assert parts_read == job.parts_read_by_first_rank
    with Reader(path) as reader:
        tables = reader.index.tables
        assert len(list(path.iterdir())) == job.files_of_save(len(tables)) and bool(tables) == (writers > 8)
        piece = Piece("blocks.1.weight", (writers, 4), Box((writers - 3, 0), (2, 4)), torch.zeros(2, 4))
        reader.load([piece])
        assert piece.tensor[:, 0].tolist() == [writers - 3, writers - 2]
        largest = max((table.bytes for table in tables.values()), default=0)
        assert reader.index_bytes <= largest and len(reader._files) == 2  # of the index and of the data, what it needs
        assert (
            sum(table.bytes for table in tables.values()) == 0 or len(tables) >= layers * writers * 90 / (1 << 16) / 2
        )


def io() -> Counter:
    """Bytes that this process has read and written so far, by its system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return Counter({name: int(value) for name, value in (line.split(": ") for line in lines)})


def saved_in(path: Path, ranks: int) -> Saved:
    """What the formulas have to know of a checkpoint, from its index."""
    with Reader(path) as reader:
        boxes = [(name, tensor, stored) for name, tensor in reader.tensors.items() for stored in tensor.stored]
        mean = lambda values: sum(values) / len(boxes)
        return Saved(
            data=sum(stored.box.size * tensor.dtype.itemsize for _, tensor, stored in boxes) / ranks,
            boxes=len(boxes) / ranks,
            tensors=len({(name, stored.file) for name, _, stored in boxes}) / ranks,
            names=len(reader.tensors),
            name=mean(len(name) for name, *_ in boxes),
            key=mean(len(stored.key) for *_, stored in boxes),
            numbers=mean(len(f"{list(stored.box.offset)}{list(stored.box.extent)}") for *_, stored in boxes),
            state=(path / "state.json").stat().st_size,
        )


@pytest.mark.parametrize("writers, layers", [(6, 9), (100, 6), pytest.param(1024, 40, marks=pytest.mark.full)])
def test_bytes_of_a_save(writers, layers, tmp_path, monkeypatch):
    """What system calls write and read: each writer, leaders, the first one, and a reader, as the formulas say."""
    monkeypatch.setattr(store, "PART", 1 << 16)
    monkeypatch.setattr(job_model, "PART", 1 << 16)
    spent = {}

    def counted(phase: str, name: str, module=store) -> None:
        real = getattr(module, name)

        def call(*args, **more):
            before = io()
            result = real(*args, **more)
            spent.setdefault(phase, []).append(io() - before)
            return result

        monkeypatch.setattr(module, name, call)

    this = sys.modules[__name__]
    for phase, name in dict(save="write_shard", merge="merge_group", publish="commit").items():
        counted(phase, name, this)
    path, _ = saved_by(writers, layers, tmp_path, monkeypatch)
    saved, job = saved_in(path, writers), Job.of(Layout(dp=writers), 2)
    own = [one["wchar"] for one in spent["save"]]
    assert sum(own) / writers == pytest.approx(job.saved_bytes(saved), rel=0.03)
    [published] = spent["publish"]
    read, written = job.published_bytes(saved)
    assert published["rchar"] == pytest.approx(read, rel=0.03)
    assert published["wchar"] == pytest.approx(written, rel=0.03)
    leaders = [one for one in spent.get("merge", []) if one["wchar"]]
    assert len(leaders) == job.leaders
    if leaders:  # the last one has fewer ranks
        read, written = job.merged_bytes(saved)
        assert sum(one["rchar"] for one in leaders) == pytest.approx(writers / store.FAN * read, rel=0.03)
        assert sum(one["wchar"] for one in leaders) == pytest.approx(writers / store.FAN * written, rel=0.03)
    before = io()
    with Reader(path) as reader:
        piece = Piece("blocks.1.weight", (writers, 4), Box.whole((writers, 4)), torch.zeros(writers, 4))
        reader.load([piece])
    found = (io() - before)["rchar"]
    assert found == pytest.approx(job.loaded_bytes(saved, 1, 16 * writers), rel=0.1)


def test_bytes_of_1024_and_16384_ranks():
    """70B parameters, ZeRO 1 over 64: 12 bytes a parameter, 400 boxes of a rank in 210 of 1,450 tensors. A rank reads what
    the index has of its stage.
    """
    saved = Saved(data=0.83e9, boxes=400, tensors=210, names=1450, name=48, key=66, numbers=28, state=15e3)
    job = Job.of(Layout(tp=8, pp=2, dp=64, zero=1, shard=64), 80)
    assert job.saved_bytes(saved) == pytest.approx(0.83e9, rel=0.001)
    assert saved.entries(1, 210) == pytest.approx(95e3, rel=0.1)
    read, written = job.published_bytes(saved)
    assert read == pytest.approx(written, rel=0.1) == pytest.approx(72e6, rel=0.1)
    assert job.merged_bytes(saved)[0] == pytest.approx(32 * 95e3, rel=0.1)
    assert job.loaded_bytes(saved, 725, 0.83e9) - 0.83e9 == pytest.approx(75e6, rel=0.15)
    # DeepSeek-V3, 12 bytes for each of 671e9 parameters.
    saved = Saved(data=12 * 671e9 / 16384, boxes=300, tensors=100, names=3000, name=52, key=72, numbers=34, state=15e3)
    job = Job.of(Layout(tp=8, pp=16, dp=128, zero=1, shard=128, ep=64, etp=1), 96)
    read, written = job.published_bytes(saved)
    assert job.saved_bytes(saved) == pytest.approx(0.49e9, rel=0.01)
    assert (read, written) == pytest.approx((0.91e9, 0.9e9), rel=0.02)


@pytest.mark.parametrize("fan", [32, 0])
def test_rounds_in_which_ranks_answer_each_other(fan, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "FAN", fan)
    monkeypatch.setattr(store, "FAN", max(1, fan))
    monkeypatch.setattr(job_model, "FAN", fan or 1)
    rounds = []
    with Saver(tmp_path, all_gather_object=lambda value: rounds.append(value) or [value]) as saver:
        rounds.clear()
        saver.save(1, [Piece("x", (1, 4), Box.whole((1, 4)), torch.zeros(1, 4))], {})
    assert len(rounds) == Job.of(Layout(dp=1 if fan else 2), 2).gathers_of_save


# ---- a real job

FLAGS = """--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 60 --mock-data
    --num-experts 4 --moe-router-load-balancing-type none --lr 1e-2 --global-batch-size 168 --eval-iters 0 --num-workers 0
    --log-interval 1 --device cpu --hidden-dropout 0 --attention-dropout 0 --save-interval 2 --train-iters 10
    --distributed-timeout-minutes 10"""
LAUNCHES = (  # ranks, node and step of a kill, layout, the last step
    (
        64,
        "3 4",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 4",
        21,
        "",
    ),
    (
        56,
        "none",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 2",
        24,
        7,
    ),
    (
        48,
        "none",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 4",
        28,
        "",
    ),
)


def launch(folder, ranks, kill, layout, micro_batch):
    """(exit code, counts of each rank that left some) of a job."""
    for path in folder.glob("counts_*.json"):
        path.unlink()
    words = f"{FLAGS} {layout} --micro-batch-size {micro_batch} --save {folder}/run --load {folder}/run".split()
    command = [sys.executable, "-m", "tests.machines.many_ranks", str(folder), str(ranks), kill, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=3000, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    counts = {int(path.stem.split("_")[1]): json.loads(path.read_text()) for path in folder.glob("counts_*.json")}
    return done.returncode, counts


FRESH = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --expert-model-parallel-size 2"


def parameters(h=16, layers=4, experts=4, words=60, positions=8) -> Counter:
    """Those of the network of FLAGS, by how ranks divide them: tp cuts them, all of tp have them, ep cuts them, ends of
    the pipeline (the embedding, which is the output, too), the first stage, and the last."""
    cut = 3 * h * h + 3 * h + h * h  # queries, keys and values with biases; the output product
    whole = h + 4 * h + experts * (h + 1)  # its bias, two norms, the router
    of_expert = 4 * h * h + 4 * h + 4 * h * h + h
    each = Counter(cut=cut, whole=whole, experts=experts * of_expert)
    return Counter({name: layers * number for name, number in each.items()}) + Counter(
        ends=words * h, first=positions * h, last=2 * h
    )


STATE = 12  # bytes of a parameter: its value and two moments, in fp32


def check_bytes(path: Path, job: Job, counts: dict, saves: int, resumed: bool) -> None:
    """What ranks wrote and read of files, as /proc counts, against the formulas; means over ranks, which differ."""
    ranks, number = job.ranks, parameters()
    saved, mean = saved_in(path, job.ranks), lambda what: sum(own.get(what, 0) for own in counts.values()) / job.ranks
    assert saved.data * ranks == pytest.approx(STATE * number.total(), rel=0.01)
    assert mean("save written") / saves == pytest.approx(job.saved_bytes(saved), rel=0.03)
    if job.leaders:
        read, written = job.merged_bytes(saved)
        assert mean("merge read") * ranks / saves == pytest.approx(ranks / store.FAN * read, rel=0.05)
        assert mean("merge written") * ranks / saves == pytest.approx(ranks / store.FAN * written, rel=0.05)
    read, written = job.published_bytes(saved)
    # Its other threads read of /proc meanwhile what heartbeats and memory need.
    assert counts[0]["publish read"] / saves == pytest.approx(read, rel=0.05, abs=16e3)
    assert counts[0]["publish written"] / saves == pytest.approx(written, rel=0.05)
    if resumed:
        tp, pp, ep = 2, 4, 2
        own = number["cut"] / (tp * pp) + number["whole"] / pp + number["experts"] / (ep * pp)
        own += (2 * number["ends"] / tp + number["first"] + number["last"]) / pp
        assert mean("load read") == pytest.approx(job.loaded_bytes(saved, 0, STATE * own), rel=0.05)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ranks", [16, 64])
def test_what_ranks_ask_of_their_machines(ranks, tmp_path):
    """Files, bytes, messages and heartbeats of a start with two saves, and of a resume with one."""
    job = Job.of(Layout(tp=2, pp=4, dp=ranks // 8, ep=2, etp=1), 4)
    for saves, resumed in ((2, False), (1, True)):
        last = f"--train-iters 10 --exit-interval {6 if resumed else 4} --heartbeat-dir {tmp_path}/beats"
        layout = f"{FRESH} --expert-tensor-parallel-size 1 --global-batch-size {ranks} {last}"
        code, counts = launch(tmp_path, ranks, "none", layout, 1)
        assert code == 0 and len(counts) == ranks
        assert counts[0]["keys"] == job.store_keys
        seconds = max(own["seconds"] for own in counts.values())
        for rank, own in counts.items():
            assert own["groups"] == job.opened_groups(rank // (ranks // 4))
            assert own["gathered"] == job.gathers(saves, resumed), rank
            most = job.opened(rank, saves, resumed)
            assert own["opened run"] <= most and (resumed or own["opened run"] >= most - 8 * (rank == 0)), rank
        check_bytes(tmp_path / f"run/iter_{6 if resumed else 4:07d}", job, counts, saves, resumed)
        others = [own for rank, own in counts.items() if rank]
        for what, more in (("read", 1.5), ("written", 1.5), ("opened elsewhere", 1.05)):  # the same for each rank
            assert max(own[what] for own in others) <= more * min(own[what] for own in others), what
        files = list((tmp_path / "beats").glob("node_*.beats"))
        assert len(files) == job.nodes * (1 + resumed)  # each launcher has its own
        assert max(path.stat().st_size for path in files) <= NODE * MESSAGE
        for node in range(job.nodes):
            written = sum(counts[NODE * node + local].get("opened beats", 0) for local in range(NODE))
            assert 1 <= written <= job.messages(seconds), node


def losses_of(folder):
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines if '"lm loss"' in line]
    return {record["iteration"]: record["lm loss"] for record in records}


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_64_ranks_lose_a_node_and_go_on_as_56_and_48(tmp_path):
    alone, many = tmp_path / "alone", tmp_path / "many"
    alone.mkdir()
    many.mkdir()
    assert launch(alone, 1, "none", "", 21)[0] == 0
    for ranks, kill, layout, micro_batch, last in LAUNCHES:
        more = f"{layout} --expert-tensor-parallel-size 1" + f" --exit-interval {last}" * bool(last)
        code, counts = launch(many, ranks, kill, more, micro_batch)
        experts = 2 if ranks == 56 else 4
        job = Job.of(Layout(tp=2, pp=4, dp=ranks // 8, ep=experts, etp=1), 4)
        if kill != "none":
            assert code != 0
            continue
        assert code == 0 and len(counts) == ranks
        assert counts[0]["keys"] == job.store_keys
        for rank, own in counts.items():
            assert own["groups"] == job.opened_groups(rank // (ranks // 4))
    assert losses_of(many) == pytest.approx(losses_of(alone), abs=2e-4)
