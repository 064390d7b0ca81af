# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization against plain torch, in each layout: loss, rewards, gradients, weights."""

import pytest
import torch
import torch.nn.functional as F

from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of
from megatron.planner.layout import Job
from megatron.settings.schema import TokenizerSettings
from megatron.tasks.chat import recipe
from megatron.tasks.chat_samples import TextEncoder, pair_samples
from megatron.tokenizer import build_tokenizer
from tests.ranks import on_ranks
from tests.tasks.chats import (
    EOD,
    TUNE,
    double,
    ids_of,
    log_probabilities,
    plain_tokens,
    talks,
    train,
    tune,
    weights_of,
    write_base,
    write_lines,
    write_vocabulary,
)
from tests.training.test_plain_loop import records

BETA, SMOOTHING = 0.3, 0.1
LAYOUTS = {
    "one process": (1, ""),
    "tp3 with sequence parallelism": (3, "--tensor-model-parallel-size 3 --sequence-parallel"),
    "pp3": (3, "--pipeline-model-parallel-size 3"),
    "pp3 zb-h1": (3, "--pipeline-model-parallel-size 3 --pipeline-schedule zb-h1 --micro-batch-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
    "zero2": (2, "--sharding-stage 2"),
    "zero3 recomputed": (2, "--sharding-stage 3 --recompute-granularity full --recompute-method uniform"),
}
QUICK = ("one process",)


def pairs() -> list[dict]:
    """Pairs of short answers in the shapes of TRL."""
    found = []
    for n, talk in enumerate(talks()[1:5]):
        wrong = dict(role="assistant", content=("No.", "Never!", "I will not say.", "Ah")[n])
        whole = dict(chosen=talk, rejected=[talk[0], wrong])
        found.append(whole if n % 2 else dict(prompt=talk[:1], chosen=talk[1:], rejected=[wrong]))
    return found


def texts_of_pairs():
    """Of each pair ((tokens, which are of the answer), the same of the rejected one)."""
    rows = [(row.get("prompt", []) + row["chosen"], row.get("prompt", []) + row["rejected"]) for row in pairs()]
    return [(plain_tokens(chosen), plain_tokens(rejected)) for chosen, rejected in rows]


def answer_logs(weights) -> torch.Tensor:
    """The log-probabilities of the chosen and of the rejected answers: [pairs, 2]."""
    sums = [
        log_probabilities(weights, ids)[torch.tensor(learned[1:], dtype=bool)].sum()
        for pair in texts_of_pairs()
        for ids, learned in pair
    ]
    return torch.stack(sums).view(-1, 2)


def rewards(weights, reference: torch.Tensor) -> torch.Tensor:
    return BETA * (answer_logs(weights) - reference)


def loss_of(weights, reference: torch.Tensor) -> torch.Tensor:
    return loss_of_rewards(rewards(weights, reference))


def loss_of_rewards(given: torch.Tensor) -> torch.Tensor:
    """given: rewards [pairs, 2]"""
    margin = given.diff(dim=1)[:, 0] * -1
    return -((1 - SMOOTHING) * F.logsigmoid(margin) + SMOOTHING * F.logsigmoid(-margin)).mean()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


def line_of(folder, base, more: str) -> str:
    file = write_lines(folder / "pairs.jsonl", pairs())
    return (
        f"--task dpo --train-data {file} --chat-template plain --load {base} --save {folder / 'run'} {TUNE} "
        f"--dpo-beta {BETA} --dpo-label-smoothing {SMOOTHING} --global-batch-size 4 --lr 1e-3 {more}"
    )


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in LAYOUTS]
)
def test_any_layout_is_the_plain_loop(layout, base, tmp_path):
    world, words = LAYOUTS[layout]
    line = line_of(tmp_path, base, f"--train-iters 3 {words}")
    on_ranks(world, tune, line)
    start = weights_of(base)
    reference = answer_logs(double(start))
    seen = []

    def loss(weights):
        seen.append(rewards({name: values.detach() for name, values in weights.items()}, reference))
        return loss_of(weights, reference)

    steps, weights = train(start, loss, 3, 1e-3)
    for step, wanted, reward in zip(records(tmp_path / "run", "step"), steps, seen, strict=True):
        assert step["dpo loss"] == pytest.approx(wanted["loss"], rel=2e-6)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-5)
        margin = reward[:, 0] - reward[:, 1]
        found = [step[f"rewards/{name}"] for name in ("chosen", "rejected", "accuracies", "margins")]
        mean = [*reward.mean(0).tolist(), (margin > 0).double().mean().item(), margin.mean().item()]
        if step["iteration"] > 1:  # all are 0 in the first step, but for rounding
            assert found == pytest.approx(mean, rel=1e-3, abs=2e-5)
    for name, values in weights_of(tmp_path / "run").items():
        assert (values[: len(weights[name])].double() - weights[name]).abs().max() < 2e-5, name


@pytest.mark.sampled(5)
def test_a_run_that_goes_on_keeps_its_reference(base, tmp_path):
    """To the bit. The checkpoint says where the reference is."""
    whole, parts = (tmp_path / name for name in ("whole", "parts"))
    schedule = "--lr-decay-style constant --save-interval 1"
    tune(0, line_of(whole, base, f"--train-iters 2 {schedule}"))
    line = line_of(parts, base, f"--train-iters 1 {schedule}")
    tune(0, line)
    tune(0, line.replace(f"--load {base}", f"--load {parts / 'run'}").replace("--train-iters 1", "--train-iters 2"))
    found = weights_of(parts / "run")
    assert all(torch.equal(values, found[name]) for name, values in weights_of(whole / "run").items())
    assert records(parts / "run", "step")[-1]["rewards/margins"] > 0


def test_pairs_of_texts_need_no_template(tmp_path):
    """The end of document follows each answer; the longer text of a pair loses its end."""
    flags = write_vocabulary(tmp_path).split()
    tokenizer = build_tokenizer(TokenizerSettings("GPT2BPETokenizer", flags[1], flags[3]), lambda text: None)
    rows = [
        dict(prompt="It is", chosen=" red.", rejected=" blue or green."),
        dict(prompt="A", chosen="b", rejected="b"),
    ]
    file = str(write_lines(tmp_path / "pairs.jsonl", rows))
    texts = TextEncoder(tokenizer, None, pairs=True).read([file], None, print)
    samples, notes = pair_samples(texts, [file], 24, EOD)
    sample = samples[0]
    ids, answers = sample["input_ids"], sample["loss_mask"] > 0
    [chosen, rejected] = [[*ids_of(f"It is{answer}"), EOD] for answer in (" red.", " blue or green.")]
    assert ids.tolist() == [*chosen, *rejected[: 25 - len(chosen)]] and len(samples) == 1
    assert sample["document_ids"].tolist() == [0] * len(chosen) + [1] * (25 - len(chosen))
    assert ids[answers].tolist() == [*chosen[5:], *rejected[5 : 25 - len(chosen)]]
    assert notes == [
        f"1 of 2 pairs have two equal answers, and are left out ({file}, line 2)",
        f"1 of 2 pairs are longer than --seq-length 24, and lose the end of an answer ({file}, line 1)",
    ]


def test_plans_count_the_reference(base, tmp_path):
    config = parse_any(line_of(tmp_path, base, "--train-iters 1").split(), recipe=recipe())
    job = Job.of(config, facts_of(config, EOD + 1), dp=1, device="cpu")
    assert config.model.hidden_dropout == config.model.attention_dropout == 0.0
    assert job.teacher.facts.parameters == job.facts.parameters and job.teacher.teacher is None
