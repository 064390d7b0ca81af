# SPDX-License-Identifier: Apache-2.0
"""Entries of index caches: each input of what is built, changed alone, gives what a build without a cache gives.

The inputs are those of the functions and classes that build, as they are declared: a new one needs a row here.
"""

import inspect
import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data import blend, document_dataset, gpt_dataset, masked_dataset, sentence_samples
from megatron.data.gpt_dataset import GPTDatasetConfig
from megatron.data.index_maps import EpochPlan
from megatron.tasks.chat_samples import NAMES, TextEncoder
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.chat_template import ChatTemplate
from tests.serving.toy import EOD, decoded
from tests.tasks.chats import write_lines

LENGTHS = np.random.RandomState(3).randint(1, 9, 3000).astype(np.int32)


def other(at: int, more: int) -> np.ndarray:
    """The lengths with another one at a place."""
    lengths = LENGTHS.copy()
    lengths[at] += more
    return lengths


def config(cache, seed=1, seq_length=4) -> GPTDatasetConfig:
    return GPTDatasetConfig(seq_length, seed, None, str(cache), [None] * 3, [0] * 3, lambda line: None)


def files(lengths, bounds=None) -> SimpleNamespace:
    return SimpleNamespace(prefix="text", sequence_lengths=lengths, document_indices=bounds)


# Each of these builds an entry by the class that has the cache, and returns its arrays ------------------------------


def epochs(cache, lengths, **plan) -> list[np.ndarray]:
    plan = EpochPlan(**plan | dict(tokens=int(lengths[plan["first"] : plan["last"]].sum())))
    made = gpt_dataset.GPTDataset(files(lengths), plan, "train", config(cache))
    return [made.document_index, made.sample_index, made.shuffle_index]


def blended(cache, weights, size, limits) -> list[np.ndarray]:
    datasets = [range(limit) for limit in limits]
    made = gpt_dataset._build_blend(datasets, [f"{cache}/a"] * len(limits), weights, size, 0, config(cache))
    return [made.dataset_index, made.dataset_sample_index]


@dataclass(frozen=True)
class Sentences(masked_dataset.MaskedSamples):
    """Samples that are never made."""


def masked(cache, documents, lengths, num_samples, longest, least, short_seq_prob, seed) -> list[np.ndarray]:
    samples = Sentences(SimpleNamespace(short_seq_prob=short_seq_prob), None, longest, least)
    part = range(len(documents) - 1)
    tokens = files(lengths, np.asarray(documents))
    return [masked_dataset.MaskedDataset(tokens, part, num_samples, "train", config(cache, seed), samples).sample_index]


def documents(cache, count, epochs, seed) -> list[np.ndarray]:
    own = config(cache, seed)
    cached = lambda key, build, names: own.cached("text", "text-train", key, build, names)
    more = dict(seq_length=4, seed=seed, pad=0, vocab_size=None, cached=cached)
    return [document_dataset.DocumentDataset(None, np.arange(count), count * epochs, **more).order]


EVERY_FOURTH = np.arange(0, 3001, 4)
PLAN = dict(first=0, last=3000, seq_length=4, seed=1, epochs=2, separate_last=False)
BUILDERS = {  # what the cache has -> (how, its inputs, each of them changed, what the build reads)
    "epochs": (
        epochs,
        dict(lengths=LENGTHS, **PLAN),
        [
            *(dict(lengths=other(at, more)) for at in (0, 1500, 2999) for more in (1, 8)),
            *(
                dict(first=1),
                dict(last=2999),
                dict(seq_length=5),
                dict(seed=2),
                dict(epochs=3),
                dict(separate_last=True),
            ),
        ],
        {"lengths"} | {one.name for one in fields(EpochPlan)} - {"tokens"},  # a sum of lengths
    ),
    "a blend": (
        blended,
        dict(weights=[0.25, 0.75], size=60, limits=[50, 50]),
        [dict(weights=[0.75, 0.25]), dict(size=61), dict(limits=[10, 90]), dict(limits=[50, 12])],
        set(inspect.signature(blend.interleave).parameters),
    ),
    "sentences": (
        masked,
        dict(documents=EVERY_FOURTH, lengths=LENGTHS, num_samples=900, longest=16, least=2, short_seq_prob=0.5, seed=1),
        [
            dict(documents=np.concatenate([EVERY_FOURTH[:-3], [2990, 2996, 3000]])),
            *(dict(lengths=other(at, 600)) for at in (0, 1500, 2999)),  # too long: its document is left out
            *(dict(num_samples=3000), dict(longest=15), dict(least=1), dict(short_seq_prob=0.1), dict(seed=2)),
        ],
        set(inspect.signature(sentence_samples.build_sentence_samples).parameters),
    ),
    "documents": (
        documents,
        dict(count=40, epochs=2, seed=1),
        [dict(count=41), dict(epochs=3), dict(seed=2)],
        set(inspect.signature(document_dataset.epoch_orders).parameters),
    ),
}


def same(ones, others) -> bool:
    return all(np.array_equal(one, another) for one, another in zip(ones, others, strict=True))


@pytest.mark.parametrize("what", BUILDERS)
def test_each_input_changed_alone_is_built_anew(what, tmp_path):
    make, inputs, changes, read = BUILDERS[what]
    assert set(inputs) == read == {name for change in changes for name in change}, "a new input needs a change here"
    before = make(tmp_path / "warm", **inputs)
    assert same(make(tmp_path / "warm", **inputs), before)
    for number, change in enumerate(changes):
        found, wanted = (make(tmp_path / cache, **inputs | change) for cache in ("warm", f"cold {number}"))
        assert same(found, wanted), change
        assert len(before[0]) != len(wanted[0]) or not same(before, wanted), f"{change} does not matter"
    assert same(make(tmp_path / "warm", **inputs), before)  # the entries stand side by side


def test_every_cache_of_index_maps_is_asked_here():
    """By the calls of `cached_arrays`, and of `GPTDatasetConfig.cached` in the same package."""
    root = Path(gpt_dataset.__file__).parents[1]
    calls = Counter()
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        calls[name] += len(re.findall(r"(?<!def )\bcached_arrays\(", path.read_text()))
        if name.startswith("data/"):
            calls[name] += len(re.findall(r"(?<!def )\bcached\((?!key, build, names\):)", path.read_text()))
    wanted = {"data/gpt_dataset.py": 4, "data/masked_dataset.py": 1, "data/document_dataset.py": 1}
    kept = {"training/shared_maps.py": 1}  # what another rank has built, under its key
    assert +calls == wanted | kept | {"tasks/chat_samples.py": 1}, "a new cache needs a row of BUILDERS"


# ---- conversations ------------------------------------------------------------------------------------------------------

TURNS = [dict(role="user", content="Why?"), dict(role="assistant", content="Because.")]
ROWS = [dict(messages=TURNS) for _ in range(210)]


SOURCE = """{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


def template_of(tokenizer) -> ChatTemplate:
    return ChatTemplate(SOURCE, "own", tokenizer, dict(eos_token="<end>"), {"<end>": EOD})


class Bytes(Tokenizer):
    """A token for each byte. fingerprint, parse_special: with another value it encodes otherwise."""

    def __init__(self, fingerprint="bytes", parse_special=False):
        more = len(fingerprint) - 5 + parse_special
        engines = dict(bytes=lambda: lambda text: [(id + more) % 256 for id in text.encode()])
        super().__init__("bytes", 257, EOD, fingerprint, engines, decoded, special_tokens={})
        self.parse_special = parse_special


def tokens_of(encoder: TextEncoder, cache, paths) -> list[np.ndarray]:
    found = encoder.read([str(path) for path in paths], str(cache), lambda line: None)
    return [getattr(found, name) for name in NAMES]


def test_each_input_of_conversations_changed_alone_is_built_anew(tmp_path):
    encoder = TextEncoder(Bytes(), template_of(Bytes()))
    template, paths = encoder.template, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    short = [dict(messages=[TURNS[0], dict(role="assistant", content="No.")])]
    write_lines(paths[0], ROWS), write_lines(paths[1], ROWS[:3])
    write_lines(tmp_path / "pairs.jsonl", [dict(prompt="a", chosen="b", rejected="c")])
    changes = {
        "tokenizer": [Bytes("other bytes"), Bytes(parse_special=True)],
        "template": [
            replace(template, source=SOURCE.replace(": ", ":: ")),
            replace(template, tokens=dict(eos_token="<end>!")),
            replace(template, special={"<end>": 7}),
        ],
        "on_prompt": [True],
    }
    assert {one.name for one in fields(TextEncoder)} == {*changes, "pairs"}, "a new field needs a change here"
    before = tokens_of(encoder, tmp_path / "warm", paths)
    number = 0
    for name, values in changes.items():
        for value in values:
            changed = replace(encoder, **{name: value})
            if name == "tokenizer":
                changed = replace(changed, template=replace(template, tokenizer=value))
            number += 1
            wanted = tokens_of(changed, tmp_path / f"cold {number}", paths)
            assert same(tokens_of(changed, tmp_path / "warm", paths), wanted), (name, value)
            assert not same(before, wanted), f"{name} {value} does not matter"
    for rows in (ROWS[:-1] + short, ROWS[:120] + short + ROWS[121:], ROWS + short):  # the files, at any place
        write_lines(paths[0], rows)
        number += 1
        wanted = tokens_of(encoder, tmp_path / f"cold {number}", paths)
        assert same(tokens_of(encoder, tmp_path / "warm", paths), wanted) and not same(before, wanted)
    turned = tokens_of(encoder, tmp_path / "warm", paths[::-1])
    assert same(turned, tokens_of(encoder, tmp_path / "cold", paths[::-1])) and not same(turned, wanted)
    write_lines(paths[0], ROWS)
    assert same(tokens_of(encoder, tmp_path / "warm", paths), before)
