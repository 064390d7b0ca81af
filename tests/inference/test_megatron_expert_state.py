# SPDX-License-Identifier: Apache-2.0
"""Optimizer state of experts in Megatron-LM's checkpoints, against files of Megatron-Core itself.

`megatron_expert_state.tar.xz` holds checkpoints of tiny mixtures that megatron-core 0.16.1 trained for three steps on two
ranks and saved on CPUs, by its own optimizers and writers. With ep 2, experts have an optimizer of their own. The forms in
a folder are of the same training, so they have to be the same state.
"""

import json
import tarfile
from pathlib import Path

import pytest
import torch

from megatron.inference.load import load_model
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import assert_same, loaded

FORMS = {
    "ep2": ("whole", "numbered", "whole_chained"),
    "ep2_distributed": ("fully_reshardable", "buffers", "dp_reshardable"),
    "ep1": ("fully_reshardable", "buffers", "dp_reshardable"),
    "gpt_oss": ("whole", "numbered"),  # in fp32: a state without main weights
}
EXPERTS = "blocks.1.mlp.experts."


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    with tarfile.open(Path(__file__).with_name("megatron_expert_state.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def convert(source: Path, out: Path, *words: str) -> dict[str, torch.Tensor]:
    tool.main(["from-megatron", str(source), str(out), *words])
    return loaded(out)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("run, form", [(run, form) for run, forms in FORMS.items() for form in forms[1:]])
def test_each_form_is_the_same_state_to_the_bit(theirs, tmp_path, run, form):
    state = convert(theirs / run / form, tmp_path / "ours")
    assert_same(state, convert(theirs / run / FORMS[run][0], tmp_path / "whole"))
    weights = convert(theirs / run / form, tmp_path / "weights", "--no-load-optim")
    buffers = {name for name in weights if name.endswith(("router.load", "router.expert_bias"))}
    assert len(buffers) == 2 and weights["blocks.1.mlp.router.expert_bias"].any()
    moments = {
        f"optimizer.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in weights if name not in buffers
    }
    assert set(state) == {*weights, *moments} and all(state[name].any() for name in moments)
    for name, values in weights.items():
        rounded = state[name] if name in buffers or run == "gpt_oss" else state[name].bfloat16().float()
        assert torch.equal(rounded, values), name


@pytest.mark.sampled(10)
def test_each_expert_has_its_own_moments(theirs, tmp_path):
    """Read from their file by number: an optimizer's main weight says which expert of which matrix it is."""
    ours = convert(theirs / "ep2" / "whole", tmp_path / "ours")
    found = []
    for rank in (0, 1):
        file = theirs / "ep2" / "numbered" / "iter_0000003" / f"mp_rank_00_{rank:03d}" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)["optimizer"][1]  # of experts
        inner = state["optimizer"]
        for group, mains in zip(inner["param_groups"], state["fp32_from_fp16_params"], strict=True):
            for number, main in zip(group["params"], mains, strict=True):
                for name in (f"{EXPERTS}{part}" for part in ("up.weight", "up.bias", "down.weight", "down.bias")):
                    same = [e for e in range(4) if ours[name][e].numel() == main.numel()]
                    same = [e for e in same if torch.equal(ours[name][e].flatten(), main.detach().flatten())]
                    if same:
                        [expert] = same
                        assert expert // 2 == rank
                        for kind in ("exp_avg", "exp_avg_sq"):
                            want = inner["state"][number][kind].flatten()
                            assert torch.equal(ours[f"optimizer.{kind}.{name}"][expert].flatten(), want)
                        found.append((name, expert))
    assert len(found) == len(set(found)) == 4 * 4


@pytest.mark.sampled(5)
def test_gpt_oss_is_megatron_cores(theirs, tmp_path):
    """Its logits with sinks, clamped gates, an offset and a router's bias; and what is exported is the same again."""
    before = convert(theirs / "gpt_oss" / "numbered", tmp_path / "ours")
    recorded, model = (
        json.loads((theirs / "gpt_oss" / "logits.json").read_text()),
        load_model(str(tmp_path / "ours")).model,
    )
    m = model.facts.settings
    assert (m.softmax_type, m.sigmoid_gate) == ("learnable", (1.702, 0.5, 1.0)) and before[
        "blocks.1.mlp.router.bias"
    ].any()
    with torch.no_grad():
        found = model.logits(torch.tensor(recorded["tokens"]).t()).transpose(0, 1)
    torch.testing.assert_close(found, torch.tensor(recorded["logits"]), rtol=1e-5, atol=1e-6)
    tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "out"), "--ep", "2", "--tp", "2"])
    after = convert(tmp_path / "out", tmp_path / "back")
    assert_same(after, {name: values for name, values in before.items() if not name.startswith("optimizer.")})
