# SPDX-License-Identifier: Apache-2.0
"""Experts from and to Megatron-LM's checkpoints. `megatron_experts.json` has the names of a model of megatron-core 0.16.1
(SequentialMLP, a shared expert, an expert bias, a dense first layer), and what it computed with the weights drawn here.
"""

import argparse
import json
import tarfile
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import load_model
from megatron.model.kinds.experts.megatron import our_expert, their_expert
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import GPT2, LLAMA, assert_same, loaded, save
from tests.inference.test_hf_settings import SIGMOID

pytestmark = pytest.mark.sampled(10)

ARGS = dict(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    group_query_attention=True,
    num_query_groups=1,
    ffn_hidden_size=24,
    kv_channels=8,
    seq_length=12,
    max_position_embeddings=12,
    position_embedding_type="rope",
    normalization="LayerNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    vocab_size=24,
    num_experts=4,
    moe_ffn_hidden_size=12,
    moe_layer_freq=[0, 1],
    moe_router_topk=2,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_topk_scaling_factor=1.5,
    moe_router_load_balancing_type="aux_loss",
    moe_aux_loss_coeff=0.01,
    moe_shared_expert_intermediate_size=20,
)
EXPERTS = "decoder.layers.1.mlp.experts."


@cache
def recorded() -> dict:
    return json.loads(Path(__file__).with_name("megatron_experts.json").read_text())


def weights() -> dict[str, torch.Tensor]:
    """Their weights, drawn as they were for the recorded logits."""
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(shape, generator=generator) * 0.3 + ("layernorm.weight" in name)
        for name, shape in recorded()["parameters"].items()
    }
    return drawn | {"decoder.layers.1.mlp.router.expert_bias": torch.rand(4, generator=generator)}


def write(folder: Path, ranks: dict[str, dict], **more) -> Path:
    """Write files: name of a rank's folder -> its tensors."""
    for name, model in ranks.items():
        path = folder / "iter_0000003" / name
        path.mkdir(parents=True)
        content = dict(args=argparse.Namespace(**ARGS | more), checkpoint_version=3.0, iteration=3, model=model)
        torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def of_two_ranks(whole: dict[str, torch.Tensor], grouped: bool) -> dict[str, dict]:
    """The files of two expert parallel ranks, each with two of the four experts."""
    ranks = {}
    for rank in range(2):
        own = {name: x for name, x in whole.items() if EXPERTS not in name}
        for name, x in whole.items():
            if found := our_expert(name.removeprefix("decoder.layers.1.")):
                if found[1] // 2 == rank:
                    own["decoder.layers.1." + their_expert(found[0], found[1] % 2, grouped)] = x
        ranks[f"mp_rank_00_{rank:03d}"] = own
    return ranks


def test_logits_are_those_of_megatron_core(tmp_path):
    write(tmp_path / "theirs", {"mp_rank_00": weights()})
    tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    model = load_model(str(tmp_path / "ours")).model
    assert model.facts.settings.balancing == (("aux_loss", 0.01),)
    with torch.no_grad():
        found = model.logits(torch.tensor(recorded()["tokens"]).t())[-4:].transpose(0, 1)
    torch.testing.assert_close(found, torch.tensor(recorded()["logits"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("grouped", [False, True], ids=["SequentialMLP", "TEGroupedMLP"])
def test_experts_of_all_ranks_arrive(grouped, tmp_path):
    write(tmp_path / "whole", {"mp_rank_00": weights()})
    write(tmp_path / "parts", of_two_ranks(weights(), grouped), expert_model_parallel_size=2)
    for name in ("whole", "parts"):
        tool.main(["from-megatron", str(tmp_path / name), str(tmp_path / f"from {name}")])
    assert_same(loaded(tmp_path / "from whole"), loaded(tmp_path / "from parts"))


def test_a_distributed_checkpoint_is_the_same_model(tmp_path):
    """`megatron_experts.tar.xz`: what megatron-core wrote as torch_dist, with the weights drawn here."""
    with tarfile.open(Path(__file__).with_name("megatron_experts.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    write(tmp_path / "classic", {"mp_rank_00": weights()})
    for name in ("classic", "experts_dist"):
        tool.main(["from-megatron", str(tmp_path / name), str(tmp_path / f"from {name}")])
    assert_same(loaded(tmp_path / "from classic"), loaded(tmp_path / "from experts_dist"))


def test_names_of_an_export_are_those_that_megatron_core_asks_for(tmp_path):
    write(tmp_path / "theirs", {"mp_rank_00": weights()})
    tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "out"), "--transformer-impl", "local"])
    path = tmp_path / "out" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    found = {name: x for name, x in content["model"].items() if x is not None}
    for name, x in weights().items():
        rows = min(len(x), len(found[name]))  # of the vocabulary, which is padded
        assert torch.equal(found[name][:rows], x[:rows]), name
    assert set(content["model"]) == {*recorded()["parameters"], *recorded()["others"]}
    args = vars(content["args"])
    assert {name: args[name] for name in ARGS if name.startswith("moe_")} == {
        name: value for name, value in ARGS.items() if name.startswith("moe_")
    }


MIXTURES = {
    "biases": dict(GPT2, num_experts=4, moe_ffn_hidden_size=24, moe_layer_freq="2", make_vocab_size_divisible_by=8),
    "gated": dict(LLAMA, num_experts=4, moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True, **SIGMOID),
}


@pytest.mark.parametrize("words", ["", "--tp 2 --pp 2 --ep 2", "--ep 4 --transformer-impl local --dtype bf16"])
@pytest.mark.parametrize("shape", MIXTURES)
def test_there_and_back_in_any_layout(shape, words, tmp_path):
    model = MIXTURES[shape] | dict(
        moe_router_load_balancing_type=["seq_aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[0.1]
    )
    save(tmp_path / "ours", model)
    tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "theirs"), *words.split()])
    tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "back")])
    before, after = loaded(tmp_path / "ours"), loaded(tmp_path / "back")
    if "bf16" in words:
        exact = ("router.load", "router.scored_load", "router.expert_bias")
        rounded = lambda name, x: x if name.endswith(exact) else x.bfloat16().float()
        before = {name: rounded(name, x) for name, x in before.items()}
    assert_same(before, after)


def test_what_is_not_read_is_named(tmp_path):
    ranks = of_two_ranks(weights(), grouped=False)
    write(
        tmp_path / "etp",
        ranks,
        expert_model_parallel_size=2,
        tensor_model_parallel_size=1,
        expert_tensor_parallel_size=2,
    )
    with pytest.raises(CheckpointError, match="divided over 2 ranks and other layers over 1"):
        tool.main(["from-megatron", str(tmp_path / "etp"), str(tmp_path / "a")])
    write(tmp_path / "part", {"mp_rank_00_000": ranks["mp_rank_00_000"]}, expert_model_parallel_size=2)
    with pytest.raises(CheckpointError, match="missing files: 1 expert parallel ranks, of 2"):
        tool.main(["from-megatron", str(tmp_path / "part"), str(tmp_path / "b")])
    del ranks["mp_rank_00_001"][f"{EXPERTS}local_experts.1.linear_fc2.weight"]
    write(tmp_path / "lacking", ranks, expert_model_parallel_size=2)
    with pytest.raises(
        CheckpointError, match=r"lacks 1 tensors, or parts of them\n  blocks.1.mlp.experts.down.weight: expert 3"
    ):
        tool.main(["from-megatron", str(tmp_path / "lacking"), str(tmp_path / "c")])
    write(tmp_path / "latent", {"mp_rank_00": weights()}, moe_apply_probs_on_input=True)
    with pytest.raises(CheckpointError, match="uses moe_apply_probs_on_input"):
        tool.main(["from-megatron", str(tmp_path / "latent"), str(tmp_path / "d")])
    save(tmp_path / "dense", LLAMA)
    with pytest.raises(SettingsError, match="--target-expert-model-parallel-size 2: the model has no experts"):
        tool.main(["to-megatron", str(tmp_path / "dense"), str(tmp_path / "e"), "--ep", "2"])
    save(tmp_path / "ours", MIXTURES["gated"])
    with pytest.raises(SettingsError, match="4 experts cannot be divided by --target-expert-model-parallel-size 3"):
        tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "e"), "--ep", "3"])
    with pytest.raises(SettingsError, match="num_experts"):
        tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "f"), "--use-legacy-models"])
