# SPDX-License-Identifier: Apache-2.0
"""No two parts of a model drop the same: the random words of every place of dropout, as its passes draw them.

Each place of each layer has words of its own, for each sample and seed; a pass that runs again has the same; and ranks
have their pieces of one whole, or, where each has all of a tensor, the same.
"""

from collections import defaultdict

import pytest
import torch

from megatron.data.loader import MicroBatch, named_batch
from megatron.model.command_line import parse_any
from megatron.model.gpt.module import GPT
from megatron.model.recipe import recipe_of
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.mpu.random import Dropout, init_parameter
from megatron.settings.schema import Model
from megatron.tasks.backbones import classifier_facts
from megatron.tasks.classifier import classifier_of
from megatron.training.rules import resolve

V, S, T, B, H, HEADS = 50, 12, 8, 3, 16, 4
WORDS = 64  # of a sample, to compare: that two streams agree in them by chance has a probability of 2 ** -1024
SIZES = f"""--hidden-size {H} --num-attention-heads {HEADS} --seq-length {S} --mock-data --vocab-size {V} --train-iters 1
    --lr 1e-3 --make-vocab-size-divisible-by 1 --micro-batch-size {B} --device cpu --precision fp32 --hidden-dropout .5
    --attention-dropout .5"""
MODELS = {
    "GPT": "--num-layers 3",
    "BERT": "--model-type BERT --num-layers 3",
    "BERT post": "--model-type BERT --num-layers 3 --post-norm",
    "T5": f"--model-type T5 --encoder-num-layers 2 --decoder-num-layers 2 --decoder-seq-length {T}",
}
OF_LAYER = ("attention.dropout", "attention_dropout", "mlp_dropout")
OF_DECODER = (*OF_LAYER, "cross.dropout", "cross_dropout")


def layers(first: int, last: int, places=OF_LAYER) -> set[str]:
    return {f"blocks.{layer}.{place}" for layer in range(first, last) for place in places}


PLACES = {
    "GPT": {"embedding.dropout", *layers(0, 3)},
    "BERT": {"embedding.dropout", *layers(0, 3)},
    "BERT post": {"embedding.dropout", *layers(0, 3)},
    "T5": {"embedding.dropout", "embedding.decoder_dropout", *layers(0, 2), *layers(2, 4, OF_DECODER)},
}
AGAIN = {  # places whose words a granularity of recomputation draws twice
    "core_attn": ("attention.dropout", "cross.dropout"),
    "selective --recompute-modules core_attn layernorm mlp": ("attention.dropout", "cross.dropout"),
    "full_attn": ("attention.dropout", "cross.dropout"),
    "full": OF_DECODER,
}


def batch_of(family: str, samples) -> MicroBatch:
    generator = torch.Generator().manual_seed(1)
    draw = lambda length: torch.randint(1, V, (length, B), generator=generator)
    tokens, samples = draw(S), torch.tensor(samples)
    ones = lambda length: torch.ones(length, B, dtype=torch.int64)
    if family == "T5":
        own = dict(text_enc=tokens, text_dec=draw(T), labels=draw(T), enc_mask=ones(S), dec_mask=ones(T))
        return named_batch(own | dict(loss_mask=ones(T).float()), samples)
    if family.startswith("BERT"):
        own = dict(text=tokens, types=draw(S) % 2, labels=draw(S), padding_mask=ones(S), is_random=draw(1)[0] % 2)
        return named_batch(own | dict(loss_mask=ones(S).float()), samples)
    return MicroBatch(tokens, draw(S), samples)


def drawn(monkeypatch, family, flags="", samples=(5, 6, 9), mesh=None, backward=False, rows=None) -> dict[str, list]:
    """place -> the words of each time that it drew some, [b, ...] each, in a pass of a model."""
    config = resolve(parse_any(f"{SIZES} {MODELS[family]} {flags}".split()), mesh.world_size if mesh else 1)
    mesh = mesh or Mesh()
    model = recipe_of(config).build_model(config, mesh, V, dtype=torch.float32, device="cpu").train()
    for name, (parameter, placement) in placements(model).items():
        init_parameter(name, parameter, placement, mesh.coordinates, seed=7)
    names = {module: name for name, module in model.named_modules() if isinstance(module, Dropout)}
    assert len(names) == len(PLACES[family])
    found, keep = defaultdict(list), Dropout.keep

    def kept(self, *args):
        mask = keep(self, *args)
        found[names[self]].append(mask.words.movedim(self.batch_dim, 0))
        return mask

    monkeypatch.setattr(Dropout, "keep", kept)
    batch = batch_of(family, samples)
    if rows is not None:
        places = torch.tensor(rows).unsqueeze(1).expand(-1, B)
        batch = MicroBatch(batch.tokens[rows], batch.labels[rows], batch.samples, position_ids=places)
    sums = model(None, batch)[1]
    if backward:
        sum(value for name, value in sums.items() if name != "tokens").backward()
    monkeypatch.setattr(Dropout, "keep", keep)
    return dict(found)


def streams(found: dict[str, list]) -> list[bytes]:
    """The first words of each sample at each place, as they were drawn the first time."""
    return [sample.flatten()[:WORDS].numpy().tobytes() for words in found.values() for sample in words[0]]


@pytest.mark.parametrize("family", MODELS)
def test_every_place_layer_sample_and_seed_has_words_of_its_own(family, monkeypatch):
    found = drawn(monkeypatch, family)
    assert found.keys() == PLACES[family] and all(len(words) == 1 for words in found.values())
    of_other_samples = drawn(monkeypatch, family, samples=(7, 8, 10))
    of_another_seed = drawn(monkeypatch, family, "--seed 4321")
    every = [*streams(found), *streams(of_other_samples), *streams(of_another_seed)]
    assert len(set(every)) == len(every) == 3 * B * len(PLACES[family])
    again = drawn(monkeypatch, family, samples=(9, 4, 5))  # in another batch the words of samples 5 and 9 are the same
    for place, [words] in found.items():
        assert torch.equal(again[place][0][[2, 0]], words[[0, 2]])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("granularity", AGAIN)
@pytest.mark.parametrize("family", ["GPT", "BERT post", "T5"])
def test_what_is_computed_again_drops_the_same(family, granularity, monkeypatch):
    plain = drawn(monkeypatch, family, backward=True)
    found = drawn(monkeypatch, family, f"--recompute-granularity {granularity}", backward=True)
    assert found.keys() == plain.keys()
    twice = {place for place, words in found.items() if len(words) == 2}
    # The last op of all that runs again need not: nothing of what it makes is read.
    may = {place for place in PLACES[family] if place.partition(".")[2].partition(".")[2] in AGAIN[granularity]}
    assert twice <= may and {place for place in may if "attention.dropout" in place} <= twice
    for place, words in found.items():
        assert all(torch.equal(each, plain[place][0]) for each in words)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("parallel", ["", "--sequence-parallel"], ids=["tp", "tp+sp"])
@pytest.mark.parametrize("family", ["GPT", "BERT", "T5"])
def test_ranks_have_pieces_of_one_whole_or_all_of_it(family, parallel, monkeypatch, run_ranks):
    """Heads of attention weights are divided, and the rows of hidden states under sequence parallelism alone."""

    def body(rank):
        with pytest.MonkeyPatch.context() as patch:
            flags = f"--tensor-model-parallel-size 2 {parallel}"
            return {place: words[0] for place, words in drawn(patch, family, flags, mesh=Mesh(rank, tp=2)).items()}

    whole = drawn(monkeypatch, family)
    first, second = run_ranks(2, body)
    for place, [words] in whole.items():
        heads = place.endswith(("attention.dropout", "cross.dropout"))
        if heads or parallel:
            assert torch.equal(torch.cat((first[place], second[place]), 1), words), place
            assert not torch.equal(first[place], second[place])
        else:
            assert torch.equal(first[place], words) and torch.equal(second[place], words), place


@pytest.mark.parametrize("exchange", ["p2p", "a2a"])
def test_ranks_of_a_sequence_have_rows_of_one_whole(exchange, monkeypatch, run_ranks):
    """Context parallelism: a rank has the first and the last of four chunks of rows, or the two between; of attention
    weights all, or those of its heads.
    """
    rows = ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8])

    def body(rank):
        with pytest.MonkeyPatch.context() as patch:
            flags, mesh = f"--context-parallel-size 2 --cp-comm-type {exchange}", Mesh(rank, cp=2)
            return {place: words[0] for place, words in drawn(patch, "GPT", flags, mesh=mesh, rows=rows[rank]).items()}

    whole = drawn(monkeypatch, "GPT")
    for rank, found in enumerate(run_ranks(2, body)):
        for place, [words] in whole.items():
            if not place.endswith("attention.dropout"):
                words = words[:, rows[rank]]
            elif exchange == "a2a":
                words = words.chunk(2, 1)[rank]
            assert torch.equal(found[place], words), place


def test_stages_of_a_pipeline_count_layers_through():
    """The second stage's first layer drops as the whole model's does, and not as the first stage's."""
    settings = Model(3, H, HEADS, S, hidden_dropout=0.5, attention_dropout=0.5)
    whole = GPT(settings, Mesh(), V, seed=1234, dtype=torch.float32)
    stage = GPT(settings, Mesh(), V, layers=[2], first=False, last=True, seed=1234, dtype=torch.float32)
    keys = lambda model: {name: module.key for name, module in model.named_modules() if isinstance(module, Dropout)}
    own = {name: key for name, key in keys(stage).items() if "embedding" not in name}
    assert len(own) == 3 and own.items() <= keys(whole).items()


def test_hidden_words_are_not_those_of_another_dropout():
    """--word-dropout of fine-tuning beside the dropout of embeddings, which has the same layer."""
    config = resolve(parse_any(f"{SIZES} {MODELS['GPT']}".split()), 1)
    kind, facts = classifier_of(GPT, "last", 0.5), classifier_facts("GPT", config, V, 2, 1)
    model = kind.of(config, Mesh(), facts, dtype=torch.float32, device="cpu")
    keys = [module.key for module in model.modules() if isinstance(module, Dropout)]
    assert len(keys) == len(set(keys)) == len(PLACES["GPT"]) + 1
