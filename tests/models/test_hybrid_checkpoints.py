# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of attention and MLP in each layer goes on as the layers of a pattern, and back: weights, moments, losses
to the bit, in each layout; and what is not the same model is refused.
"""

import re

import pytest
import torch
from safetensors.torch import load_file

import pretrain_gpt
import pretrain_hybrid
from megatron.checkpoint.choose import choose
from megatron.checkpoint.reader import Reader
from megatron.convert.export.source import Wanted
from megatron.convert.export.write import export
from megatron.convert.huggingface import to_hf
from megatron.errors import Failure
from megatron.inference.generation import generate
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling
from megatron.storage.urls import location
from megatron.tools import prune
from tests.ranks import on_ranks
from tests.training.test_plain_loop import records

LINE = (
    "--hidden-size 24 --num-attention-heads 4 --seq-length 12 --mock-data --vocab-size 100 --micro-batch-size 1 "
    "--global-batch-size 8 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 --lr 1e-2 --lr-decay-style constant "
    "--log-interval 1 --device cpu --num-workers 0 --peak-tflops 1 --clip-grad 1e9"  # a norm is summed in another order
)
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --norm-position sandwich"
EXPERTS = f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 16"
PP = "--pipeline-model-parallel-size 2"
# name -> (ranks, flags of both, layers, pattern, its cuts, more flags of the transformer)
CASES = {
    "one process": (1, "", 2, "*-*-", "*-*-", ""),
    "one process, sandwich": (1, LLAMA, 2, "*-*-", "*-*-", ""),
    "experts": (1, EXPERTS, 2, "*-*E", "*-*E", "--moe-layer-freq [0,1]"),
    "experts in all layers, ep2": (2, f"{EXPERTS} --expert-model-parallel-size 2", 2, "*E*E", "*E*E", ""),
    "bf16": (1, f"{LLAMA} --bf16", 2, "*-*-", "*-*-", ""),
    "recomputed as a transformer alone": (1, LLAMA, 2, "*-*-", "*-*-", "--recompute-granularity full"),
    "tp2 with sequence parallelism": (2, "--tensor-model-parallel-size 2 --sequence-parallel", 2, "*-*-", "*-*-", ""),
    "pp2": (2, PP, 2, "*-*-", "*-|*-", ""),
    "pp2, zb-h1": (2, f"{PP} --pipeline-schedule zb-h1", 2, "*-*-", "*-|*-", ""),
    "pp2, interleaved": (2, PP, 4, "*-*-*-*-", "*-|*-|*-|*-", "--num-layers-per-virtual-pipeline-stage 1"),
    "zero1": (2, "--sharding-stage 1 --overlap-grad-reduce --overlap-param-gather", 2, "*-*-", "*-*-", ""),
    "zero3": (2, f"{LLAMA} --sharding-stage 3", 2, "*-*-", "*-*-", ""),
    "cp2": (2, f"{LLAMA} --context-parallel-size 2", 2, "*-*-", "*-*-", ""),
    "depths of prediction": (1, LLAMA, 2, "*-*-", "*-*-/*-/*-", "--mtp-num-layers 2"),
    "a repeated depth with experts, pp2": (
        2,
        f"{EXPERTS} {PP} --mtp-use-repeated-layer",
        2,
        "*-*E",
        "*-|*E/*E/*E",
        "--mtp-num-layers 2 --moe-layer-freq [0,1]",
    ),
}


def pretrain(rank: int, flags: str) -> None:
    script = pretrain_hybrid if "--hybrid-layer-pattern" in flags else pretrain_gpt
    script.main(f"{LINE} {flags}".split())


def train(world: int, flags: str, folder) -> list[tuple]:
    on_ranks(world, pretrain, f"{flags} --save {folder}")
    return [(step["lm loss"], pytest.approx(step["grad_norm"], rel=1e-6)) for step in records(folder, "step")]


def tensors(folder) -> dict[str, torch.Tensor]:
    """Weights and moments of the newest checkpoint."""
    with Reader(choose(location(str(folder))).paths[0]) as reader:
        return {name: reader.read(name) for name in reader.tensors}


def lettered(name: str) -> str:
    """The name of a transformer layer's tensor in *-*-...: attention in every second layer, an MLP after it."""
    number = lambda found: str(2 * int(found[2]) + ("mlp" in found[3]))
    in_a_layer = r"(blocks|mtp\.\d+\.layers)\.(\d+)\.(\w+)"
    return re.sub(in_a_layer, lambda found: f"{found[1]}.{number(found)}.{found[3]}", name)


def equal(ours: dict, theirs: dict) -> None:
    assert set(ours) == set(theirs)
    for name, values in ours.items():
        assert values.dtype == theirs[name].dtype and torch.equal(values, theirs[name]), name


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES)
def test_a_pattern_of_pairs_is_the_transformer_to_the_bit(case, tmp_path):
    """Two steps of a transformer, then two as a pattern, then two more as a transformer, beside six of the transformer."""
    world, both, layers, letters, cuts, more = CASES[case]
    paired = f"--num-layers {layers} {both} {more}"
    pattern = f"--hybrid-layer-pattern {cuts} {both}"
    start, own, other, back = (tmp_path / name for name in ("start", "own", "other", "back"))
    train(world, f"{paired} --train-iters 2", start)
    steps = train(world, f"{paired} --train-iters 4 --load {start}", own)
    assert steps == train(world, f"{pattern} --train-iters 4 --load {start}", other)
    wanted, found = tensors(own), tensors(other)
    assert any("exp_avg_sq" in name for name in wanted)
    equal({lettered(name): values for name, values in wanted.items()}, found)
    steps = train(world, f"{paired} --train-iters 6 --load {own}", own)[-2:]
    assert steps == train(world, f"{paired} --train-iters 6 --load {other}", back)
    equal(tensors(own), tensors(back))


def test_layers_without_rotation_go_on(tmp_path):
    """The second of two layers, which is the third of four letters."""
    flags = "--position-embedding-type rope"
    train(1, f"--num-layers 2 {flags} --no-rope-freq 2 --train-iters 2", tmp_path / "start")
    line = f"{flags} --train-iters 4 --load {tmp_path}/start"
    steps = train(1, f"--num-layers 2 --no-rope-freq 2 {line}", tmp_path / "own")
    assert steps == train(1, f"--hybrid-layer-pattern *-*- --no-rope-freq [0]*2+[1,0] {line}", tmp_path / "other")
    with pytest.raises(Failure, match="the checkpoint is of another model"):
        pretrain(0, f"--hybrid-layer-pattern *-*- --no-rope-freq 4 {line}")


# ---- what else reads such a checkpoint -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(checkpoint of a transformer, of the same as a pattern, with one more step of each)."""
    folder = tmp_path_factory.mktemp("both")
    flags = f"{LLAMA.replace(' --norm-position sandwich', '')} --untie-embeddings-and-output-weights"
    pretrain(0, f"--num-layers 2 {flags} --train-iters 1 --save {folder}/start")
    for name, layers in (("paired", "--num-layers 2"), ("lettered", "--hybrid-layer-pattern *-*-")):
        pretrain(0, f"{layers} {flags} --train-iters 2 --load {folder}/start --save {folder}/{name}")
    return folder / "paired", folder / "lettered"


def test_it_generates_as_the_transformer(both):
    """With a cache and without; and its logits are equal to the bit."""
    models = [load_model(str(folder)).model for folder in both]
    tokens = torch.randint(100, (9, 2), generator=torch.Generator().manual_seed(1))
    assert torch.equal(*(model.logits(tokens) for model in models))
    greedy = Sampling(tokens_to_generate=6, greedy=True)
    texts = {tuple(generate(one, [[5, 7]], greedy, longest=12, use_cache=use)[0]) for one in models for use in (0, 1)}
    assert len(texts) == 1


def test_exported_bits_are_the_transformers(both, tmp_path):
    for folder in both:
        to_hf(choose(location(str(folder))).paths[0], tmp_path / folder.name, torch.float32, {}, check=False)
    assert (tmp_path / "paired/config.json").read_text() == (tmp_path / "lettered/config.json").read_text()
    equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("paired", "lettered")))
    export(str(both[1]), tmp_path / "hf", Wanted("hf", check=False), given={})
    equal(load_file(tmp_path / "hf/model.safetensors"), load_file(tmp_path / "paired/model.safetensors"))


REFUSED = {
    "another order": ("--hybrid-layer-pattern -*-*", "--hybrid-layer-pattern: None in the checkpoint, -*-* now"),
    "fewer layers": ("--hybrid-layer-pattern *-", "--hybrid-layer-pattern: None in the checkpoint, *- now"),
    "more layers": ("--hybrid-layer-pattern *-*-*-", "--hybrid-layer-pattern: None in the checkpoint, *-*-*- now"),
    "another kind": ("--hybrid-layer-pattern *E*E --num-experts 4", "--num-experts: None in the checkpoint, 4 now"),
    "layers that a window counts": (
        "--hybrid-layer-pattern *-*- --window-size 4,0 --window-attn-skip-freq 3",
        "--hybrid-layer-pattern: None in the checkpoint, *-*- now",
    ),
    "another window": (
        "--hybrid-layer-pattern *-*- --window-size 4,0",
        "--window-size: None in the checkpoint, 4,0 now",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_another_model_is_refused(case, both, tmp_path):
    flags, said = REFUSED[case]
    own = LLAMA.replace(" --norm-position sandwich", "") + " --untie-embeddings-and-output-weights"
    with pytest.raises(Failure, match="the checkpoint is of ") as error:
        pretrain(0, f"{flags} {own} --train-iters 3 --load {both[0]}")
    assert said in str(error.value)


def test_other_letters_do_not_go_on(both):
    own = LLAMA.replace(" --norm-position sandwich", "") + " --untie-embeddings-and-output-weights"
    with pytest.raises(Failure, match=re.escape("--hybrid-layer-pattern: *-*- in the checkpoint, -*-* now")):
        pretrain(0, f"--hybrid-layer-pattern -*-* {own} --train-iters 3 --load {both[1]}")
    pretrain(0, f"--hybrid-layer-pattern *-|*- {own} --train-iters 3 --load {both[1]}")  # cuts are layout


def test_the_order_may_change_with_finetune(both, tmp_path):
    """The i-th attention and the i-th MLP are those of layer i, as in Megatron-LM."""
    own = LLAMA.replace(" --norm-position sandwich", "") + " --untie-embeddings-and-output-weights"
    more = f"--train-iters 1 --lr 1e-30 --finetune --load {both[0]} --save {tmp_path}"
    pretrain(0, f"--hybrid-layer-pattern -*-* {own} {more}")
    wanted, found = tensors(both[0]), tensors(tmp_path)
    for layer in range(2):
        for part, n in (("attention.qkv", 2 * layer + 1), ("mlp.up", 2 * layer), ("mlp_norm", 2 * layer)):
            assert torch.equal(wanted[f"blocks.{layer}.{part}.weight"], found[f"blocks.{n}.{part}.weight"])


@pytest.mark.parametrize("letters", ["-*-*", "**--", "*--"])
def test_other_programs_refuse_other_patterns(letters, tmp_path):
    pretrain(0, f"--hybrid-layer-pattern {letters} --train-iters 1 --save {tmp_path}/run")
    path = choose(location(f"{tmp_path}/run")).paths[0]
    with pytest.raises(Failure, match=re.escape(f"{letters}: Hugging Face knows layers of attention and MLP, in turn")):
        to_hf(path, tmp_path / "out", torch.float32, {}, check=False)
    with pytest.raises(
        Failure, match=re.escape(f"{letters}: --format gguf knows layers of attention and MLP, in turn")
    ):
        export(str(tmp_path / "run"), tmp_path / "out", Wanted("gguf"), given={})
    assert not (tmp_path / "out").exists()


def test_layers_go_with_their_letters(tmp_path):
    pretrain(0, f"--hybrid-layer-pattern -*--** --train-iters 1 --save {tmp_path}/run")
    prune.main(f"--load {tmp_path}/run --save {tmp_path}/small --prune-layers 0 4".split())
    loaded = load_model(f"{tmp_path}/small")
    assert loaded.config.model.hybrid_layer_pattern == "*--*"
    before, after = tensors(tmp_path / "run"), tensors(tmp_path / "small")
    for new, old in enumerate((1, 2, 3, 5)):
        own = {name.replace(f"blocks.{old}.", "") for name in before if name.startswith(f"blocks.{old}.")}
        assert own and all(torch.equal(before[f"blocks.{old}.{name}"], after[f"blocks.{new}.{name}"]) for name in own)


@pytest.mark.parametrize("letters", ["-*--**", "*-*E-E"])
def test_any_pattern_generates(letters, tmp_path):
    """With a cache as without."""
    experts = "--num-experts 4 --moe-ffn-hidden-size 16" if "E" in letters else ""
    pretrain(0, f"--hybrid-layer-pattern {letters} {experts} --train-iters 2 --save {tmp_path}")
    model, greedy = load_model(str(tmp_path)).model, Sampling(tokens_to_generate=6, greedy=True)
    texts = [generate(model, [[5, 7], [1, 2, 3]], greedy, longest=12, use_cache=use) for use in (True, False)]
    assert texts[0] == texts[1]


def test_new_layers_between_those_of_a_transformer(both, tmp_path):
    """Mamba-2 has no counterpart in a transformer, and starts anew with --finetune."""
    own = LLAMA.replace(" --norm-position sandwich", "") + " --untie-embeddings-and-output-weights"
    mamba = "--mamba-num-heads 4 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8"
    line = f"--hybrid-layer-pattern M*-M*- {mamba} {own} --load {both[0]}"
    pretrain(0, f"{line} --train-iters 1 --lr 1e-30 --finetune --save {tmp_path}")
    wanted, found = tensors(both[0]), tensors(tmp_path)
    for layer in range(2):
        for part, n in (("attention.qkv", 3 * layer + 1), ("mlp.up", 3 * layer + 2), ("mlp_norm", 3 * layer + 2)):
            assert torch.equal(wanted[f"blocks.{layer}.{part}.weight"], found[f"blocks.{n}.{part}.weight"])
        assert f"blocks.{3 * layer}.mamba.in_proj.weight" in found
    with pytest.raises(Failure, match="the checkpoint is of another model"):
        pretrain(0, f"{line} --train-iters 3")
