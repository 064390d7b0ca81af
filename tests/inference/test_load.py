# SPDX-License-Identifier: Apache-2.0
"""What is said, and refused, when a checkpoint is loaded: without a model."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.errors import SettingsError
from megatron.inference import load
from megatron.inference.load import Loaded, check_vocabulary, quantized, without_model
from megatron.inference.passes import PassRow
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.model.quantization import QuantizeOptions
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
