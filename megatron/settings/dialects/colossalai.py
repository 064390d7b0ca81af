# SPDX-License-Identifier: Apache-2.0
"""Colossal-AI's Python configs (ZeRO, pipeline and tensor parallelism of GPT-2), for `dialects.translate`."""

from megatron.settings.dialects.table import Default, Dialect, NoEffect

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
model.hidden_size                               --hidden-size
model.depth                                     --num-layers
model.num_heads                                 --num-attention-heads
model.max_position_embeddings                   --max-position-embeddings
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
    "no layer here is one that cuDNN computes": "cudnn_*",
    "messages have the shape that the settings give": "TENSOR_SHAPE",
    "logs lie under --save, checkpoints as well": "LOG_PATH LOG_NAME",
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
    "--optimizer says which there are": "optimizer.type",
    "an optimizer has --lr, --weight-decay, --adam-beta1 ... (docs/flags.md)": "optimizer.*",
    "a shape is --num-layers, --hidden-size ..., or a name: --model-name-or-path gpt2-small": "model.*",
    "the suite logs, saves and times by itself; code of your own is --hooks MODULE:CLASS": "hooks hook_list",
}
CHANGED = {
    "BATCH_SIZE": "by NUM_MICRO_BATCHES; samples of joined documents (--dataset-type webtext: one each, filled up)",
    "zero.model_config.offload_config.device": "the shards between their uses, as there",
}


def micro_batch(words, given):
    """Translate BATCH_SIZE: the batch of one rank, which its pipeline splits into NUM_MICRO_BATCHES."""
    parts = int(given["NUM_MICRO_BATCHES"].value) if "NUM_MICRO_BATCHES" in given else 1
    size, rest = divmod(int(words[0]), parts)
    if rest or not size:
        raise ValueError(f"{words[0]} samples are no {parts} micro-batches of one size")
    return [("--micro-batch-size", [str(size)])]


def accumulated(words, given):
    """Translate gradient_accumulation: it counts batches of BATCH_SIZE, each of NUM_MICRO_BATCHES."""
    parts = given["NUM_MICRO_BATCHES"].value if "NUM_MICRO_BATCHES" in given else "1"
    return [("--gradient-accumulation-steps", [str(int(words[0]) * int(parts))])]


def parts_of_batch(words, given):
    if "gradient_accumulation" in given:
        raise NoEffect("--gradient-accumulation-steps is this times gradient_accumulation")
    return [("--gradient-accumulation-steps", words)]


def dtype(words, given):
    if not any(key.startswith(("fp16", "zero")) for key in given):
        raise ValueError("weights and ops have the format of --fp16, --bf16 or --precision fp32")
    raise NoEffect("fp16 = dict(...) and zero = dict(...) say the format")


COLOSSALAI = Dialect(
    "colossalai",
    "Colossal-AI",
    WORDS,
    CHANGED,
    IDLE,
    LOST,
    {
        "BATCH_SIZE": micro_batch,
        "gradient_accumulation": accumulated,
        "NUM_MICRO_BATCHES": parts_of_batch,
        "model.dtype": dtype,
    },
    defaults=(Default("--seed", "1024"), Default("--clip-grad", "0")),
    programs=("train_gpt.py", "train.py"),
    presence={"zero": "--sharding-stage 3; --fp16"},
    unsaid={
        "LinearWarmupLR(total_steps=NUM_EPOCHS, warmup_steps=5)": "its train_gpt.py warms up over 5 epochs, and the"
        " rate changes with each epoch; say it by --lr-warmup-iters or --lr-warmup-fraction, and --lr-step-unit epoch"
    },
    configs=dict(config="python"),
    kept=("rank", "world_size", "local_rank", "host", "port"),
)
