# SPDX-License-Identifier: Apache-2.0
"""Conversations of a few words, a vocabulary of bytes, and their training in plain torch, each conversation by itself."""

import json
from functools import cache
from pathlib import Path

import torch

import finetune
import pretrain_gpt
from megatron.inference.load import load_model
from tests.ranks import trains
from tests.tasks.classification import double, hidden

LAYERS, LENGTH = 3, 120
SHAPE = (
    f"--num-layers {LAYERS} --hidden-size 24 --num-attention-heads 3 --seq-length {LENGTH} --init-method-std 0.3 "
    "--hidden-dropout 0 --attention-dropout 0"
)
RUN = "--device cpu --num-workers 0 --log-interval 1 --micro-batch-size 1 --peak-tflops 1"
TUNE = f"{RUN} --lr 1e-2 --lr-decay-style constant --lr-warmup-fraction 0 --weight-decay 0 --adam-eps 1e-4"
QUESTIONS = (
    "How many legs has a cat?", "And a bird?", "What is red?", "Who are you?", "One and one?", "Hello!", "Why?", "Is it?",
)  # fmt: skip
REPLIES = ("Four.", "Two, as you.", "A rose.", "A model.", "Two", "Hi.", "Because.", "It is.")


@cache
def alphabet() -> dict[str, int]:
    from tokenizers.pre_tokenizers import ByteLevel

    found = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    return found | {"th": 256, "<|endoftext|>": 257}


EOD = 257


def write_vocabulary(folder: Path) -> str:
    """Flags of a vocabulary of bytes, and one pair of them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(alphabet()))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\n")
    return f"--vocab-file {folder / 'vocab.json'} --merge-file {folder / 'merges.txt'}"


def write_base(folder: Path) -> Path:
    """A folder with a pretrained checkpoint and its vocabulary."""
    words = write_vocabulary(folder / "vocabulary")
    line = f"{SHAPE} {words} {RUN} --mock-data --train-iters 1 --lr 1e-3 --eval-iters 0 --save {folder}"
    pretrain_gpt.main(line.split())
    return folder


tune = trains(finetune)


def ids_of(text: str) -> list[int]:
    """The tokens of an English text."""
    letters = {" ": "\u0120", "\n": "\u010a"}
    joined = "".join(letters.get(letter, letter) for letter in text).replace("th", "\0")
    return [alphabet()["th" if letter == "\0" else letter] for letter in joined]


def talks() -> list[list[dict[str, str]]]:
    """Conversations of one turn or two."""
    turn = lambda n: [dict(role="user", content=QUESTIONS[n]), dict(role="assistant", content=REPLIES[n])]
    return [turn(0) + turn(1), *(turn(n) for n in range(2, 8))]


def plain_tokens(talk) -> tuple[list[int], list[int]]:
    """(tokens, 1 for those of answers) of a conversation in the template `plain`."""
    ids, learned = [], []
    for message in talk:
        head = ids_of(f"### {message['role'].capitalize()}\n")
        text = ids_of(message["content"])
        answer = [*text, EOD] if message["role"] == "assistant" else []
        ids += [*head, *(answer or text), *ids_of("\n")]
        learned += [0] * len(head) + ([1] * len(answer) or [0] * len(text)) + [0]
    return ids, learned


def write_lines(path: Path, rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def log_probabilities(weights, ids: list[int]) -> torch.Tensor:
    """Log-probability of each token of a text after those before it: [n - 1]."""
    scores = hidden(weights, ids[:-1], LAYERS) @ weights["embedding.word.weight"][: EOD + 1].T
    return scores.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def answer_losses(weights, texts) -> torch.Tensor:
    """The mean loss of all tokens of answers."""
    losses = [-log_probabilities(weights, ids)[torch.tensor(learned[1:], dtype=bool)] for ids, learned in texts]
    return torch.cat(losses).mean()


def train(weights, loss_of, steps: int, rate: float):
    """([{loss, gradient's norm}], weights) of steps with all samples each, by torch's AdamW."""
    weights = {name: values.clone().requires_grad_() for name, values in double(weights).items()}
    adam = torch.optim.AdamW(weights.values(), lr=rate, eps=1e-4, weight_decay=0.0)
    done = []
    for _ in range(steps):
        adam.zero_grad()
        loss = loss_of(weights)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        adam.step()
        done.append(dict(loss=loss.item(), grad_norm=norm.item()))
    return done, {name: values.detach() for name, values in weights.items()}


def weights_of(folder) -> dict[str, torch.Tensor]:
    return {name: values.detach() for name, values in load_model(str(folder)).model.named_parameters()}
