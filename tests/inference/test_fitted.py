# SPDX-License-Identifier: Apache-2.0
"""Every tensor of a Hugging Face folder counts, or is named: what we import and open computes what transformers 5 does with
the same files, whatever config.json says about the output layer.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.convert.export.load_exported import load_exported
from megatron.convert.families import imported
from megatron.convert.huggingface import from_hf
from megatron.errors import CheckpointError
from megatron.inference.load import load_model
from megatron.training.conversion_commands import fresh_state

transformers = pytest.importorskip("transformers")

V, H, S = 50, 32, 24
DECODER = dict(vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
DECODER |= dict(max_position_embeddings=S, bos_token_id=None, eos_token_id=None, pad_token_id=None)
T5 = dict(vocab_size=V, d_model=H, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
CASES = {  # kind -> (settings, class of transformers, its output layer, its embedding)
    "llama": (DECODER, "AutoModelForCausalLM", "lm_head.weight", "model.embed_tokens.weight"),
    "gpt2": (
        dict(vocab_size=V, n_embd=H, n_layer=2, n_head=4, n_positions=S),
        *("AutoModelForCausalLM", "lm_head.weight", "transformer.wte.weight"),
    ),
    "gemma": (
        DECODER | dict(head_dim=8, num_key_value_heads=2),
        "AutoModelForCausalLM",
        "lm_head.weight",
        "model.embed_tokens.weight",
    ),
    "t5": (T5, "T5ForConditionalGeneration", "lm_head.weight", "shared.weight"),
    "bert": (
        DECODER,
        *("BertForPreTraining", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ),
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """`tied(kind)`: a folder of transformers whose model has a tied output layer; it is made once."""
    made = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp("tied")
            settings, name, *_ = CASES[kind]
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(kind, **settings, tie_word_embeddings=True)
            model = getattr(transformers, name)
            model = model.from_config(config) if name.startswith("Auto") else model(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn_like(parameter))
            model.save_pretrained(folder)
            made[kind] = folder
        return made[kind]

    return make


def changed(source: Path, out: Path, tensors=lambda files: files, **config) -> Path:
    """A copy of a folder with other tensors and entries of config.json."""
    shutil.copytree(source, out)
    save_file(tensors(load_file(out / "model.safetensors")), out / "model.safetensors", dict(format="pt"))
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return out


def with_own_head(kind: str):
    *_, head, table = CASES[kind]
    return lambda files: (
        files | {head: files[table] + 0.2 * torch.randn(V, H, generator=torch.Generator().manual_seed(5))}
    )


def assert_as_in_transformers(folder: Path, tmp_path: Path) -> list[str]:
    """Opened, and imported without a comparison; returns what the import says."""
    family = imported(json.loads((folder / "config.json").read_text()))
    prompts = torch.randint(V, (S, 3), generator=torch.Generator().manual_seed(1))
    notices = from_hf(folder, tmp_path / "ours", fresh_state(), check=False)
    with torch.no_grad():
        want = family.run(transformers, folder, prompts)
        for loaded in (load_exported(str(folder)), load_model(str(tmp_path / "ours"))):
            found = family.ours(loaded.model, prompts)
            torch.testing.assert_close(found, want, rtol=0, atol=2e-5 * want.abs().max().item())
    return notices


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", CASES)
def test_a_head_that_differs_from_a_tied_embedding_is_used(tied, kind, tmp_path):
    folder = changed(tied(kind), tmp_path / "theirs", with_own_head(kind))
    notices = assert_as_in_transformers(folder, tmp_path)
    assert any(f"{CASES[kind][2]} differs from {CASES[kind][3]}: the model has its own" in one for one in notices)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", CASES)
def test_a_head_in_the_place_of_a_tied_embedding_is_the_embedding(tied, kind, tmp_path):
    *_, head, table = CASES[kind]

    def renamed(files):
        return {head if name == table else name: x for name, x in files.items()}

    assert_as_in_transformers(changed(tied(kind), tmp_path / "theirs", renamed), tmp_path)


def test_a_head_that_is_a_copy_is_no_second_tensor(tied, tmp_path):
    def copied(files):
        return files | {"lm_head.weight": files["model.embed_tokens.weight"].clone()}

    assert_as_in_transformers(changed(tied("llama"), tmp_path / "theirs", copied), tmp_path)
    assert not load_model(str(tmp_path / "ours")).config.model.untie_embeddings_and_output_weights


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_missing_head_of_an_untied_model_is_named(tied, kind, tmp_path):
    """transformers would make one up."""
    folder = changed(tied(kind), tmp_path / "theirs", tie_word_embeddings=False)
    for use in (
        lambda: from_hf(folder, tmp_path / "ours", fresh_state(), check=False),
        lambda: load_exported(str(folder)),
    ):
        with pytest.raises(CheckpointError, match=f"has no {CASES[kind][2]}\n.*tie_word_embeddings is not true"):
            use()


@pytest.mark.parametrize("head", [False, True])
def test_t5_is_tied_as_its_files_are(tied, head, tmp_path):
    """Its published config.json of version 1.1 says untied, and transformers 5 always ties what does not differ."""
    more = with_own_head("t5") if head else lambda files: files
    config = dict(tie_word_embeddings=False, scale_decoder_outputs=False)
    assert_as_in_transformers(changed(tied("t5"), tmp_path / "theirs", more, **config), tmp_path)


@pytest.mark.parametrize(
    "kind, name", [("t5", "encoder.embed_tokens.weight"), ("bert", "cls.predictions.decoder.bias")]
)
def test_a_copy_that_differs_is_named(tied, kind, name, tmp_path):
    """transformers computes with both."""

    def apart(files):
        return files | {name: torch.ones(V, *((H,) if name.endswith("weight") else ()))}

    folder = changed(tied(kind), tmp_path / "theirs", apart)
    for use in (
        lambda: from_hf(folder, tmp_path / "ours", fresh_state(), check=False),
        lambda: load_exported(str(folder)),
    ):
        with pytest.raises(CheckpointError, match=f"{name} in .* differs from"):
            use()


def test_other_tensors_are_named(tied, tmp_path):
    """Unknown ones end it, opened or imported; a second head that BertForMaskedLM has not is left out with a note."""
    extra = changed(tied("llama"), tmp_path / "extra", lambda files: files | {"score.weight": torch.ones(2, H)})
    with pytest.raises(CheckpointError, match="config.json: 1 tensor is unknown\n  score.weight: unknown"):
        load_exported(str(extra))
    rows = changed(tied("llama"), tmp_path / "rows", vocab_size=V - 1)  # which would be the first of the file's
    with pytest.raises(
        CheckpointError, match="embed_tokens.weight in .* is \\(50, 32\\), config.json says \\(49, 32\\)"
    ):
        load_exported(str(rows))
    masked = changed(tied("bert"), tmp_path / "masked", architectures=["BertForMaskedLM"])
    notices = assert_as_in_transformers(masked, tmp_path)
    assert any("left out as in transformers: bert.pooler.dense.bias, bert.pooler" in one for one in notices)


def test_constants_of_old_files_are_no_news(tied, tmp_path):
    mask = torch.ones(1, 1, S, S).tril()
    folder = changed(tied("gpt2"), tmp_path / "theirs", lambda files: files | {"transformer.h.0.attn.bias": mask})
    assert not any("left out" in one for one in assert_as_in_transformers(folder, tmp_path))
