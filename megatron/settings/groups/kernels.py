# SPDX-License-Identifier: Apache-2.0
"""The settings of devices and kernels."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, Natural, Needs, shown_by

# Of a sum that tensor parallel ranks divide in --batch-invariant-mode: the most ranks there can be (`mpu.ordered_sums`)
BLOCKS = 8

CUDA = Needs("a CUDA device", lambda s: s.device != "cpu")

# Tests that show effects
FUSED = "test_a_fused_kernel_is_used_unless_its_flag_says_no"


@dataclass(frozen=True)
class Kernels:
    """The device, the implementations of operations, and garbage collection."""

    device: Literal["auto", "cpu", "cuda"] = shown_by("test_device")(
        "device; auto: CUDA if available", "auto", also=dict(gpu="cuda")
    )
    torch_compile: bool = shown_by("test_torch_compile_compiles_each_layer")(
        "compile the layers with torch.compile; auto: if the first steps show that it pays",
        False,
        also=dict(auto="auto"),
    )
    dump_graph: Optional[str] = shown_by("test_a_run_writes_the_graphs_of_each_rank")(
        "folder for the generated code of --torch-compile, with a subfolder per rank",
        None,
        needs="torch_compile",
        on_resume="irrelevant",
    )
    attention_backend: Literal["auto", "explicit", "sdpa", "flash"] = shown_by("test_attention_backend")(
        "implementation of attention",
        "auto",
        "--use-flash-attn=flash",
        "--use-flash-attn-v2=flash",
        also=dict(fused="sdpa", unfused="explicit", local="explicit"),
    )
    flash_attention_version: Literal[2, 3, 4] = shown_by("test_flash_attention_version")(
        "version of FlashAttention for torch's attention on CUDA; 3 and 4 need their package", 2
    )
    cross_entropy_chunk: Optional[Count] = shown_by("test_cross_entropy_chunk_is_the_rows_of_logits_at_a_time")(
        "tokens per chunk of logits (default: automatic)", None
    )
    # Fusions, which change only the speed; off: separate torch ops. Most have no fused form on CPUs.
    masked_softmax_fusion: bool = shown_by("test_plain_softmax_makes_all_scores_at_once")(
        "compute explicit attention in blocks; off: all scores together", True
    )
    bias_dropout_fusion: bool = shown_by(FUSED)(
        "fuse dropout with the residual addition",
        True,
        needs=Needs("a CUDA device, and --hidden-dropout above 0", lambda s: s.device != "cpu" and s.hidden_dropout),
    )
    bias_swiglu_fusion: bool = shown_by(FUSED)(
        "fuse the activation of --swiglu",
        True,
        needs=Needs("a CUDA device, and --swiglu", lambda s: s.device != "cpu" and s.swiglu),
    )
    rope_fusion: bool = shown_by(FUSED)(
        "fuse the rotary embedding",
        True,
        "--apply-rope-fusion~=true",
        needs=Needs(
            "a CUDA device, and --position-embedding-type rope",
            lambda s: s.device != "cpu" and s.position_embedding_type == "rope",
        ),
    )
    persist_layer_norm: bool = shown_by(FUSED)("use the suite's norm kernels; off: apex's or torch's", True, needs=CUDA)
    cross_entropy_loss_fusion: bool = shown_by(FUSED)("fuse softmax, cross-entropy and its gradient", True, needs=CUDA)
    fused_linear: bool = shown_by("test_products_without_biases")(
        "add biases inside the matrix product",
        True,
        needs=Needs("biases (no --disable-bias-linear)", lambda s: s.add_qkv_bias or not s.disable_bias_linear),
    )
    fuse_attn_qkv: bool = shown_by("test_three_products_for_queries_keys_and_values")(
        "compute queries, keys and values with one matrix product", True
    )
    deterministic_mode: bool = shown_by("test_cuda_is_asked_for_kernels_that_repeat")(
        "on CUDA: use deterministic kernels; an error if torch has none (CPUs are always deterministic)", False
    )
    manual_gc_interval: Natural = shown_by("test_a_run_collects_at_its_interval")(
        "steps between garbage collections, on all ranks at the same step; 0: Python decides", 100
    )
