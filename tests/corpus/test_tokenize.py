# SPDX-License-Identifier: Apache-2.0
"""The last stage makes the files that preprocess_data.py makes of the shards by hand."""

from dataclasses import fields

import pytest

import preprocess_data
from megatron.corpus.tokenize import TokenizeOptions, preprocess_settings
from megatron.errors import Failure
from tests.corpus.conftest import SmallCorpus


@pytest.fixture
def numbers(tmp_path) -> SmallCorpus:
    """Texts of numbers, for a tokenizer that needs no files; the middle shards become empty."""
    made = SmallCorpus(tmp_path, 1, 0.002)
    made.texts = [" ".join([f"{n} {n * 7 % 901}"] * (1 if 150 < n < 350 else n % 5 + 3)) for n in range(500)]
    with open(made.input, "w") as file:
        file.writelines(f'{{"text": "{text}"}}\n' for text in made.texts)
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form, endings", [("megatron", (".bin", ".idx")), ("paddle", ("_ids.npy", "_idx.npz"))])
def test_token_files_are_those_of_preprocessing_the_shards(numbers, tmp_path, form, endings):
    filters = "stages:\n  - filter: [{'tests.corpus.toy_stages:TooShort': {least: 12}}]\n"
    options = "tokenizer-type: NullTokenizer, vocab-size: 9999, append-eod: true, output-format: " + form
    plan = numbers.run(tmp_path / "documents", stages=filters)
    numbers.run(tmp_path / "tokens", stages=filters + f"  - tokenize: {{{options}}}\n", workers=2)
    shards = [str(path) for path in sorted((tmp_path / "documents/final").glob("*.zst"))]
    assert len(shards) > 4 and any((tmp_path / "documents/tasks" / s).stat().st_size < 20 for s in plan.final)
    words = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9999", "--append-eod", "--output-format", form]
    preprocess_data.main([*words, "--input", *shards, "--output-prefix", str(tmp_path / "by_hand"), "--workers", "1"])
    by_hand = tmp_path / ("by_hand_text_document" if form == "megatron" else "by_hand")
    for ending in endings:
        made = tmp_path / "tokens/final" / f"text_document{ending}"
        assert made.read_bytes() == by_hand.with_name(by_hand.name + ending).read_bytes()


@pytest.mark.sampled(5)
def test_several_datasets(numbers, tmp_path):
    options = "tokenizer-type: NullTokenizer, vocab-size: 9999, datasets: 3"
    numbers.run(tmp_path / "one", stages=f"stages: [{{tokenize: {{{options[:-1]}1}}}}]\n")
    numbers.run(tmp_path / "three", stages=f"stages: [{{tokenize: {{{options}}}}}]\n")
    parts = [tmp_path / f"three/final/{number:02}-text_document.bin" for number in range(3)]
    assert b"".join(path.read_bytes() for path in parts) == (tmp_path / "one/final/text_document.bin").read_bytes()
    with pytest.raises(Failure, match="datasets 100: from 1 to the number of shards"):
        numbers.plan(tmp_path / "x", stages=f"stages: [{{tokenize: {{{options[:-1]}100}}}}]\n")


def test_a_tokenizer_that_cannot_be_is_told_before_anything_runs(numbers, tmp_path):
    with pytest.raises(Failure, match="tokenize: --tokenizer-type GPT2BPETokenizer needs --vocab-file"):
        numbers.plan(tmp_path / "x", stages="stages: [{tokenize: {tokenizer-type: GPT2BPETokenizer}}]\n")
    assert not (tmp_path / "x").exists()


def test_all_settings_of_preprocessing_are_given(tmp_path):
    given = preprocess_settings(TokenizeOptions(), tmp_path / "in", tmp_path / "out")
    assert {one.name for one in fields(preprocess_data.PreprocessOptions)} <= set(vars(given))
