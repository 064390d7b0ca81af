# SPDX-License-Identifier: Apache-2.0
"""NeMo 2's recipes (nemo.collections.llm.recipes of NeMo 2.4, September 2025) and the words of its configurations."""

from dataclasses import replace

from megatron.settings.dialects.nemo import constant, ranks
from megatron.settings.dialects.recipes import RecipeRuns, RecipeTable
from megatron.settings.dialects.table import Dialect, NoEffect

WORDS = """
preset                                                --model-name-or-path
data=mockdatamodule                                   --mock-data
=  data.seq_length data.global_batch_size data.micro_batch_size data.num_workers data.split data.seed
=  trainer.strategy.tensor_model_parallel_size trainer.strategy.pipeline_model_parallel_size
=  trainer.strategy.context_parallel_size trainer.strategy.expert_model_parallel_size
=  trainer.strategy.expert_tensor_parallel_size trainer.strategy.sequence_parallel
=  trainer.strategy.account_for_embedding_in_pipeline_split trainer.strategy.account_for_loss_in_pipeline_split
=  trainer.strategy.ddp.overlap_grad_reduce trainer.strategy.ddp.overlap_param_gather
=  optim.config.lr optim.config.weight_decay optim.config.clip_grad optim.config.adam_beta1 optim.config.adam_beta2
=  optim.config.adam_eps optim.lr_scheduler.min_lr
=  model.config.num_layers model.config.hidden_size model.config.ffn_hidden_size model.config.num_attention_heads
=  model.config.num_query_groups model.config.kv_channels model.config.seq_length model.config.max_position_embeddings
=  model.config.init_method_std model.config.hidden_dropout model.config.attention_dropout model.config.vocab_size
=  model.config.rotary_base model.config.rotary_percent model.config.mtp_num_layers model.config.mtp_loss_scaling_factor
=  model.config.moe_router_topk model.config.moe_ffn_hidden_size model.config.moe_aux_loss_coeff
=  model.config.moe_router_load_balancing_type model.config.moe_router_bias_update_rate
=  model.config.moe_token_dispatcher_type model.config.moe_expert_capacity_factor model.config.make_vocab_size_divisible_by
=  model.config.recompute_method model.config.recompute_num_layers model.config.recompute_modules
=  model.config.cp_comm_type model.config.attention_backend
model.config.moe_router_load_balancing_type=none      --moe-router-load-balancing-type none
model.config.num_moe_experts                          --num-experts
model.config.layernorm_epsilon                        --norm-epsilon
model.config.recompute_granularity=full               --recompute-granularity full
model.config.recompute_granularity=selective          --recompute-granularity selective
trainer.strategy.virtual_pipeline_model_parallel_size  --num-virtual-stages-per-pipeline-rank
trainer.strategy.num_layers_in_first_pipeline_stage   --decoder-first-pipeline-num-layers
trainer.strategy.num_layers_in_last_pipeline_stage    --decoder-last-pipeline-num-layers
trainer.strategy.ddp.grad_reduce_in_fp32=false        --grad-reduce-in-bf16
trainer.plugins.grad_reduce_in_fp32=false             --grad-reduce-in-bf16
trainer.plugins.precision=bf16-mixed|bf16             --bf16
trainer.plugins.precision=16-mixed|16                 --fp16
trainer.plugins.precision=32                          --precision fp32
trainer.strategy.ckpt_async_save=true                 --async-save
trainer.max_steps                                     --train-iters
trainer.val_check_interval                            --eval-interval
trainer.limit_val_batches                             --eval-iters
trainer.limit_test_batches                            --test-iters
trainer.log_every_n_steps                             --log-interval
trainer.accelerator=gpu                               --device cuda
trainer.accelerator=cpu                               --device cpu
optim.config.optimizer=adam                           --optimizer adam
optim.config.use_distributed_optimizer=true           --sharding-stage 1
optim.config.main_grads_dtype=bfloat16                --main-grads-dtype bf16
optim.config.exp_avg_dtype=bfloat16                   --exp-avg-dtype bf16
optim.config.exp_avg_sq_dtype=bfloat16                --exp-avg-sq-dtype bf16
optim.lr_scheduler=cosineannealingscheduler           --lr-decay-style cosine
optim.lr_scheduler.warmup_steps                       --lr-warmup-iters
log.ckpt.save_top_k                                   --keep-last
log.ckpt.every_n_train_steps                          --save-interval
log.wandb.project                                     --wandb-project
data.paths                                            --data-path
-  trainer.strategy.ddp.grad_reduce_in_fp32|trainer.plugins.grad_reduce_in_fp32=true log.ckpt.save_last=true
-  trainer.accumulate_grad_batches=1 optim.config.main_params_dtype|optim.config.main_grads_dtype=float32
-  optim.config.exp_avg_dtype|optim.config.exp_avg_sq_dtype=float32 optim.config.bf16=true
-  trainer.strategy.ddp.check_for_nan_in_grad=true
"""
CHANGED = {
    "log.ckpt.save_top_k": "the newest are kept, not those with the best figure",
    "data": "numbers of the published vocabulary, not of a tokenizer",
    "trainer.strategy.virtual_pipeline_model_parallel_size": "stages of each rank",
    "optim.config.use_distributed_optimizer": "moments and main weights are divided among the ranks of dp",
}
IDLE = {
    "how it is computed and exchanged changes the speed alone": """trainer.callbacks* trainer.plugins.params_dtype
        trainer.plugins.pipeline_dtype trainer.plugins.autocast_enabled trainer.strategy.pipeline_dtype
        trainer.strategy.gradient_as_bucket_view trainer.strategy.ddp.average_in_collective model.config.*_fusion
        trainer.strategy.ddp.data_parallel_sharding_strategy trainer.strategy.ddp.bucket_size model.config.tp_comm_*
        model.config.deallocate_pipeline_outputs model.config.cpu_offloading* model.config.gc_interval*""",
    "formats of moments and gradients need no other flag": "optim.config.use_precision_aware_optimizer optim.config.fp16",
    "this suite has its own loop, samplers, logs and files": """trainer.use_distributed_sampler trainer.num_sanity_val_steps
        trainer.strategy.ckpt_parallel_load trainer.strategy.ckpt_include_optimizer log.ckpt.filename log.tensorboard.*
        trainer.enable_checkpointing executor* trainer.strategy.ckpt_*""",
}
LOST = {
    "checkpoints are saved by steps: --save-interval N, or auto with --mean-time-to-interruption": """
        log.ckpt.train_time_interval.*""",
    "its settings stand in NeMo's pretrain_performance_optimizations: say them one by one": "performance_mode",
    "ZeRO 3 is --sharding-stage 3": "trainer.strategy.fsdp",
    "the formats of fp8 are --fp8-format and --fp8-recipe (docs/fp8.md)": "trainer.plugins.fp8* trainer.plugins.*",
    "--optimizer says which there are": "optim.config.* optim.lr_scheduler optim.lr_scheduler.*",
    "fine-tuning is finetune.py": "peft peft.*",
    "the vocabulary is --tokenizer-type, --tokenizer-model, or --vocab-file and --merge-file": "data.tokenizer*",
    "this suite's settings of a network are in docs/flags.md": "model.config.* model",
}


def folder(given):
    root = given["log.log_dir"].value if "log.log_dir" in given else "nemo_experiments"
    return [f"{root}/{given['log.name'].value if 'log.name' in given else 'default'}"]


def resumed(words, given):
    """Load the run's own checkpoints, if there are any."""
    return [("--load", folder(given)), ("--auto-resume", [])] if words[0] == "true" else []


def named_by_folder(words, given):
    raise NoEffect("it is part of the folder of checkpoints")


def decay_steps(words, given):
    """Translate constant_steps. A warm-up that is longer than the run is begun, there as well; the decay comes after it."""
    [(flag, [steps])] = constant(words, given)
    warmup = given.get("optim.lr_scheduler.warmup_steps")
    return [(flag, [str(max(int(steps), int(warmup.value) + 1 if warmup else 1))])]


def flags_of_shape(words, given):
    """The flags of a model without a preset, as the table of models has them."""
    flags: list[tuple[str, list[str]]] = []
    for word in words:
        flags.append((word, [])) if word.startswith("--") else flags[-1][1].append(word)
    return flags


KEYS = Dialect(
    "nemo2",
    "NeMo 2",
    WORDS,
    CHANGED,
    IDLE,
    LOST,
    {
        "shape": flags_of_shape,
        "trainer.devices": ranks,
        "trainer.num_nodes": lambda words, given: [("--nnodes", words)],
        "log.name": lambda words, given: [("--save", folder(given))],
        "log.log_dir": named_by_folder,
        "resume.resume_if_exists": resumed,
        "resume.resume_ignore_no_checkpoint": lambda words, given: [],
        "optim.lr_scheduler.constant_steps": decay_steps,
    },
    programs=("nemo",),
)
_NEMOTRON = """--position-embedding-type rope --rotary-percent 0.5 --squared-relu --disable-bias-linear --hidden-dropout 0
    --attention-dropout 0 --untie-embeddings-and-output-weights --normalization LayerNorm --vocab-size 256000"""
_GEMMA = """--position-embedding-type rope --geglu --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
    --kv-channels 256 --normalization RMSNorm --scale-embedding --max-position-embeddings 8192 --vocab-size 256000"""


def _nemotron(layers: int, hidden: int, ffn: int, heads: int, groups: int = 0, std: str = "", channels: int = 0) -> str:
    own = f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads {heads}"
    own += f" --num-query-groups {groups} --group-query-attention" * bool(groups) + f" --kv-channels {channels}" * bool(
        channels
    )
    return f"{own} --init-method-std {std} {_NEMOTRON}"


MODELS = {
    "gpt-3-175b": "--model-name-or-path 175B --hidden-dropout 0 --attention-dropout 0 --vocab-size 50257",
    "nemotron-3-4b": _nemotron(32, 3072, 9216, 24, 8, "0.0134", 128),
    "nemotron-3-8b": _nemotron(32, 4096, 16384, 32, 0, "0.01"),
    "nemotron-3-22b": _nemotron(40, 6144, 24576, 48, 0, "0.008"),
    "nemotron-4-15b": _nemotron(32, 6144, 24576, 48, 8, "0.0134"),
    "nemotron-4-340b": _nemotron(96, 18432, 73728, 96, 8, "0.0063"),
    "gemma-2b": f"""--num-layers 18 --hidden-size 2048 --num-attention-heads 8 --group-query-attention --num-query-groups 1
        --ffn-hidden-size 16384 {_GEMMA}""",
    "gemma-7b": f"--num-layers 28 --hidden-size 3072 --num-attention-heads 16 --ffn-hidden-size 24576 {_GEMMA}",
    "mistral-nemo-12b": """--num-layers 40 --hidden-size 5120 --num-attention-heads 32 --group-query-attention
        --num-query-groups 8 --kv-channels 128 --ffn-hidden-size 14336 --position-embedding-type rope --rotary-base 1000000
        --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-5 --hidden-dropout 0 --attention-dropout 0
        --untie-embeddings-and-output-weights --vocab-size 131072""",
}
_PARALLEL, _MODEL = "trainer.strategy.", "model.config."
COLUMNS = dict(
    nodes="trainer.num_nodes",
    gpus="trainer.devices",
    tp=f"{_PARALLEL}tensor_model_parallel_size",
    pp=f"{_PARALLEL}pipeline_model_parallel_size",
    vp=f"{_PARALLEL}virtual_pipeline_model_parallel_size",
    cp=f"{_PARALLEL}context_parallel_size",
    ep=f"{_PARALLEL}expert_model_parallel_size",
    etp=f"{_PARALLEL}expert_tensor_parallel_size",
    sp=f"{_PARALLEL}sequence_parallel",
    embedding=f"{_PARALLEL}account_for_embedding_in_pipeline_split",
    loss=f"{_PARALLEL}account_for_loss_in_pipeline_split",
    reduce=f"{_PARALLEL}ddp.overlap_grad_reduce",
    gather=f"{_PARALLEL}ddp.overlap_param_gather",
    seq="data.seq_length",
    gbs="data.global_batch_size",
    mbs="data.micro_batch_size",
    steps="trainer.max_steps",
    eval="trainer.val_check_interval",
    tests="trainer.limit_test_batches",
    lr="optim.config.lr",
    min="optim.lr_scheduler.min_lr",
    warmup="optim.lr_scheduler.warmup_steps",
    granularity=f"{_MODEL}recompute_granularity",
    method=f"{_MODEL}recompute_method",
    layers=f"{_MODEL}recompute_num_layers",
    modules=f"{_MODEL}recompute_modules",
    std=f"{_MODEL}init_method_std",
    balance=f"{_MODEL}moe_router_load_balancing_type",
    coeff=f"{_MODEL}moe_aux_loss_coeff",
    bias=f"{_MODEL}moe_router_bias_update_rate",
)
COMMON = """nodes=1 gpus=8 tp=1 pp=1 cp=1 sp=false seq=4096 gbs=512 mbs=1 steps=1168251 eval=2000 tests=50
    reduce=true gather=true data=MockDataModule trainer.limit_val_batches=32 trainer.log_every_n_steps=10
    trainer.accelerator=gpu trainer.plugins.precision=bf16-mixed trainer.plugins.grad_reduce_in_fp32=true
    trainer.strategy.ddp.grad_reduce_in_fp32=true trainer.strategy.ddp.check_for_nan_in_grad=true
    trainer.strategy.ckpt_async_save=true lr=3e-4 min=3e-5 warmup=2000 optim.config.optimizer=adam
    optim.config.weight_decay=0.1 optim.config.clip_grad=1.0 optim.config.adam_beta1=0.9
    optim.config.adam_beta2=0.95 optim.config.adam_eps=1e-5 optim.config.use_distributed_optimizer=true
    optim.lr_scheduler=CosineAnnealingScheduler optim.lr_scheduler.constant_steps=0 log.name=default
    log.ckpt.save_top_k=10 log.ckpt.save_last=true log.ckpt.train_time_interval.minutes=15
    resume.resume_if_exists=true resume.resume_ignore_no_checkpoint=true"""
ROWS = """
deepseek_v2_lite deepseek-v2-lite ep=8 sp=true trainer.callbacks=DeepEPCallback std=0.006 balance=seq_aux_loss
    coeff=1e-3
deepseek_v3 deepseek-v3 nodes=128 tp=2 pp=16 ep=64 etp=1 sp=true gbs=4096 modules=mla_up_proj+layernorm
    model.config.mtp_num_layers=1 model.config.mtp_loss_scaling_factor=0.1 granularity=selective
    trainer.strategy.ddp.grad_reduce_in_fp32=false trainer.strategy.num_layers_in_first_pipeline_stage=3
    trainer.strategy.num_layers_in_last_pipeline_stage=2 log.ckpt.save_top_k=2 log.ckpt.train_time_interval.minutes=60
    optim.config.use_precision_aware_optimizer=true optim.config.main_params_dtype=float32
    optim.config.main_grads_dtype=bfloat16 optim.config.exp_avg_dtype=bfloat16 optim.config.exp_avg_sq_dtype=bfloat16
    trainer.callbacks=DeepEPCallback std=0.006 balance=seq_aux_loss coeff=1e-4 bias=1e-3
gemma2_27b gemma-2-27b nodes=2 tp=8 pp=2 gbs=32 mbs=2 warmup=500 eval=500 tests=32
gemma2_2b gemma-2-2b tp=2 gbs=32 mbs=2 warmup=500 eval=500 tests=32
gemma2_9b gemma-2-9b tp=8 gbs=32 mbs=2 warmup=500 eval=500 tests=32
gemma3_1b gemma-3-1b seq=8192 steps=10
gemma_2b gemma-2b cp=2 seq=8192
gemma_7b gemma-7b tp=2 cp=2 seq=8192
gpt3_175b gpt-3-175b tp=4 pp=8 vp=6 sp=true seq=2048 gbs=2048 mbs=2 lr=9e-05 min=9e-06
llama2_7b llama-2-7b tp=2
llama31_405b llama-3.1-405b tp=8 pp=8 vp=2 cp=4 sp=true seq=8192 embedding=true loss=true
llama31_70b llama-3.1-70b tp=4 pp=4 vp=5 cp=2 sp=true seq=8192
llama31_8b llama-3.1-8b cp=2 seq=8192
llama31_nemotron_70b llama-3.1-70b tp=4 pp=4 vp=5 cp=2 sp=true seq=8192
llama31_nemotron_nano_8b llama-3.1-8b cp=2 seq=8192
llama32_1b llama-3.2-1b seq=8192
llama32_3b llama-3.2-3b seq=8192
llama3_70b llama-3-70b tp=4 pp=4 vp=5 cp=2 sp=true seq=8192 std=0.008944
llama3_70b_16k llama-3-70b nodes=4 tp=8 pp=2 cp=2 sp=true seq=16384 std=0.008944
llama3_70b_64k llama-3-70b nodes=32 tp=8 pp=4 cp=8 sp=true seq=65536 std=0.008944
llama3_8b llama-3-8b cp=2 seq=8192 std=0.01
llama3_8b_128k llama-3-8b nodes=8 tp=4 pp=2 cp=8 sp=true seq=131072 std=0.01
llama3_8b_16k llama-3-8b nodes=2 tp=4 pp=2 cp=2 sp=true seq=16384 std=0.01
llama3_8b_64k llama-3-8b nodes=4 tp=4 pp=2 cp=4 sp=true seq=65536 std=0.01
mistral_7b mistral-7b-v0.1 cp=2 steps=100
mistral_nemo_12b mistral-nemo-12b tp=2 cp=2 sp=true seq=8192
mixtral_8x22b mixtral-8x22b nodes=16 tp=2 pp=4 vp=14 cp=2 ep=8 sp=true balance=aux_loss coeff=0.01
mixtral_8x22b_64k mixtral-8x22b nodes=16 tp=2 pp=4 vp=14 cp=2 ep=8 sp=true seq=65536 balance=aux_loss coeff=0.01
mixtral_8x7b mixtral-8x7b nodes=8 pp=4 vp=8 ep=8 balance=aux_loss coeff=0.01
mixtral_8x7b_16k mixtral-8x7b nodes=4 tp=4 pp=2 cp=4 sp=true seq=16384 model.config.max_position_embeddings=16384
    balance=aux_loss coeff=0.01
mixtral_8x7b_64k mixtral-8x7b nodes=16 tp=8 pp=4 cp=4 sp=true seq=65536 balance=aux_loss coeff=0.01
nemotron3_22b nemotron-3-22b tp=2 pp=4 vp=10 gbs=32 steps=300000 lr=0.0001 min=1e-05 warmup=500 tests=32
nemotron3_22b_16k nemotron-3-22b tp=4 cp=2 sp=true seq=16384 gbs=32 steps=300000 lr=0.0001 min=1e-05 warmup=500
    tests=32
nemotron3_22b_64k nemotron-3-22b nodes=4 tp=4 pp=2 cp=4 sp=true seq=65536 gbs=32 steps=300000 lr=0.0001 min=1e-05
    warmup=500 tests=32
nemotron3_4b nemotron-3-4b tp=2 gbs=32 mbs=2 warmup=500 tests=32
nemotron3_8b nemotron-3-8b tp=2 gbs=32 mbs=2 steps=300000 warmup=500 tests=32
nemotron4_15b nemotron-4-15b tp=4 sp=true gbs=32 mbs=2 steps=300000 lr=4.5e-05 min=4.5e-05 warmup=500 tests=32
nemotron4_15b_16k nemotron-4-15b tp=2 pp=2 cp=2 sp=true seq=16384 gbs=32 mbs=2 steps=300000 lr=4.5e-05 min=4.5e-05
    warmup=500 tests=32
nemotron4_15b_64k nemotron-4-15b nodes=4 tp=4 pp=2 cp=4 sp=true seq=65536 gbs=32 mbs=2 steps=300000 lr=4.5e-05
    min=4.5e-05 warmup=500 tests=32
nemotron4_340b nemotron-4-340b nodes=768 tp=8 pp=12 vp=8 cp=2 sp=true gbs=2304 steps=100000 lr=0.0001 min=1e-05
    warmup=500 tests=32
phi3_mini_4k_instruct phi-3-mini-4k gpus=1
qwen25_14b qwen2.5-14b tp=4 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false gather=false
qwen25_1p5b qwen2.5-1.5b gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false gather=false
qwen25_32b qwen2.5-32b nodes=2 tp=8 pp=2 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false
    gather=false
qwen25_500m qwen2.5-0.5b gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false gather=false
qwen25_72b qwen2.5-72b nodes=4 tp=8 pp=4 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false
    gather=false
qwen25_7b qwen2.5-7b tp=2 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false gather=false
qwen2_1p5b qwen2.5-1.5b gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false gather=false
qwen2_500m qwen2.5-0.5b gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false gather=false
qwen2_72b qwen2.5-72b nodes=4 tp=8 pp=4 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false
    gather=false
qwen2_7b qwen2.5-7b tp=2 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 reduce=false gather=false
qwen3_14b qwen3-14b tp=8 etp=1 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32
qwen3_1p7b qwen3-1.7b etp=1 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32
qwen3_235b_a22b qwen3-235b-a22b nodes=16 tp=4 pp=16 cp=2 ep=8 etp=1 sp=true gbs=32 steps=300000 warmup=500 eval=500
    tests=32 embedding=true loss=true balance=aux_loss coeff=1e-3
qwen3_30b_a3b qwen3-30b-a3b tp=4 pp=2 ep=4 etp=1 sp=true gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32
    granularity=full method=uniform layers=1 balance=aux_loss coeff=1e-3
qwen3_32b qwen3-32b nodes=2 tp=8 pp=2 etp=1 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32 granularity=full
    method=uniform layers=1
qwen3_4b qwen3-4b tp=2 etp=1 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32
qwen3_600m qwen3-0.6b etp=1 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32
qwen3_8b qwen3-8b tp=4 etp=1 gbs=32 mbs=2 steps=300000 warmup=500 eval=500 tests=32
"""
OTHERS = {
    "^(bert|e5|llama_embedding|llama_reranker)": "encoders are pretrain_bert.py's, which reads no recipe",
    "^t5": "encoder-decoders are pretrain_t5.py's, which reads no recipe",
    "^hyena": "Hyena's convolutions are not part of this suite",
    "^(mamba|nemotronh|nemotron_nano|nemotron5)": "states are --hybrid-layer-pattern or a preset (docs/hybrid.md)",
    "^hf_auto": "models of Hugging Face are imported (docs/huggingface.md)",
    "_(embedding|reranker)": "it is no pretraining",
    "^(llama4|gemma3_4b|gemma3_12b|gemma3_27b)": "its images are not part of this suite",
    "super_49b|ultra_253b": "its layers differ from each other by a search of architectures",
}
NEMO_RECIPES = RecipeTable(
    COLUMNS,
    COMMON,
    ROWS,
    MODELS,
    OTHERS,
    dict(dir="log.log_dir", name="log.name", num_nodes="trainer.num_nodes", num_gpus_per_node="trainer.devices"),
    dict.fromkeys(("-y", "--yes", "--dryrun", "--repl", "--detach", "--tail-logs", "-d", "-r"), ""),
)
NEMO2 = replace(KEYS, own=RecipeRuns(KEYS, NEMO_RECIPES, ("nemo", "llm", "pretrain"), "--factory"))
