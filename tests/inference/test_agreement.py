# SPDX-License-Identifier: Apache-2.0
"""What a conversion says about its files is measured here again, from the files as they are and the checkpoint's model."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import pretrain_gpt
from megatron.convert.families import prompts_for
from megatron.errors import CheckpointError
from megatron.inference.agreement import LIMITS, Agreement, agreement
from megatron.inference.load import load_model
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import LLAMA, save
from tests.inference.test_families import CASES, COMMON

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.sampled(5)

TOTAL = re.compile(r"differ by at most (\S+) of \S+ from the checkpoint's")
SHARES = re.compile(r"change by rounding to (\S+) is (\S+), the largest by .+ itself (\S+) \(allowed: (\S+)\)")


@torch.no_grad()
def logits_of(folder) -> torch.Tensor:
    """Of a checkpoint of ours, in fp32, on the prompts that conversions compare with."""
    loaded = load_model(str(folder), precision="fp32")
    return loaded.model.logits(prompts_for(loaded.facts)), prompts_for(loaded.facts)


@torch.no_grad()
def logits_of_transformers(folder, prompts) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model(prompts.t()).logits.transpose(0, 1)


def difference(checkpoint, folder) -> float:
    ours, prompts = logits_of(checkpoint)
    return (ours - logits_of_transformers(folder, prompts)).abs().max().item()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A folder with adapters on a base whose weights are stored in bf16."""
    folder = tmp_path_factory.mktemp("adapters")
    line = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --vocab-size 50 --mock-data
        --device cpu --micro-batch-size 4 --eval-iters 0 --precision fp32 --lr 3e-2"""
    pretrain_gpt.main(f"{line} --train-iters 1 --save {folder / 'plain'}".split())
    tool.main(f"reshard {folder / 'plain'} {folder / 'base'} --writers 1 --weights-only --dtype bf16".split())
    more = "--lora-rank 4 --lora-alpha 12 --train-iters 3 --finetune"
    pretrain_gpt.main(f"{line} {more} --load {folder / 'base'} --save {folder / 'run'}".split())
    return folder / "run"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_to_hf_says_how_far_the_file_is_from_the_checkpoint(tmp_path, dtype, capsys):
    save(tmp_path / "ours", LLAMA)
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "hf"), "--dtype", dtype])
    said = capsys.readouterr().out
    assert float(TOTAL.search(said)[1]) == pytest.approx(difference(tmp_path / "ours", tmp_path / "hf"), rel=1e-2)
    to, rounding, left, allowed = SHARES.search(said).groups()
    assert to == dtype and float(rounding) > 100 * float(left) and float(left) <= float(allowed)
    assert "both models agree" not in said


def test_a_file_of_the_stored_numbers_has_none_to_explain(tmp_path, capsys):
    save(tmp_path / "fp32", LLAMA)
    tool.main(f"reshard {tmp_path / 'fp32'} {tmp_path / 'ours'} --writers 1 --weights-only --dtype bf16".split())
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "hf")])
    said = capsys.readouterr().out
    assert "both models agree: logits of transformers" in said and "by rounding" not in said
    assert float(TOTAL.search(said)[1]) < 1e-4


def test_merged_adapters_are_compared_with_the_unmerged(adapters, tmp_path, capsys):
    """The base has bf16, so the sum is rounded to it, even in a file of fp32."""
    tool.main(["to-hf", str(adapters), str(tmp_path / "hf"), "--dtype", "fp32"])
    said = capsys.readouterr().out
    found = difference(adapters, tmp_path / "hf")
    assert found > 1e-4 and float(TOTAL.search(said)[1]) == pytest.approx(found, rel=1e-2)
    assert float(SHARES.search(said)[2]) == pytest.approx(found, rel=1e-2)
    tool.main(["merge-lora", str(adapters), str(tmp_path / "merged")])
    moved = re.search(
        r"keep their format, bfloat16: rounding to it has moved merged ones by at most (\S+)", capsys.readouterr().out
    )
    assert 1e-5 < float(moved[1]) < 1e-2


def test_to_megatron_says_it_too(adapters, tmp_path, capsys):
    save(tmp_path / "ours", LLAMA)
    tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "bf16"), "--dtype", "bf16"])
    said = float(TOTAL.search(capsys.readouterr().out)[1])
    tool.main(f"reshard {tmp_path / 'ours'} {tmp_path / 'rounded'} --writers 1 --weights-only --dtype bf16".split())
    found = (logits_of(tmp_path / "ours")[0] - logits_of(tmp_path / "rounded")[0]).abs().max().item()
    assert said == pytest.approx(found, rel=1e-2)
    tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "fp32")])
    said = capsys.readouterr().out
    assert "tensors equal to the bit\n" in said and "differ" not in said
    tool.main(["to-megatron", str(adapters), str(tmp_path / "merged")])
    assert "the largest change by rounding to " in capsys.readouterr().out


def test_from_hf_says_which_numbers_are_those_of_the_files(tmp_path, capsys):
    """bf16 is exact in fp32; 1 + weight of a Gemma's norm is not if the weight is small."""
    config = transformers.AutoConfig.for_model("gemma", **COMMON | CASES["gemma"])
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    tool.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "exact")])
    said = capsys.readouterr().out
    assert re.search(r"all \d+ tensors have the numbers of the files, in fp32", said) and "both models agree" in said
    files = load_file(tmp_path / "hf" / "model.safetensors")
    files["model.norm.weight"] = torch.full_like(files["model.norm.weight"], 1e-9)
    save_file(files, tmp_path / "hf" / "model.safetensors", dict(format="pt"))
    tool.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "rounded")])
    assert "in fp32; final_norm.weight were rounded to it" in capsys.readouterr().out


@pytest.mark.parametrize("rounding, told", [(0.0, False), (2e-5 * 50, False), (2.1e-5 * 50, True), (1.0, True)])
def test_rounded_weights_show_from_the_order_of_sums_on(rounding, told):
    """More than two parts in 10^5 of the largest value, whatever the difference may be."""
    found = Agreement("it", 0.001, 50.0, 0.01, rounding=rounding, total=0.002, to="bf16")
    assert found.rounded is told and ("change by rounding to bf16 is" in found.sentence) is told
    assert found.allowed == 0.5 and "allowed: 5.00e-01" in found.sentence


@pytest.mark.parametrize("form, dtype", [(form, "bf16" if dtype == "any" else dtype) for form, dtype in LIMITS])
def test_a_client_may_differ_by_its_own_share_of_the_largest_value(form, dtype):
    """The nearest entry counts: of the form and the format of weights, of the form, of its first word."""
    share = LIMITS[(form, dtype) if (form, dtype) in LIMITS else (form, "any")][0]
    ours = torch.tensor([[8.0, -2.0]], dtype=torch.float64)
    for part, fits in ((0.99, True), (1.01, False)):
        theirs = ours + torch.tensor([[0.0, 8.0 * share * part]])
        if fits:
            found = agreement(form, dtype, "it", ours, theirs)
            assert found.share == share and found.difference == pytest.approx(8.0 * share * part)
        else:
            with pytest.raises(CheckpointError):
                agreement(form, dtype, "it", ours, theirs)


@pytest.mark.parametrize("dtype, ties", [("fp32", 0.25), ("bf16", 1.5), ("fp16", 1.5)])
def test_rounding_of_inputs_may_fall_to_either_side(dtype, ties):
    """In fp32 for a quarter of its effect, which here is 0.4; in half precision for half as much again."""
    ours = torch.tensor([[8.0, -2.0]], dtype=torch.float64)
    plain, share = ours + 0.4, LIMITS[("torch-export", dtype)][0]
    most = share * 8.0 + ties * 0.4
    agreement("torch-export", dtype, "it", ours, ours + 0.99 * most, plain=plain)
    with pytest.raises(CheckpointError):
        agreement("torch-export", dtype, "it", ours, ours + 1.01 * most, plain=plain)
