# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters to and from PEFT: its own class gives the same logits, and what cannot be read is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.convert.peft import refuse_others
from megatron.errors import CheckpointError, Failure, SettingsError, UsageError
from megatron.inference.load import load_model
from megatron.tools import checkpoint as tool
from megatron.tools import generate, serve
from tests.training.test_plain_loop import records

pytestmark = pytest.mark.sampled(10)

RUN = """--mock-data --device cpu --micro-batch-size 4 --eval-iters 0 --precision fp32 --lr 3e-2
    --lr-decay-style constant --log-interval 1"""
SIZES = f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --vocab-size 50 {RUN}"
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights"""
OURS = {
    "gpt2": ("", "--lora-rank 4 --lora-alpha 12"),
    "gpt2, one layer": ("", "--lora-rank 3 --use-rslora --lora-target blocks.1.mlp.*,blocks.0.attention.output"),
    "llama": (LLAMA, "--lora-rank 4 --lora-alpha 12 --lora-split-fused --use-rslora"),
    "llama, fused": (LLAMA, "--lora-rank 4 --lora-alpha 12 --lora-target attention.*,mlp.up"),
    "gpt2, dora": ("", "--lora-rank 4 --lora-alpha 12 --use-dora"),
    "llama, dora": (LLAMA, "--lora-rank 4 --lora-alpha 12 --use-dora --lora-split-fused"),
}
TOKENS = torch.randint(50, (2, 24), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def peft():
    return pytest.importorskip("peft")


def ours(folder) -> torch.Tensor:
    return load_model(str(folder), precision="fp32").model.logits(TOKENS.t()).transpose(0, 1)


@torch.no_grad()
def theirs(peft, base, adapters) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    return (peft.PeftModel.from_pretrained(model, adapters).eval() if adapters else model)(input_ids=TOKENS).logits


@pytest.mark.parametrize("name", OURS)
def test_our_adapters_in_peft(name, peft, tmp_path):
    shape, words = OURS[name]
    base, run = tmp_path / "base", tmp_path / "run"
    pretrain_gpt.main(f"{SIZES} {shape} --train-iters 2 --save {base}".split())
    pretrain_gpt.main(f"{SIZES} {shape} {words} --train-iters 4 --finetune --load {base} --save {run}".split())
    for source, name in ((base, "hf"), (run, "all")):
        tool.main(["to-hf", str(source), str(tmp_path / name), "--dtype", "fp32"])
    tool.main(["to-peft", str(run), str(tmp_path / "peft")])
    wanted = ours(run)
    assert (theirs(peft, tmp_path / "hf", None) - wanted).abs().max() > 0.01  # adapters count
    assert (theirs(peft, tmp_path / "hf", tmp_path / "peft") - wanted).abs().max() <= 1e-5
    assert (theirs(peft, tmp_path / "all", None) - wanted).abs().max() <= 1e-5
    # And back: each bit, and so the same logits.
    tool.main(["from-peft", str(tmp_path / "peft"), str(tmp_path / "back"), "--base", str(base)])
    with Reader(run / "iter_0000004") as one, Reader(tmp_path / "back" / "iter_0000000") as other:
        names = {name for name in one.tensors if not name.startswith("optimizer.")}
        exact = {n for n in names if not n.endswith("magnitude")}  # norms have been added to these
        assert names == set(other.tensors) and all(torch.equal(one.read(n), other.read(n)) for n in exact)
    assert (ours(tmp_path / "back") - wanted).abs().max() <= 1e-5 * (names != exact)


THEIRS = {
    "gpt2": ("gpt2", dict(target_modules=["c_attn"], r=4, lora_alpha=9)),
    "gpt2, all": ("gpt2", dict(target_modules="all-linear", r=3, lora_alpha=9, use_rslora=True)),
    "llama, q and v": ("llama", dict(target_modules=["q_proj", "v_proj"], r=4, lora_alpha=9, lora_dropout=0.1)),
    "llama, a layer": ("llama", dict(target_modules=["up_proj", "o_proj"], r=2, lora_alpha=9, layers_to_transform=[1])),
    "llama, two of three layers": (
        "three llamas",
        dict(target_modules=["up_proj", "o_proj"], r=2, lora_alpha=9, layers_to_transform=[0, 2]),
    ),
    "gpt2, dora": ("gpt2", dict(target_modules="all-linear", r=3, lora_alpha=9, use_dora=True)),
    "llama, dora": ("llama", dict(target_modules=["q_proj", "v_proj", "up_proj"], r=4, lora_alpha=9, use_dora=True)),
    "llama, all": ("llama", dict(target_modules="all-linear", r=4, lora_alpha=9, init_lora_weights="gaussian")),
}


def their_model(kind: str):
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=24, n_embd=32, n_layer=2, n_head=4))
    layers = 3 if kind == "three llamas" else 2
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=24, **sizes))


@pytest.mark.parametrize("name", THEIRS)
def test_their_adapters_here(name, peft, tmp_path):
    kind, how = THEIRS[name]
    model = their_model(kind)
    model.save_pretrained(tmp_path / "hf")
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **how)).eval()
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_B" in parameter_name:
            parameter.data.normal_(0, 0.1)
        if "magnitude" in parameter_name:
            parameter.data.mul_(1.1)
    adapted.save_pretrained(tmp_path / "peft")
    tool.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "base")])
    tool.main(["from-peft", str(tmp_path / "peft"), str(tmp_path / "own"), "--base", str(tmp_path / "base")])
    with torch.no_grad():
        wanted = adapted(input_ids=TOKENS).logits
    assert (ours(tmp_path / "own") - wanted).abs().max() <= 1e-5
    assert (ours(tmp_path / "base") - wanted).abs().max() > 0.01
    tool.main(["merge-lora", str(tmp_path / "own"), str(tmp_path / "merged")])
    assert (ours(tmp_path / "merged") - wanted).abs().max() <= 1e-5
    tool.main(["to-peft", str(tmp_path / "own"), str(tmp_path / "back"), "--base-model", "some/model"])
    before, after = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("peft", "back"))
    assert before.keys() == after.keys()
    for one, x in before.items():  # of norms those of the weight have been subtracted and added
        torch.testing.assert_close(after[one], x, rtol=1e-6 if "magnitude" in one else 0, atol=0)
    # They are trained on here; the pair of keys that they do not have stays 0.
    line = f"{RUN} --train-iters 2 --finetune --load {tmp_path / 'own'} --save {tmp_path / 'more'}"
    pretrain_gpt.main(line.split())
    assert len(records(tmp_path / "more", "step")) == 2
    tool.main(["to-peft", str(tmp_path / "more"), str(tmp_path / "new")])
    names = load_file(tmp_path / "new" / "adapter_model.safetensors").keys()
    assert names == before.keys() or names > before.keys() and "dora" in name  # with the norms of keys and gates


def test_another_base_than_that_of_the_adapters_is_named(peft, tmp_path, capsys):
    """By the weights of a folder; by the name on the hub; and the model itself after more training."""
    right, other = their_model("llama"), their_model("llama")
    with torch.no_grad():
        other.model.layers[1].self_attn.o_proj.weight[0, 0] += 1
    for name, model in (("right", right), ("other", other)):
        model.save_pretrained(tmp_path / name)
        tool.main(["from-hf", str(tmp_path / name), str(tmp_path / f"our_{name}")])
    more = f"{RUN} --train-iters 1 --finetune --load {tmp_path / 'our_right'} --save {tmp_path / 'our_more'}"
    pretrain_gpt.main(more.split())
    peft.get_peft_model(right, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["o_proj"])).save_pretrained(
        tmp_path / "peft"
    )
    file = tmp_path / "peft" / "adapter_config.json"
    folder, config = str(tmp_path / "right"), json.loads(file.read_text())

    def said(named, base: str, *more: str) -> list[str]:
        file.write_text(json.dumps(config | dict(base_model_name_or_path=named)))
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        capsys.readouterr()
        tool.main(["from-peft", str(tmp_path / "peft"), str(out), "--base", str(tmp_path / base), *more])
        tool.main(["inspect", str(out)])
        said = capsys.readouterr().out
        assert (f"origin: PEFT (of the base {named}) in " if named else "origin: PEFT in ") in said
        return [line.strip() for line in said.splitlines() if "names " in line or "not compared" in line]

    assert said(folder, "our_right") == said("org/right", "our_right") == []
    for base, layer in (("our_other", 1), ("our_more", 0)):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(CheckpointError, match="--unchecked") as refused:
            said(folder, base)
        assert f"names {folder}, whose model.layers.{layer}.self_attn.o_proj.weight differs" in str(refused.value)
        assert refused.value.code == 5 and sorted(tmp_path.iterdir()) == before
        [line] = said(folder, base, "--unchecked")
        assert f"was not compared with {folder} (--unchecked)" in line
    for named, base, words in (
        ("org/right", "our_other", "is of another model (other)"),
        ("org/right", "our_more", "was trained further"),
        (None, "our_right", "names no base"),
    ):
        [line] = said(named, base)
        assert words in line, (named, base, line)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "change, said",
    [
        (dict(modules_to_save=["lm_head"]), 'modules_to_save: \\["lm_head"\\]'),
        (dict(bias="lora_only"), 'bias: "lora_only"'),
        (dict(rank_pattern={"q_proj": 4}), "rank_pattern"),
        (dict(alpha_pattern={"q_proj": 4}), "alpha_pattern"),
        (dict(init_lora_weights="pissa"), 'init_lora_weights: "pissa"'),
        (dict(lora_bias=True), "lora_bias"),
        (dict(layer_replication=[[0, 2]]), "layer_replication"),
        (dict(a_flag_of_tomorrow=1), "a_flag_of_tomorrow"),
        (dict(peft_type="LOHA"), "is of LOHA; LORA is what can be read"),
        (dict(r="many"), "has no valid r"),
    ],
)
def test_what_is_no_lora_of_ours_is_refused_by_name(change, said):
    plain = dict(
        peft_type="LORA", r=4, lora_alpha=8, bias="none", use_dora=False, rank_pattern={}, target_modules=["c_attn"]
    )
    refuse_others(plain)
    with pytest.raises(CheckpointError, match=said):
        refuse_others(plain | change)


def test_wrong_files_are_refused(tmp_path):
    base, source = tmp_path / "base", tmp_path / "peft"
    pretrain_gpt.main(f"{SIZES} --train-iters 1 --save {base}".split())
    source.mkdir()
    (source / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA", r=2, lora_alpha=4)))
    own = "base_model.model.transformer.h.0.attn.c_attn"
    pair = {f"{own}.lora_A.weight": torch.ones(2, 32), f"{own}.lora_B.weight": torch.ones(96, 2)}

    def read(tensors, *more: str):
        save_file({name: x.contiguous() for name, x in tensors.items()}, source / "adapter_model.safetensors")
        tool.main(["from-peft", str(source), str(tmp_path / "out"), "--base", str(base), *more])

    for tensors, said in (
        ({**pair, "base_model.model.lm_head.weight": torch.ones(50, 32)}, "lm_head.weight .* is no half of a pair"),
        ({**pair, f"{own}.lora_magnitude_vector": torch.ones(96)}, "has norms of DoRA .*, and .* has no use_dora"),
        ({name: x for name, x in pair.items() if "lora_A" in name}, "has half of a pair: transformer.h.0.attn.c_attn"),
        ({name.replace("h.0", "h.7"): x for name, x in pair.items()}, r"that this model does not have: .*h\.7\.attn"),
        ({name.replace("attn.c_attn", "wte"): x for name, x in pair.items()}, "not have: transformer.h.0.wte"),
        ({name: x[:, :1] if "B" in name else x for name, x in pair.items()}, "is no half of a pair of rank 2"),
        ({name: x / 0 * 0 for name, x in pair.items()}, "lora_A.weight has numbers that no adapter has: NaN"),
        ({name: x.int() for name, x in pair.items()}, "lora_A.weight has numbers that no adapter has"),
        ({name: x[:90] for name, x in pair.items()}, r"is of a weight \[90, 32\], the base has \[96, 32\]"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read(tensors)
        assert not (tmp_path / "out").exists()
    (source / "adapter_config.json").rename(source / "config.json")
    with pytest.raises(CheckpointError, match="holds a whole model, and no adapters.*\n  -> from-hf imports it"):
        read(pair)
    (source / "config.json").rename(source / "adapter_config.json")
    read(pair)
    with pytest.raises(SettingsError, match="is there already"):
        read(pair)
    with pytest.raises(UsageError, match="needs the model of the adapters"):
        tool.main(["from-peft", str(source), str(tmp_path / "none")])
    with pytest.raises(SettingsError, match="is no plain model"):
        tool.main(["from-peft", str(source), str(tmp_path / "two"), "--base", str(tmp_path / "out")])
    with pytest.raises(SettingsError, match="has no LoRA adapters"):
        tool.main(["to-peft", str(base), str(tmp_path / "three")])


def test_other_trained_weights_are_not_lost(tmp_path):
    pretrain_gpt.main(f"{SIZES} --train-iters 1 --save {tmp_path / 'base'}".split())
    words = f"--lora-rank 2 --train-only final_norm.* --finetune --load {tmp_path / 'base'} --save {tmp_path / 'run'}"
    pretrain_gpt.main(f"{SIZES} --train-iters 1 {words}".split())
    with pytest.raises(SettingsError, match="has trained other weights beside its adapters: final_norm.bias"):
        tool.main(["to-peft", str(tmp_path / "run"), str(tmp_path / "out")])


@pytest.mark.parametrize("command, words", [(generate, "--load"), (generate, "--load-exported"), (serve, "--load")])
def test_adapters_in_the_place_of_a_whole_model_are_named(tmp_path, command, words, capsys):
    """With the command that puts them on their base. `from-hf` says so, too: tests/inference/test_hf_folders.py."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    more = ["--prompt", "a"] if command is generate else []
    with pytest.raises(Failure) as refused:
        command.main([words, str(tmp_path), "--device", "cpu", *more])
    said = f"{tmp_path} holds adapters of PEFT; put them on the model they belong to"
    assert said in str(refused.value) and f"from-peft {tmp_path} OUT --base" in str(refused.value)
    assert refused.value.code == 5
