# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's recipes (megatron.bridge.recipes, August 2026) and the words of its configurations.

Keys of its groups are Megatron-LM's flags: `model.tensor_model_parallel_size` is --tensor-model-parallel-size.
"""

import re
from dataclasses import replace

from megatron.settings.declare import dashed
from megatron.settings.dialects.nemo2 import MODELS, flags_of_shape
from megatron.settings.dialects.recipes import RecipeRuns, RecipeTable
from megatron.settings.dialects.table import Dialect, NoEffect

GROUPS = (
    "model train validation optimizer scheduler ddp dataset logger tokenizer checkpoint rng dist comm_overlap".split()
)
WORDS = """
preset                                             --model-name-or-path
--mixed-precision=bf16_mixed                       --bf16
--mixed-precision=bf16_with_fp8_current_scaling_mixed  --bf16; --fp8-format hybrid; --fp8-recipe tensorwise
--mixed-precision=fp16_mixed                       --fp16
--mock                                             --mock-data
--virtual-pipeline-model-parallel-size             --num-virtual-stages-per-pipeline-rank
--num-layers-in-first-pipeline-stage               --decoder-first-pipeline-num-layers
--num-layers-in-last-pipeline-stage                --decoder-last-pipeline-num-layers
--grad-reduce-in-fp32=false                        --grad-reduce-in-bf16
--use-distributed-optimizer=true                   --sharding-stage 1
--optimizer=adam                                   --optimizer adam
--optimizer=dist_muon                              --optimizer muon; --sharding-stage 1
--main-grads-dtype=bfloat16                        --main-grads-dtype bf16
--exp-avg-dtype=bfloat16                           --exp-avg-dtype bf16
--exp-avg-sq-dtype=bfloat16                        --exp-avg-sq-dtype bf16
--tensorboard-dir                                  --tensorboard-dir
--blend                                            --data-path
--num-moe-experts                                  --num-experts
--layernorm-epsilon                                --norm-epsilon
--pretrained-checkpoint                            --pretrained-checkpoint
-  --grad-reduce-in-fp32=true --main-grads-dtype|--exp-avg-dtype|--exp-avg-sq-dtype|--main-params-dtype=float32
-  --use-distributed-optimizer=false --check-for-nan-in-grad=true --cuda-graph-impl=none
-  --muon-scale-mode=spectral --muon-scalar-optimizer=adam
-  --lr-warmup-init=0.0
"""
CHANGED = {
    "--mock": "numbers of the published vocabulary",
    "--virtual-pipeline-model-parallel-size": "stages of each rank",
    "--use-distributed-optimizer": "moments and main weights are divided among the ranks of dp",
    "--moe-token-dispatcher-type": "by all-to-all; DeepEP or HybridEP only with --moe-flex-dispatcher-backend",
    "--end-weight-decay": "the scheduler sets it at each step, whatever optimizer.weight_decay is",
}
IDLE = {
    "how it is computed and exchanged changes the speed alone": """--pipeline-dtype --*-fusion --*-fusion-impl
        --transformer-impl --cuda-graph-* --average-in-collective --data-parallel-sharding-strategy --tp-comm-*
        --moe-grouped-gemm
        --defer-embedding-wgrad-compute --wgrad-deferral-limit --delay-wgrad-compute --moe-flex-dispatcher-*
        --moe-hybridep-* --moe-deepep-* --moe-shared-expert-overlap --env-vars --muon-fp32-matmul-prec
        --muon-tp-mode --high-priority-a2a-comm-stream --moe-router-dtype --moe-router-padding-for-fp8""",
    "formats of moments and gradients need no other flag": "--use-precision-aware-optimizer",
    "this suite has its own loop, samplers, logs and files": """--skip-getting-attention-mask-from-dataset --data-sharding
        --num-dataset-builder-threads --log-timers-to-tensorboard --use-tokenizer-vocab-size --override-opt-param-scheduler
        --fully-parallel-save --random-seed --lr-wsd-*""",
    "the mean is over all tokens of a step": "--calculate-per-token-loss",
    "of the Lion that may stand beside Muon": "--lion-*",
}
LOST = {
    "the first update has a step's worth of warm-up, as in Megatron-LM": "--lr-warmup-init",
    "a gradient that is not finite ends the run, or --on-nan skip counts it": "--check-for-nan-in-grad",
    "the formats are --bf16, --fp16, --fp8-format and --fp8-recipe (docs/fp8.md)": "--mixed-precision",
    "norms of queries and keys have no weight decay": "--apply-wd-to-qk-layernorm",
    "a vocabulary is --tokenizer-type, --tokenizer-model, or --vocab-file and --merge-file": "--tokenizer-*",
    "fine-tuning is finetune.py": "--peft* --mode --packed-sequence",
    "--data-path, or --mock-data": "--dataset",
}


def decay(words, given):
    """Translate optimizer.weight_decay: Megatron-Core's scheduler sets its own at each step, if it has one."""
    if "--end-weight-decay" in given:
        raise NoEffect("scheduler.end_weight_decay is set at each step, there as well")
    return [("--weight-decay", words)]


def last_decay(words, given):
    """Translate scheduler.end_weight_decay: of a decay that is constant it is all of it."""
    style = given.get("--weight-decay-incr-style")
    same = style is None or style.value == "constant"
    return [("--weight-decay" if same else "--end-weight-decay", words)]


def first_decay(words, given):
    style = given.get("--weight-decay-incr-style")
    return [] if style is None or style.value == "constant" else [("--start-weight-decay", words)]


KEYS = Dialect(
    "megatron-bridge",
    "Megatron-Bridge",
    WORDS,
    CHANGED,
    IDLE,
    LOST,
    {
        "shape": flags_of_shape,
        "--weight-decay": decay,
        "--end-weight-decay": last_decay,
        "--start-weight-decay": first_decay,
        "--mode": lambda words, given: [] if words == ["pretrain"] else None,
        "--dataset": lambda words, given: [] if words[0] in ("mock", "mock_dataset") else None,
    },
    programs=("run_recipe.py",),
    base=True,
)
COLUMNS = dict(
    tp="model.tensor_model_parallel_size",
    pp="model.pipeline_model_parallel_size",
    vp="model.virtual_pipeline_model_parallel_size",
    cp="model.context_parallel_size",
    ep="model.expert_model_parallel_size",
    etp="model.expert_tensor_parallel_size",
    sp="model.sequence_parallel",
    layout="model.pipeline_model_parallel_layout",
    embedding="model.account_for_embedding_in_pipeline_split",
    loss="model.account_for_loss_in_pipeline_split",
    granularity="model.recompute_granularity",
    method="model.recompute_method",
    layers="model.recompute_num_layers",
    modules="model.recompute_modules",
    balance="model.moe_router_load_balancing_type",
    coeff="model.moe_aux_loss_coeff",
    seq="dataset.seq_length",
    gbs="train.global_batch_size",
    mbs="train.micro_batch_size",
    steps="train.train_iters",
    lr="optimizer.lr",
    min="optimizer.min_lr",
    warmup="scheduler.lr_warmup_iters",
    decay="scheduler.lr_decay_iters",
    eval="validation.eval_interval",
    save="checkpoint.save_interval",
    reduce="ddp.overlap_grad_reduce",
    gather="ddp.overlap_param_gather",
    fp32="ddp.grad_reduce_in_fp32",
    nan="ddp.check_for_nan_in_grad",
)
COMMON = """tp=1 pp=1 cp=1 sp=false seq=4096 gbs=32 mbs=2 steps=300000 lr=3e-4 min=3e-5 warmup=500 eval=500 save=500
    reduce=true gather=true fp32=true nan=true mixed_precision=bf16_mixed dataset.mock=true dataset.split=9999,8,2
    dataset.num_workers=8 dataset.reset_attention_mask=false dataset.reset_position_ids=false dataset.eod_mask_loss=false
    dataset.dataloader_type=single validation.eval_iters=32 train.manual_gc=true train.manual_gc_interval=100
    optimizer.optimizer=adam optimizer.weight_decay=0.1 optimizer.adam_beta1=0.9 optimizer.adam_beta2=0.95
    optimizer.adam_eps=1e-8 optimizer.clip_grad=1.0 ddp.use_distributed_optimizer=true ddp.average_in_collective=true
    scheduler.lr_decay_style=cosine scheduler.start_weight_decay=0.033 scheduler.end_weight_decay=0.033
    scheduler.weight_decay_incr_style=constant scheduler.lr_warmup_init=0.0 logger.log_interval=10
    logger.tensorboard_dir=nemo_experiments/default/tb_logs checkpoint.save=nemo_experiments/default/checkpoints
    checkpoint.load=nemo_experiments/default/checkpoints checkpoint.ckpt_format=torch_dist
    checkpoint.fully_parallel_save=true rng.seed=1234 model.transformer_impl=transformer_engine model.cuda_graph_impl=none
    model.cross_entropy_loss_fusion=true"""
ROWS = """
llama2_7b_pretrain_2gpu_h100_bf16_config|llama2_7b_pretrain_config llama-2-7b tp=2 gbs=512 mbs=1 steps=1168251
    warmup=2000 eval=2000 save=2000
llama32_1b_pretrain_1gpu_h100_bf16_config|llama32_1b_pretrain_config llama-3.2-1b seq=8192 gbs=512 mbs=1 steps=1168251
    warmup=2000 eval=2000
llama32_3b_pretrain_1gpu_h100_bf16_config|llama32_3b_pretrain_config llama-3.2-3b seq=8192 gbs=512 mbs=1 steps=1168251
    warmup=2000 eval=2000
llama3_8b_pretrain_2gpu_h100_bf16_config|llama3_8b_pretrain_config llama-3-8b cp=2 seq=8192 gbs=512 mbs=1
    steps=1168251 warmup=2000 eval=2000
llama3_8b_pretrain_16gpu_h100_bf16_16k_config|llama3_8b_16k_pretrain_config llama-3-8b tp=4 pp=2 cp=2 sp=true
    seq=16384 gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000
llama3_8b_pretrain_32gpu_h100_bf16_64k_config|llama3_8b_64k_pretrain_config llama-3-8b tp=4 pp=2 cp=4 sp=true
    seq=65536 gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000
llama3_8b_pretrain_64gpu_h100_bf16_128k_config|llama3_8b_128k_pretrain_config llama-3-8b tp=4 pp=2 cp=8 sp=true
    seq=131072 gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000
llama3_8b_pretrain_2gpu_h100_fp8cs_config|llama3_8b_low_precision_pretrain_config llama-3-8b cp=2 seq=8192 gbs=768
    mbs=1 steps=1168251 lr=0.0006 min=6e-06 warmup=2000 eval=2000 mixed_precision=bf16_with_fp8_current_scaling_mixed
llama3_70b_pretrain_32gpu_h100_bf16_config|llama3_70b_pretrain_config llama-3-70b tp=4 pp=4 vp=5 cp=2 sp=true seq=8192
    gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000
llama3_70b_pretrain_32gpu_h100_bf16_deterministic_config|llama3_70b_pretrain_deterministic_config llama-3-70b tp=4
    pp=4 vp=5 cp=2 sp=true seq=8192 gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000 model.deterministic_mode=true
llama3_70b_pretrain_32gpu_h100_bf16_16k_config|llama3_70b_16k_pretrain_config llama-3-70b tp=8 pp=2 cp=2 sp=true
    seq=16384 gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000
llama3_70b_pretrain_256gpu_h100_bf16_64k_config|llama3_70b_64k_pretrain_config llama-3-70b tp=8 pp=4 cp=8 sp=true
    seq=65536 gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000
llama31_8b_pretrain_2gpu_h100_bf16_config|llama31_8b_pretrain_config llama-3.1-8b cp=2 seq=8192 gbs=512 mbs=1
    steps=1168251 warmup=2000 eval=2000
llama31_70b_pretrain_32gpu_h100_bf16_config|llama31_70b_pretrain_config llama-3.1-70b tp=4 pp=4 vp=5 cp=2 sp=true
    seq=131072 gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000
llama31_405b_pretrain_256gpu_h100_bf16_config|llama31_405b_pretrain_config llama-3.1-405b tp=8 pp=8 vp=2 cp=4 sp=true
    seq=131072 gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000 embedding=true loss=true
llama31_405b_pretrain_256gpu_h100_bf16_deterministic_config|llama31_405b_pretrain_deterministic_config llama-3.1-405b
    tp=8 pp=8 vp=2 cp=4 sp=true seq=131072 gbs=512 mbs=1 steps=1168251 warmup=2000 eval=2000 embedding=true loss=true
    model.deterministic_mode=true
qwen2_500m_pretrain_1gpu_h100_bf16_config|qwen2_500m_pretrain_config qwen2.5-0.5b reduce=false gather=false fp32=false
    nan=false
qwen2_1p5b_pretrain_1gpu_h100_bf16_config|qwen2_1p5b_pretrain_config qwen2.5-1.5b reduce=false gather=false fp32=false
    nan=false
qwen2_7b_pretrain_2gpu_h100_bf16_config|qwen2_7b_pretrain_config qwen2.5-7b tp=2 reduce=false gather=false fp32=false
    nan=false
qwen2_72b_pretrain_32gpu_h100_bf16_config|qwen2_72b_pretrain_config qwen2.5-72b tp=8 pp=4 reduce=false gather=false
    fp32=false nan=false
qwen25_500m_pretrain_1gpu_h100_bf16_config|qwen25_500m_pretrain_config qwen2.5-0.5b reduce=false gather=false
    fp32=false
qwen25_1p5b_pretrain_1gpu_h100_bf16_config|qwen25_1p5b_pretrain_config qwen2.5-1.5b reduce=false gather=false
    fp32=false
qwen25_7b_pretrain_2gpu_h100_bf16_config|qwen25_7b_pretrain_config qwen2.5-7b tp=2 reduce=false gather=false
    fp32=false
qwen25_14b_pretrain_4gpu_h100_bf16_config|qwen25_14b_pretrain_config qwen2.5-14b tp=4 reduce=false gather=false
    fp32=false
qwen25_32b_pretrain_16gpu_h100_bf16_config|qwen25_32b_pretrain_config qwen2.5-32b tp=8 pp=2 reduce=false gather=false
    fp32=false
qwen25_72b_pretrain_32gpu_h100_bf16_config|qwen25_72b_pretrain_config qwen2.5-72b tp=8 pp=4 reduce=false gather=false
    fp32=false
qwen3_600m_pretrain_1gpu_h100_bf16_config|qwen3_600m_pretrain_config qwen3-0.6b
qwen3_1p7b_pretrain_1gpu_h100_bf16_config|qwen3_1p7b_pretrain_config qwen3-1.7b
qwen3_4b_pretrain_2gpu_h100_bf16_config|qwen3_4b_pretrain_config qwen3-4b tp=2
qwen3_8b_pretrain_4gpu_h100_bf16_config qwen3-8b tp=4
qwen3_8b_pretrain_16gpu_h100_bf16_config|qwen3_8b_pretrain_config qwen3-8b gbs=1024 mbs=1 steps=100 warmup=40
    decay=100 save=50 fp32=false optimizer.use_precision_aware_optimizer=true
qwen3_14b_pretrain_8gpu_h100_bf16_config|qwen3_14b_pretrain_config qwen3-14b tp=8
qwen3_32b_pretrain_16gpu_h100_bf16_config|qwen3_32b_pretrain_config qwen3-32b tp=8 pp=2 granularity=full
    method=uniform layers=1
qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config qwen3-30b-a3b tp=4 pp=2 ep=4 etp=1 sp=true granularity=full
    method=uniform layers=1 balance=aux_loss coeff=1e-3
qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config|qwen3_30b_a3b_pretrain_config qwen3-30b-a3b ep=16 etp=1 gbs=1024 mbs=1
    steps=100 warmup=40 decay=100 save=50 fp32=false model.moe_token_dispatcher_type=flex
    model.moe_flex_dispatcher_backend=hybridep model.cuda_graph_impl=transformer_engine
    optimizer.use_precision_aware_optimizer=true balance=aux_loss coeff=1e-3
qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config|qwen3_235b_a22b_pretrain_config qwen3-235b-a22b tp=4 pp=16 cp=2 ep=8
    etp=1 sp=true mbs=1 embedding=true loss=true balance=aux_loss coeff=1e-3
qwen3_next_80b_a3b_pretrain_32gpu_h100_bf16_config|qwen3_next_80b_a3b_pretrain_config qwen3-next-80b-a3b pp=4 ep=8
    etp=1 model.mtp_num_layers=1 model.mtp_loss_scaling_factor=0.1 granularity=selective modules=layernorm+moe+moe_act
    optimizer.apply_wd_to_qk_layernorm=true balance=global_aux_loss coeff=1e-3
gemma2_2b_pretrain_2gpu_h100_bf16_config|gemma2_2b_pretrain_config gemma-2-2b tp=2 reduce=false gather=false
    fp32=false
gemma2_9b_pretrain_8gpu_h100_bf16_config|gemma2_9b_pretrain_config gemma-2-9b tp=8 reduce=false gather=false
    fp32=false
gemma2_27b_pretrain_16gpu_h100_bf16_config|gemma2_27b_pretrain_config gemma-2-27b tp=8 pp=2 reduce=false gather=false
    fp32=false
gemma3_1b_pretrain_1gpu_h100_bf16_config|gemma3_1b_pretrain_config gemma-3-1b seq=32768 gbs=512 mbs=1 steps=1168251
    warmup=2000 eval=2000
gpt3_175b_pretrain_32gpu_h100_bf16_config|gpt3_175b_pretrain_config gpt-3-175b tp=4 pp=8 vp=6 sp=true seq=2048
    gbs=2048 steps=1168251 lr=9e-05 min=9e-06 warmup=2000 eval=2000 save=2000 fp32=false
    comm_overlap.defer_embedding_wgrad_compute=true comm_overlap.wgrad_deferral_limit=50
deepseek_v3_pretrain_1024gpu_h100_bf16_config|deepseek_v3_pretrain_config deepseek-v3 tp=2 pp=16 ep=64 etp=1 sp=true
    gbs=4096 mbs=1 steps=1000000 warmup=2000 eval=2000 save=2000 fp32=false
    layout=Etttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tmL model.mtp_num_layers=1
    model.mtp_loss_scaling_factor=0.1 model.init_method_std=0.006 optimizer.use_precision_aware_optimizer=true
    optimizer.main_grads_dtype=bfloat16 optimizer.exp_avg_dtype=bfloat16 optimizer.exp_avg_sq_dtype=bfloat16
    balance=seq_aux_loss coeff=1e-4
deepseek_v3_pretrain_256gpu_h100_bf16_32nodes_config deepseek-v3 tp=2 pp=8 ep=32 etp=1 sp=true gbs=4096 mbs=1
    steps=1000000 warmup=2000 eval=2000 save=2000 fp32=false
    layout=Etttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttmL model.mtp_num_layers=1
    model.mtp_loss_scaling_factor=0.1 model.init_method_std=0.006 granularity=full method=uniform layers=1
    optimizer.use_precision_aware_optimizer=true optimizer.main_grads_dtype=bfloat16 optimizer.exp_avg_dtype=bfloat16
    optimizer.exp_avg_sq_dtype=bfloat16 balance=seq_aux_loss coeff=1e-4
olmoe_7b_pretrain_8gpu_h100_bf16_config|olmoe_7b_pretrain_config olmoe-1b-7b ep=8 gbs=2048 mbs=1 steps=500000
    warmup=2000 decay=500000 eval=2000 save=2000 fp32=false granularity=selective
    optimizer.use_precision_aware_optimizer=true optimizer.main_grads_dtype=bfloat16 optimizer.exp_avg_dtype=bfloat16
    optimizer.exp_avg_sq_dtype=bfloat16 balance=seq_aux_loss coeff=1e-2
gpt_oss_20b_pretrain_16gpu_h100_bf16_config|gpt_oss_20b_pretrain_config gpt-oss-20b tp=2 pp=4 ep=4 etp=1 sp=true
    gbs=512 mbs=1 steps=1000000 warmup=2000 eval=2000 model.cp_comm_type=a2a model.calculate_per_token_loss=true
    balance=none
gpt_oss_120b_pretrain_64gpu_h100_bf16_config|gpt_oss_120b_pretrain_config gpt-oss-120b tp=2 pp=4 ep=16 etp=1 sp=true
    gbs=512 mbs=1 steps=1000000 warmup=2000 eval=2000 model.cp_comm_type=a2a model.calculate_per_token_loss=true
    balance=none
gpt_oss_20b_pretrain_16gpu_h100_fp8cs_config|gpt_oss_20b_pretrain_fp8_current_scaling_config gpt-oss-20b tp=2 pp=4
    ep=4 etp=1 sp=true gbs=512 mbs=1 steps=1000000 warmup=2000 eval=2000
    mixed_precision=bf16_with_fp8_current_scaling_mixed model.cp_comm_type=a2a model.calculate_per_token_loss=true
    balance=none
kimi_k2_pretrain_512gpu_h100_bf16_config|kimi_k2_pretrain_config kimi-k2 tp=2 pp=16 ep=32 etp=1 sp=true gbs=4096 mbs=1
    steps=1000000 warmup=2000 decay=1000000 eval=2000 save=2000 gather=false
    layout=Etttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tL granularity=selective
    optimizer.optimizer=dist_muon optimizer.muon_momentum=0.95 optimizer.muon_nesterov=true
    optimizer.muon_scale_mode=spectral optimizer.muon_fp32_matmul_prec=medium optimizer.muon_num_ns_steps=5
    optimizer.muon_tp_mode=blockwise optimizer.muon_extra_scale_factor=1 optimizer.muon_scalar_optimizer=adam
    optimizer.lion_beta1=0.95 optimizer.lion_beta2=0.98 ddp.use_distributed_optimizer=false balance=seq_aux_loss
    coeff=1e-3
nemotronh_8b_pretrain_2gpu_h100_bf16_config|nemotronh_8b_pretrain_config nemotron-h-8b tp=2 sp=true seq=8192 gbs=768
    mbs=1 steps=1168251 warmup=2000 eval=10 save=10 gather=false model.moe_aux_loss_coeff=0.0001
    model.moe_router_score_function=sigmoid model.moe_router_enable_expert_bias=true
    model.moe_router_load_balancing_type=seq_aux_loss model.moe_router_dtype=fp32
"""
OTHERS = {
    "_(sft|peft)_|_(sft|peft)$": "it is fine-tuning: finetune.py",
    "_(fp8mx|nvfp4|mxfp8)": "formats with a scale for each 32 or 16 numbers are not part of this suite (docs/fp8.md)",
    "^(nemotronh|nemotron_nano|nemotron_3|mamba|falcon)": "states are --hybrid-layer-pattern or a preset (docs/hybrid.md)",
    "_vl|omni|audio|flux|bagel|wan": "images and sound are not part of this suite",
    "^(moonlight|deepseek_v2|deepseek_v4|glm|kimi_k25|qwen35|minimax)": "its shape has no preset here: give its sizes",
}
FLAGS = {
    **dict.fromkeys(("-ms", "--max_steps"), "train.train_iters"),
    **dict.fromkeys(("-gb", "--global_batch_size"), "train.global_batch_size"),
    **dict.fromkeys(("-mb", "--micro_batch_size"), "train.micro_batch_size"),
    **dict.fromkeys(("-sl", "--seq_length"), "dataset.seq_length"),
    **dict.fromkeys(("-tp", "--tensor_model_parallel_size"), "model.tensor_model_parallel_size"),
    **dict.fromkeys(("-pp", "--pipeline_model_parallel_size"), "model.pipeline_model_parallel_size"),
    **dict.fromkeys(("-cp", "--context_parallel_size"), "model.context_parallel_size"),
    **dict.fromkeys(("-vp", "--virtual_pipeline_model_parallel_size"), "model.virtual_pipeline_model_parallel_size"),
    **dict.fromkeys(("-ep", "--expert_model_parallel_size"), "model.expert_model_parallel_size"),
    **dict.fromkeys(("-etp", "--expert_tensor_parallel_size"), "model.expert_tensor_parallel_size"),
    "--lr": "optimizer.lr",
    "--min_lr": "optimizer.min_lr",
    "--warmup_iters": "scheduler.lr_warmup_iters",
    "--pretrained_checkpoint": "checkpoint.pretrained_checkpoint",
    "--save_dir": "checkpoint.save",
    "--load_dir": "checkpoint.load",
    "--save_interval": "checkpoint.save_interval",
    "--mode": "mode",
    "--dataset": "dataset",
}
BRIDGE_RECIPES = RecipeTable(COLUMNS, COMMON, ROWS, MODELS, OTHERS, words=FLAGS)


def as_flag(key: str) -> str:
    """model.tensor_model_parallel_size -> --tensor-model-parallel-size; a group that is unknown stays a key."""
    group, _, name = key.partition(".")
    if group in GROUPS and name:
        return dashed(name)
    return dashed(key) if key in ("mixed_precision", "env_vars", "mode", "dataset") else key


def ranks_of(name: str) -> tuple[int, int] | None:
    """(nodes, GPUs of each) of a recipe's name: llama3_8b_pretrain_16gpu_h100_bf16_16k_config."""
    full = next((one for row in BRIDGE_RECIPES.names for one in row if name in row and "gpu_" in one), "")
    found = re.search(r"_(\d+)gpu_", full)
    count = int(found[1]) if found else 0
    return (max(1, count // 8), min(8, count)) if count else None


BRIDGE = replace(KEYS, own=RecipeRuns(KEYS, BRIDGE_RECIPES, ("run_recipe.py",), "--recipe", as_flag, ranks_of))
