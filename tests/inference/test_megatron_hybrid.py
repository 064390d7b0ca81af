# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Megatron-LM's HybridModel (and MambaModel): a module for each character of the pattern, `final_norm`."""

import re

import pytest
import torch

from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import GPT2, LLAMA, TIED, V, assert_same, loaded, megatron_files

pytestmark = pytest.mark.sampled(10)


def hybrid_files(folder, model, tp, pattern, argument="hybrid_layer_pattern"):
    """Files of a HybridModel, cut as the pattern says, from those of a transformer with the same layers: each layer's
    attention is a module, its MLP the next one."""
    weights = megatron_files(folder / "gpt", model, tp, 1, core=True)
    stages, first = pattern.split("|"), 0
    for p, stage in enumerate(stages):
        for t in range(tp):
            content = torch.load(folder / f"gpt/iter_0000300/mp_rank_{t:02d}/model_optim_rng.pt", weights_only=False)
            args, own = content["args"], {}
            setattr(args, argument, pattern)
            args.num_layers = sum(map(len, stages))
            for name, x in content["model"].items():
                if found := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name):
                    n = 2 * int(found[1]) + found[2].startswith(("mlp", "pre_mlp"))
                    if first <= n < first + len(stage):
                        own[f"decoder.layers.{n - first}.{found[2]}"] = x
                elif "final_layernorm" in name and p == len(stages) - 1:
                    own[name.replace("final_layernorm", "final_norm")] = x
                elif ("embedding" in name and p == 0) or ("output_layer" in name and p == len(stages) - 1):
                    own[name] = x
            place = folder / f"theirs/iter_0000300/mp_rank_{t:02d}{f'_{p:03d}' if len(stages) > 1 else ''}"
            place.mkdir(parents=True)
            torch.save(content | dict(model=own), place / "model_optim_rng.pt")
        first += len(stage)
    (folder / "theirs/latest_checkpointed_iteration.txt").write_text("300")
    return weights


def lettered(name):
    number = lambda found: f"blocks.{2 * int(found[1]) + ('mlp' in found[2])}.{found[2]}"
    return re.sub(r"blocks\.(\d+)\.(\w+)", number, name)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cuts", ["*-" * 4, "*|-*-|*-|*-", "|*-*-*-*|-"])
@pytest.mark.parametrize("model", [GPT2, LLAMA | TIED], ids=["gpt", "llama"])
def test_each_module_is_a_layer(model, cuts, tp, tmp_path):
    assert model["num_layers"] == 4
    if "|" in cuts and not model.get("untie_embeddings_and_output_weights"):
        model = dict(model, untie_embeddings_and_output_weights=True)
    weights = hybrid_files(tmp_path, model, tp, cuts)
    tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--vocab-size", str(V)])
    assert_same(loaded(tmp_path / "ours"), {lettered(name): x for name, x in weights.items()})
    with Reader(tmp_path / "ours" / "iter_0000000") as reader:
        saved = reader.state["config"]["model"]
    assert (saved["hybrid_layer_pattern"], saved["num_layers"]) == ("*-" * 4, 8)


def test_the_older_argument(tmp_path):
    weights = hybrid_files(tmp_path, GPT2, 1, "*-" * 4, "hybrid_override_pattern")
    tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--vocab-size", str(V)])
    assert_same(loaded(tmp_path / "ours"), {lettered(name): x for name, x in weights.items()})


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("M-" * 4, "linear_qkv.layer_norm_weight is not known: blocks.0 is mamba"),
        ("*-*-*-D-", "D is sparse latent attention"),
        ("*-*-*-*-/*-", "mtp.0.eh_proj.weight"),
        ("*-*-|*-*-|", "of unknown sizes"),
    ],
)
def test_other_layers_are_named(pattern, said, tmp_path):
    hybrid_files(tmp_path, GPT2, 1, "*-" * 4)
    path = tmp_path / "theirs/iter_0000300/mp_rank_00/model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["args"].hybrid_layer_pattern = pattern
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--vocab-size", str(V)])
