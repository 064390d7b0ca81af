# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face, with random weights: logits over ranks, gradients and greedy texts are transformers' own, and
tensors come back as they were.
"""

import copy
import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F

from megatron.convert.families import imported
from megatron.convert.hf_files import TensorFiles
from megatron.data.loader import MicroBatch
from megatron.inference.generation import generate
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling
from megatron.mpu.mesh import Mesh
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import loaded

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.sampled(5)
V, S = 96, 24
COMMON = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
LINEAR = dict(rope_type="linear", factor=4.0)
SLIDING = ["sliding_attention"]
GEMMA_3_ROPE = dict(
    full_attention=dict(rope_theta=5e4, **LINEAR), sliding_attention=dict(rope_type="default", rope_theta=300.0)
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
DOTS = dict(n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=2.5)
DOTS |= dict(n_group=4, topk_group=2, head_dim=16, sliding_window=None)
GPT_OSS_ROPE = dict(rope_type="yarn", rope_theta=150.0, factor=4.0, truncate=False, original_max_position_embeddings=16)
GPT_OSS_ROPE |= dict(beta_fast=32.0, beta_slow=1.0, attention_factor=0.1 * math.log(4) + 1)
GPT_OSS = dict(swiglu_limit=0.5, sliding_window=6, rope_parameters=GPT_OSS_ROPE, head_dim=16)
GPT_OSS |= dict(intermediate_size=32)  # square matrices: a wrong transpose has the same shape
QWEN3_NEXT = dict(
    EXPERTS, head_dim=16, shared_expert_intermediate_size=40, linear_num_key_heads=2, linear_conv_kernel_dim=3
)
QWEN3_NEXT |= dict(linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, norm_topk_prob=True)
QWEN3_NEXT |= dict(layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"])
CASES = {  # family -> settings of its configuration class
    "llama": dict(attention_bias=True, mlp_bias=True, head_dim=16),
    "qwen2": dict(tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)),
    "qwen2, windows": dict(use_sliding_window=True, sliding_window=5, layer_types=[*SLIDING, "full_attention"] * 2),
    "qwen3": dict(head_dim=16, rms_norm_eps=1e-5),
    "phi3": dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5), sliding_window=7
    ),
    "olmo2": dict(rope_parameters=dict(rope_type="default", rope_theta=5e5)),
    "gemma": dict(head_dim=16, num_key_value_heads=1),
    "gemma2": dict(head_dim=16, sliding_window=6, query_pre_attn_scalar=48, attn_logit_softcapping=3.0),
    "gemma3_text": dict(head_dim=16, sliding_window=6, sliding_window_pattern=3, rope_parameters=GEMMA_3_ROPE),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=9, head_dim=8),
    "olmoe": dict(num_experts=8, num_experts_per_tok=3),
    "qwen2_moe": dict(EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[0, 2]),
    "qwen3_moe": dict(EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_next": QWEN3_NEXT,
    "gpt_oss": dict(GPT_OSS, num_local_experts=8, num_experts_per_tok=4),
    "dots1": dict(DOTS, num_experts_per_tok=4, n_routed_experts=8, moe_intermediate_size=24),
}
_LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=10,
    n_shared_experts=2,
    n_routed_experts=8,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
)
_TEMPERATURE = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
_TEMPERATURE |= dict(beta_fast=4.0, beta_slow=1.0, mscale=0.6, mscale_all_dim=0.8, truncate=True)
CASES |= {
    # Groups by their best expert, of which there are others than topk / topk_group.
    "deepseek_v2": dict(
        _LATENT,
        num_experts_per_tok=6,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=3,
        routed_scaling_factor=4.0,
        rope_parameters=_TEMPERATURE,
    ),
    "deepseek_v2, lite": dict(_LATENT, q_lora_rank=None, num_experts_per_tok=3, n_group=1, topk_group=1),
    # Groups by their two best experts.
    "deepseek_v3": dict(_LATENT, num_experts_per_tok=3, n_group=4, topk_group=3, rope_parameters=_TEMPERATURE),
    "deepseek_v3, one group": dict(_LATENT, num_experts_per_tok=4, n_group=1, topk_group=1, first_k_dense_replace=0),
    "deepseek_v3, dense": dict(_LATENT, first_k_dense_replace=4),
}
MIXTURES = (
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "dots1",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v2, lite",
)
MIXTURES += ("deepseek_v3", "deepseek_v3, one group")
STATES = ("qwen3_next",)
CENTRED = ("gemma", "gemma2", "gemma3_text", "qwen3_next")  # norms multiply by 1 + weight
RARE = ("olmoe", "qwen2_moe", "qwen3_moe")  # whose parts others have, too
MODELS = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full) if case in RARE else case for case in CASES]
)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """`family(case)`: (transformers' model, its folder, the folder of our import)."""
    made = {}

    def make(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("family")
            torch.manual_seed(0)  # for decay rates, which their classes draw
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = transformers.AutoConfig.for_model(case.split(",")[0], **COMMON | CASES[case])
                theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            generator = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for parameter in theirs.parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    # Norms of states' small outputs magnify rounding: their reads are kept away from 0.
                    scale = 0.05 if case in STATES else 0.15
                    parameter.copy_(scale * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
                for name, buffer in theirs.named_buffers():
                    if "e_score_correction_bias" in name:
                        buffer.copy_(-torch.rand(buffer.shape, generator=generator))
            theirs.save_pretrained(folder / "theirs")
            tool.main(["from-hf", str(folder / "theirs"), str(folder / "ours")])
            made[case] = theirs, folder / "theirs", folder / "ours"
        return made[case]

    return make


def tokens(b: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randint(V, (S, b), generator=torch.Generator().manual_seed(seed))


@pytest.mark.sampled(10)
@MODELS
def test_logits_over_ranks(case, family, run_ranks):
    theirs, _, ours = family(case)
    with torch.no_grad():
        want = theirs(tokens().t()).logits.transpose(0, 1)
    assert want.abs().max() > 0.3
    ways = [(1, 1), (2, 2)] if case != "gemma" else [(1, 2)]  # it has one group of queries
    for tp, pp in ways:
        sizes = dict(tp=tp, pp=pp, **(dict(ep=tp, etp=1) if case in MIXTURES else {}))
        run = lambda rank, sizes=sizes: load_model(str(ours), mesh=Mesh(rank, **sizes)).model.logits(tokens())
        with torch.no_grad():
            *_, found = run_ranks(tp * pp, run) if tp * pp > 1 else [run(0)]
        assert (found - want).abs().max() <= 1e-5


def gradients_by_name(theirs, folder) -> TensorFiles:
    """The gradients of their model by the names of its files, of which each expert has its own."""
    copied = copy.deepcopy(theirs)
    with torch.no_grad():
        for own, parameter in zip(copied.parameters(), theirs.parameters(), strict=True):
            own.copy_(parameter.grad)
    copied.save_pretrained(folder)
    return TensorFiles(folder)


@MODELS
def test_gradients(case, family, tmp_path):
    theirs, folder, ours = family(case)
    model = load_model(str(ours)).model.train()
    inputs, labels = tokens(), tokens(seed=2)
    theirs.zero_grad()
    logits = theirs(inputs.t()).logits
    F.cross_entropy(logits.reshape(-1, V), labels.t().reshape(-1)).backward()
    for parameter in model.parameters():
        parameter.grad = None
    sums = model(None, MicroBatch(inputs, labels, torch.arange(3)))[1]
    (sums["lm loss"] / sums["tokens"]).backward()
    found, wanted = dict(model.named_parameters()), gradients_by_name(theirs, tmp_path)
    matches = imported(json.loads((folder / "config.json").read_text())).matches
    buffers = {name for name, _ in model.named_buffers() if ".router." in name}
    assert {match.ours for match in matches} == {*found, *buffers}
    matches = [match for match in matches if match.ours not in buffers]
    for match in matches:
        parts = [wanted.get(name) for name in match.theirs]
        want = match.to_ours(parts) - match.to_ours([torch.zeros_like(part) for part in parts])
        got = found[match.ours].grad[: len(want)]
        torch.testing.assert_close(
            got, want, rtol=1e-3, atol=2e-6, msg=lambda text, match=match: f"{match.ours}: {text}"
        )


@pytest.mark.sampled(10)
@MODELS
def test_greedy_texts(case, family, run_ranks):
    """With a cache, on prompts that are longer than the windows; of two families over ranks, too."""
    theirs, _, ours = family(case)
    prompts = tokens(2, seed=3)[:9].t()

    def continued(mesh=None):
        model = load_model(str(ours), mesh=mesh).model
        more = {} if mesh is None else dict(pp=mesh.pp)
        return generate(model, prompts.tolist(), Sampling(20, greedy=True), longest=64, **more)

    want = theirs.generate(prompts, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(prompts))
    texts = continued()
    if case in ("olmo2", "gemma3_text", "gpt_oss"):
        sizes = dict(tp=2, pp=2, **(dict(ep=2, etp=1) if case in MIXTURES else {}))
        assert run_ranks(4, lambda rank: continued(Mesh(rank, **sizes))) == [texts] * 4
    assert texts == want[:, 9:].tolist() and len({tuple(text) for text in texts}) == 2


@pytest.mark.sampled(10)
@MODELS
def test_there_and_back(case, family, tmp_path, capsys):
    """The same family with the same settings, and the same tensors. Norms of Gemma lose the last bit of 1 + weight."""
    theirs, folder, ours = family(case)
    tool.main(["to-hf", str(ours), str(tmp_path / "out"), "--dtype", "fp32"])
    assert "both models agree" in capsys.readouterr().out
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, after = theirs.state_dict(), again.state_dict()
    assert set(before) == set(after) and type(again) is type(theirs)
    for name, tensor in before.items():
        lost = 2**-23 if case in CENTRED and "norm" in name else 0.0
        assert (tensor - after[name]).abs().max() <= lost, name
    skipped = {"transformers_version", "dtype", "max_window_layers", "original_max_position_embeddings"}
    old, new = (
        {name: value for name, value in json.loads((place / "config.json").read_text()).items() if name not in skipped}
        for place in (folder, tmp_path / "out")
    )
    assert {name: (value, new[name]) for name, value in old.items() if name in new and new[name] != value} == {}
    tool.main(["from-hf", str(tmp_path / "out"), str(tmp_path / "back")])
    for name, tensor in loaded(tmp_path / "back").items():
        assert torch.equal(tensor, loaded(ours)[name]), name
