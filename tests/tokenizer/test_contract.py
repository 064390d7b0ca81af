# SPDX-License-Identifier: Apache-2.0
"""docs/tokenizers.md where transformers says nothing: ids of earlier versions, beginnings of tasks, ends carried along."""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.checkpoint.reshard import copy_companions
from megatron.convert.export import gguf_vocabulary
from megatron.data.vocabulary import learned_vocabulary, refuse_other_vocabulary
from megatron.errors import DataError
from megatron.inference import generation_config
from megatron.inference.prompts import source_of
from megatron.settings.schema import TokenizerSettings
from megatron.tasks.chat import ends_note
from megatron.tasks.readers import CausalReader
from megatron.tokenizer import build_tokenizer
from tests.tokenizer.matrix.layouts import files_of, write
from tests.tokenizer.plain import PlainTokenizer, letters
from tests.tokenizer.turns import save_tokenizer

THINK = dict(content="<think>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer whose vocabulary is followed by a special token and one that is not."""
    save_tokenizer(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    size = len(description["model"]["vocab"])
    description["added_tokens"] += [THINK | dict(id=size, content="<|end|>", special=True), THINK | dict(id=size + 1)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    return tmp_path


def opened(folder, **more):
    return build_tokenizer(TokenizerSettings("HuggingFaceTokenizer", tokenizer_model=str(folder), **more))


def earlier_fingerprint(folder) -> str:
    """That of the version before: of the file alone."""
    digest = hashlib.sha256()
    for piece in ("tokenizer.json", json.dumps(json.loads((folder / "tokenizer.json").read_text()), sort_keys=True)):
        digest.update(len(piece.encode()).to_bytes(8, "little") + piece.encode())
    return digest.hexdigest()[:32]


def test_token_files_with_ids_of_an_earlier_version_are_named(folder):
    tokenizer = opened(folder)
    identity = dict(type="HuggingFaceTokenizer", vocab_size=tokenizer.vocab_size, eod=None)
    files = {"old": earlier_fingerprint(folder), "new": tokenizer.fingerprint, "other": "0" * 32}
    for name, fingerprint in files.items():
        content = dict(tokenizer=identity | dict(fingerprint=fingerprint))
        (folder / f"{name}.stats.json").write_text(json.dumps(content))
    [note] = refuse_other_vocabulary([str(folder / "new"), str(folder / "old")], tokenizer)
    assert note.startswith(f"{folder / 'old'} was made with this tokenizer by an earlier version") and "<think>" in note
    with pytest.raises(DataError, match="another vocabulary"):
        refuse_other_vocabulary([str(folder / "other")], tokenizer)


def test_a_tokenizer_whose_ids_were_right_keeps_its_fingerprint(tmp_path):
    save_tokenizer(tmp_path)
    assert opened(tmp_path).fingerprint == earlier_fingerprint(tmp_path) and not opened(tmp_path).superseded


def test_an_unknown_token_that_no_text_has_changes_no_fingerprint(tmp_path):
    """transformers' LlamaTokenizer leaves it out; each byte is a token (Mistral's third vocabulary)."""
    write(files_of("mistral3"), tmp_path)
    tokenizer = opened(tmp_path)
    assert tokenizer.fingerprint == earlier_fingerprint(tmp_path) and not tokenizer.superseded
    write(files_of("mistral1"), tmp_path / "steps")
    assert len(opened(tmp_path / "steps").superseded) == 1  # of its own steps


def test_a_resumed_run_keeps_the_fingerprint_of_an_earlier_version(folder):
    """Its model has learned those ids."""
    tokenizer, earlier = opened(folder), earlier_fingerprint(folder)
    for before, kept in ((earlier, earlier), (None, tokenizer.fingerprint), ("0" * 32, tokenizer.fingerprint)):
        entries = learned_vocabulary(tokenizer, before)
        assert entries["vocabulary"] == entries["tokenizer"]["fingerprint"] == kept


def test_names_in_documents_are_text_unless_they_are_parsed(folder):
    text, end = "hello<|end|> <think>", opened(folder).pieces["<|end|>"]
    plain, parsed = opened(folder), opened(folder, parse_special=True)
    assert end not in plain.encode(text) and plain.encode(text)[-1] == end + 1
    assert parsed.encode(text) == plain.encode_prompt(text) == plain.encode_special(text) and end in parsed.encode(text)
    assert list(parsed.encoder("hello")) == list(plain.encoder("hello"))


def test_tasks_of_a_gpt_begin_as_prompts_do():
    config = SimpleNamespace(model=SimpleNamespace(seq_length=8))
    tokenizer = PlainTokenizer(letters, eod=9)
    tokenizer.prefix = [5]
    reader = CausalReader.of(config, tokenizer, 100)
    assert (reader.room(False), reader.room(True)) == (7, 6)
    read = reader.read([1, 2], [3])
    assert [value for value in read.values()][1] == 5 and list(next(iter(read.values())))[:5] == [5, 1, 2, 9, 3]


def test_a_further_end_is_added_once(tmp_path):
    place = tmp_path / generation_config.NAME
    assert generation_config.with_end(tmp_path, 7) == {}  # without a file the template's eos_token counts
    place.write_text(json.dumps(dict(eos_token_id=3, top_p=0.5)))
    content = json.loads(generation_config.with_end(tmp_path, 7)[generation_config.NAME])
    assert content == dict(eos_token_id=[7, 3], top_p=0.5)
    assert generation_config.with_end(tmp_path, 3) == {}
    assert generation_config.ends_beside(tmp_path / "iter_0000001") == (3,)


def test_a_tuned_model_keeps_what_is_beside_its_base(tmp_path):
    (base := tmp_path / "base").mkdir()
    (own := tmp_path / "own").mkdir()
    (base / generation_config.NAME).write_text("{}")
    (base / "chat_template.jinja").write_text("base")
    (own / "chat_template.jinja").write_text("own")
    copy_companions(base, own)
    assert (own / generation_config.NAME).read_text() == "{}" and (own / "chat_template.jinja").read_text() == "own"


@pytest.mark.parametrize(
    "stops, words",
    [
        ([2, 2, 2], None),
        ([65, 65, 2], "answers end with 'A', which is text: the model learns no token that ends an answer"),
        ([65, 66, 67], "answers end with no token in common"),
        ([-1, -1, 2], None),  # two conversations without an answer
    ],
)
def test_answers_without_an_end_are_noted(stops, words):
    template = SimpleNamespace(special={"<|end|>": 2}, tokenizer=PlainTokenizer(letters))
    note = ends_note(SimpleNamespace(stops=np.array(stops)), template)
    assert note is None if words is None else words in note


def test_sources_of_an_imported_t5_are_prompts(tmp_path):
    transformers = pytest.importorskip("transformers")
    write(files_of("t5"), tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = opened(tmp_path)
    for text in ("summarize: the cat", "one <extra_id_0> two<extra_id_1>", " <extra_id_1> a "):
        assert source_of(ours, text) == theirs(text)["input_ids"]
    with pytest.raises(DataError, match="the prompt has <extra_id_200>"):
        source_of(ours, "one <extra_id_200>")


def test_what_llama_cpp_does_not_normalize_is_said(tmp_path):
    """Qwen's tokenizer composes characters (NFC) before it cuts a text, and llama.cpp's byte-level BPE does not."""
    write(files_of("qwen3"), tmp_path / "qwen3")
    write(files_of("llama3"), tmp_path / "llama3")
    [notice] = gguf_vocabulary.unexpressed(tmp_path / "qwen3")
    assert notice.endswith("it normalizes no texts (NFC)") and gguf_vocabulary.unexpressed(tmp_path / "llama3") == []
    assert [gguf_vocabulary.is_expressed(tmp_path / "qwen3", text) for text in ("cafe\u0301", "caf\u00e9")] == [
        False,
        True,
    ]
    assert gguf_vocabulary.is_expressed(tmp_path / "llama3", "cafe\u0301")


def legacy(description: dict) -> None:
    description["model"]["merges"] = [" ".join(pair) for pair in description["model"]["merges"]]
    for name in ("ignore_merges", "byte_fallback"):
        description["model"].pop(name, None)


FORMS = {
    "another order of keys": lambda content: content.update(dict(reversed([*content.items()]))),
    "of an earlier version of tokenizers": legacy,
    "cut at 512 tokens": lambda content: content.update(
        truncation=dict(direction="Right", max_length=512, strategy="LongestFirst", stride=0)
    ),
}
OTHERS = {
    "another order of added tokens": lambda content: content["added_tokens"].reverse(),  # which the library numbers
    "two tokens changed places": lambda content: swap(content["model"]["vocab"]),
    "a merge less": lambda content: content["model"]["merges"].pop(),
    "another added token": lambda content: content["added_tokens"][-1].update(content="<other>"),
    "whole words first": lambda content: content["model"].update(ignore_merges=True),
}


def swap(vocab: dict) -> None:
    one, other = [name for name in vocab if len(name) > 1][:2]
    vocab[one], vocab[other] = vocab[other], vocab[one]


def test_token_files_of_imports_with_the_decoder_of_transformers_are_of_the_same_vocabulary(folder):
    """Of Qwen and GPT-2 imports had the decoder of their class, whose settings change no id and no text."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["decoder"] = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    path.write_text(json.dumps(content))
    own = opened(folder)
    content["decoder"] |= dict(add_prefix_space=True, use_regex=True)
    path.write_text(json.dumps(content))
    imported = opened(folder)
    assert imported.fingerprint != own.fingerprint and own.superseded[imported.fingerprint] == ""
    ids = own.encode("naive caf\u00e9 <think> 12")
    assert ids == imported.encode("naive caf\u00e9 <think> 12") and own.decode(ids) == imported.decode(ids)


@pytest.mark.parametrize("name", [*FORMS, *OTHERS])
def test_fingerprints_are_of_the_content_not_of_the_form(name, folder):
    """Files with the same ids are one vocabulary, however they were written; checkpoints of before are recognised."""
    before, path = opened(folder), folder / "tokenizer.json"
    content = json.loads(path.read_text())
    (FORMS | OTHERS)[name](content)
    path.write_text(json.dumps(content, indent=1))
    after = opened(folder)
    assert (after.fingerprint == before.fingerprint) == (name in FORMS)
    moved = hashlib.sha256()
    for piece in ("tokenizer.json 2", json.dumps(json.loads(path.read_text()), sort_keys=True)):
        moved.update(len(piece.encode()).to_bytes(8, "little") + piece.encode())
    if name in FORMS:
        assert moved.hexdigest()[:32] in (after.fingerprint, *after.superseded)
        text = "hello <think> they're 12 naive \u00e9" * 100
        assert list(before.encode(text)) == list(after.encode(text))
