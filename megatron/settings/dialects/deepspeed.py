# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's JSON (https://www.deepspeed.ai/docs/config-json/), for `dialects.translate`."""

from megatron.settings.dialects.table import Default, Dialect

WORDS = """
=  gradient_accumulation_steps optimizer.params.lr optimizer.params.weight_decay fp16.loss_scale fp16.loss_scale_window
=  fp16.hysteresis fp16.min_loss_scale
train_batch_size                                 --global-batch-size
train_micro_batch_size_per_gpu                   --micro-batch-size
gradient_clipping                                --clip-grad
steps_per_print                                  --log-interval
wall_clock_breakdown=true                        --timing-log-level 2
optimizer.type=adam|adamw                        --optimizer adam
optimizer.type=sgd                               --optimizer sgd
optimizer.type=lion                              --optimizer lion
optimizer.type=muon                              --optimizer muon
optimizer.params.betas                           --adam-beta1 --adam-beta2
optimizer.params.eps                             --adam-eps
optimizer.params.momentum                        --sgd-momentum
scheduler.type=warmuplr                          --lr-decay-style constant
scheduler.type=warmupdecaylr                     --lr-decay-style linear
scheduler.type=warmupcosinelr                    --lr-decay-style cosine
scheduler.params.warmup_min_lr                   --lr-warmup-init
scheduler.params.warmup_max_lr                   --lr
scheduler.params.warmup_num_steps                --lr-warmup-iters
scheduler.params.total_num_steps                 --lr-decay-iters
fp16.enabled=true                                --fp16
bf16.enabled|bfloat16.enabled=true               --bf16
amp.enabled=true                                 --fp16; --amp-level O1
data_types.grad_accum_dtype=bf16                 --grad-reduce-in-bf16
zero_optimization.stage                          --sharding-stage
zero_optimization.overlap_comm=true              --overlap-grad-reduce
zero_optimization.cpu_offload=true               --optimizer-cpu-offload
zero_optimization.offload_optimizer.device=cpu   --optimizer-cpu-offload
zero_optimization.offload_optimizer.device=nvme  --nvme-offload-fraction 1
zero_optimization.offload_optimizer.nvme_path    --nvme-offload-dir
zero_optimization.offload_optimizer.ratio        --optimizer-offload-fraction
zero_optimization.offload_param.device=cpu       --param-cpu-offload
zero_optimization.mics_shard_size                --sharding-degree
flops_profiler.enabled=true                      --log-throughput
tensorboard.output_path                          --tensorboard-dir
wandb.project                                    --wandb-project
autotuning.enabled=true                          --auto-parallel
tensor_parallel.autotp_size                      --tensor-model-parallel-size
sequence_parallel_size                           --context-parallel-size; --cp-comm-type a2a
-  optimizer.params.adam_w_mode=true scheduler.params.warmup_type=linear fp16.loss_scale=0 fp16.auto_cast=false
-  fp16.fp16_master_weights_and_grads=false data_types.grad_accum_dtype=fp32
-  zero_optimization.offload_optimizer.device=none zero_optimization.offload_param.device=none
-  tensorboard.enabled=true|false wandb.enabled=true|false csv_monitor.enabled=true|false
"""

IDLE = {
    "bucket sizes and buffers of communication change only the speed; this suite chooses them": """
        zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size zero_optimization.reduce_scatter
        zero_optimization.reduce_bucket_size zero_optimization.contiguous_gradients zero_optimization.sub_group_size
        zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
        zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold
        zero_optimization.stage3_module_granularity_threshold zero_optimization.round_robin_gradients
        zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.param_persistence_threshold
        zero_optimization.model_persistence_threshold zero_optimization.memory_efficient_linear
        zero_optimization.mics_hierarchical_params_gather zero_optimization.ignore_unused_parameters
        zero_optimization.offload_*.pin_memory zero_optimization.offload_*.buffer_*
        zero_optimization.offload_*.pipeline_* zero_optimization.offload_*.fast_init
        zero_optimization.offload_*.max_in_cpu zero_optimization.cpu_offload_use_pin_memory aio.*
        communication_data_type pipeline.* activation_checkpointing.contiguous_memory_optimization""",
    "gradients are summed in fp32 and divided once, by the tokens of the batch": """prescale_gradients
        gradient_predivide_factor fp32_allreduce disable_allgather""",
    "a checkpoint holds whole tensors under their names, which every layout reads": """
        zero_optimization.stage3_gather_16bit_weights_on_model_save
        zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.load_from_fp32_weights
        zero_optimization.elastic_checkpoint checkpoint.*""",
    "any optimizer goes with any sharding": """zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
        optimizer.params.torch_adam optimizer.params.bias_correction optimizer.params.fused""",
    "a run always writes metrics.jsonl under --save": "csv_monitor.* tensorboard.job_name",
    "--save and --print-config keep the settings": "dump_state optimizer.legacy_fusion",
    "a checkpoint holds the step to resume from": "scheduler.params.last_batch_iteration",
    "--sequence-parallel divides what is kept among tensor parallel ranks": """
        activation_checkpointing.partition_activations""",
    "--timing-log-level says how much is timed": """activation_checkpointing.synchronize_checkpoint_boundary
        activation_checkpointing.profile flops_profiler.* comms_logger.* memory_breakdown""",
    "a good step does not refill the hysteresis (Megatron-LM's rule)": "fp16.consecutive_hysteresis",
    "the search is over layouts, memory and time of the planner": "autotuning.*",
}
LOST = {
    "activations are kept on the device, or computed again: --recompute-granularity": """
        activation_checkpointing.cpu_checkpointing activation_checkpointing.number_checkpoints""",
    "ZeRO++ is not part of this suite; --sharding-degree shards inside of groups": """
        zero_optimization.zero_hpz_partition_size zero_optimization.zero_quantized_*""",
    "parameters stay on the device or on the host (--param-cpu-offload), not on disk": """
        zero_optimization.offload_param.*""",
    "experts are part of the model: --num-experts and --moe-*": "moe.*",
    "attention is dense, and all layers are there in every step": """sparse_attention.*
        progressive_layer_drop.* sparse_gradients""",
    "data come in the order of the index: no curriculum": "curriculum_learning.* data_efficiency.*",
    "compression is --quantization, --sparsity and --teacher-load (docs/compression.md)": """compression_training.*
        quantize_training.* eigenvalue.*""",
    "the batch does not change with the number of ranks": "elasticity.*",
    "weight decay is decoupled, as AdamW has it": "optimizer.params.adam_w_mode",
    "gradients are summed in fp32, or in bf16": "data_types.*",
    "warm-up is linear": "scheduler.params.warmup_type",
    "there is --lr-decay-style constant, linear, linear-from-start, cosine, inverse-square-root and WSD": "scheduler.*",
    "--optimizer says which there are": "optimizer.*",
    "a tracker of the run is --wandb-project or --tensorboard-dir": "wandb.* tensorboard.* comet.*",
}
CHANGED = {
    "scheduler.type": "warm-up is linear; DeepSpeed's is logarithmic unless warmup_type is linear",
    "zero_optimization.stage": "the same shards; overlap is --overlap-grad-reduce and --overlap-param-gather",
    "train_batch_size": "the mean is over the tokens of the whole batch, not of each rank (--loss-averaging micro-batch)",
}


def share_of_peak(flag):
    """Compute a rate from a ratio to the scheduler's peak rate."""

    def computed(words, given):
        peak = given.get("optimizer.params.lr") or given.get("scheduler.params.warmup_max_lr")
        if peak is None or peak.value == "auto":
            raise ValueError(f"{flag} is this share of the learning rate, which the file does not say")
        return [(flag, [f"{float(words[0]) * float(peak.value):g}"])]

    return computed


COMPUTED = {
    "fp16.initial_scale_power": lambda words, given: [("--initial-loss-scale", [str(2 ** int(words[0]))])],
    "scheduler.params.cos_min_ratio": share_of_peak("--min-lr"),
    "scheduler.params.warmup_min_ratio": share_of_peak("--lr-warmup-init"),
}
DEFAULTS = (
    Default("--clip-grad", "0"),
    Default("--weight-decay", "0", where="optimizer"),
    *(
        Default("--lr-warmup-iters", "1000", ("scheduler.params.warmup_num_steps",), f"scheduler.type={name}")
        for name in ("warmuplr", "warmupdecaylr", "warmupcosinelr")
    ),
)
DEEPSPEED = Dialect("deepspeed", "DeepSpeed", WORDS, CHANGED, IDLE, LOST, COMPUTED, DEFAULTS)
