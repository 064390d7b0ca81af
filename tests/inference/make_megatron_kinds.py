# SPDX-License-Identifier: Apache-2.0
"""Make `megatron_kinds.json` and `megatron_kinds.tar.xz` with Megatron-Core itself, on a CPU:

    python tests/inference/make_megatron_kinds.py CORE OUT      CORE: a checkout of Megatron-LM. Needs torch and einops

Megatron-Core's modules compute everything but three kernels, which it has for GPUs alone: softmax attention, the scan of
Mamba-2 and the gated norm after it are written out below. Weights are drawn here and in the tests from one seed.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import tarfile
import types
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

S, B, V, LAST = 12, 2, 24, 3


class CoreAttention(nn.Module):
    """Causal softmax attention: [s, b, heads, d] -> [s, b, heads d]."""

    def __init__(self, config, softmax_scale=None, k_channels=None, **others):
        super().__init__()
        self.scale = softmax_scale or 1 / math.sqrt(k_channels or config.kv_channels)

    def forward(self, query, key, value, *args, **others):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(-1, -2) * self.scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def scan(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False, return_final_states=False, **others
):
    """The recurrence of Mamba-2, token by token: x [b, l, heads, p], dt [b, l, heads], B and C [b, l, groups, n]."""
    dt = F.softplus(dt.float() + dt_bias)
    B, C = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (B, C))
    state, out = torch.zeros(*x.shape[:1], *x.shape[2:], B.shape[-1]), []
    for t in range(x.shape[1]):
        written = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        state = state * (dt[:, t] * A).exp()[..., None, None] + written
        out.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1)


class GatedNorm(nn.Module):
    """RMSNorm of x silu(z) over each group."""

    def __init__(self, width, eps, group_size, norm_before_gate, device=None, dtype=None):
        super().__init__()
        self.weight, self.eps, self.group = nn.Parameter(torch.ones(width)), eps, group_size

    def forward(self, x, z):
        x = (x * F.silu(z)).unflatten(-1, (-1, self.group))
        return (x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight


def module(name: str, **content) -> None:
    """An importable module."""
    made = types.ModuleType(name)
    made.__dict__.update(content, __path__=[])
    made.__spec__ = None
    sys.modules[name] = made


def set_up(core: Path, rank: int, ranks: int, port: int) -> None:
    module("megatron")
    sys.modules["megatron"].__path__ = [str(core / "megatron")]
    l2norm = lambda x, dim=-1, eps=1e-6: x * (x.square().sum(dim, keepdim=True) + eps).rsqrt()
    for name in ("fla", "fla.modules", "fla.ops", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
        module(name)
    sys.modules["mamba_ssm"].__version__ = "2.2.6"
    module("fla.modules.convolution", causal_conv1d=None, causal_conv1d_update=None)
    module("fla.modules.l2norm", l2norm=l2norm)
    module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=None, fused_recurrent_gated_delta_rule=None)
    module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GatedNorm)
    kernels = dict(mamba_chunk_scan_combined=scan, mamba_split_conv1d_scan_combined=scan)
    module("mamba_ssm.ops.triton.ssd_combined", **kernels)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *args: None
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(ranks, 1)
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_token_prediction

    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    multi_token_prediction.is_inference_column_parallel_linear = lambda module: False  # asks for Transformer Engine's


def shared(**more):
    """Of both models' arguments and configurations."""
    return dict(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, normalization="RMSNorm") | more


LATENT = dict(
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_head_dim=8,
    qk_pos_emb_head_dim=8,
    v_head_dim=6,
    qk_layernorm=True,
    rope_type="yarn",
    rotary_scaling_factor=4.0,
    mscale=0.7,
    mscale_all_dim=0.8,
    original_max_position_embeddings=8,
    mtp_num_layers=2,
)
HYBRID = dict(
    num_query_groups=2,
    kv_channels=8,
    attention_output_gate=True,
    mamba_num_heads=4,
    mamba_head_dim=4,
    mamba_state_dim=3,
    mamba_num_groups=2,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=4,
    linear_value_head_dim=6,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    mtp_num_layers=1,
)
PATTERN = "MG*-/G-"


def config_of(kind, values: dict, ranks: int):
    return kind(
        **values,
        tensor_model_parallel_size=ranks,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        transformer_impl="local",
        layernorm_epsilon=1e-5,
        deterministic_mode=True,
    )


def latent_model(ranks: int):
    """A GPT with multi-latent attention and two depths of multi-token prediction."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = config_of(MLATransformerConfig, shared(**LATENT), ranks)
    layer = specs.get_gpt_layer_local_spec(qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = CoreAttention
    ahead = specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    plain = dict(vocab_size=V, max_sequence_length=S, position_embedding_type="rope")
    return GPTModel(config, layer, **plain, share_embeddings_and_output_weights=False, mtp_block_spec=ahead)


def hybrid_model(ranks: int):
    """A HybridModel of PATTERN, of modules without Transformer Engine."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.hybrid import hybrid_block, hybrid_layer_specs
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    backend = LocalSpecProvider()
    norm, column, row = (
        backend.layer_norm(rms_norm=True),
        backend.column_parallel_linear(),
        backend.row_parallel_linear(),
    )
    spec = hybrid_layer_specs.hybrid_stack_spec
    own = spec.submodules
    own.mamba_layer.submodules.norm = norm
    for inner in (own.mamba_layer.submodules.mixer.submodules, own.gdn_layer.submodules.self_attention.submodules):
        inner.in_proj, inner.out_proj = column, row
    own.gdn_layer.submodules.input_layernorm = own.attention_layer.submodules.input_layernorm = norm
    own.gdn_layer.submodules.self_attention.submodules.out_norm = norm
    attention = own.attention_layer.submodules.self_attention.submodules
    attention.linear_qkv, attention.linear_proj, attention.core_attention = column, row, CoreAttention
    own.mlp_layer.submodules.pre_mlp_layernorm = norm
    parts = own.mlp_layer.submodules.mlp.keywords["submodules"]
    parts.linear_fc1, parts.linear_fc2 = column, row
    for ahead in own.mtp_block_spec.submodules.layer_specs:
        inner = ahead.submodules
        inner.enorm = inner.hnorm = inner.layer_norm = norm
        inner.eh_proj = column
    hybrid_block.TENorm = norm
    config = config_of(TransformerConfig, shared(**HYBRID) | dict(num_layers=4, use_mamba_mem_eff_path=False), ranks)
    plain = dict(vocab_size=V, max_sequence_length=S, position_embedding_type="rope")
    assert isinstance(spec, ModuleSpec)
    return HybridModel(config, spec, **plain, hybrid_layer_pattern=PATTERN, share_embeddings_and_output_weights=False)


MODELS = dict(latent=latent_model, hybrid=hybrid_model)
ARGS = dict(
    latent=shared(**LATENT, multi_latent_attention=True),
    hybrid=shared(**HYBRID, hybrid_layer_pattern=PATTERN, group_query_attention=True) | dict(num_layers=4),
)


def drawn(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """Weights of these shapes; those of norms are near 1, and decay rates in a range that training has."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator) * 0.3
        found[name] = x + ("norm" in name) + 0.5 * ("A_log" in name)
    return found


def arguments(name: str, **more) -> argparse.Namespace:
    """As a run saves them."""
    plain = dict(
        seq_length=S,
        max_position_embeddings=S,
        position_embedding_type="rope",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        vocab_size=V,
        norm_epsilon=1e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return argparse.Namespace(**plain | ARGS[name] | more)


def tokens() -> torch.Tensor:
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1))


def recorded(name: str) -> dict:
    """Names, shapes, the last logits of the network, and those of each depth at the last places that have its tokens."""
    model = MODELS[name](1).eval()
    shapes = {one: list(parameter.shape) for one, parameter in model.named_parameters()}
    model.load_state_dict(drawn(shapes), strict=False)
    ahead = []
    model.mtp.register_forward_hook(lambda module, inputs, output: ahead.append(output))
    with torch.no_grad():
        places = torch.arange(S).expand(B, S)
        model(tokens(), places, None, labels=tokens())
        depths = ahead[0].chunk(1 + model.config.mtp_num_layers)
        logits = [(x @ model.output_layer.weight.t()).transpose(0, 1) for x in depths]
    last = [one[:, S - depth - LAST : S - depth] for depth, one in enumerate(logits)]
    rounded = [[[[round(x, 6) for x in row] for row in text] for text in one.tolist()] for one in last]
    others = [one for one, x in model.state_dict().items() if x is None]
    return dict(parameters=shapes, others=others, logits=rounded)


def save_whole(name: str, out: Path) -> None:
    """What Megatron-Core writes as torch_dist, with weights that number their elements."""
    from megatron.core import dist_checkpointing

    model = MODELS[name](1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    out.mkdir(parents=True)
    dist_checkpointing.save(model.sharded_state_dict(prefix="") | dict(args=arguments(name), iteration=3), str(out))


def shards(name: str, source: Path) -> dict:
    """What a rank of two gets of each weight from that checkpoint: the numbers of its elements, as runs (first, length)."""
    from megatron.core import dist_checkpointing

    model = MODELS[name](2)
    loaded = dist_checkpointing.load(model.sharded_state_dict(prefix=""), str(source))
    model.load_state_dict(loaded, strict=False)
    found = {}
    for one, parameter in model.named_parameters():
        numbers = parameter.detach().flatten().long()
        starts = [0, *((numbers.diff() != 1).nonzero().flatten() + 1).tolist()]
        ends = [*starts[1:], len(numbers)]
        runs = [[int(numbers[a]), b - a] for a, b in zip(starts, ends, strict=True)]
        found[one] = dict(shape=list(parameter.shape), runs=runs)
    return found


def in_process(core: Path, rank: int, ranks: int, port: int, work: Path) -> None:
    set_up(core, rank, ranks, port)
    for name in MODELS:
        if ranks == 1:
            (work / f"{name}.json").write_text(json.dumps(recorded(name)))
            save_whole(name, work / name / "iter_0000003")
        else:
            (work / f"{name}_{rank}.json").write_text(json.dumps(shards(name, work / name / "iter_0000003")))


def main(core: Path, out: Path) -> None:
    import tempfile

    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for ranks in (1, 2):
            context = mp.get_context("spawn")
            jobs = [
                context.Process(target=in_process, args=(core, n, ranks, 29533 + ranks, work)) for n in range(ranks)
            ]
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()
                assert job.exitcode == 0
        found = {}
        for name in MODELS:
            found[name] = json.loads((work / f"{name}.json").read_text())
            found[name]["ranks"] = [json.loads((work / f"{name}_{rank}.json").read_text()) for rank in range(2)]
            (work / name / "latest_checkpointed_iteration.txt").write_text("3")
        (out / "megatron_kinds.json").write_text(json.dumps(found, separators=(",", ":")))
        with tarfile.open(out / "megatron_kinds.tar.xz", "w:xz") as archive:
            for name in MODELS:
                archive.add(work / name, arcname=name)


if __name__ == "__main__":
    with patch.dict(os.environ):
        main(Path(sys.argv[1]), Path(sys.argv[2]))
