# SPDX-License-Identifier: Apache-2.0
"""Small models with sharp opinions, and checkpoints of them."""

import json
import sys
import types
from dataclasses import asdict
from enum import Enum
from functools import cache

import pytest

from megatron.settings import schema

VOCABULARY = 512 + 8  # padded to 640


@pytest.fixture(autouse=True)
def their_modules(monkeypatch):
    """Megatron-LM's own classes can be pickled here. The reader must not need them."""
    module = types.ModuleType("megatron.core.enums")
    module.ModelType = Enum("ModelType", ["encoder_or_decoder"], module="megatron.core.enums")
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    monkeypatch.setitem(sys.modules, "megatron.core.enums", module)


@pytest.fixture(scope="session")
def small_gpt():
    """See `make_small_gpt`."""
    return make_small_gpt


def make_small_gpt(vocab_size: int = VOCABULARY, scale: float = 8.0, **settings):
    """A two-layer GPT of 32 positions whose weights are large, so that its choices differ."""
    import torch

    from megatron.model.gpt.module import GPT
    from megatron.mpu.mesh import Mesh
    from megatron.mpu.placement import placements
    from megatron.mpu.random import init_parameter

    plain = dict(
        num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=32, hidden_dropout=0.0, attention_dropout=0.0
    )
    model = GPT(schema.Model(**plain | settings), Mesh(), vocab_size)
    for name, (parameter, placement) in placements(model).items():
        init_parameter(name, parameter, placement, Mesh().coordinates, seed=5)
        with torch.no_grad():
            parameter.mul_(scale if parameter.dim() > 1 else 1.0)
    return model.eval()


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A folder with a small trained vocabulary: vocab.json, merges.txt."""
    from megatron.tools import train_tokenizer

    folder = tmp_path_factory.mktemp("vocabulary")
    texts = ["the cat sat on the mat and the dog sat on the hat", "a dog and a cat , they say , is a dog"] * 5
    (folder / "corpus.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    train_tokenizer.main(["--input", str(folder / "corpus.jsonl"), "--output", str(folder), "--vocab-size", "300"])
    return folder


@pytest.fixture(scope="session")
def new_checkpoint(tmp_path_factory, vocabulary, small_gpt):
    """`new_checkpoint(**tokenizer)`: a folder with one checkpoint as training writes it (300 ids at most, 32 positions).

    folder, iteration: to add another one to a folder; by: a factor of its weights; record: more entries of state.json
    rows: of another vocabulary
    """
    from megatron.checkpoint.boxes import Box
    from megatron.checkpoint.folder import Saver
    from megatron.checkpoint.store import Piece
    from megatron.mpu.placement import placements

    usual = len(json.loads((vocabulary / "vocab.json").read_text(encoding="utf-8")))
    settings = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=32)

    @cache
    def tensors_of(vocab_size: int) -> dict:
        model = small_gpt(vocab_size, **settings)
        return {
            name: (placement.shape, parameter.detach()[: placement.shape[0]])
            for name, (parameter, placement) in placements(model).items()
        }

    groups = {name: group() for name, group in schema.GROUPS.items() if name not in ("model", "tokenizer")}
    files = dict(vocab_file=str(vocabulary / "vocab.json"), merge_file=str(vocabulary / "merges.txt"))

    def new(folder=None, iteration=7, by=1.0, record=None, rows=usual, **tokenizer):
        own = schema.TokenizerSettings(**dict(tokenizer_type="GPT2BPETokenizer") | files | tokenizer)
        config = schema.Config(model=schema.Model(**settings), tokenizer=own, **groups)
        tensors = tensors_of(rows).items()
        pieces = [Piece(name, shape, Box.whole(shape), by * tensor) for name, (shape, tensor) in tensors]
        folder = folder or tmp_path_factory.mktemp("checkpoints")
        with Saver(folder) as saver:
            saver.save(iteration, pieces, dict(config=asdict(config), vocab_size=rows, **(record or {})))
        return folder

    return new


@pytest.fixture(scope="session")
def checkpoint(new_checkpoint):
    return new_checkpoint()
