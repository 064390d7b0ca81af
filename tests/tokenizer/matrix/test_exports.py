# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of models that are imported and exported: transformers gives the same ids before and after."""

import json
import unicodedata
from types import SimpleNamespace

import pytest

from megatron.convert import hf_files, hf_tokenizer
from megatron.convert.export import gguf_vocabulary
from megatron.errors import SettingsError
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.chat_template import find_template
from tests.tokenizer.matrix import llama
from tests.tokenizer.matrix.differences import assert_equal
from tests.tokenizer.matrix.layouts import VARIANTS

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def exported(settings, tokenizer, checkpoint, folder):
    """Write the tokenizer of a run as all formats of exports, and adapters for PEFT, do."""
    folder.mkdir()
    config = SimpleNamespace(tokenizer=settings, model=SimpleNamespace(position_table=64))
    run = SimpleNamespace(
        config=config, record=dict(config={}), vocab_size=tokenizer.vocab_size, path=checkpoint, facts=None
    )
    return hf_tokenizer.write_tokenizer(folder, run, {}, checkpoint, lambda end: dict(eos_token_id=end))


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
        template = find_template([folder], again)
        for title, messages in matrix.talks(variant, named=False).items():
            try:
                expected = first.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
            except Exception:  # the template refuses the messages
                continue
            found = copied.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
            assert found == expected == template.encode(messages[:-1]), f"{variant}, {where}, {title}"


def with_model(matrix, variant: str, folder) -> None:
    """What an export has beside its tokenizer."""
    kind = matrix.family(variant).model_type
    (folder / "config.json").write_text(json.dumps(dict(model_type=kind)))


@pytest.mark.sampled(10)
@every_variant
def test_exports(matrix, variant, tmp_path):
    """A run with this tokenizer: its exports."""
    exported(matrix.settings(variant), matrix.ours(variant), tmp_path, tmp_path / "out")
    with_model(matrix, variant, tmp_path / "out")
    same_everywhere(matrix, variant, tmp_path / "out", "exported")


@pytest.mark.sampled(10)
@every_variant
def test_imports(matrix, variant, tmp_path):
    """A model with this tokenizer: its import, and the export of that."""
    settings = hf_files.import_tokenizer(matrix.folder(variant), tmp_path / "tokenizer", VARIANTS[variant][0] == "gpt2")
    same_everywhere(matrix, variant, tmp_path / "tokenizer", "imported")
    if VARIANTS[variant][0] != "bert":  # whose class has another post-processor than the file: docs/limits.md
        again = build_tokenizer(settings, lambda text: None)
        # Token files of both are of one vocabulary
        assert again.fingerprint == matrix.ours(variant).fingerprint, variant
    exported(settings, build_tokenizer(settings, lambda text: None), tmp_path, tmp_path / "out")
    with_model(matrix, variant, tmp_path / "out")
    same_everywhere(matrix, variant, tmp_path / "out", "imported and exported")


@pytest.fixture(scope="module")
def llama_cpp():
    pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    process = llama.Process()
    yield process
    process.end()


@pytest.mark.sampled(10)
@every_variant
def test_llama_cpp(matrix, variant, tmp_path, llama_cpp):
    """The vocabulary of a GGUF file: documents and prompts in llama.cpp. What it does not express: docs/limits.md."""
    ours, theirs, folder = matrix.ours(variant), matrix.theirs(variant), tmp_path / "out"
    tokenizer = exported(matrix.settings(variant), ours, tmp_path, folder)
    try:
        path = llama.write(folder, tokenizer, ours.vocab_size)
    except SettingsError as error:
        assert "llama.cpp has no tokenizer like" in str(error) or "not its other models" in str(error), variant
        pytest.skip("llama.cpp has no such tokenizer")
    asked = list(texts_for_llama_cpp(matrix, variant, gguf_vocabulary.is_of_pieces(folder)))
    found = llama_cpp.ids(path, asked)
    rows = (
        ("prompt" if prompt else "document", text, matrix.ids(variant, text) if prompt else ours.encode(text), ids)
        for (text, prompt), ids in zip(asked, found, strict=True)
    )
    assert_equal(f"{variant}, llama.cpp", theirs, rows)


def texts_for_llama_cpp(matrix, variant: str, of_pieces: bool):
    """(text, whether it is a prompt)."""
    theirs = matrix.theirs(variant)
    added = theirs.added_tokens_decoder.values()
    names = [token.content for token in added]
    flagged = [one.content for one in added if one.lstrip or one.rstrip or one.single_word or one.normalized]
    composes = matrix.family(variant).kind == "bytes" and matrix.family(variant).normalizer == dict(type="NFC")
    for text in matrix.texts(variant).values():
        if composes and text != unicodedata.normalize("NFC", text) or of_pieces and text.startswith((" ", "\u2581")):
            continue
        named = any(name in text for name in names)
        if not named:
            yield text, False
        if not (named if of_pieces or theirs.split_special_tokens else any(name in text for name in flagged)):
            yield text, True
