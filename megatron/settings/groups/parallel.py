# SPDX-License-Identifier: Apache-2.0
"""The settings of parallelism."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, Needs, Positive, shown_by

RANKS = Needs("more than one rank", lambda s: s.world > 1)
DATA_PARALLEL = Needs("data parallel size above 1", lambda s: s.dp * s.cp > 1)
STAGES = Needs("--pipeline-model-parallel-size above 1", lambda s: s.pp > 1)

# Tests that show effects
CUT = "test_layers_of_stages"
EXPERTS = "test_ranks_hold_their_part_of_the_experts"

stage_cut = shown_by(CUT, needs=STAGES)


DIFFERENT_EXPERTS = Needs(
    "--expert-model-parallel-size above 1: nothing is exchanged", lambda s: s.expert_model_parallel_size > 1
)

FLEX = Needs("--moe-token-dispatcher-type flex", lambda s: s.moe_token_dispatcher_type == "flex")


@dataclass(frozen=True)
class Parallel:
    """Parallelism. The order of the grid of ranks is tp (fastest), cp, dp, pp."""

    tensor_model_parallel_size: Count = shown_by("test_tensor_parallel_ranks_hold_a_half_of_each_matrix")(
        "degree of tensor model parallelism", 1, "--tp", "--mp-degree", "--model-parallel-size"
    )
    pipeline_model_parallel_size: Count = shown_by("test_pipeline_ranks_hold_their_layers")(
        "degree of pipeline model parallelism", 1, "--pp", "--pp-degree"
    )
    context_parallel_size: Count = shown_by("test_context_parallel_ranks_hold_two_chunks_of_the_sequence")(
        "degree of context parallelism", 1, "--cp"
    )
    cp_comm_type: Optional[list[Literal["p2p", "a2a", "allgather", "a2a+p2p"]]] = shown_by(
        "test_cp_comm_type_is_what_ranks_send_in_each_layer"
    )(
        "communication of context parallelism, for all layers or one word for each: p2p sends keys and values round a "
        "ring, allgather gathers them, a2a exchanges tokens for heads, a2a+p2p does that in groups with a ring between "
        "them (default: p2p)",
        None,
        also=dict(all_gather="allgather"),
        needs=Needs("--context-parallel-size above 1", lambda s: s.cp > 1),
    )
    hierarchical_context_parallel_sizes: Optional[list[int]] = shown_by(
        "test_hierarchical_context_parallel_sizes_are_those_of_two_levels"
    )(
        "ranks that exchange tokens for heads, and ranks of a ring, with --cp-comm-type a2a+p2p: two numbers, whose "
        "product is the context parallel size",
        None,
        needs=Needs("--cp-comm-type a2a+p2p", lambda s: "a2a+p2p" in s.cp_comm),
    )
    expert_model_parallel_size: Count = shown_by(EXPERTS)(
        "degree of expert model parallelism", 1, "--ep", "--moe-expert-parallel-size"
    )
    expert_tensor_parallel_size: Optional[Count] = shown_by(EXPERTS)(
        "degree of tensor parallelism of experts (default: --tensor-model-parallel-size)", None, "--etp"
    )
    moe_token_dispatcher_type: Literal["alltoall", "flex"] = shown_by("test_two_hops_train_as_one")(
        "how tokens reach the ranks of their experts: alltoall sends a row to each expert; flex sends a token once to each "
        "node with some of its experts, and from there once to each rank, and adds up what comes back on the way",
        "alltoall",
        also=dict(allgather="alltoall"),
        needs=DIFFERENT_EXPERTS._replace(
            met=lambda s: s.expert_model_parallel_size > 1 or s.moe_token_dispatcher_type != "flex"
        ),
    )
    moe_ranks_per_node: Optional[Count] = shown_by("test_two_hops_train_as_one")(
        "ranks with fast links between them, with --moe-token-dispatcher-type flex (default: those of a node)",
        None,
        needs=FLEX,
    )
    moe_flex_dispatcher_backend: Optional[Literal["deepep", "hybridep"]] = shown_by("test_a_library_trains_as_hops_do")(
        "the library that sends tokens with --moe-token-dispatcher-type flex, which has to be installed (default: "
        "torch.distributed, in two hops)",
        None,
        "--moe-enable-deepep=deepep",
        needs=FLEX,
    )
    moe_deepep_num_sms: Optional[Count] = shown_by("test_multiprocessors_are_those_of_the_flag")(
        "multiprocessors for DeepEP (default: 20, as it has them)",
        None,
        needs=Needs("--moe-flex-dispatcher-backend deepep", lambda s: s.moe_flex_dispatcher_backend == "deepep"),
    )
    moe_hybridep_num_sms: Optional[Count] = shown_by("test_multiprocessors_are_those_of_the_flag")(
        "multiprocessors for HybridEP (default: as it has them)",
        None,
        needs=Needs("--moe-flex-dispatcher-backend hybridep", lambda s: s.moe_flex_dispatcher_backend == "hybridep"),
    )
    overlap_moe_expert_parallel_comm: bool = shown_by("test_turns_hide_the_exchanges_of_experts")(
        "the forward pass of a micro-batch and the backward pass of another one take turns: while experts' tokens of one "
        "are exchanged, the other computes",
        False,
        needs=DIFFERENT_EXPERTS,
    )
    data_parallel_size: Optional[Count] = shown_by("test_data_parallel_size_is_asserted")(
        "only checked: must be world size / (tp x pp x cp)", None
    )
    dp_degree: Optional[Count] = shown_by("test_world_is_the_product_of_paddles_degrees")(
        "only checked: PaddlePaddle's data parallel size, must be world size / (mp x pp x --sharding-degree)", None
    )
    sequence_parallel: bool = shown_by("test_sequence_parallel_ranks_hold_a_half_of_the_sequence")(
        "enable sequence parallelism in tensor parallel groups",
        False,
        needs=Needs("--tensor-model-parallel-size above 1", lambda s: s.tp > 1),
    )
    pipeline_schedule: str = shown_by("test_pipeline_schedule_is_the_order_of_passes")(
        "pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half, or a FILE.txt with a line of ops per rank",
        "1f1b",
    )
    num_layers_per_virtual_pipeline_stage: Optional[Count] = shown_by(CUT)(
        "number of layers per model chunk (interleaved schedule)",
        None,
        needs=Needs(
            "several model chunks a rank (fewer layers than a rank has): nothing is interleaved",
            lambda s: (
                s.num_layers_per_virtual_pipeline_stage * s.pp
                < s.num_layers + s.account_for_embedding_in_pipeline_split + s.account_for_loss_in_pipeline_split
            ),
        ),
    )
    num_virtual_stages_per_pipeline_rank: Optional[Count] = shown_by(CUT)(
        "number of model chunks per rank (interleaved schedule)", None, "--virtual-pp-degree"
    )
    pipeline_stage_layers: Optional[str] = stage_cut(
        "number of layers of each pipeline stage, as 2,1,1,1, or Megatron-LM's layout, as Et*2|t|t|tL",
        None,
        "--pipeline-model-parallel-layout",
    )
    decoder_first_pipeline_num_layers: Optional[Count] = stage_cut("number of layers of the first pipeline rank", None)
    decoder_last_pipeline_num_layers: Optional[Count] = stage_cut("number of layers of the last pipeline rank", None)
    account_for_embedding_in_pipeline_split: bool = stage_cut(
        "count the embedding as a layer of the first stage", False
    )
    account_for_loss_in_pipeline_split: bool = stage_cut(
        "count output layer and loss as a layer of the last stage", False
    )
    pipeline_timeline: Optional[str] = shown_by("test_a_timeline_is_written_where_it_is_wanted")(
        "file for a record of a step's passes, for megatron.pipeline.check", None
    )
    sharding_stage: Literal[0, 1, 2, 3] = shown_by("test_bytes_of_each_stage")(
        "ZeRO stage: shard optimizer state (1), gradients (2), parameters (3)",
        0,
        "--use-distributed-optimizer~=1/0",
        "--use-sharding~=1/0",
        "--zero-stage",
        "--data-parallel-sharding-strategy",
        also=dict(no_shard=0, optim=1, optim_grads=2, optim_grads_params=3),
        needs=DATA_PARALLEL._replace(met=lambda s: s.dp * s.cp > 1 or s.sharding_stage == 3),
    )
    sharding_degree: Optional[Count] = shown_by("test_sharding_degree_is_the_ranks_that_share_the_state")(
        "number of ranks to shard over (default: data parallel size)", None, needs="sharding_stage"
    )
    overlap_grad_reduce: bool = shown_by("test_reductions_of_kept_gradients_overlap_the_last_backward_pass")(
        "overlap the reduction of gradients with the backward pass", False, "--reduce-overlap", needs=DATA_PARALLEL
    )
    overlap_param_gather: bool = shown_by("test_stage_1_gathers_all_units_ahead_and_waits_at_their_use")(
        "overlap the all-gather of parameters with the forward pass",
        False,
        "--broadcast-overlap",
        needs=Needs(
            "--sharding-stage and data parallel size above 1",
            lambda s: s.sharding_stage and (s.dp * s.cp > 1 or s.sharding_stage == 3),
        ),
    )
    batch_invariant_mode: bool = shown_by("test_weights_have_the_same_bits_in_every_layout")(
        "train with the same bits in every layout and with every micro-batch size: each pass has one sample, whatever "
        "--micro-batch-size is, and sums have one order",
        False,
    )
    print_topology: bool = shown_by("test_print_topology_prints_the_groups_and_stops")(
        "print the ranks of every group and exit", False
    )
    distributed_backend: Optional[Literal["gloo", "nccl"]] = shown_by("test_backend_and_timeout_of_the_process_group")(
        "backend of torch.distributed (default: nccl on CUDA, gloo on CPU)", None, "--backend", needs=RANKS
    )
    distributed_timeout_minutes: Positive = shown_by("test_a_search_joins_with_the_same_timeout")(
        "timeout of communication between ranks", 10.0, needs=RANKS
    )

    @property
    def asserted_data_parallel(self) -> Optional[int]:
        """The data parallel size that `--data-parallel-size` or `--dp-degree` asserts; None: neither was given."""
        if self.data_parallel_size or not self.dp_degree:
            return self.data_parallel_size
        return self.dp_degree * (self.sharding_degree or 1)

    @property
    def cp_comm_types(self) -> tuple[str, ...]:
        """`cp_comm_type` with its default: one word for all layers, or one for each."""
        return tuple(self.cp_comm_type or ["p2p"])

    @property
    def cp_levels(self) -> Optional[tuple[int, ...]]:
        """`hierarchical_context_parallel_sizes`, if a layer uses them."""
        sizes = self.hierarchical_context_parallel_sizes
        return tuple(sizes) if sizes and self.context_parallel_size > 1 and "a2a+p2p" in self.cp_comm_types else None
