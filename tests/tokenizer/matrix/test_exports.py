# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of models that are imported and exported: transformers gives the same ids before and after."""

import json
from types import SimpleNamespace

import pytest

from megatron.errors import SettingsError
from megatron.inference import generation_config
from megatron.inference.convert import hf_files
from megatron.inference.export import write
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.chat_template import RefusedMessages, find_template
from tests.tokenizer.matrix.differences import assert_equal
from tests.tokenizer.matrix.layouts import VARIANTS

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def exported(settings, tokenizer, checkpoint, folder):
    """Write the tokenizer of a run as all formats of exports do."""
    folder.mkdir()
    end = tokenizer.eod
    source = SimpleNamespace(
        tokenizer=tokenizer, tokenizer_settings=settings, end=end, longest=64, trained=checkpoint, vocab_size=tokenizer.vocab_size
    )  # fmt: skip
    return write._write_tokenizer(source, folder)


def same_everywhere(matrix, variant: str, folder, where: str) -> None:
    """Compare what transformers and the suite read in a folder with what they read in the variant's."""
    from transformers import AutoTokenizer

    first, ours, copied = matrix.theirs(variant), matrix.ours(variant), AutoTokenizer.from_pretrained(folder)
    again = build_tokenizer(hf_files.tokenizer_of(folder, of_gpt2=VARIANTS[variant][0] == "gpt2"), lambda text: None)

    def rows():
        for title, text in matrix.texts(variant).items():
            expected, plain = matrix.ids(variant, text), ours.encode(text)
            yield f"prompt, {title}", text, expected, copied(text)["input_ids"]
            yield f"ours, {title}", text, expected, again.encode_prompt(text)
            yield f"document, {title}", text, plain, again.encode(text)

    assert_equal(f"{variant}, {where}", first, rows())
    assert (again.eod, again.vocab_size) == (ours.eod, ours.vocab_size), variant
    assert first.eos_token_id in (None, copied.eos_token_id) and copied.chat_template == first.chat_template, variant
    if first.chat_template:
        for title, messages in matrix.talks(variant, named=False).items():
            try:
                expected = first.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
            except Exception:  # the template refuses the messages
                continue
            found = copied.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
            assert found == expected == find_template([folder], again).encode(messages[:-1]), (
                f"{variant}, {where}, {title}"
            )


def with_model(matrix, variant: str, folder) -> None:
    """What an export has beside its tokenizer."""
    kind = matrix.family(variant).model_type
    (folder / "config.json").write_text(json.dumps(dict(model_type=kind)))


@pytest.mark.sampled(5)
@every_variant
def test_exports(matrix, variant, tmp_path):
    """A run with this tokenizer: its exports."""
    exported(matrix.settings(variant), matrix.ours(variant), tmp_path, tmp_path / "out")
    with_model(matrix, variant, tmp_path / "out")
    same_everywhere(matrix, variant, tmp_path / "out", "exported")


@pytest.mark.sampled(5)
@every_variant
def test_imports(matrix, variant, tmp_path):
    """A model with this tokenizer: its import, and the export of that."""
    settings = hf_files.import_tokenizer(matrix.folder(variant), tmp_path / "tokenizer", VARIANTS[variant][0] == "gpt2")
    same_everywhere(matrix, variant, tmp_path / "tokenizer", "imported")
    exported(settings, build_tokenizer(settings, lambda text: None), tmp_path, tmp_path / "out")
    with_model(matrix, variant, tmp_path / "out")
    same_everywhere(matrix, variant, tmp_path / "out", "imported and exported")
