# SPDX-License-Identifier: Apache-2.0
"""Distillation: whole trainings against the same student and teacher in plain PyTorch, in all kinds of layouts; what is
loaded and saved; mistakes.
"""

import itertools
import os
import re
import shutil
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.model.frozen_settings import frozen_record, frozen_settings, layer_pairs
from megatron.model.recipe import facts_of, recipe_of, sums_of
from megatron.mpu import forked
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import seed_of
from megatron.planner import layout as plans
from megatron.planner.cluster import Cluster
from megatron.planner.device import cpu
from megatron.planner.memory import NO_DEVICE, state, step_memory
from megatron.planner.parameters import rank_units
from megatron.planner.parity import laid_out, parse_layout
from megatron.planner.speed import end_costs
from megatron.telemetry.events import EventLog
from megatron.tools import checkpoint
from megatron.training import build
from megatron.training.distillation import Teacher
from megatron.training.rules import resolve
from megatron.training.step import train_step
from tests.model.test_distillation_loss import divergence
from tests.models.in_layouts import check_layout
from tests.ranks import on_ranks, trains
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
FEW = "one process", "pp2 zb-h1, zero3"
FULL = pytest.mark.full


def cases(way: str, quick) -> list:
    """All layouts, of which those that are not quick run with --full alone."""
    return [pytest.param(way, layout, marks=() if layout in quick else FULL) for layout in LAYOUTS]


CASES = cases("forward", LAYOUTS.keys() - {"tp3 pp2, zero2", "cp2"}) + [
    (way, FEW[0]) for way in ("reverse", "js alone")
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    """A checkpoint of a larger model, written by two ranks of ZeRO 3, whose run had dropout. Its logits are large."""
    folder = tmp_path_factory.mktemp("teacher")
    shape = "--num-layers 3 --hidden-size 36 --num-attention-heads 6 --init-method-std 0.15 --seed 7"
    flags = f"{LINE} {shape} --train-iters 1 --hidden-dropout 0.5 --attention-dropout 0.5 --sharding-stage 3"
    forked.run_ranks(2, pretrain, f"{flags} --save {folder}")
    return str(folder)


pretrain = trains(pretrain_gpt)


def tensors(folder, step: int) -> dict[str, torch.Tensor]:
    with Reader(folder / f"iter_{step:07d}") as reader:
        return {name: reader.read(name) for name in reader.tensors}


def weights_of(teacher: str) -> dict[str, torch.Tensor]:
    with Reader(f"{teacher}/iter_0000001") as reader:
        return {name: reader.read(name).double() for name in reader.tensors if not name.startswith("optimizer")}


def of_logits(weights: dict[str, torch.Tensor], kind: str = "forward_kl", temperature: float = 1.0):
    """The loss on the logits of a teacher with these weights."""
    job = Job(**PLAIN)
    return lambda scores, tokens: divergence(kind, logits(weights, tokens, job), scores, temperature)


@cache
def plain(teacher: str, way: str):
    """The student's training in plain PyTorch."""
    kind, temperature, alpha = WAYS[way][1]
    return train(Job(**PLAIN, teacher=of_logits(weights_of(teacher), kind, temperature), alpha=alpha))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way, layout", CASES)
def test_any_layout_is_the_plain_loop(way, layout, teacher, tmp_path):
    """Both losses, norms, the student's weights; and nothing of the teacher is saved."""
    world, words = LAYOUTS[layout]
    line = f"{LINE} --teacher-load {teacher} {WAYS[way][0]} {words} --save {tmp_path}"
    on_ranks(world, pretrain, line)
    expected = plain(teacher, way)
    assert expected.steps[0]["kd loss"] > 0.02
    compare(tmp_path, expected)


@pytest.fixture(scope="module")
def wide_teacher(tmp_path_factory) -> str:
    """A teacher with the student's hidden size."""
    folder = tmp_path_factory.mktemp("wide")
    pretrain(0, f"{LINE} --num-layers 4 --init-method-std 0.15 --seed 7 --train-iters 1 --save {folder}")
    return str(folder)


HIDDEN_WAYS = {"mse": "--kd-hidden-layers 0:1,1:3", "cosine": "--kd-hidden-layers 1:2 --kd-hidden-loss cosine"}
PAIRS = {"mse": {0: 1, 1: 3}, "cosine": {1: 2}}


@cache
def plain_hidden(teacher: str, way: str):
    weights, job = weights_of(teacher), Job(**PLAIN)

    def of_states(outputs, tokens, _):
        logits(weights, tokens, job, wanted := [])
        pairs = [(outputs[a], wanted[b]) for a, b in PAIRS[way].items()]
        if way == "mse":
            return sum((a - b).square().mean(-1) for a, b in pairs)
        return sum(1 - torch.cosine_similarity(a, b, dim=-1) for a, b in pairs)

    return train(Job(**PLAIN, teacher=of_logits(weights), alpha=0.5, hidden_teacher=of_states))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way, layout", cases("mse", FEW) + [("cosine", FEW[0])])
def test_hidden_states_are_those_of_the_plain_loop(way, layout, wide_teacher, tmp_path):
    """Layers of every stage are compared; other stages have the teacher's first layers alone."""
    world, words = LAYOUTS[layout]
    line = f"{LINE} --teacher-load {wide_teacher} {HIDDEN_WAYS[way]} {words} --save {tmp_path}"
    on_ranks(world, pretrain, line)
    compare(tmp_path, plain_hidden(wide_teacher, way))


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--kd-hidden-layers 0:4", "the teacher has layers 0 to 3, and no layer 4"),
        ("--kd-hidden-layers 2:1", "the student has layers 0 to 1, and no layer 2"),
        ("--kd-hidden-layers 0:1,0:2", "a layer of the student learns from one layer of the teacher"),
        ("--kd-hidden-layers last", "give pairs of layers, student:teacher, as in 0:1,1:3, or even"),
        (
            "--kd-hidden-layers 0:1 --hidden-size 36 --kd-hidden-projections 0:12",
            "--kd-hidden-projections 0:12: the teacher needs 0:24",
        ),
    ],
)
def test_mistakes_in_layers(flags, said, wide_teacher):
    with pytest.raises(SettingsError) as error:
        pretrain(0, f"{LINE} --teacher-load {wide_teacher} {flags}")
    assert said in str(error.value)


PROJECTED = "--kd-hidden-layers 0:0,1:2"
NAMES = [f"hidden_projections.{n}.weight" for n in range(2)]


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """The projections' initial values, which belong to a seed and a name."""
    generators = {name: torch.Generator().manual_seed(seed_of(seed, name, 0)) for name in NAMES}
    return {
        name: torch.empty(36, 24).normal_(0.0, 24**-0.5, generator=one).double() for name, one in generators.items()
    }


@cache
def plain_projected(teacher: str):
    weights, job = weights_of(teacher), Job(**PLAIN)

    def of_states(outputs, tokens, student):
        logits(weights, tokens, job, wanted := [])
        ours = [outputs[n] @ student[name].T for n, name in enumerate(NAMES)]
        return sum((a - wanted[b]).square().mean(-1) for a, b in zip(ours, (0, 2), strict=True))

    return train(Job(**PLAIN, teacher=of_logits(weights), alpha=0.5, hidden_teacher=of_states, more=drawn))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_narrow_states_are_projected_to_those_of_the_teacher(layout, teacher, tmp_path):
    """By matrices that are trained, reduced, sharded and saved as other weights."""
    world, words = LAYOUTS[layout]
    line = f"{LINE} --teacher-load {teacher} {PROJECTED} {words} --save {tmp_path}"
    on_ranks(world, pretrain, line)
    compare(tmp_path, plain_projected(teacher))


@pytest.mark.sampled(10)
def test_projections_are_resumed_in_another_layout_and_left_out_later(teacher, run_ranks, tmp_path, capsys):
    line = f"{LINE} --teacher-load {teacher} {PROJECTED} --save {tmp_path}"
    run_ranks(2, pretrain, f"{line} {PP2} --sharding-stage 3 --exit-interval 3")
    run_ranks(3, pretrain, f"{line} {TP3} --sequence-parallel --load {tmp_path}")
    compare(tmp_path, plain_projected(teacher))
    with pytest.raises(SettingsError, match="--kd-hidden-projections: 0:36,1:36 in the checkpoint") as error:
        pretrain(0, f"{LINE} --load {tmp_path}")
    assert "--kd-hidden-layers as before; or --finetune" in error.value.do
    model = load_model(str(tmp_path)).model
    assert not [name for name, _ in model.named_parameters() if "projection" in name]
    pretrain(
        0, f"{LINE} --finetune --load {tmp_path} --use-checkpoint-args --save {tmp_path / 'later'} --train-iters 1"
    )
    assert not set(NAMES) & tensors(tmp_path / "later", 1).keys()
    checkpoint.main(["to-hf", str(tmp_path), str(tmp_path / "hf")])
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "projection" in name]


def with_layers(config, layers: int):
    return replace(config, model=replace(config.model, num_layers=layers))


def test_even_pairs(wide_teacher):
    config = parse_any(f"{LINE} --teacher-load {wide_teacher} --kd-hidden-layers even --kd-hidden-coeff 0.5".split())
    teacher = frozen_settings("--teacher-load", wide_teacher, frozen_record("--teacher-load", wide_teacher), config)
    assert layer_pairs(config, teacher) == {0: 1, 1: 3}
    assert sums_of(recipe_of(config), config) == {"lm loss": 0.5, "kd loss": 0.5, "kd hidden loss": 0.5}
    for student, layers in itertools.product(range(1, 8), repeat=2):
        pairs = layer_pairs(with_layers(config, student), with_layers(teacher, layers))
        found = [pairs.pop(n) for n in range(student)]
        assert not pairs and found == sorted(found) and found[-1] == layers - 1, (student, layers, found)
        if student < layers:  # as far apart as whole numbers allow
            assert {b - a for a, b in itertools.pairwise([-1, *found])} <= {layers // student, -(-layers // student)}
        else:  # each layer teaches as many as any other, or one more
            assert {found.count(n) for n in range(layers)} <= {student // layers, -(-student // layers)}
    narrow = f"{LINE} --hidden-size 12 --teacher-load {wide_teacher} --kd-hidden-layers 1:3 --lora-rank 2".split()
    assert parse_any(narrow).model.kd_hidden_projections == "1:24"
    assert parse_any(narrow).optimizer.train_only == ["*.lora_a", "*.lora_b", "hidden_projections.*"]


@pytest.mark.parametrize("multiple", [1, 4, 128])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_both_vocabularies_have_equal_parts(multiple, tp, wide_teacher):
    """Whatever the teacher's was padded to in its own run."""
    config = parse_any(f"{LINE} --teacher-load {wide_teacher} --make-vocab-size-divisible-by {multiple}".split())
    teacher = frozen_settings("--teacher-load", wide_teacher, frozen_record("--teacher-load", wide_teacher), config)
    own, other = (facts_of(one, 101).weights["embedding.word.weight"] for one in (config, teacher))
    assert own.local_shape({"tp": tp}) == other.local_shape({"tp": tp}) == (multiple * -(-101 // (multiple * tp)), 24)


def test_logits_are_those_of_the_micro_batch():
    """Where other micro-batches pass through the first layers before one reaches the loss, and after a loss."""
    logits = lambda batch: lambda rows: torch.full((1, 3), float(batch))
    frozen = SimpleNamespace(states=lambda batch, layers: ({0: torch.zeros(1)}, logits(batch)), logits=logits)
    settings = parse_any(LINE.split()).distillation
    teacher = Teacher(frozen, settings, SimpleNamespace(mesh=Mesh()), {0: 0})
    batches = [SimpleBatch(n) for n in range(3)]
    for batch in batches[:2]:
        teacher.hidden_losses(batch)
    for batch in (*batches, batches[1], batches[1]):
        assert teacher.loss(batch).logits(slice(0, 1)).tolist() == [[float(batch)] * 3]


class SimpleBatch(int):
    """A micro-batch of which only the number matters."""


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "layout",
    ["pp2-zbv", *(pytest.param(each, marks=FULL) for each in ("pp2vp2", "tp2sp-cp2a2a-zero1", "cp2-pp2-zbh1"))],
)
def test_more_layouts(layout, teacher_of_pairs):
    """Against one process: stages of four layers, documents, hidden states, dropout in the student alone."""
    flags = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100"
    flags += " --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --eval-iters 0 --precision fp32 --lr 1e-3"
    flags += " --kd-temperature 3 --kd-hidden-layers even --reset-attention-mask --reset-position-ids --eod-mask-loss"
    check_layout(layout, f"{flags} --teacher-load {teacher_of_pairs}")


@pytest.fixture(scope="module")
def teacher_of_pairs(tmp_path_factory) -> str:
    """A teacher whose heads two and four ranks can share."""
    folder = tmp_path_factory.mktemp("pairs")
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --init-method-std 0.15 --train-iters 1"
    pretrain(0, f"{LINE} {shape} --seq-length 16 --save {folder}")
    return str(folder)


COMMON = """--hidden-size 32 --num-attention-heads 4 --mock-data --vocab-size 90 --make-vocab-size-divisible-by 8
    --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-2 --eval-iters 0 --device cpu --num-workers 0
    --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.2"""
MODELS = {
    "GPT": (pretrain_gpt, "--num-layers 2 --seq-length 16"),
    "GPT with experts": (pretrain_gpt, "--num-layers 2 --seq-length 16 --num-experts 4 --moe-ffn-hidden-size 16"),
    "T5": (pretrain_t5, "--encoder-num-layers 2 --decoder-num-layers 2 --seq-length 24 --decoder-seq-length 8"),
    "BERT": (pretrain_bert, "--num-layers 2 --seq-length 24"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "layout",
    [
        "",
        pytest.param(f"--tensor-model-parallel-size 2 --sequence-parallel {PP2}", marks=FULL),
        pytest.param("--tensor-model-parallel-size 2 --sharding-stage 3", marks=FULL),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_a_student_that_is_its_teacher_learns_nothing_from_it(model, layout, run_ranks, tmp_path):
    """Its kd loss is 0, and so is the gradient. Logits shifted by a token would differ."""
    script, shape = MODELS[model]
    line = f"{COMMON} {shape}".split()
    script.main([*line, "--save", str(tmp_path / "teacher")])
    words = f"--finetune --load {tmp_path}/teacher --teacher-load {tmp_path}/teacher --kd-alpha 1 --kd-temperature 2"
    layout += " --ep 2 --etp 1" * ("experts" in model and bool(layout))
    words = [*line, *words.split(), *layout.split(), "--save", str(tmp_path / "student")]
    run_ranks(4 if layout else 1, lambda rank: script.main(words))
    first, *_ = records(tmp_path / "student", "step")
    assert abs(first["kd loss"]) < 1e-5 and first["lm loss"] > 1
    assert model == "BERT" or first["grad_norm"] < 1e-3  # BERT's second head has labels


def built(teacher: str, more: str = ""):
    config = resolve(parse_any(f"{LINE} --teacher-load {teacher} {more}".split()), 1)
    return build.build_run(config, recipe_of(config))


def test_the_teacher_is_frozen(teacher):
    """It is no part of the student's modules, has no gradients, and is in evaluation mode while the student trains."""
    run = built(teacher)
    [stage] = run.stages
    frozen = stage.teacher.__self__.frozen
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


def test_a_damaged_teacher_is_passed_over_with_a_warning(teacher, tmp_path, capsys):
    """As a damaged checkpoint of --load is: by an event, which is a line of the log, too."""
    folder = shutil.copytree(teacher, tmp_path / "teacher")
    newer = shutil.copytree(folder / "iter_0000001", folder / "iter_0000002")
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    os.truncate(newer / "shard_00001.safetensors", 100)
    config = resolve(parse_any(f"{LINE} --teacher-load {folder}".split()), 1)
    build.build_run(config, recipe_of(config), events=EventLog())
    said = capsys.readouterr().out
    assert re.search(r"warning: .*iter_0000002 is passed over, and iteration 1 loaded instead: .* 100 bytes", said)


def test_its_logits_and_losses_are_those_of_the_loaded_model(teacher):
    """For a micro-batch of training; `load_model` reads the same checkpoint for inference."""
    run = built(teacher)
    frozen = run.stages[0].teacher.__self__.frozen
    [batch, *_] = run.loaders.train.step(0, 4)
    wanted = load_model(teacher).model.logits(batch.tokens)
    found = frozen.logits(batch)(slice(0, batch.tokens.numel())).view(*batch.tokens.shape, -1)[..., :101]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    losses = torch.nn.functional.cross_entropy(wanted.flatten(0, 1), batch.labels.flatten(), reduction="none")
    torch.testing.assert_close(frozen.token_losses(batch).flatten(), losses, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "hidden", ["", "--hidden-size 32 --kd-hidden-layers 0:0", "--hidden-size 16 --kd-hidden-layers even"]
)
@pytest.mark.parametrize("layout", ["", "tp2sp-pp2", "cp2-pp2-zero3"])
def test_planned_weights_are_those_of_a_run(layout, hidden, teacher_of_pairs):
    """To the byte, on each pipeline rank; with hidden states also of the first layers on other stages."""
    layout, flags = parse_layout(layout), f"{LINE} --num-attention-heads 4 --teacher-load {teacher_of_pairs} {hidden}"
    config = resolve(laid_out(parse_any(flags.split()), layout), layout.world_size)

    def held(rank):
        run = build.build_run(config, recipe_of(config))
        found = [each.__self__ for stage in run.stages for each in (stage.teacher, stage.hidden_teacher) if each]
        own = sum(unit.size for unit in run.optimizer.units)
        return run.context.mesh.pp.rank, found[0].frozen.weights.nbytes if found else 0, own

    plan = plans.Layout.of(config, layout.world_size)
    job = plans.Job.of(config, facts_of(config, 101), dp=1, device="cpu")
    wanted = [state(job, plan, rank)[0].get("teacher", 0) for rank in range(plan.pp)]
    assert wanted[-1] > 0 and (wanted[0] > 0 or not hidden)
    whole = state(job, replace(plan, zero=min(plan.zero, 2)), plan.pp - 1)[0]["teacher"]
    assert wanted[-1] < 0.8 * whole if plan.zero == 3 else wanted[-1] == whole
    for rank, found, own in forked.run_ranks(layout.world_size, held):
        assert found == wanted[rank] and own == rank_units(job, plan, rank).padded(plan.data_sizes)


def test_planned_passes_are_at_least_those_of_a_run(teacher, most_allocated):
    """The most bytes of a forward pass, which a teacher raises by what is planned for it, or less."""
    more = "--micro-batch-size 8"
    run, alone = built(teacher, more), built(teacher, more)
    alone.stages[0].teacher = None
    most = []
    for each in (alone, run):
        [batch] = each.loaders.train.step(0, 1)
        each.stages[0].train()
        most.append(most_allocated(lambda each=each, batch=batch: each.stages[0](None, batch)))
    job = plans.Job.of(run.config, facts_of(run.config, 101), dp=1, device="cpu")
    planned = step_memory(job, plans.Layout.of(run.config, 1), NO_DEVICE, 0)[0]["teacher's passes"]
    assert 0.4 * planned < most[1] - most[0] <= planned


def test_a_plan_counts_the_teachers_time(teacher):
    """In the last stage alone, by its forward products."""
    flags = f"{LINE} --pipeline-model-parallel-size 2"
    jobs = [
        (plans.Job.of(config, facts_of(config, 101), dp=1, device="cpu"), plans.Layout.of(config, 2))
        for config in (resolve(parse_any(f"{flags} {more}".split()), 2) for more in ("", f"--teacher-load {teacher}"))
    ]
    (first, last), (with_first, with_last) = (end_costs(*each, Cluster(cpu(), 2)) for each in jobs)
    assert first == with_first and with_last > last


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
        ("--teacher-load {gone}", CheckpointError, "--teacher-load: {gone} holds no checkpoint"),
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
