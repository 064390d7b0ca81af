# SPDX-License-Identifier: Apache-2.0
"""`--save X --load X` from the first launch on: a folder that never held a checkpoint is a beginning, one that lost
its checkpoints is an error.
"""

import json
import shutil

import pytest

import pretrain_gpt
from megatron.checkpoint.first_launch import may_begin
from megatron.errors import CheckpointError
from megatron.planner.problems import file_problems
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Checkpoint
from megatron.training.loop import pretrain
from megatron.training.rules import resolve

TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4 --mock-data --vocab-size 20 --lr 1e-2 "
    "--micro-batch-size 2 --eval-iters 0 --device cpu --num-workers 0"
)


def train(rank, flags, world=1):
    pretrain(resolve(parse_pretrain(f"{TINY} {flags}".split()), world), pretrain_gpt.recipe())


def steps(folder) -> list[int]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["iteration"] for record in lines if record["kind"] == "step"]


def lose_checkpoints(folder, *, tracker: bool) -> None:
    for path in folder.glob("iter_*"):
        shutil.rmtree(path)
    if tracker:
        (folder / "latest_checkpointed_iteration.txt").unlink()


@pytest.mark.parametrize("made", [False, True])
def test_one_command_starts_and_goes_on(made, tmp_path, capsys):
    folder = tmp_path / "run"
    if made:
        folder.mkdir()
    flags = f"--save {folder} --load {tmp_path / 'elsewhere' / '..' / 'run'} --lr-decay-iters 9"
    (tmp_path / "elsewhere").mkdir()
    train(0, f"{flags} --train-iters 2")
    said = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint" in line]
    assert len(said) == 1 and said[0].endswith("yet: starting from iteration 0")
    train(0, f"{flags} --train-iters 4")
    assert "no checkpoint" not in capsys.readouterr().out
    assert steps(folder) == [1, 2, 3, 4]


def test_all_ranks_start_anew_together(run_ranks, tmp_path):
    run_ranks(2, train, f"--train-iters 2 --save {tmp_path} --load {tmp_path}", 2)
    assert steps(tmp_path) == [1, 2]


def test_a_lost_checkpoint_is_an_error_on_all_ranks(run_ranks, tmp_path):
    run_ranks(2, train, f"--train-iters 2 --save {tmp_path}", 2)
    lose_checkpoints(tmp_path, tracker=True)

    def body(rank):
        with pytest.raises(CheckpointError, match="and there was one") as refused:
            train(rank, f"--train-iters 4 --save {tmp_path} --load {tmp_path}", 2)
        return refused.value.code

    assert run_ranks(2, body) == [5, 5]


@pytest.mark.parametrize("tracker, names", [(False, "latest_checkpointed_iteration.txt"), (True, "metrics.jsonl")])
def test_a_folder_that_had_one_is_an_error_unless_it_is_meant(tracker, names, tmp_path, capsys):
    flags = f"--save {tmp_path} --load {tmp_path} --train-iters 2"
    train(0, flags)
    lose_checkpoints(tmp_path, tracker=tracker)
    with pytest.raises(CheckpointError, match="and there was one") as refused:
        train(0, flags)
    assert refused.value.code == 5 and names in refused.value.why and "--auto-resume" in refused.value.do
    assert "and there was one" in "\n".join(file_problems(parse_pretrain(f"{TINY} {flags}".split())))  # --dry-run
    train(0, f"{flags} --auto-resume")
    assert steps(tmp_path) == [1, 2, 1, 2]


def test_damaged_iterations_are_no_beginning(tmp_path):
    flags = f"--save {tmp_path} --load {tmp_path} --train-iters 1"
    train(0, flags)
    (tmp_path / "iter_0000001" / "index.json").unlink()
    for more in ("", "--auto-resume"):
        with pytest.raises(CheckpointError, match="holds no valid checkpoint"):
            train(0, f"{flags} {more}")


def test_copies_are_gone_on_from_and_lost_ones_are_no_beginning(tmp_path):
    folder, copies = tmp_path / "run", tmp_path / "copies"
    flags = f"--save {folder} --load {folder} --save-copy {copies} --lr-decay-iters 9 --train-iters"
    train(0, f"{flags} 2")
    shutil.rmtree(folder)
    train(0, f"{flags} 3")
    assert steps(folder) == [3]
    shutil.rmtree(folder)
    lose_checkpoints(copies, tracker=False)
    with pytest.raises(CheckpointError, match="and there was one") as refused:
        train(0, f"{flags} 3")
    assert str(copies) in refused.value.why


@pytest.mark.parametrize(
    "more",
    [
        "--load {0}/other --save {0}/run",
        "--load {0}/run --save {0}/run --finetune",
        "--load {0}/run --save {0}/run --exit-on-missing-checkpoint",
    ],
)
def test_what_needs_a_checkpoint_is_refused(more, tmp_path):
    flags = f"--train-iters 1 {more.format(tmp_path)}"
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        train(0, flags)
    assert "holds no checkpoint" in "\n".join(file_problems(parse_pretrain(f"{TINY} {flags}".split())))


def record(kind, iteration, **more):
    return dict(kind=kind, iteration=iteration) | more


def launch(iteration=0, **checkpoint):
    return record("run", iteration, config=dict(checkpoint=dict(save="{folder}", **checkpoint)))


def many(first, last):
    return [record("step", number) for number in range(first, last + 1)]


@pytest.mark.parametrize(
    "had_one, lines",
    [
        (False, []),
        (False, [launch()]),
        (True, many(1, 1)),  # steps of nobody knows what
        (False, [launch(save_interval=10), *many(1, 9)]),  # killed before the first save,
        (False, [launch(save_interval=10), *many(1, 10)]),  # in it,
        (True, [launch(save_interval=10), *many(1, 11)]),  # behind it
        (False, [launch(save_interval=10, async_save=True), *many(1, 20)]),  # still being written
        (True, [launch(save_interval=10, async_save=True), *many(1, 21)]),
        (False, [launch(save_interval=-1), *many(1, 10)]),
        (True, [launch(save_interval=-1), *many(1, 11)]),
        (False, [launch(save_interval=-1, async_save=True), *many(1, 99)]),
        (False, [launch(), *many(1, 50)]),
        (False, [launch(), *many(1, 50), record("end", 50, code=8)]),
        (True, [launch(), *many(1, 50), record("end", 50, code=0)]),
        (False, [launch(), record("end", 0, code=0)]),
        (False, [launch(save_interval=10), *many(1, 9), launch(save_interval=10), *many(1, 9)]),
        (True, [launch(), launch(40)]),  # it went on from somewhere
    ],
)
def test_what_metrics_tell_of_saves(had_one, lines, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("torn {\n" + "".join(json.dumps(line).replace("{folder}", str(tmp_path)) + "\n" for line in lines))
    settings = Checkpoint(save=str(tmp_path), load=str(tmp_path))
    if not had_one:
        assert may_begin(settings, path)
    else:
        with pytest.raises(CheckpointError, match="and there was one"):
            may_begin(settings, path)


def test_metrics_of_another_run_say_nothing_of_this_one(tmp_path):
    """--metrics-file elsewhere may be that of several runs."""
    path = tmp_path / "all.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [launch(), *many(1, 2), record("end", 2, code=0)]))
    assert may_begin(Checkpoint(save=str(tmp_path / "run"), load=str(tmp_path / "run")), path)
    path.write_text(path.read_text().replace("{folder}", str(tmp_path / "run")))
    with pytest.raises(CheckpointError):
        may_begin(Checkpoint(save=str(tmp_path / "run"), load=str(tmp_path / "run")), path)
