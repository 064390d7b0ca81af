# SPDX-License-Identifier: Apache-2.0
"""What is said, and refused, when a checkpoint is loaded, and what follows from it: with a small model, or without."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint.reader import QUANTIZED
from megatron.errors import DataError, SettingsError
from megatron.inference import generation_config, load
from megatron.inference.generation import generate
from megatron.inference.gptq import gptq
from megatron.inference.load import Loaded, check_vocabulary, quantized, without_model
from megatron.inference.passes import PassRow
from megatron.inference.prompts import boundaries, source_of
from megatron.inference.quantize import KINDS, Int4, Int8, product_of
from megatron.inference.quantized import refuse_twice
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling, Search
from megatron.model.quantization import QuantizeOptions
from megatron.model.sparse_product import SparseProduct
from megatron.model.sparsity import MASK
from tests.tokenizer.plain import PlainTokenizer


def loaded(rows: int = 20, **record) -> Loaded:
    return Loaded(None, None, dict(config={}) | record, rows, 7, Path("folder"), ("an older checkpoint",))


@pytest.mark.parametrize(
    "method, said", [("gptq", ("an older checkpoint", "calibrated")), ("round", ("an older checkpoint",))]
)
def test_notices_of_loading_stay_beside_those_of_rounding(method, said, monkeypatch):
    rounded = []
    monkeypatch.setattr(load, "quantize_model", lambda *_: rounded.append("gptq") or "calibrated")
    monkeypatch.setattr(load, "quantize_layers", lambda *_: rounded.append("round"))
    monkeypatch.setattr(load, "facts_of", lambda *_: None)
    monkeypatch.setattr(load, "refuse_other_tokens", lambda *_: None)
    monkeypatch.setattr(Loaded, "longest", 9)
    how = QuantizeOptions("int8", quantize_method=method, calibration_data=["a"] if method == "gptq" else None)
    assert quantized(loaded(), how).notices == said and rounded == [method]
    assert quantized(loaded(), QuantizeOptions()).notices == ("an older checkpoint",) and len(rounded) == 1


def words(size: int) -> PlainTokenizer:
    return PlainTokenizer(lambda text: [], lambda ids: "", vocab_size=size, eod=0)


@pytest.mark.parametrize("asked, fits", [(None, True), (16, True), (20, True), (18, False), (21, False)])
def test_a_size_that_is_given_is_that_of_the_vocabulary_or_of_the_model(asked, fits):
    """Of 16 tokens for a model with 20 rows."""
    check = lambda: check_vocabulary(words(16), loaded(20), SimpleNamespace(vocab_extra_ids=0), dict(vocab_size=asked))
    if fits:
        assert check().vocab_size == 16
    else:
        with pytest.raises(SettingsError, match=f"--vocab-size {asked}: the vocabulary has 16 tokens, the model 20"):
            check()


@pytest.mark.parametrize("size, fits", [(19, True), (20, True), (21, False)])
def test_a_vocabulary_with_more_tokens_than_the_model_is_refused(size, fits):
    check = lambda: check_vocabulary(words(size), loaded(20), SimpleNamespace(vocab_extra_ids=0))
    if fits:
        assert check().vocab_size == size
    else:
        with pytest.raises(SettingsError, match="the tokenizer has 21 ids, the model 20"):
            check()


@pytest.mark.parametrize("iteration, number", [(None, 0), (0, 0), ("12", 12), (12, 12)])
def test_a_checkpoint_without_its_model_has_its_iteration(iteration, number):
    assert without_model(None, dict(vocab_size=5, iteration=iteration), Path("x")).iteration == number


@pytest.mark.parametrize("logprobs, each", [(None, 1), (0, 1), (1, 3), (4, 9)])
@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("scores", [range(0), range(3, 5)])
def test_a_rows_answer_has_as_many_numbers(logprobs, each, chooses, scores):
    """Of each scored token its log-probability, and two of each likeliest one; a new token has its number before these."""
    row, request = PassRow(0, 0, chooses, scores, (), (1, 2)), Request((1, 2), Sampling(), logprobs=logprobs)
    new = 1 + (0 if logprobs is None else each)
    assert row.answer_size(request) == len(scores) * each + chooses * new


@pytest.mark.parametrize("step", [None, 3, 7])
def test_the_record_is_that_of_the_checkpoint_whose_weights_are_loaded(step, new_checkpoint):
    """Of an older step, too."""
    folder = new_checkpoint(iteration=3, record=dict(mark="older"))
    new_checkpoint(folder=folder, iteration=7, record=dict(mark="newer"))
    found = load.load_model(str(folder), step=step, precision="fp32")
    assert (found.iteration, found.record["mark"]) == ((3, "older") if step == 3 else (7, "newer"))


@pytest.mark.parametrize(
    "special, eod, wanted",
    [
        (dict(bos=5, cls=6, eos=7, sep=8), 9, (5, 7)),
        (dict(cls=6, sep=8), 9, (6, 8)),
        (dict(bos=0, cls=6), 9, (0, 9)),
        ({}, 9, (0, 9)),
        ({}, None, (0, None)),
    ],
)
def test_tokens_around_a_target_are_those_of_the_tokenizer(special, eod, wanted):
    """<s> before [CLS], </s> before [SEP]; the user's count before both."""
    words, facts = SimpleNamespace(special=special.get, eod=eod), SimpleNamespace(vocab_size=20)
    assert boundaries(words, facts) == wanted
    assert boundaries(words, facts, Search(decoder_start_id=0, decoder_end_id=19)) == (0, 19)
    for flag, search in (("start", Search(decoder_start_id=20)), ("end", Search(decoder_end_id=-1))):
        with pytest.raises(SettingsError, match=f"--decoder-{flag}-id .*: the model knows ids from 0 to 19"):
            boundaries(words, facts, search)


@pytest.mark.parametrize("kind", [Int8, Int4])
def test_weights_of_zeros_stay_zeros(kind):
    """Rows of a closed unit: their scale is not 0, which nothing can be divided by."""
    product = object.__new__(kind)
    product.symmetric = False
    rows = torch.tensor([[0.0, 0.0], [1.0, -1.0]])
    scale, zero = product.grid(rows)
    codes = (rows / scale + zero).round()
    assert (scale > 0).all() and codes.isfinite().all() and ((codes - zero) * scale)[0].tolist() == [0.0, 0.0]


def test_inputs_that_a_text_never_has_are_rounded_to_the_nearest():
    """Nothing is known of them: no error of theirs can be corrected."""
    weight = torch.tensor([[0.3, -0.74, 1.0], [0.2, 0.5, -1.0]])
    grid = lambda rows: (rows.abs().amax(1, keepdim=True) / 10, torch.zeros(len(rows), 1))
    found = gptq(weight, torch.zeros(3, 3), grid, -10, 10, None)
    assert found.values.tolist() == (weight * 10).round().tolist()


def test_each_new_token_is_reported_for_its_own_prompt(small_gpt):
    """Without a cache one prompt comes after the other."""
    reported = []
    prompts, sampling = [[3, 1], [4, 1, 5], [9]], Sampling(2, greedy=True)
    texts = generate(small_gpt(), prompts, sampling, longest=32, use_cache=False, on_token=reported.append)
    wanted = [[token if at == place else -1 for at in range(3)] for place, text in enumerate(texts) for token in text]
    assert reported == wanted and len(reported) == 6


def test_no_prompts_have_no_texts(small_gpt):
    for use_cache in (True, False):
        assert generate(small_gpt(), [], Sampling(2), longest=32, use_cache=use_cache) == []


@pytest.mark.parametrize(
    "imported, longest", [([], 16), ([False], 16), ([False, True], 64), ([True, False], 64), ([True], 64)]
)
def test_a_model_looks_as_far_as_the_one_that_was_imported(imported, longest, monkeypatch):
    """However it was tuned since."""
    monkeypatch.setattr(load, "ancestors", lambda record: [SimpleNamespace(imported=one) for one in imported])
    config = SimpleNamespace(model=SimpleNamespace(position_table=64, context_length=16))
    assert Loaded(None, config, {}, 5, 7, Path("x"), ()).longest == longest


@pytest.mark.parametrize(
    "stored, asked, fits", [(None, "int8", True), ("int4", None, True), (None, None, True), ("int4", "int8", False)]
)
def test_a_quantized_checkpoint_is_not_quantized_again(stored, asked, fits):
    record = {QUANTIZED: dict(quantize=stored)} if stored else {}
    if fits:
        refuse_twice("x", record, QuantizeOptions(quantize=asked))
    else:
        with pytest.raises(SettingsError, match="--quantize int8: x is quantized already, as int4"):
            refuse_twice("x", record, QuantizeOptions(quantize=asked))


@pytest.mark.parametrize("written, stop", [("x", ["x"]), (["x", "yz"], ["x", "yz"]), (None, None)])
def test_one_stop_string_of_a_model_is_a_list_of_one(written, stop):
    found = generation_config.defaults_of(dict(stop_strings=written, max_new_tokens=3))
    assert found.settings.get("stop") == stop and found.settings["tokens_to_generate"] == 3 and not found.unknown


@pytest.mark.parametrize("suffix", [(), (1,)])
def test_sentinels_that_the_vocabulary_does_not_have_are_named(suffix):
    """Of two, 0 and 1; with a token after prompts, too."""
    encode = lambda text: [5] * len(text)
    words = SimpleNamespace(suffix=suffix, sentinels=[100, 101], encode=encode, encode_prompt=lambda text: [7])
    assert source_of(words, "ab <extra_id_1> c") == ([7] if suffix else [5, 5, 101, 5, 5])
    with pytest.raises(
        DataError, match="prompt 3 has <extra_id_2>; of sentinels the vocabulary has <extra_id_0> to <extra_id_1>"
    ):
        source_of(words, "ab <extra_id_0> c<extra_id_2>", 3)


def test_weights_that_a_mask_has_closed_are_rounded_as_zeros(monkeypatch):
    """A layer of sparse training holds them, though its products do not: their scale would be wrong."""
    layer = torch.nn.Linear(4, 2, bias=False)
    layer.weight.data.copy_(torch.tensor([[9.0, 1.0, 2.0, 8.0], [1.0, 1.0, 1.0, 7.0]]))
    setattr(layer, MASK, torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]))
    layer.product = object.__new__(SparseProduct)
    monkeypatch.setitem(KINDS, "int8", lambda layer, name, settings: layer.weight.detach().clone())
    found = product_of(layer, "blocks.0.up", SimpleNamespace(linear="*=sparse"), QuantizeOptions(quantize="int8"))
    assert found.tolist() == [[0.0, 1.0, 2.0, 0.0], [1.0, 1.0, 1.0, 0.0]]
