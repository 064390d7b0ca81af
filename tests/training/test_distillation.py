# SPDX-License-Identifier: Apache-2.0
"""Distillation: whole trainings against the same student and teacher in plain PyTorch, in all kinds of layouts; what is
loaded and saved; mistakes.
"""

from functools import cache

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import load_model
from megatron.model.arguments import parse_any
from megatron.model.recipe import recipe_of
from megatron.mpu import forked
from megatron.training import build
from megatron.training.rules import resolve
from megatron.training.step import train_step
from tests.model.test_distillation_loss import divergence
from tests.models.in_layouts import check_layout
from tests.training.plain_loop import LENGTH, Job, logits, train
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, compare, records

LINE = f"{FLAGS} {SIX} {ADAM}"
TP3, PP2 = "--tensor-model-parallel-size 3", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one process": (1, ""),
    "tp3 with sequence parallelism, recomputation": (3, f"{TP3} --sequence-parallel --recompute-granularity full_attn"),
    "pp2 zb-h1, zero3": (2, f"{PP2} --pipeline-schedule zb-h1 --sharding-stage 3"),
    "zero2, recomputation": (2, "--sharding-stage 2 --recompute-granularity full --recompute-method uniform"),
    "zero3": (2, "--sharding-stage 3 --overlap-param-gather"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp3 pp2, zero2": (6, f"{TP3} {PP2} --sharding-stage 2"),
}
# Flags -> the plain loop's divergence, temperature and weight
WAYS = {
    "forward": ("--kd-temperature 2 --kd-alpha 0.7", ("forward_kl", 2.0, 0.7)),
    "reverse": ("--kd-loss reverse_kl --kd-temperature 1.5", ("reverse_kl", 1.5, 0.5)),
    "js alone": ("--kd-loss js --kd-alpha 1", ("js", 1.0, 1.0)),
}
CASES = [("forward", layout) for layout in LAYOUTS] + [(way, next(iter(LAYOUTS))) for way in ("reverse", "js alone")]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """A checkpoint of a larger model, written by two ranks of ZeRO 3, whose run had dropout. Its logits are large."""
    folder = tmp_path_factory.mktemp("teacher")
    shape = "--num-layers 3 --hidden-size 36 --num-attention-heads 6 --init-method-std 0.15 --seed 7"
    flags = f"{LINE} {shape} --train-iters 1 --hidden-dropout 0.5 --attention-dropout 0.5 --sharding-stage 3"
    forked.run_ranks(2, pretrain, f"{flags} --save {folder}")
    return str(folder)


def pretrain(rank: int, flags: str) -> None:
    pretrain_gpt.main(flags.split())


def tensors(folder, step: int) -> dict[str, torch.Tensor]:
    with Reader(folder / f"iter_{step:07d}") as reader:
        return {name: reader.read(name) for name in reader.tensors}


@cache
def plain(teacher: str, way: str):
    """The student's training in plain PyTorch."""
    kind, temperature, alpha = WAYS[way][1]
    with Reader(f"{teacher}/iter_0000001") as reader:
        weights = {name: reader.read(name).double() for name in reader.tensors if not name.startswith("optimizer")}
    job = Job(**PLAIN)

    def of_teacher(scores, tokens):
        return divergence(kind, logits(weights, tokens, job), scores, temperature)

    return train(Job(**PLAIN, teacher=of_teacher, alpha=alpha))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way, layout", CASES)
def test_any_layout_is_the_plain_loop(way, layout, teacher, run_ranks, tmp_path):
    """Both losses, norms, the student's weights; and nothing of the teacher is saved."""
    world, words = LAYOUTS[layout]
    line = f"{LINE} --teacher-load {teacher} {WAYS[way][0]} {words} --save {tmp_path}"
    pretrain(0, line) if world == 1 else run_ranks(world, pretrain, line)
    expected = plain(teacher, way)
    assert expected.steps[0]["kd loss"] > 0.02
    compare(tmp_path, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["pp2-zbv", "pp2vp2", "tp2sp-cp2a2a-zero1", "cp2-pp2-zbh1"])
def test_more_layouts(layout, teacher_of_pairs):
    """Against one process. Stages of four layers, documents that stay apart, dropout in the student alone."""
    flags = (
        "--num-layers 4 --hidden-size 24 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-3"
    )
    flags += (
        " --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --eval-iters 0 --precision fp32 --kd-temperature 3"
    )
    flags += " --reset-attention-mask --reset-position-ids --eod-mask-loss"
    check_layout(layout, f"{flags} --teacher-load {teacher_of_pairs}")


@pytest.fixture(scope="module")
def teacher_of_pairs(tmp_path_factory) -> str:
    """A teacher whose heads two and four ranks can share."""
    folder = tmp_path_factory.mktemp("pairs")
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --init-method-std 0.15 --train-iters 1"
    pretrain(0, f"{LINE} {shape} --seq-length 16 --save {folder}")
    return str(folder)


def built(teacher: str, more: str = ""):
    config = resolve(parse_any(f"{LINE} --teacher-load {teacher} {more}".split()), 1)
    return build.build_run(config, recipe_of(config))


def test_the_teacher_is_frozen(teacher):
    """It is no part of the student's modules, has no gradients, and is in evaluation mode while the student trains."""
    run = built(teacher)
    [stage] = run.stages
    frozen, *_ = stage.teacher.args
    assert not any(module is frozen.model for module in stage.modules())
    before = frozen.weights.clone()
    for each in run.stages:
        each.train()
    for _ in range(2):
        train_step(run)
    assert torch.equal(before, frozen.weights)
    assert not any(module.training for module in frozen.model.modules()) and stage.training
    assert not any(each.requires_grad or each.grad is not None for each in frozen.model.parameters())
    assert sum(unit.size for unit in run.optimizer.units) < frozen.weights.numel()


def test_its_logits_and_losses_are_those_of_the_loaded_model(teacher):
    """For a micro-batch of training; `load_model` reads the same checkpoint for inference."""
    run = built(teacher)
    frozen, *_ = run.stages[0].teacher.args
    [batch, *_] = run.loaders.train.step(0, 4)
    wanted = load_model(teacher).model.logits(batch.tokens)
    found = frozen.logits(batch)(slice(0, batch.tokens.numel())).view(*batch.tokens.shape, -1)[..., :101]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    losses = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), batch.labels.flatten(), reduction="none")
    torch.testing.assert_close(frozen.token_losses(batch).flatten(), losses, rtol=1e-5, atol=1e-5)


def test_a_resumed_run_is_the_same_to_the_bit(teacher, tmp_path, capsys):
    line = f"{LINE} --teacher-load {teacher} --kd-temperature 2"
    pretrain(0, f"{line} --save {tmp_path / 'whole'}")
    assert f"--teacher-load: loaded {teacher}/iter_0000001" in capsys.readouterr().out
    pretrain(0, f"{line} --save {tmp_path / 'part'} --exit-interval 3")
    pretrain(0, f"{line} --save {tmp_path / 'part'} --load {tmp_path / 'part'}")
    whole, resumed = (tensors(tmp_path / name, 6) for name in ("whole", "part"))
    assert whole.keys() == resumed.keys()
    assert [name for name, values in whole.items() if not torch.equal(values, resumed[name])] == []
    capsys.readouterr()
    pretrain(0, f"{LINE} --train-iters 7 --teacher-load {teacher} --kd-alpha 1 --load {tmp_path / 'part'}")
    assert "--kd-alpha was 0.5 in the checkpoint, is 1.0 now" in capsys.readouterr().out


def test_evaluations_need_no_teacher(teacher, tmp_path):
    """A validation has the language model's loss alone, and its record no other."""
    pretrain(0, f"{LINE} --teacher-load {teacher} --train-iters 2 --eval-iters 1 --eval-interval 1 --save {tmp_path}")
    assert "kd loss" in records(tmp_path, "step")[0]
    evals = records(tmp_path, "eval")
    assert evals and all("lm loss" in each and "kd loss" not in each for each in evals)


@pytest.mark.parametrize(
    "flags, kind, said",
    [
        ("--teacher-load {gone}", CheckpointError, "--teacher-load {gone}: {gone} holds no checkpoint"),
        (
            "--vocab-size 120",
            SettingsError,
            "--teacher-load {teacher}: the model has a vocabulary of 101, this run one of 121",
        ),
        (
            f"--seq-length {LENGTH + 1}",
            SettingsError,
            f"the model has {LENGTH} positions, and samples have {LENGTH + 1} tokens",
        ),
        ("--kd-alpha 0", SettingsError, "--kd-alpha 0.0 must be above 0 and at most 1"),
        ("--kd-temperature 0", SettingsError, "--kd-temperature 0.0 must be above 0"),
    ],
)
def test_mistakes_get_one_message(flags, kind, said, teacher, tmp_path):
    names = dict(gone=tmp_path / "gone", teacher=teacher)
    with pytest.raises(kind) as error:
        pretrain(0, f"{LINE} --teacher-load {teacher} {flags}".format(**names))
    assert said.format(**names) in str(error.value)
