# SPDX-License-Identifier: Apache-2.0
"""A small task whose texts are numbers, and its fine-tuning in plain torch: what the recipe is compared with."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Optional

import torch
import torch.nn.functional as F

from megatron.mpu.random import random_words, seed_of
from tests.training.plain_loop import EOD, HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY

LABELS = ("red", "green", "blue")
SIZE = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {LENGTH} --vocab-size {EOD} "
    "--tokenizer-type NullTokenizer --micro-batch-size 2 --device cpu --num-workers 0 --hidden-dropout 0 "
    "--attention-dropout 0 --peak-tflops 1"
)


@dataclass
class Toy:
    """Rows (first text, second text or None, label) of each split, as numbers; and the files of them."""

    folder: Path
    pairs: bool = False
    regression: bool = False
    pooling: str = "last"
    word_dropout: float = 0.0  # the end of a document stands where a word is hidden in training
    balance: float = 0.0  # weight of the loss that balances experts, for each layer
    soft: bool = False  # two files say how likely each label of a training text is, and their mean is learned
    sizes: dict = field(default_factory=lambda: dict(train=21, valid=11, test=5))

    def __post_init__(self):
        draw = random.Random(5)
        self.rows = {split: [self._row(draw) for _ in range(size)] for split, size in self.sizes.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        for split, rows in self.rows.items():
            lines = ["id\tfirst\tsecond\tlabel"]
            for number, (first, second, label) in enumerate(rows):
                words = [" ".join(map(str, text or [])) for text in (first, second)]
                lines.append("\t".join([f"{split}{number}", *words, "" if split == "test" else self.word(label)]))
            (self.folder / f"{split}.tsv").write_text("\n".join(lines) + "\n")
        if self.soft:
            tables = [[_shares(draw) for _ in self.rows["train"]] for _ in range(2)]
            self.shares = torch.tensor(tables, dtype=torch.float64).mean(0)
            for number, table in enumerate(tables):  # the second one names the labels in another order
                order = range(len(LABELS)) if number == 0 else reversed(range(len(LABELS)))
                self.write_shares(number, table, list(order))
        description = ["name: toy", "text: first", "label: label", "id: id"]
        description += [f"{split}: {split}.tsv" for split in self.rows]
        description += ["text_pair: second"] if self.pairs else []
        description += ["regression: true"] if self.regression else [f"labels: [{', '.join(LABELS)}]"]
        self.yaml = self.folder / "toy.yaml"
        self.yaml.write_text("\n".join(description) + "\n")

    def _row(self, draw):
        first = [draw.randrange(EOD) for _ in range(draw.randrange(1, LENGTH + 4))]
        second = [draw.randrange(EOD) for _ in range(draw.randrange(1, LENGTH))] if self.pairs else None
        label = round(draw.uniform(-2, 3), 3) if self.regression else draw.randrange(len(LABELS))
        return first, second, label

    def write_shares(self, number: int, table: list[list[float]], order: list[int]) -> None:
        lines = ["\t".join(["index", *(LABELS[place] for place in order)])]
        for row, shares in enumerate(table):
            lines.append("\t".join([f"train{row}", *(f"{shares[place]:.6f}" for place in order)]))
        (self.folder / f"soft{number}.tsv").write_text("\n".join(lines) + "\n")

    def word(self, label) -> str:
        return str(label) if self.regression else LABELS[label]

    def tokens(self, split: str) -> list[list[int]]:
        """The ids of each text, cut to LENGTH: of two, the longer one loses tokens until both fit."""
        found = []
        for first, second, _ in self.rows[split]:
            first, second = list(first), second and list(second)
            while second and len(first) + len(second) > LENGTH - 1:
                (second if len(second) >= len(first) else first).pop()
            found.append(first[:LENGTH] if second is None else [*first, EOD, *second])
        return found


def _shares(draw: random.Random) -> list[float]:
    """Probabilities of the labels, in thousandths."""
    first = draw.randrange(1001)
    second = draw.randrange(1001 - first)
    return [first / 1000, second / 1000, (1000 - first - second) / 1000]


def outputs(weights, tokens: list[list[int]], pooling: str = "last", routed: Optional[list] = None) -> torch.Tensor:
    """Of each text, by itself and without padding, the head's outputs: [n, c]. routed: takes the routers' logits"""
    routed = [] if routed is None else routed
    routed += [[] for _ in tokens]
    states = [hidden(weights, text, routed=own) for text, own in zip(tokens, routed, strict=True)]
    seen = torch.stack([state.mean(0) if pooling == "mean" else state[-1] for state in states])
    return seen @ weights["head.weight"].T


def token_scores(weights, text: list[int]) -> torch.Tensor:
    """Log-probability of each token of a text behind those before it: [n - 1]."""
    scores = hidden(weights, text[:-1]) @ weights["embedding.word.weight"][:VOCABULARY].T
    return scores.log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0]


def hidden(weights, text: list[int], layers: int = LAYERS, routed: Optional[list] = None) -> torch.Tensor:
    """The states behind the final norm, [n, h]. routed: takes the router's logits [n, E] of each layer with experts."""

    def linear(name, x):
        weight = weights[f"{name}.weight"]
        return x @ weight.reshape(-1, weight.shape[-1]).T + weights[f"{name}.bias"].reshape(-1)

    def norm(name, x):
        return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    ids = torch.tensor(text)
    x = weights["embedding.word.weight"][ids] + weights["embedding.position.weight"][: len(ids)]
    for n in range(layers):
        block = f"blocks.{n}."
        qkv = linear(block + "attention.qkv", norm(block + "attention_norm", x))
        q, k, v = qkv.view(len(ids), HEADS, 3, -1).permute(2, 1, 0, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(block + "attention.output", mixed.transpose(0, 1).reshape(x.shape))
        normal = norm(block + "mlp_norm", x)
        if f"{block}mlp.router.weight" in weights:
            x = x + mixture(weights, f"{block}mlp.", normal, [] if routed is None else routed)
        else:
            x = x + linear(block + "mlp.down", F.gelu(linear(block + "mlp.up", normal), approximate="tanh"))
    return norm("final_norm", x)


CHOSEN = 2  # experts of a token


def mixture(weights, own: str, x: torch.Tensor, routed: list) -> torch.Tensor:
    """Every expert computes every token, [n, h]; two of them count. routed: takes the router's logits."""
    logits = x @ weights[f"{own}router.weight"].T + weights[f"{own}router.bias"]
    routed.append(logits)
    best = logits.topk(CHOSEN, -1).indices
    parts = torch.zeros_like(logits).scatter(-1, best, logits.gather(-1, best).softmax(-1))
    up, down = (weights[f"{own}experts.{name}.weight"] for name in ("up", "down"))
    wide = torch.einsum("nh,efh->nef", x, up) + weights[f"{own}experts.up.bias"]
    out = torch.einsum("nef,ehf->neh", F.gelu(wide, approximate="tanh"), down) + weights[f"{own}experts.down.bias"]
    return (parts.unsqueeze(-1) * out).sum(1)


def balance(routed: list[torch.Tensor], counted: Optional[torch.Tensor] = None) -> torch.Tensor:
    """The balance loss of a text (arXiv:2405.04434), mean over layers. counted: [n] bool: tokens of the loss; None: all"""
    losses = []
    for logits in routed:
        logits = logits if counted is None else logits[counted]
        shares = F.one_hot(logits.topk(CHOSEN, -1).indices, logits.shape[-1]).sum(1).double().mean(0) / CHOSEN
        losses.append(logits.shape[-1] * (shares * logits.softmax(-1).mean(0)).sum())
    return torch.stack(losses).mean()


def double(weights) -> dict[str, torch.Tensor]:
    return {name: values.detach().double() for name, values in weights.items()}


def losses(
    weights,
    toy: Toy,
    split: str,
    places: Optional[list[int]] = None,
    samples: Optional[range] = None,
    routed: Optional[list] = None,
) -> torch.Tensor:
    """Of each text. samples: their numbers in training. routed: as in `outputs`"""
    places = range(len(toy.rows[split])) if places is None else places
    texts = [toy.tokens(split)[place] for place in places]
    if samples is not None:
        texts = [with_hidden_words(text, toy.word_dropout, sample) for text, sample in zip(texts, samples, strict=True)]
    scores = outputs(weights, texts, toy.pooling, routed)
    labels = [toy.rows[split][place][2] for place in places]
    if toy.regression:
        return (scores[:, 0] - torch.tensor(labels, dtype=torch.float64)).square()
    if toy.soft and split == "train":
        return -(toy.shares[list(places)] * scores.log_softmax(-1)).sum(-1)
    return F.cross_entropy(scores, torch.tensor(labels), reduction="none")


def with_hidden_words(ids: list[int], share: float, sample: int, by: int = EOD, special: tuple = ()) -> list[int]:
    """What is drawn for a sample is the same in each layout: 16 bits for each place, of which the lowest values hide."""
    words = random_words((LENGTH,), [seed_of(1234, -1, "words", sample)], torch.device("cpu"))[0].tolist()
    return [
        by if (word + 32768) / 65536 < share and id not in special else id for id, word in zip(ids, words, strict=False)
    ]


def train(trunk: dict[str, torch.Tensor], toy: Toy, steps: int, batch: int, rate: float) -> tuple[list[dict], dict]:
    """([{loss, grad_norm} of each step], weights at the end) of AdamW over shuffled epochs. trunk: the first weights."""
    size, count = len(toy.rows["train"]), 1 if toy.regression else len(LABELS)
    generator = torch.Generator().manual_seed(seed_of(1234, "head.weight", 0))
    weights = {name: values.double().clone() for name, values in trunk.items() if not name.startswith("output.")}
    weights["embedding.word.weight"] = weights["embedding.word.weight"][:VOCABULARY]
    weights["head.weight"] = torch.empty(count, HIDDEN).normal_(0.0, 0.02, generator=generator).double()
    weights = {name: values.requires_grad_() for name, values in weights.items()}
    decayed = {name for name in weights if name.endswith("weight") and "norm" not in name}
    groups = [
        dict(params=[v for name, v in weights.items() if (name in decayed) == decays], weight_decay=0.01 * decays)
        for decays in (True, False)
    ]
    adam, records = torch.optim.AdamW(groups, lr=rate, eps=1e-4), []
    orders = [torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(9)]
    for step in range(steps):
        places = [orders[place // size][place % size] for place in range(step * batch, (step + 1) * batch)]
        routed: list[list[torch.Tensor]] = []
        loss = losses(weights, toy, "train", places, range(step * batch, (step + 1) * batch), routed).mean()
        records.append(dict(loss=loss.item()))
        if toy.balance:
            even = torch.stack([balance(of_text) for of_text in routed]).mean()
            loss = loss + LAYERS * toy.balance * even
            records[-1]["seq load balancing loss"] = even.item()
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 1.0).item()
        adam.step()
        records[-1]["grad_norm"] = norm
    return records, {name: values.detach() for name, values in weights.items()}
