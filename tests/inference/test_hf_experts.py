# SPDX-License-Identifier: Apache-2.0
"""Experts to and from Hugging Face, beside the families of `test_families.py`: DeepSeek-MoE, which transformers lacks,
against plain torch; formats of files; files that lack experts; checkpoints of a run over ranks.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import pretrain_gpt
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import load_model
from megatron.settings.schema import Model
from megatron.tools import checkpoint as tool
from megatron.tools import export
from tests.inference.test_convert import S, V, assert_same, loaded, save
from tests.inference.test_hf_settings import BASES

E, SCALING = 4, 1.5


def to_hf(folder, *more: str):
    tool.main(["to-hf", str(folder / "ours"), str(folder / "theirs"), *more])
    return load_file(folder / "theirs" / "model.safetensors")


def deepseek(files: dict[str, torch.Tensor], config: dict, tokens: torch.Tensor) -> torch.Tensor:
    """The logits [b, s, v] of DeepSeek-MoE (arXiv:2401.06066, eq. 3 to 11) from its files, in plain torch."""
    linear = lambda x, name: F.linear(x, files[f"{name}.weight"])
    norm = lambda x, name: F.rms_norm(x, x.shape[-1:], files[f"{name}.weight"], config["rms_norm_eps"])
    mlp = lambda x, at: linear(F.silu(linear(x, f"{at}.gate_proj")) * linear(x, f"{at}.up_proj"), f"{at}.down_proj")
    heads, groups, d = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    x = files["model.embed_tokens.weight"][tokens]
    angles = torch.arange(x.shape[1]).unsqueeze(1) / config["rope_theta"] ** (torch.arange(0, d, 2) / d)
    cos, sin = (torch.cat((f(angles), f(angles)), -1) for f in (torch.cos, torch.sin))
    turned = lambda x: x * cos + torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1) * sin
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (linear(y, f"{at}.self_attn.{name}_proj").unflatten(-1, (-1, d)).transpose(1, 2) for name in "qkv")
        k, v = (part.repeat_interleave(heads // groups, 1) for part in (turned(k), v))
        attended = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        x = x + linear(attended.transpose(1, 2).flatten(2), f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm")
        if n < config["first_k_dense_replace"]:
            x = x + mlp(y, f"{at}.mlp")
            continue
        scores = linear(y, f"{at}.mlp.gate").softmax(-1)
        best = scores.topk(config["num_experts_per_tok"], -1)
        gates = torch.zeros_like(scores).scatter(-1, best.indices, best.values) * config["routed_scaling_factor"]
        routed = sum(gates[..., e : e + 1] * mlp(y, f"{at}.mlp.experts.{e}") for e in range(config["n_routed_experts"]))
        x = x + routed + mlp(y, f"{at}.mlp.shared_experts")
    return linear(norm(x, "model.norm"), "lm_head")


def test_deepseek_moe_is_that_of_its_paper(tmp_path, capsys):
    save(tmp_path / "ours", BASES["deepseek"] | dict(moe_router_topk_scaling_factor=SCALING))
    files = to_hf(tmp_path, "--dtype", "fp32")
    assert (
        "transformers has no deepseek without code from the hub: the models were not compared"
        in capsys.readouterr().out
    )
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (config["n_shared_experts"], config["first_k_dense_replace"], config["norm_topk_prob"]) == (2, 1, False)
    tokens = torch.randint(V, (S, 3), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = load_model(str(tmp_path / "ours")).model.logits(tokens).transpose(0, 1)
        torch.testing.assert_close(ours, deepseek(files, config, tokens.t()), rtol=1e-5, atol=2e-5)
    tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")])
    assert_same(loaded(tmp_path / "back"), loaded(tmp_path / "ours"))


def test_expert_bias_is_fp32_in_bf16_files(tmp_path):
    """Rounded to bf16 it would choose other experts."""
    save(tmp_path / "ours", BASES["dots1"])
    files, ours = to_hf(tmp_path, "--unchecked"), loaded(tmp_path / "ours")
    bias = files["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert files["model.layers.2.mlp.gate.weight"].dtype == torch.bfloat16
    assert torch.equal(bias, ours["blocks.2.mlp.router.expert_bias"])
    tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back"), "--unchecked"])
    assert torch.equal(loaded(tmp_path / "back")["blocks.2.mlp.router.expert_bias"], bias)


def test_a_file_that_lacks_an_expert_is_named(tmp_path):
    save(tmp_path / "ours", BASES["mixtral"])
    files = to_hf(tmp_path, "--unchecked", "--dtype", "fp32")
    expert = "model.layers.1.block_sparse_moe.experts.3."
    for name in [name for name in files if name.startswith(expert)]:
        del files[name]
    save_file(files, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")])
    assert "3 tensors are missing" in str(error.value)
    assert f"{expert}w2.weight: missing" in str(error.value)
    assert not (tmp_path / "back").exists()
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config | dict(num_local_experts=3)))
    with pytest.raises(CheckpointError, match=r"experts.3.w1.weight: unknown"):  # not dropped
        tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_square_output_matrices_are_not_transposed(kind, tmp_path):
    """An expert as wide as the model: a transposed matrix has the same shape."""
    pytest.importorskip("transformers")
    model = BASES[kind] | dict(moe_ffn_hidden_size=32)
    assert Model(**model).expert_ffn_size == model["hidden_size"]
    save(tmp_path / "ours", model)
    to_hf(tmp_path, "--dtype", "fp32")
    tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")])
    assert_same(loaded(tmp_path / "back"), loaded(tmp_path / "ours"))


@pytest.mark.parametrize("form", ["onnx", "torch-export"])
def test_experts_are_not_recorded_as_programs(form, tmp_path):
    save(tmp_path / "ours", BASES["mixtral"])
    words = ["--load", str(tmp_path / "ours"), "--output", str(tmp_path / "out"), "--format", form]
    with pytest.raises(SettingsError, match=f"--format {form}: a model with experts is not recorded as a program"):
        export.main(words)
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_a_run_over_ranks_leaves_with_all_experts(tmp_path, run_ranks, capsys):
    """tp 2, ep 2 and pp 2: the files hold the experts of all ranks, and both models agree."""
    pytest.importorskip("transformers")
    words = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 50 --swiglu "
        "--num-experts 4 --moe-ffn-hidden-size 24 --position-embedding-type rope --normalization RMSNorm --qk-layernorm "
        "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 "
        "--micro-batch-size 2 --global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-2 --device cpu --num-workers 0 "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 --sequence-parallel --peak-tflops 1 --save {tmp_path}/ours"
    )
    run_ranks(4, lambda rank: pretrain_gpt.main(words.split()))
    files = to_hf(tmp_path, "--dtype", "fp32")
    assert "both models agree" in capsys.readouterr().out
    ours = loaded(tmp_path / "ours")
    for e in range(E):
        assert torch.equal(
            files[f"model.layers.3.mlp.experts.{e}.down_proj.weight"], ours["blocks.3.mlp.experts.down.weight"][e]
        )
