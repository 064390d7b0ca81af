# SPDX-License-Identifier: Apache-2.0
"""Colossal-AI's Python configs (ZeRO, pipeline and tensor parallelism of GPT-2), for `settings.translate`."""

from megatron.settings.dialects.table import Default, Dialect

WORDS = """
=  seed optimizer.lr optimizer.weight_decay optimizer.nvme_offload_fraction optimizer.nvme_offload_dir model.vocab_size
=  zero.optimizer_config.hysteresis
BATCH_SIZE                                      --micro-batch-size
NUM_EPOCHS                                      --train-epochs
SEQ_LEN|SEQ_LENGTH                              --seq-length
VOCAB_SIZE                                      --vocab-size
HIDDEN_SIZE                                     --hidden-size
NUM_MICRO_BATCHES|gradient_accumulation         --gradient-accumulation-steps
clip_grad_norm                                  --clip-grad
backend                                         --distributed-backend
optimizer.type=hybridadam|fusedadam|adam|adamw  --optimizer adam
optimizer.type=cpuadam                          --optimizer cpu_adam; --optimizer-cpu-offload
optimizer.type=sgd                              --optimizer sgd
optimizer.betas                                 --adam-beta1 --adam-beta2
optimizer.eps                                   --adam-eps
model.type=gpt2_small                           --model-name-or-path gpt2-small
model.type=gpt2_medium                          --model-name-or-path gpt2-medium
model.type=gpt2_large                           --model-name-or-path gpt2-large
model.type=gpt2_xl                              --model-name-or-path gpt2-xl
model.type=gpt3                                 --model-name-or-path gpt3-175B
model.checkpoint=true                           --recompute-granularity full
model.num_chunks                                --num-virtual-stages-per-pipeline-rank
parallel.pipeline|parallel.pipeline.size        --pipeline-model-parallel-size
parallel.tensor.size                            --tensor-model-parallel-size
parallel.tensor.mode=sequence                   --sequence-parallel
fp16.mode=amp_type.naive                        --fp16; --amp-level O2
fp16.mode=amp_type.torch|amp_type.apex          --fp16; --amp-level O1
fp16.initial_scale|zero.optimizer_config.initial_scale      --initial-loss-scale
fp16.growth_interval|zero.optimizer_config.growth_interval  --loss-scale-window
fp16.min_scale|zero.optimizer_config.min_scale              --min-loss-scale
zero.model_config.offload_config.device=cpu     --param-cpu-offload
zero.model_config.tensor_placement_policy=cpu   --param-cpu-offload; --optimizer-cpu-offload
zero.optimizer_config.cpu_offload=true          --optimizer-cpu-offload
zero.level                                      --sharding-stage
-  from_torch=true parallel.tensor.mode=1d|none zero.model_config.offload_config.device=cuda
-  zero.model_config.tensor_placement_policy=auto|cuda
"""

IDLE = {
    "state is cut into equal ranges of one buffer, whatever its tensors are": """zero.model_config.shard_strategy
        zero.model_config.reduce_scatter_bucket_size_mb zero.model_config.fp32_reduce_scatter
        zero.model_config.gradient_predivide_factor zero.model_config.reuse_fp16_shard
        zero.optimizer_config.gpu_margin_mem_ratio""",
    "the loss is the next token's cross-entropy, over a vocabulary that tensor parallel ranks share": "loss_fn* loss.*",
    "messages have the shape that the settings give": "TENSOR_SHAPE",
    "logs lie under --save, checkpoints as well": "LOG_PATH LOG_NAME cudnn_*",
    "compute follows the data": "gradient_handler",
    "ranks are numbered by torchrun or srun, or by --rank and --world_size": "from_torch from_slurm local_rank",
}
LOST = {
    "matrices are split in one direction (1d); Colossal-AI has moved 2d, 2.5d and 3d to its legacy": """parallel.tensor.mode
        parallel.tensor.depth""",
    "warm-up is --lr-warmup-iters or --lr-warmup-fraction; --lr-step-unit epoch changes the rate between epochs": """
        WARMUP_EPOCHS""",
    """lines of text become tokens first: preprocess_data.py --input FILE --output-prefix P --append-eod; then say
        --data-path P_text_document --dataset-type webtext""".replace("\n       ", ""): "DATA",
    "tensors are on the device or on the host: --param-cpu-offload, --optimizer-cpu-offload": "zero.model_config.*",
    "--optimizer says which there are": "optimizer.*",
    "shapes are --num-layers and its like, or a name: --model-name-or-path gpt2-small": "model.*",
    "the suite logs, saves and times by itself; code of your own is --hooks MODULE:CLASS": "hooks hook_list",
}
CHANGED = {
    "BATCH_SIZE": "samples of joined documents; with --dataset-type webtext one document each, filled up, as there",
    "zero.model_config.offload_config.device": "the shards between their uses, as there",
}

COLOSSALAI = Dialect(
    "colossalai",
    "Colossal-AI",
    WORDS,
    CHANGED,
    IDLE,
    LOST,
    defaults=(Default("--seed", "1024"), Default("--clip-grad", "0")),
    programs=("train_gpt.py", "train.py"),
    presence={"zero": "--sharding-stage 3; --fp16"},
    kept=("rank", "world_size", "local_rank", "host", "port"),
)
