# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning of GPTs with experts against plain torch, each text by itself: tasks, conversations and pairs, with a loss
that balances experts.
"""

import pytest
import torch

import finetune
import pretrain_gpt
from megatron.data.loader import named_batch
from megatron.tasks.classifier import token_weights
from tests.ranks import on_ranks
from tests.tasks import chats, test_dpo
from tests.tasks.chats import EOD, double, plain_tokens, talks, tune, weights_of, write_lines, write_vocabulary
from tests.tasks.classification import SIZE, Toy, balance, hidden, train
from tests.tasks.test_finetune import STEPS, TUNE, check_evaluations
from tests.training.test_plain_loop import records

pytestmark = pytest.mark.sampled(10)

EXPERTS = "--num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 18"
COEFFICIENT = 0.05
BALANCE = f"--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff {COEFFICIENT}"
SUM = "seq load balancing loss"
TP3 = "--tensor-model-parallel-size 3 --expert-model-parallel-size 3 --expert-tensor-parallel-size 1"
PP2 = "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one process": (1, ""),
    "ep2": (2, "--expert-model-parallel-size 2"),
    "tp3 ep3": (3, TP3),
    "tp3 ep3, sequence parallel": (3, f"{TP3} --sequence-parallel"),
    "pp2 zb-h1": (2, f"{PP2} --pipeline-schedule zb-h1"),
    "pp2 ep2": (4, f"{PP2} --expert-model-parallel-size 2"),
    "ep2, zero3, recomputed": (
        2,
        "--expert-model-parallel-size 2 --sharding-stage 3 --recompute-granularity full --recompute-method uniform",
    ),
}
# Those of conversations, whose model has three layers
CUT = f"{PP2} --pipeline-stage-layers 2,1"
TALKS = {name: (world, words.replace(PP2, CUT)) for name, (world, words) in LAYOUTS.items()}
TALKS |= {"cp2 ep2": (2, "--context-parallel-size 2 --expert-model-parallel-size 2")}


def cases(layouts) -> list:
    return [pytest.param(name, marks=() if name == "one process" else pytest.mark.full) for name in layouts]


def run(world: int, line: str) -> None:
    on_ranks(world, tune, line)


def compare(folder, steps: list[dict], weights) -> None:
    """Steps with their losses and norms, and the weights at the end."""
    for step, wanted in zip(records(folder, "step"), steps, strict=True):
        assert {name: step[name] for name in wanted} == pytest.approx(wanted, rel=5e-5)
    for name, values in weights_of(folder).items():
        assert (values[: len(weights[name])].double() - weights[name]).abs().max() < 2e-5, name


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trunk")
    line = (
        f"{SIZE} {EXPERTS} --init-method-std 0.2 --mock-data --train-iters 2 --lr 1e-2 --eval-iters 0 --save {folder}"
    )
    pretrain_gpt.main(line.split())
    return folder


@pytest.mark.parametrize("layout", cases(LAYOUTS))
def test_a_task_in_any_layout_is_the_plain_loop(layout, trunk, tmp_path):
    world, words = LAYOUTS[layout]
    toy = Toy(tmp_path / "toy", pairs=True, balance=COEFFICIENT)
    line = (
        f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE} {BALANCE} {words}"
    )
    run(world, line)
    steps, weights = train(weights_of(trunk), toy, STEPS, 8, 1e-2)
    compare(tmp_path / "run", steps, weights)
    check_evaluations(tmp_path / "run", toy)


# ---- conversations and pairs -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    words = write_vocabulary(folder / "vocabulary")
    line = f"{chats.SHAPE} {EXPERTS} {words} {chats.RUN} --mock-data --train-iters 1 --lr 1e-3 --eval-iters 0"
    pretrain_gpt.main(f"{line} --save {folder}".split())
    return folder


def logged(steps: list[dict], sums: list[dict]) -> list[dict]:
    """The values of each step by their names in the log."""
    return [dict(own, grad_norm=step["grad_norm"]) for step, own in zip(steps, sums, strict=True)]


def losses_and_balance(weights, ids: list[int], learned: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the answers in a text: the log-probability of each token, and the balance loss of all."""
    routed, counted = [], torch.tensor(learned[1:], dtype=bool)
    scores = hidden(weights, ids[:-1], chats.LAYERS, routed) @ weights["embedding.word.weight"][: EOD + 1].T
    logs = scores.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logs[counted], balance(routed, counted)


@pytest.mark.parametrize("layout", cases(TALKS))
def test_conversations_in_any_layout_are_the_plain_loop(layout, base, tmp_path):
    """The loss that balances experts is a mean over all tokens of answers."""
    world, words = TALKS[layout]
    file = write_lines(tmp_path / "talks.jsonl", [dict(messages=talk) for talk in talks()[1:]])
    line = f"--task chat --train-data {file} --chat-template plain --load {base} --save {tmp_path / 'run'} {chats.TUNE}"
    run(world, f"{line} {BALANCE} --global-batch-size 6 --train-iters 3 {words}")
    texts, seen = [plain_tokens(talk) for talk in talks()[1:]], []

    def loss(weights):
        logs, even = zip(*(losses_and_balance(weights, ids, learned) for ids, learned in texts), strict=True)
        even = sum(value * len(own) for own, value in zip(logs, even, strict=True)) / sum(map(len, logs))
        seen.append({"lm loss": -torch.cat(logs).mean().item(), SUM: even.item()})
        return -torch.cat(logs).mean() + chats.LAYERS * COEFFICIENT * even

    steps, weights = chats.train(weights_of(base), loss, 3, 1e-2)
    compare(tmp_path / "run", logged(steps, seen), weights)


@pytest.mark.parametrize("layout", cases(TALKS))
def test_pairs_in_any_layout_are_the_plain_loop(layout, base, tmp_path):
    """The loss that balances experts is a mean over pairs of means over the tokens of both answers."""
    world, words = TALKS[layout]
    line = test_dpo.line_of(tmp_path, base, f"--train-iters 3 {BALANCE} {words}")
    run(world, line)
    start, seen = weights_of(base), []

    def parts(weights):
        """([pairs, 2] log-probabilities of answers, balance loss)"""
        pairs = []
        for texts in test_dpo.texts_of_pairs():
            routed, counted = [], []
            for ids, learned in texts:
                own: list[torch.Tensor] = []
                hidden(weights, ids[:-1], chats.LAYERS, own)
                routed.append(own)
                counted.append(torch.tensor(learned[1:], dtype=bool))
            both = [torch.cat(layers) for layers in zip(*routed, strict=True)]
            pairs.append(balance(both, torch.cat(counted)))
        logs = [losses_and_balance(weights, *text)[0].sum() for texts in test_dpo.texts_of_pairs() for text in texts]
        return torch.stack(logs).view(-1, 2), torch.stack(pairs).mean()

    reference = parts(double(start))[0]

    def loss(weights):
        logs, even = parts(weights)
        pairwise = test_dpo.loss_of_rewards(test_dpo.BETA * (logs - reference))
        seen.append({"dpo loss": pairwise.item(), SUM: even.item()})
        return pairwise + chats.LAYERS * COEFFICIENT * even

    steps, weights = chats.train(start, loss, 3, 1e-3)
    compare(tmp_path / "run", logged(steps, seen), weights)


@pytest.mark.sampled(1)
def test_each_sample_counts_once():
    """Of three options with other lengths, one of which is missing in the second sample; the third has no label."""
    lengths = torch.tensor([[4, 1, 2], [3, 2, 3], [4, 4, 4]])  # [b, o]
    arrays = dict(
        tokens=torch.zeros(4, 9, dtype=torch.int64),
        lengths=lengths.flatten(),
        options=torch.tensor([3, 2, 3]),
        labels=torch.zeros(3, dtype=torch.int64),
        loss_mask=torch.tensor([1.0, 1.0, 0.0]),
    )
    found = token_weights(named_batch(arrays, torch.arange(9))).view(4, 3, 3)  # [s, b, o]
    for sample, present in enumerate((3, 2, 0)):
        for option in range(3):
            n = int(lengths[sample, option])
            wanted = [1 / (present * n)] * n if option < present else [0.0] * n
            assert found[:, sample, option].tolist() == pytest.approx([*wanted, *[0.0] * (4 - n)])


@pytest.mark.sampled(1)
def test_a_pattern_counts_up_to_its_label():
    arrays = dict(
        tokens=torch.zeros(5, 2, dtype=torch.int64),
        gap=torch.tensor([1, 3]),
        labels=torch.zeros(2, dtype=torch.int64),
        loss_mask=torch.ones(2),
    )
    found = token_weights(named_batch(arrays, torch.arange(2)))
    assert found.t().tolist() == [[0.5, 0.5, 0, 0, 0], [0.25] * 4 + [0]]


def test_a_pattern_is_learned(trunk, tmp_path):
    toy = Toy(tmp_path / "toy")
    (tmp_path / "words.json").write_text('{"red": "7", "green": "8", "blue": "9"}')
    line = (
        f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE} {BALANCE}".split()
    )
    finetune.main([*line, "--pet-pattern", "{text} 5 {label}", "--pet-verbalizer", str(tmp_path / "words.json")])
    assert all(1 <= step[SUM] < 3 and step["loss"] > 0 for step in records(tmp_path / "run", "step"))
