# SPDX-License-Identifier: Apache-2.0
"""The settings of devices and kernels."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, Natural, Needs, setting

CUDA = Needs("a CUDA device", lambda s: s.device != "cpu")

# Tests that show effects
FUSED = "test_a_fused_kernel_is_used_unless_its_flag_says_no"


@dataclass(frozen=True)
class Kernels:
    """The device, the implementations of operations, and garbage collection."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "device; auto: CUDA if available", "auto", also=dict(gpu="cuda"), shown="test_device"
    )
    torch_compile: bool = setting(
        "compile the layers with torch.compile; auto: if the first steps show that it pays",
        False,
        also=dict(auto="auto"),
        shown="test_torch_compile_compiles_each_layer",
    )
    dump_graph: Optional[str] = setting(
        "folder for the generated code of --torch-compile, with a subfolder per rank",
        None,
        needs="torch_compile",
        on_resume="irrelevant",
        shown="test_a_run_writes_the_graphs_of_each_rank",
    )
    attention_backend: Literal["auto", "explicit", "sdpa", "flash"] = setting(
        "implementation of attention",
        "auto",
        "--use-flash-attn=flash",
        "--use-flash-attn-v2=flash",
        also=dict(fused="sdpa", unfused="explicit", local="explicit"),
        shown="test_attention_backend",
    )
    flash_attention_version: Literal[2, 3, 4] = setting(
        "version of FlashAttention for torch's attention on CUDA; 3 and 4 need their package",
        2,
        shown="test_flash_attention_version",
    )
    cross_entropy_chunk: Optional[Count] = setting(
        "tokens per chunk of logits (default: automatic)",
        None,
        shown="test_cross_entropy_chunk_is_the_rows_of_logits_at_a_time",
    )
    # Fusions, which change only the speed; off: separate torch ops. Most have no fused form on CPUs.
    masked_softmax_fusion: bool = setting(
        "compute explicit attention in blocks; off: all scores together",
        True,
        shown="test_plain_softmax_makes_all_scores_at_once",
    )
    bias_dropout_fusion: bool = setting(
        "fuse dropout with the residual addition",
        True,
        needs=Needs("a CUDA device, and --hidden-dropout above 0", lambda s: s.device != "cpu" and s.hidden_dropout),
        shown=FUSED,
    )
    bias_swiglu_fusion: bool = setting(
        "fuse the activation of --swiglu",
        True,
        needs=Needs("a CUDA device, and --swiglu", lambda s: s.device != "cpu" and s.swiglu),
        shown=FUSED,
    )
    rope_fusion: bool = setting(
        "fuse the rotary embedding",
        True,
        "--apply-rope-fusion~=true",
        needs=Needs(
            "a CUDA device, and --position-embedding-type rope",
            lambda s: s.device != "cpu" and s.position_embedding_type == "rope",
        ),
        shown=FUSED,
    )
    persist_layer_norm: bool = setting(
        "use the suite's norm kernels; off: apex's or torch's", True, needs=CUDA, shown=FUSED
    )
    cross_entropy_loss_fusion: bool = setting(
        "fuse softmax, cross-entropy and its gradient", True, needs=CUDA, shown=FUSED
    )
    fused_linear: bool = setting(
        "add biases inside the matrix product",
        True,
        needs=Needs("biases (no --disable-bias-linear)", lambda s: s.add_qkv_bias or not s.disable_bias_linear),
        shown="test_products_without_biases",
    )
    fuse_attn_qkv: bool = setting(
        "compute queries, keys and values with one matrix product",
        True,
        shown="test_three_products_for_queries_keys_and_values",
    )
    deterministic_mode: bool = setting(
        "on CUDA: use deterministic kernels; an error if torch has none (CPUs are always deterministic)",
        False,
        shown="test_cuda_is_asked_for_kernels_that_repeat",
    )
    manual_gc_interval: Natural = setting(
        "steps between garbage collections, on all ranks at the same step; 0: Python decides",
        100,
        shown="test_a_run_collects_at_its_interval",
    )
