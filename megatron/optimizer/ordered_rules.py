# SPDX-License-Identifier: Apache-2.0
"""What --batch-invariant-mode does not cover: sums whose order is still that of the layout. Refused, with one message."""

import math
from types import SimpleNamespace

from megatron.model.recipe import recipe_of
from megatron.optimizer.kinds import knows_matrices
from megatron.settings.declare import dashed
from megatron.settings.groups.kernels import BLOCKS
from megatron.settings.kernel_sizes import SAME_ROWS, SAME_SIZE, VECTORS
from megatron.settings.rules import Rule, record, said
from megatron.settings.schema import Config
from megatron.settings.statements import SaidBy

# Of what a padded vocabulary is a multiple: ranks and blocks divide it alike.
VOCABULARY = 512
# Weights of layers whose sums are those of blocks when tensor parallel ranks divide them.
LAYERS = ("attention.qkv", "attention.output", "mlp.up", "mlp.down", "mlp.shared.up", "mlp.shared.down")
NORMS = ("attention.q_norm", "attention.k_norm")  # whose heads they divide
EXPERTS = ("mlp.router", "mlp.experts.up", "mlp.experts.down")  # of ranks with other rows
DIVIDED = {f"{layer}.{name}" for layer in (*LAYERS, *NORMS, *EXPERTS) for name in ("weight", "bias")}
DIVIDED |= {"attention.softmax_offset"}  # one of each head

# Setting -> whether it is covered. `s` is `rules.record`.
COVERED = {
    "device": lambda s: s.device == "cpu",
    "model_type": lambda s: recipe_of(s.settings).batch_invariant,
    "make_vocab_size_divisible_by": lambda s: VOCABULARY % s.make_vocab_size_divisible_by == 0,
    "fuse_attn_qkv": lambda s: s.fuse_attn_qkv,
    "cp_comm_type": lambda s: set(s.cp_comm) <= {"a2a"},
    "precision": lambda s: s.precision in ("fp32", "bf16"),
    "amp_level": lambda s: s.amp_level != "O1" or s.precision == "fp32",
    "fp8_format": lambda s: not s.fp8_format,
    "optimizer": lambda s: not knows_matrices(s.settings.optimizer),
    "qk_clip": lambda s: not s.qk_clip,
    "loss_averaging": lambda s: s.loss_averaging == "token",
    "torch_compile": lambda s: s.torch_compile in (False, "auto"),
    "linear": lambda s: not s.linear,
    "mtp_num_layers": lambda s: not s.mtp_num_layers,
    "hybrid_layer_pattern": lambda s: not s.hybrid_layer_pattern,
    "experimental_attention_variant": lambda s: not s.experimental_attention_variant,
    "teacher_load": lambda s: not s.teacher_load,
    "teacher_logits": lambda s: not s.teacher_logits,
    "moe_router_load_balancing_type": lambda s: "global_aux_loss" not in words_of(s.moe_router_load_balancing_type),
    # Of sums over the samples of several ranks, which are kept in fp32:
    "moe_token_dispatcher_type": lambda s: _experts_stay(s) or s.moe_token_dispatcher_type == "alltoall",
    "expert_tensor_parallel_size": lambda s: _experts_stay(s) or (s.expert_tensor_parallel_size or s.tp) == 1,
    "disable_bias_linear": lambda s: _experts_stay(s) or s.disable_bias_linear,
    "grad_reduce_in_bf16": lambda s: _experts_stay(s) or not s.grad_reduce_in_bf16,
    "main_grads_dtype": lambda s: _experts_stay(s) or s.main_grads_dtype == "fp32",
}
# What to do about a setting; otherwise: leave it out
INSTEAD = {
    "device": "say --device cpu",
    "cp_comm_type": "say --cp-comm-type a2a, which has whole heads on each rank",
    "precision": "say --bf16 or --precision fp32",
    "expert_tensor_parallel_size": "say --expert-tensor-parallel-size 1",
    "disable_bias_linear": "say --disable-bias-linear, or leave out --expert-model-parallel-size",
}


def _experts_stay(s: SimpleNamespace) -> bool:
    """Whether each rank has all experts."""
    return s.expert_model_parallel_size == 1


def words_of(value: object) -> tuple[str, ...]:
    """The words of a setting that may have several."""
    return tuple(value) if isinstance(value, (list, tuple)) else (str(value),)


def said_of(s: SimpleNamespace, name: str) -> str:
    """A setting that is not covered, as the user wrote it."""
    if name == "expert_tensor_parallel_size" and s.expert_tensor_parallel_size is None:
        return f"experts whose weights {s.tp} ranks divide"
    if name == "cp_comm_type" and s.cp_comm_type is None:
        return f"{said(s, 'context_parallel_size')} with keys and values in a ring"
    return _implying(s, name) or said(s, name)


def _implying(s: SimpleNamespace, name: str) -> str:
    """The flag of the user that implies a setting which the user did not give: --lora-rank, for linear; "" if none does."""
    one = s.settings.said(name)
    return one.words if one and one.source is SaidBy.DERIVED and not one.by_user else ""


def uncovered(s: SimpleNamespace) -> list[str]:
    """The names of the settings that the mode does not cover."""
    if not s.batch_invariant_mode:
        return []
    return [name for name, covered in COVERED.items() if not covered(s)]


def _sentence(s: SimpleNamespace) -> str:
    names = uncovered(s)
    words = " and ".join(said_of(s, name) for name in names)
    instead = [INSTEAD[name] for name in names if name in INSTEAD]
    others = [_implying(s, name) or dashed(name) for name in names if name not in INSTEAD]
    do = [*instead, f"leave out {', '.join(others)}"] if others else instead
    return (
        f"--batch-invariant-mode does not cover {words}: weights would depend on the layout; {', and '.join(do)}, or leave "
        "out --batch-invariant-mode (docs/parallelism.md#the-same-bits-in-every-layout)"
    )


# Of these, settings that a forward pass depends on: with others, training in the mode has the same log-probabilities.
FORWARD = (
    "model_type fuse_attn_qkv amp_level torch_compile linear hybrid_layer_pattern experimental_attention_variant"
).split()


def forward_problems(config: Config, world: int) -> list[str]:
    """What generation in the mode does not cover of a model. config: its settings, with the layout of generation"""
    s = record(config, world)
    found = [said(s, name) for name in FORWARD if not COVERED[name](s)]
    found += ["--multi-latent-attention"] if s.multi_latent_attention else []
    found += [f"--seq-length {s.seq_length}, no multiple of {2 * BLOCKS}"] if s.seq_length % (2 * BLOCKS) else []
    if s.settings.model.mixture:
        found += [said(s, "moe_expert_capacity_factor")] if s.moe_expert_capacity_factor is not None else []
        width = s.settings.model.expert_ffn_size
        found += [f"experts of width {width}, no multiple of {2 * BLOCKS}"] if width % (2 * BLOCKS) else []
        found += [f"experts over {s.tp} ranks, which have too few tokens of a pass"] if s.tp > 1 else []
    return found + (not_divided(s) if s.tp > 1 and not found else [])


def problems(s: SimpleNamespace) -> list[str]:
    """The problem of a model whose sums tensor or context parallel ranks cannot divide in one order. s: of settings that
    work
    """
    found = not_divided(s) if s.batch_invariant_mode and s.tp * s.cp > 1 else []
    names = [name for name in ("tensor_model_parallel_size", "context_parallel_size") if getattr(s, name) > 1]
    return found and [
        f"--batch-invariant-mode with {' and '.join(said(s, name) for name in names)} does not cover {'; '.join(found)}; "
        "leave one of them out (docs/parallelism.md#the-same-bits-in-every-layout)"
    ]


def refusal(config: Config, world: int) -> str:
    """What of these settings the mode does not cover, in a layout of so many ranks, in a few words; or ""."""
    s = record(config, world)
    found = [said_of(s, name) for name in uncovered(s)]
    found += [f"{s.dp} data parallel ranks"] if s.dp & (s.dp - 1) else []
    found += not_divided(s) if s.tp * s.cp > 1 and not found else []
    return f"--batch-invariant-mode does not cover {' and '.join(found)}" if found else ""


def not_divided(s: SimpleNamespace) -> list[str]:
    """What of a model has sums that tensor and context parallel ranks cannot divide in one order."""
    found = [f"{s.tp} ranks: blocks are divided by 2, 4 or 8"] if s.tp not in (1, 2, 4, 8) else []
    if s.cp > 1:
        found += [f"{s.cp} ranks: a sample's {BLOCKS} blocks are divided by 2 or 4"] if s.cp not in (2, 4) else []
        found += [f"{s.tp} x {s.cp} ranks, more than {BLOCKS}"] if s.tp * s.cp > BLOCKS else []
    found += ["--attention-output-gate"] if s.attention_output_gate else []
    cut = s.cp * (s.tp if s.settings.model.mixture else 1)  # ranks with rows that no product joins
    rows = cut * max(VECTORS, SAME_ROWS) if cut > 1 else BLOCKS  # kernels treat the rows of ranks alike
    found += experts_not_divided(s) if s.settings.model.mixture else []
    found += [f"--seq-length {s.seq_length}, no multiple of {rows}"] if s.seq_length % rows else []
    tables = recipe_of(s.settings).facts(s.settings, 1).tables.values()
    for name, placed in {name: placed for table in tables for name, placed in table.items()}.items():
        layer, _, own = name.partition(".")
        if placed.buffer:
            continue
        if name not in DIVIDED and not (layer.endswith("_norm") and own in ("weight", "bias")):
            found.append(f"the weight {name}")
        elif name.removesuffix(".weight") in LAYERS and (dim := placed.cut.get("tp")) is not None:
            width = math.prod(placed.shape[dim : max(dim + 1, len(placed.shape) - 1)])
            found += [f"{name}, whose {width} rows or columns are no multiple of {BLOCKS}"] if width % BLOCKS else []
            size = s.seq_length // s.cp * s.hidden_size * width // BLOCKS
            if s.cp > 1 and size < SAME_SIZE:
                found.append(
                    f"{name} of {s.seq_length} / {s.cp} tokens, a product too small for the kernel of larger ones"
                )
    return found


def experts_not_divided(s: SimpleNamespace) -> list[str]:
    """What of experts tensor or context parallel ranks cannot divide in one order: neighbouring ranks have to have a
    sample's rows, and whole experts.
    """
    if s.cp > 1:
        return ["experts"]
    if s.tp == 1:
        return []
    found, ways = [], words_of(s.moe_router_load_balancing_type)
    if s.expert_model_parallel_size % s.tp or (s.expert_tensor_parallel_size or s.tp) > 1:
        ranks = f"--expert-model-parallel-size {s.tp} or a multiple"
        found.append(f"experts without --expert-tensor-parallel-size 1 and {ranks}")
    found += [said(s, "moe_expert_capacity_factor")] if s.moe_expert_capacity_factor is not None else []
    found += [said(s, "moe_router_load_balancing_type")] if "sinkhorn" in ways else []  # sums over tokens
    if s.seq_length // s.tp * s.hidden_size * s.num_experts < SAME_SIZE:
        found.append(f"a router of {s.num_experts} experts and {s.seq_length} / {s.tp} tokens, a product too small")
    return found


RULES = (
    Rule(uncovered, _sentence),
    Rule(
        lambda s: s.batch_invariant_mode and s.dp & (s.dp - 1),
        lambda s: (
            f"--batch-invariant-mode adds up the ranks' samples in pairs, and {s.dp} data parallel ranks are no power of "
            f"two; nearest: {1 << s.dp.bit_length() - 1}, {1 << s.dp.bit_length()}"
        ),
    ),
)
