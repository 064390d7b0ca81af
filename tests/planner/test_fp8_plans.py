# SPDX-License-Identifier: Apache-2.0
"""Plans with --fp8-format: bytes of saved inputs and cast weights, against those of real layers; times and MFU, against
arithmetic by hand.
"""

import pytest
import torch

import pretrain_gpt
from megatron.data.loader import MicroBatch
from megatron.errors import SettingsError
from megatron.model.command_line import parse_any
from megatron.model.facts import Facts
from megatron.model.fp8 import tables_of
from megatron.model.fp8_product import attach_fp8
from megatron.model.gpt.module import GPT
from megatron.model.recipe import facts_of
from megatron.mpu.deferred_wgrad import WeightGradStore
from megatron.mpu.layers import linear_products
from megatron.mpu.mesh import Mesh
from megatron.planner import activations, memory
from megatron.planner.cluster import Cluster
from megatron.planner.device import find
from megatron.planner.dry_run import dry_run
from megatron.planner.layout import Job, Layout
from megatron.planner.speed import step as step_time
from megatron.telemetry.peak_flops import joint_peak
from megatron.training.rules import resolve
from tests.planner.test_activations import recomputed, saved_by_autograd

FLAGS = """--num-layers 3 --hidden-size 256 --num-attention-heads 4 --seq-length 48 --micro-batch-size 2 --mock-data
    --vocab-size 100 --hidden-dropout 0 --attention-dropout 0 --attention-backend explicit --lr 1e-3 --train-iters 4
    --precision fp32 --device cpu --fp8-format hybrid"""
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --ffn-hidden-size 512"
EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128"
MLA = f"""{LLAMA} --multi-latent-attention --qk-layernorm --q-lora-rank 128 --kv-lora-rank 128 --qk-head-dim 32
    --qk-pos-emb-head-dim 32 --v-head-dim 32"""


def job_of(flags: str, device: str = "cpu") -> tuple[Job, Facts]:
    config = resolve(parse_any(f"{FLAGS} {flags}".split()), 1)
    facts = facts_of(config, 100)
    return Job.of(config, facts, dp=1, device=device), config


def network(flags: str, modules=()) -> tuple[GPT, Job]:
    job, config = job_of(flags)
    stage = GPT(job.facts, Mesh(), last=False, kernels=config.kernels, recompute=recomputed(modules), device="cpu")
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(0, 0.02)
    attach_fp8([stage], config, tables_of(job.facts))
    return stage, job


def forward(stage) -> torch.Tensor:
    tokens = torch.zeros(48, 2, dtype=torch.long)
    return stage(None, MicroBatch(tokens, tokens, torch.arange(2)))


def saved(stage) -> int:
    """Bytes that autograd saves of a forward pass, without what is kept of weights."""
    with saved_by_autograd(stage) as seen:
        y = forward(stage)
    del y
    cast = {t.untyped_storage().data_ptr() for product in linear_products([stage]) for t in product._kept or ()}
    return sum(one.nbytes() for address, one in seen.items() if address not in cast)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("modules", [(), ("layernorm", "mlp_act"), ("full",)], ids=str)
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--fp8-recipe blockwise",
        "--fp8-recipe mxfp8",
        "--fp8-recipe blockwise --no-fp8-wgrad",
        f"{LLAMA} --fp8-recipe blockwise --first-last-layers-bf16",
        f"{LLAMA} --fp8-layers mlp.*",
        f"{EXPERTS} --fp8-recipe blockwise",
        f"{MLA} --fp8-recipe blockwise",
    ],
)
def test_saved_inputs_and_cast_weights_to_the_byte(flags, modules):
    stage, job = network(flags, modules)
    plain = [layer for layer in stage.modules() if getattr(layer, "product", None) is not None]
    layout = Layout(micro_batch_size=2, recompute=recomputed(modules))
    sums = lambda job: sum(activations.stage_saved_bytes(job, layout, range(3), True, False).values())
    predicted = sums(job) - sums(job.without_fp8)
    found = saved(stage)
    products = [layer.product for layer in plain]
    for layer in plain:
        layer.product = None
    found -= saved(stage)
    # A down product that stays in bf16 reads what the norm computes again, which the prediction does not see.
    assert found == predicted or "multi-latent" in flags and "layernorm" in modules and found < predicted
    assert (found == 0) == ("full" in modules or "no-fp8-wgrad" in flags)
    for layer, product in zip(plain, products, strict=True):
        layer.product = product
    weights = sum(product.operand_bytes for product in linear_products([stage]))
    assert memory.static_memory(job, layout, 0)[0]["weights in fp8"] == weights > 0


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_gradients_that_wait_are_a_byte_a_number(recipe):
    stage, job = network(f"--seq-length 64 --fp8-recipe {recipe}")
    store = WeightGradStore()
    for layer in stage.modules():
        if getattr(layer, "product", None) is not None:
            layer.weight_grad_store = store
    tokens = torch.zeros(64, 2, dtype=torch.long)
    with store.collect() as products:
        stage(None, MicroBatch(tokens, tokens, torch.arange(2))).sum().backward()
    waiting = sum(one.nbytes for _, wgrad in products for one in (*wgrad.gradient, *wgrad.operand()))
    layout = Layout(micro_batch_size=2)
    assert waiting == pytest.approx(activations.deferred(job, layout, range(3)), rel=1e-2)


def seconds(flags: str, name: str, plain: bool = False) -> float:
    job, _ = job_of(f"--precision bf16 --global-batch-size 16 --attention-backend auto {flags}", "cuda")
    job = job.without_fp8 if plain else job
    return step_time(job, Layout(micro_batch_size=1), Cluster(find(name), 1)).seconds


LARGE = f"{LLAMA} --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192"


def test_large_products_gain_and_small_ones_lose():
    for recipe, least, most in (("tensorwise", 1.15, 1.6), ("blockwise", 1.1, 1.55)):
        gain = seconds(LARGE, "H100-80GB", plain=True) / seconds(f"{LARGE} --fp8-recipe {recipe}", "H100-80GB")
        assert least < gain < most
    no_wgrad = seconds(f"{LARGE} --no-fp8-wgrad", "H100-80GB")
    assert seconds(LARGE, "H100-80GB") < no_wgrad < seconds(LARGE, "H100-80GB", plain=True)
    small = f"{LLAMA} --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12 --seq-length 1024"
    assert seconds(small, "H100-80GB") > seconds(small, "H100-80GB", plain=True)
    for recipe, name in (("tensorwise", "A100-80GB"), ("mxfp8", "H100-80GB"), ("blockwise", "B200-180GB")):
        # Plain torch, in fp32
        assert seconds(f"{LARGE} --fp8-recipe {recipe}", name) > 2 * seconds(LARGE, name, plain=True)


def test_experts_gain_where_products_of_groups_are():
    """Two of three products, on H100 and B200; elsewhere they are those of bf16, and casts are additional."""
    mixture = f"{LARGE} --num-experts 8 --moe-router-topk 2 --fp8-layers mlp.experts.*"
    for name in ("H100-80GB", "B200-180GB"):
        assert 1.05 < seconds(mixture, name, plain=True) / seconds(mixture, name) < 1.35
    for name in ("L40S-48GB", "A100-80GB"):
        assert 1 < seconds(mixture, name) / seconds(mixture, name, plain=True) < 1.1
    job, _ = job_of(f"{mixture} --precision bf16 --moe-ffn-hidden-size 14336", "cuda")
    h, f, s, layers = 4096, 14336, 8192, 3
    experts, others = layers * 2 * 2 * 3 * h * f, layers * 2 * (3 * h * h + h * h + 8 * h)
    forward = experts + others + layers * 4 * s * h + 2 * h * 100
    assert job.facts.fp8_share("tensorwise", True) == pytest.approx(2 / 3 * experts / forward)


def test_mfu_is_of_the_peaks_of_both_formats():
    """By hand: a third of layers' products in fp8 is left to bf16 without those for weights."""
    job, _ = job_of(f"{LARGE} --precision bf16", "cuda")
    h, f, s, layers, vocabulary = 4096, 14336, 8192, 3, 100
    products = layers * 2 * (h * 3 * h + h * h + 3 * h * f)
    forward = products + layers * 4 * s * h + 2 * h * vocabulary
    assert job.facts.fp8_share("tensorwise", True) == pytest.approx(products / forward)
    assert job.facts.fp8_share("tensorwise", False) == pytest.approx(2 / 3 * products / forward)
    assert joint_peak(989.4e12, 1978.9e12, 0.8) == pytest.approx(1 / (0.8 / 1978.9e12 + 0.2 / 989.4e12))
    assert joint_peak(None, 1.0, 0.5) is None and joint_peak(2.0, None, 0.5) == 2.0


def test_a_plan_says_what_fp8_changes_and_which_layers_lose(capsys):
    """Of a small model all but the widest; of a large one none."""
    small = (
        f"{FLAGS} {LLAMA} --precision bf16 --device-name H100-80GB --dry-run --hidden-size 1024 --ffn-hidden-size 4096"
    )
    parsed = lambda flags: dry_run(parse_any(flags.split()))
    parsed(small)
    out = " ".join(capsys.readouterr().out.split())
    factor = float(out.partition("--fp8-format: a step takes ")[2].split()[0])
    assert (
        factor > 1 and "slower with it: attention.qkv, attention.output" in out and "--fp8-skip attention.qkv," in out
    )
    parsed(f"{FLAGS} {LARGE} --precision bf16 --device-name H100-80GB --dry-run")
    out = " ".join(capsys.readouterr().out.split())
    assert 0.6 < float(out.partition("--fp8-format: a step takes ")[2].split()[0]) < 0.9 and "slower with it" not in out


LLAMA_3_8B = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
    --disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples
    1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
    --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
    --exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid
    --fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1
    --context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
    --data-cache-path cache --tiktoken-pattern v2 --split 99,1,0 --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000
    --log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
    --distributed-timeout-minutes 60 --save x --load x --tensorboard-dir t --dry-run --world-size 8
    --device-name H100-80GB"""


def test_megatron_lms_script_of_llama_3_8b_in_fp8_is_planned(capsys):
    """The arguments of its examples/llama/train_llama3_8b_h100_fp8.sh, unchanged. It fits because weights are fp8 alone."""
    pretrain_gpt.main(LLAMA_3_8B.split())
    out = " ".join(capsys.readouterr().out.split())
    assert "dry run: no problems found" in out and "GPT of 8.0 B parameters" in out
    assert "128 of 128 linear layers multiply in fp8 (tensorwise)" in out
    in_layers = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)  # a byte each; two of others
    others = 2 * 128_257 * 4096 + 65 * 4096  # and some rows of padding
    weights = float(out.partition("memory of pipeline rank 0 weights ")[2].split()[0])
    assert weights == pytest.approx((in_layers + 2 * others) / 1e9, rel=2e-3)
    with pytest.raises(SettingsError, match="out of memory by 1"):
        pretrain_gpt.main(f"{LLAMA_3_8B} --no-fp8-param-gather".split())
