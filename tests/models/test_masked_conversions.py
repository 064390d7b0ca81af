# SPDX-License-Identifier: Apache-2.0
"""T5 and BERT to and from Hugging Face transformers: every bit comes back, and what cannot be is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron.checkpoint.reader import Reader
from megatron.convert.huggingface import from_hf, to_hf
from megatron.entry import start
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import load_model
from megatron.model.recipe import named_recipe
from megatron.training.conversion_commands import fresh_state

transformers = pytest.importorskip("transformers")

SIZES = """--hidden-size 16 --num-attention-heads 2 --seq-length 24 --mock-data --vocab-size 50 --device cpu --lr 1e-2
    --micro-batch-size 2 --train-iters 1 --eval-iters 0 --precision fp32"""
T5 = """--encoder-num-layers 2 --decoder-num-layers 3 --decoder-seq-length 16 --position-embedding-type relative
    --normalization RMSNorm --disable-bias-linear --unscaled-attention"""
MODELS = {
    "T5 1.0": ("T5", f"{T5} --feed-forward-proj relu --scale-tied-output"),
    "T5 1.1": ("T5", f"{T5} --feed-forward-proj gated-gelu --untie-embeddings-and-output-weights"),
    "BERT": ("BERT", "--num-layers 2 --post-norm --norm-epsilon 1e-12"),
    "BERT with an output layer of its own": (
        "BERT",
        "--num-layers 2 --post-norm --untie-embeddings-and-output-weights",
    ),
    "BERT without a second head": ("BERT", "--num-layers 2 --post-norm --bert-no-binary-head --no-bias-gelu-fusion"),
}


def trained(folder, name: str):
    kind, flags = MODELS[name]
    start(f"{SIZES} {flags} --save {folder}".split(), named_recipe(kind))
    return folder / "iter_0000001"


def tensors(folder) -> dict[str, torch.Tensor]:
    with Reader(folder) as reader:
        return {name: reader.read(name) for name in reader.tensors if not name.startswith("optimizer.")}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if "1.0" in n or "out" in n else n for n in MODELS]
)
def test_there_and_back_keeps_every_bit(tmp_path, name):
    path = trained(tmp_path / "ours", name)
    told = to_hf(path, tmp_path / "hf", torch.float32, {})
    assert any("both models agree" in line for line in told)
    told = from_hf(tmp_path / "hf", tmp_path / "back", fresh_state())
    assert any("both models agree" in line for line in told)
    before, after = tensors(path), tensors(tmp_path / "back" / "iter_0000000")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    ours, theirs = load_model(tmp_path / "ours").config, load_model(tmp_path / "back").config
    assert ours.extra.keys() == theirs.extra.keys() and ours.model.num_layers == theirs.model.num_layers


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_output_that_is_not_scaled_is_theirs_with_a_copy_of_the_table(tmp_path, dtype):
    """Their T5 divides by the root of its width where it shares the table, and there alone; so it does when saved again."""
    start(f"{SIZES} {T5} --feed-forward-proj relu --save {tmp_path / 'ours'}".split(), named_recipe("T5"))
    path = tmp_path / "ours" / "iter_0000001"
    told = to_hf(path, tmp_path / "hf", dtype, {})
    assert any("lm_head.weight is a copy of the embedding" in line for line in told)
    source, target = torch.randint(50, (2, 24, 3), generator=torch.Generator().manual_seed(0)).split(1)
    ours = load_model(path, precision="fp32").model.eval()
    for parameter in ours.parameters():
        parameter.data = parameter.data.to(dtype).float()
    logits = ours.logits(source[0], target[0][:16]).transpose(0, 1)
    folder = tmp_path / "hf"
    written = load_file(folder / "model.safetensors")  # older releases of transformers look for both
    assert torch.equal(written["lm_head.weight"], written["shared.weight"])
    for turn in ("first", "second"):
        theirs = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        assert not theirs.config.scale_decoder_outputs
        found = theirs(input_ids=source[0].t(), decoder_input_ids=target[0][:16].t()).logits
        torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-6)
        assert any("both models agree" in line for line in from_hf(folder, tmp_path / turn, fresh_state()))
        folder = tmp_path / "saved"
        theirs.to(dtype).save_pretrained(folder)


def test_a_model_of_another_shape_is_refused(tmp_path):
    start(f"{SIZES} --num-layers 1 --save {tmp_path / 'bert'}".split(), named_recipe("BERT"))
    with pytest.raises(SettingsError, match="BERT is no model of this shape") as refusal:
        to_hf(tmp_path / "bert" / "iter_0000001", tmp_path / "hf", torch.float32, {})
    assert "no --post-norm" in str(refusal.value) and not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "content, match",
    [
        (dict(model_type="t5", feed_forward_proj="gated-silu"), "gated-silu"),
        (dict(model_type="t5"), "not complete: KeyError"),
        (dict(model_type="bert", hidden_act="relu"), "hidden_act 'relu'"),
        (dict(model_type="bert", position_embedding_type="relative_key"), "relative_key"),
        (dict(model_type="bart"), "'bart' in config.json is not read here"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(tmp_path, content, match):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=match):
        from_hf(tmp_path, tmp_path / "out", fresh_state())
