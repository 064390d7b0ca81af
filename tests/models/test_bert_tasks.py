# SPDX-License-Identifier: Apache-2.0
"""One encoder and several heads: each learns from the samples of its own task, in every layout the same."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import pretrain_bert
from megatron.checkpoint.reader import Reader
from megatron.data.loader import MicroBatch
from megatron.entry import start
from megatron.model.command_line import parse_any
from megatron.model.recipe import logged_means, recipe_of, sums_of
from megatron.mpu.mesh import Mesh
from megatron.planner.parity import compare, laid_out, parse_layout, trace
from megatron.tasks.finetune import recipe
from megatron.telemetry.step_metrics import Interval, StepMetrics
from megatron.training.rules import idle, resolve

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]
S, V = 24, len(WORDS) + 2
PARTS = ("pooler.bias", "pooler.weight", "scores.bias", "scores.weight")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A BERT, a mixture of masked words with two tasks of 3 and of 2 classes, masked words made up."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    for name, classes in (("topic", 3), ("mood", 2)):
        rows = [
            dict(text=" ".join(f"w{(i * k) % 40}" for k in range(1, 9)), label=f"c{i % classes}") for i in range(30)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"""--model-type BERT --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {S} --mock-data
        --tokenizer-type BertWordPieceLowerCase --vocab-file {folder}/vocab.txt --make-vocab-size-divisible-by 8
        --task-mixture masked=2 topic=1:{folder}/topic.jsonl mood=1:{folder}/mood.jsonl --split 80,10,10
        --lr 1e-3 --global-batch-size 8 --train-iters 4 --eval-iters 0 --precision fp32 --device cpu
        --hidden-dropout 0 --attention-dropout 0"""


def test_heads_are_plain_ones_and_learn_from_their_own_samples(flags):
    config = resolve(parse_any(f"{flags} --global-batch-size 12 --micro-batch-size 6".split()), 1)
    recipe = recipe_of(config)
    model = recipe.build_model(config, Mesh(), V, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    draw = lambda below, *shape: torch.randint(below, shape, generator=generator)
    tasks, labels = torch.tensor([0, 1, 2, 1, 0, 2]), torch.tensor([0, 2, 1, 0, 0, 0])
    counts = (torch.rand(S, 6, generator=generator) < 0.2).float() * (tasks == 0)
    arrays = dict(text=draw(V, S, 6), types=draw(2, S, 6), labels=draw(V, S, 6), is_random=draw(2, 6), loss_mask=counts)
    arrays |= dict(padding_mask=torch.ones(S, 6, dtype=torch.int64), task=tasks, class_label=labels)
    _, sums = model(None, MicroBatch(arrays["text"], arrays["labels"], torch.arange(6), counts, arrays=arrays))
    assert set(sums) == {*sums_of(recipe, config), "tokens"}

    weights, first = (
        dict(model.named_parameters()),
        model.hidden(arrays["text"], arrays["padding_mask"], arrays["types"])[0],
    )
    means = logged_means({name: value.item() for name, value in sums.items()}, recipe.counts(config))
    for number, (name, classes) in enumerate((("topic", 3), ("mood", 2)), 1):
        linear = lambda part, x, name=name: F.linear(
            x, weights[f"tasks.{name}.{part}.weight"], weights[f"tasks.{name}.{part}.bias"]
        )
        mine = tasks == number
        scores = linear("scores", linear("pooler", first[mine]).tanh())
        assert scores.shape == (2, classes)
        assert means[f"{name} loss"] == pytest.approx(F.cross_entropy(scores, labels[mine]).item(), rel=1e-5)
        assert means[f"{name} accuracy"] == (scores.argmax(1) == labels[mine]).float().mean().item()
        assert f"{name} samples" not in means
    total = sum(weight * sums[name] for name, weight in sums_of(recipe, config).items() if name.startswith("topic"))
    total.backward()
    assert weights["tasks.topic.scores.weight"].grad.abs().max() > 0
    assert weights["tasks.mood.scores.weight"].grad is None or not weights["tasks.mood.scores.weight"].grad.any()
    assert weights["embedding.word.weight"].grad.abs().max() > 0


def test_tasks_may_have_names_of_attributes(flags):
    config = resolve(
        parse_any(f"{flags} --micro-batch-size 8".replace("topic=", "type=").replace("mood=", "training=").split()), 1
    )
    model = recipe_of(config).build_model(config, Mesh(), V, dtype=torch.float32, device="cpu").eval().train()
    names = {name for name, _ in model.named_parameters()}
    assert {"tasks.type.scores.weight", "tasks.training.pooler.bias"} <= names and model.tasks.training is True


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "case",
    ["tp2sp 4", *(pytest.param(case, marks=pytest.mark.full) for case in ("dp2-zero3 2", "pp2-zbh1 8", "tp2sp-pp2 4"))],
)
def test_layout_trains_the_same_model(flags, case):
    layout, micro = case.split()
    layout = parse_layout(layout)
    traces = [
        trace(
            laid_out(config := parse_any(f"{flags} --micro-batch-size {size}".split()), one),
            recipe_of(config),
            ranks,
            2,
        )
        for one, size, ranks in ((parse_layout(""), 8, 1), (layout, micro, layout.world_size))
    ]
    difference = compare(*traces)
    assert difference.passes("fp32"), difference


def test_a_step_without_samples_of_a_task_has_no_part_in_its_mean():
    counts = {"mood loss": "mood samples"}
    steps = [
        {"lm loss": 2.0, "mood loss": 0.0, "mood samples": 0.0},
        {"lm loss": 4.0, "mood loss": 6.0, "mood samples": 3.0},
    ]
    interval = Interval()
    for number, means in enumerate(steps):
        means = logged_means(means, counts)
        step = StepMetrics(number, 8, 8, means, 1e-3)
        interval.add(step, means, 0.1)
    assert interval.means == {"lm loss": 3.0, "mood loss": 2.0}


def test_heads_that_a_checkpoint_has_not_begin_anew(flags, tmp_path, capsys):
    """Those that it has are taken out of it, as all other weights are: steps of hardly any rate leave them as they were."""
    plain = re.sub("--model-type BERT|--task-mixture.*mood.jsonl", "", flags)
    topic, mood = re.search(r"--task-mixture (.*) (mood\S+)", flags).groups()
    new = []  # of each run, what its log says

    def weights(seed: int, words: str) -> dict[str, torch.Tensor]:
        save = f"{tmp_path}/{seed}"
        small = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --micro-batch-size 8 --train-iters 1 --lr 1e-12"
        pretrain_bert.main(f"{plain} {small} --seed {seed} --save {save} {words}".split())
        new.append(re.findall("new, and not out of the checkpoint: (.*)", capsys.readouterr().out))
        with Reader(Path(save) / "iter_0000001") as reader:
            return {name: reader.read(name) for name in reader.tensors if not name.startswith("optimizer.")}

    heads = lambda name: {f"tasks.{name}.{rest}" for rest in PARTS}
    first = weights(1, "")
    second = weights(2, f"--load {tmp_path}/1 --finetune --task-mixture {topic}")
    third = weights(3, f"--load {tmp_path}/2 --finetune --task-mixture {topic} {mood}")
    weights(4, f"--load {tmp_path}/3 --finetune")  # it has no use for heads
    assert new == [[], [", ".join(sorted(heads("topic")))], [", ".join(sorted(heads("mood")))], []]
    assert second.keys() - first.keys() == heads("topic") and third.keys() - second.keys() == heads("mood")
    for before, after in ((first, second), (second, third)):
        torch.testing.assert_close({name: after[name] for name in before}, before, rtol=0, atol=1e-9)
    assert not torch.equal(second["tasks.topic.pooler.weight"], third["tasks.mood.pooler.weight"])
    assert not pretrain_bert.recipe().reinitialize("binary.pooler.bias", False)  # what is no task's head must be there

    # The second stage: one of the tasks by itself, on what all of them have taught.
    folder = Path(mood.split(":")[1]).parent
    (folder / "mood.yaml").write_text("train: mood.jsonl\ntext: text\nlabel: label\n")
    line = f"--task {folder}/mood.yaml --data-path {folder} --load {tmp_path}/3 --save {tmp_path}/own --lr 1e-12"
    start(f"{line} --device cpu --precision fp32 --train-epochs 1 --global-batch-size 30".split(), recipe())
    assert re.findall("new, and not out of the checkpoint: (.*)", capsys.readouterr().out) == ["head.weight"]
    with Reader(tmp_path / "own" / "iter_0000001") as reader:
        own = {name: reader.read(name) for name in reader.tensors if not name.startswith("optimizer.")}
    assert third.keys() - own.keys() == {name for name in third if name.startswith(("tasks.", "head.", "binary."))}
    kept = own.keys() & third.keys()
    torch.testing.assert_close(
        {name: own[name] for name in kept}, {name: third[name] for name in kept}, rtol=0, atol=1e-9
    )


def test_a_split_divides_the_rows_of_a_mixture(flags):
    said = lambda line: idle(parse_any(f"{line} --micro-batch-size 4".split()), 1)
    assert "split" not in said(flags)
    assert "split" in said(re.sub("--task-mixture.*mood.jsonl", "", flags))
