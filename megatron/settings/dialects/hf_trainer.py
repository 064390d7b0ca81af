# SPDX-License-Identifier: Apache-2.0
"""TrainingArguments of Hugging Face's Trainer, and the flags of its run_clm.py, for `dialects.translate`."""

import re

from megatron.settings.dialects.table import Default, Dialect, NoEffect, counts_steps, epochs_unless

WORDS = """
=  gradient_accumulation_steps weight_decay adam_beta1 adam_beta2 lr_scheduler_kwargs.min_lr seed
per_device_train_batch_size                           --micro-batch-size
max_steps                                             --train-iters
learning_rate                                         --lr
adam_epsilon                                          --adam-eps
max_grad_norm                                         --clip-grad
label_smoothing_factor                                --label-smoothing
lr_scheduler_type=linear                              --lr-decay-style linear
lr_scheduler_type=cosine|cosine_with_min_lr           --lr-decay-style cosine
lr_scheduler_type=constant|constant_with_warmup       --lr-decay-style constant
lr_scheduler_type=inverse_sqrt                        --lr-decay-style inverse-square-root
lr_scheduler_type=warmup_stable_decay                 --lr-decay-style WSD
lr_scheduler_kwargs.num_decay_steps                   --lr-wsd-decay-iters
warmup_ratio                                          --lr-warmup-fraction
optim=adamw_torch|adamw_torch_fused|adamw_hf|adamw_apex_fused  --optimizer adam
optim=sgd                                             --optimizer sgd
optim=lion_32bit                                      --optimizer lion
bf16=true                                             --bf16; --amp-level O1
fp16=true                                             --fp16; --amp-level O1
gradient_checkpointing|activation_checkpointing=true  --recompute-granularity full
torch_compile=true                                    --torch-compile
logging_strategy=epoch                                --log-epoch
logging_steps                                         --log-interval
logging_dir                                           --tensorboard-dir
run_name                                              --wandb-exp-name
project|WANDB_PROJECT                                 --wandb-project
eval_steps                                            --eval-interval
save_steps                                            --save-interval
save_total_limit                                      --keep-last
output_dir                                            --save
use_cpu|no_cuda=true                                  --device cpu
dataloader_num_workers                                --num-workers
fsdp=full_shard|full_shard auto_wrap                  --sharding-stage 3
fsdp=shard_grad_op|shard_grad_op auto_wrap            --sharding-stage 2
fsdp=full_shard offload                               --sharding-stage 3; --param-cpu-offload; --optimizer-cpu-offload
ddp_backend                                           --distributed-backend
full_determinism=true                                 --deterministic-mode
block_size                                            --seq-length
do_train=false                                        --skip-train
save_only_model=true                                  --no-save-optim
-  max_steps=-1 logging_strategy=steps report_to=none dataloader_drop_last=true fsdp=no_shard model_type=gpt2
-  do_train=true do_eval=true|false
"""

IDLE = {
    "data, formats and ranks are arranged by this suite": """dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_in_order ddp_find_unused_parameters ddp_bucket_cap_mb
        ddp_broadcast_buffers ddp_static_graph gradient_checkpointing_kwargs* torch_empty_cache_steps
        preprocessing_num_workers remove_unused_columns average_tokens_across_devices eval_do_concat_batches
        low_cpu_mem_usage use_fast_tokenizer tf32 local_rank accelerator_config* parallelism_config*
        dataloader_multiprocessing_context""",
    "validation takes the training batch": "per_device_eval_batch_size eval_accumulation_steps",
    "a folder that is not empty is resumed from, or refused": "overwrite_output_dir",
    "the log is this suite's; --console, --log-file and --log-interval say where and how often": """log_level*
        disable_tqdm log_on_each_node logging_first_step logging_nan_inf_filter include_num_input_tokens_seen
        skip_memory_metrics""",
    "evaluation has the format of training, and begins at the first --eval-interval": """bf16_full_eval fp16_full_eval
        eval_delay eval_on_start eval_use_gather_object""",
    "the test part of --split is evaluated after training": "do_predict",
    "kernels are this suite's own, and training keeps no cache of keys and values": """use_liger_kernel
        liger_kernel_config use_cache activation_checkpointing_kwargs""",
    "--check-replicas-interval, --on-nan and --debug watch a run": "debug restore_callback_states_from_checkpoint",
    "the loss is what is evaluated": "prediction_loss_only include_for_metrics batch_eval_metrics label_names",
    "checkpoints hold everything needed to resume": "save_on_each_node ignore_data_skip save_safetensors",
    "the vocabulary is written into the token files' record": "overwrite_cache cache_dir streaming",
    "compiled layers take torch's own choices": "torch_compile_backend torch_compile_mode",
}
MODEL = "model model_path model_id model_name_or_path"
PLANS = "--published"  # a flag of megatron.tools.plan alone
# Words of TRL, PEFT, `generate` of transformers and planners that are no flags, what is meant here, and the flag by which a
# command is known that the row is for (default: any flag that the sentence has). The first row for a command counts.
MEANT_HERE = (
    ("max_length", "say --tokens-to-generate, which counts new tokens alone"),
    ("max_length max_seq_length", "say --seq-length"),
    ("eos_token_id", "say --stop-token-ids"),
    ("suppress_tokens sequence_bias", "say --logit-bias TOKEN:X, as in --logit-bias 7:-inf"),
    ("no_repeat_ngram_size", "say --repetition-penalty, or --bad-words-ids"),
    ("typical_p epsilon_cutoff eta_cutoff top_h", "tokens are chosen by --temperature, --top-k, --top-p and --min-p"),
    (
        "device_map",
        "say --device; ranks share a model by --tensor-model-parallel-size and --pipeline-model-parallel-size",
    ),
    ("config_overrides", "say --num-layers, --hidden-size, --num-attention-heads"),
    ("warmup_steps", "say --lr-warmup-iters"),
    ("dataloader_drop_last", "samples are counted by --train-iters; an incomplete last batch is left out"),
    ("do_train do_eval", "training is what is done; --eval-interval and --eval-iters say how it is evaluated"),
    ("resume_from_checkpoint", "say --load FOLDER, the --save of that run"),
    ("train_file validation_file", "say --train-data FILE and --valid-data FILE: conversations", "--chat-template"),
    (
        "dataset_config dataset_train_split dataset_test_split",
        "say --train-data and --valid-data, with files or splits",
    ),
    ("dataset_num_proc", "conversations are encoded once, and kept in --data-cache-path", "--chat-template"),
    (
        "eos_token pad_token dataset_kwargs",
        "--chat-template writes the end of an answer; samples are padded without loss",
    ),
    ("padding_free packing_strategy", "say --packing"),
    ("ref_model ref_model_name_or_path", "say --reference-load FOLDER"),
    (
        "reference_free precompute_ref_log_probs sync_ref_model",
        "the reference is --reference-load, or the model that the run begins with, and stays as it is",
    ),
    ("loss_type f_divergence_type rpo_alpha", "the loss is DPO's own: --dpo-beta, --dpo-label-smoothing"),
    ("max_prompt_length max_completion_length truncation_mode", "a text longer than --seq-length loses its end"),
    ("lora_task_type task_type peft_type", "--lora-rank alone starts adapters, of any model"),
    ("layers_to_transform layers_pattern exclude_modules", "say --lora-target, as in --lora-target 'blocks.[0-3].*'"),
    (
        "init_lora_weights rank_pattern alpha_pattern lora_bias",
        "pairs begin as PEFT's do, and have one --lora-rank and one --lora-alpha",
    ),
    (
        "dataset_name",
        "conversations are finetune.py --train-data FILE; preprocess_data.py --input hf://datasets/ORG/NAME makes token "
        "files of texts, for --data-path",
    ),
    ("dataset_text_field text_column text_column_name", "preprocess_data.py --json-keys names the text"),
    (
        "dataset_text_field text_column text_column_name",
        "preprocess_data.py --json-keys NAME makes token files of the texts, for --data-path",
    ),
    ("torch_dtype dtype model_dtype", "say --dtype, as in --dtype bf16"),
    ("torch_dtype dtype model_dtype", "say --precision, as in --precision bf16"),
    ("assistant_only_loss completion_only_loss", "the loss is on answers alone, unless --train-on-prompt is given"),
    ("chat_template_path", "say --chat-template"),
    ("packing", "say --packing, with finetune.py --task chat"),
    ("beta", "say --dpo-beta"),
    ("use_peft", "say --lora-rank R"),
    ("r lora_r", "say --lora-rank"),
    ("target_modules lora_target_modules", "say --lora-target, which names layers as they are called here"),
    ("modules_to_save lora_modules_to_save", "say --train-only PATTERN, beside --lora-rank"),
    ("load_in_4bit load_in_8bit", "a base of --lora-rank is not quantized in training (see checkpoint quantize)"),
    ("merge_and_unload", "checkpoint merge-lora does it, and to-hf by itself, of a run with --lora-rank"),
    ("neftune_noise_alpha", "no noise is added to embeddings (--hidden-dropout)"),
    ("eval_strategy save_strategy", "say --eval-interval, --save-interval, or --save-epoch"),
    ("report_to", "say --wandb-project, or --tensorboard-dir"),
    ("do_sample", "tokens are drawn (--temperature, --top-k, --top-p) unless --greedy is given"),
    ("apply_chat_template", "generate --chat writes prompts in the chat template, as megatron.tools.serve does"),
    (MODEL, "say --model-name-or-path: a known shape, such as llama-3-8b, or a folder of checkpoints", PLANS),
    (MODEL, "say --load, or --load-exported for a folder of Hugging Face", "--load-exported"),
    (
        MODEL,
        "say --load for a folder of checkpoints, or --model-name-or-path for a known shape, such as llama-3-8b",
        "--model-name-or-path",
    ),
    (MODEL, "say --load, a folder of checkpoints"),
    ("gpus n_gpu ngpus", "say --world-size: ranks in all (--local-world-size: ranks of a node)", PLANS),
    ("nodes num_nodes n_nodes", "say --world-size, ranks in all, and --local-world-size, ranks of a node", PLANS),
    ("gpu gpu_type gpu_name gpu_model hardware", "say --device-name, as in --device-name H100", PLANS),
    ("gpu_memory gpu_memory_gb vram", "say --device-memory-gb", PLANS),
    ("gpu gpus n_gpu ngpus", "--device cuda; megatron.tools.launch --nproc-per-node N starts a process for each GPU"),
)
LOST = {
    "it counts steps or epochs: --save-interval, --save-epoch, --eval-interval, --eval-epoch": """logging_strategy
        eval_strategy evaluation_strategy save_strategy""",
    "token files are made by preprocess_data.py --input FILE.jsonl --output-prefix P; say --data-path P_text_document": """
        train_file validation_file dataset_name dataset_config_name validation_split_percentage max_train_samples
        max_eval_samples keep_linebreaks""",
    "weights of Hugging Face become a checkpoint by python -m megatron.tools.checkpoint, then --load and --finetune": """
        model_name_or_path config_name torch_dtype dtype model_revision token attn_implementation""",
    "pretraining keeps the newest checkpoints (--keep-last, --save-retain-interval), finetune.py the best one": """
        load_best_model_at_end metric_for_best_model greater_is_better""",
    "nothing is sent to a hub": "push_to_hub* hub_* trackio_*",
    "translate that file by itself: --from deepspeed FILE": "deepspeed",
    "how units are cut is this suite's: a layer each": """fsdp_config* fsdp_min_num_params
        fsdp_transformer_layer_cls_to_wrap""",
    "order, weights and dropout have one seed: --seed": "data_seed",
    "code from a model's folder is never run": "trust_remote_code",
    "samples have one length, and each is a row of tokens": """group_by_length length_column_name
        train_sampling_strategy neftune_noise_alpha auto_find_batch_size""",
    "there is --lr-decay-style constant, linear, linear-from-start, cosine, inverse-square-root and WSD": "lr_scheduler_*",
    "--optimizer says which there are": "optim optim_args optim_target_modules",
    "checkpoints are saved at steps, and where a signal asks for it: --exit-signal-handler": "enable_jit_checkpoint",
}
CHANGED = {
    "per_device_train_batch_size": "samples are rows of --seq-length tokens, cut from all documents one after the other",
    "warmup_ratio": "a share of the decay's length, by default that of the run",
    "bf16": "weights stay in fp32 and formats are chosen op by op, as there; --amp-level O2 is faster",
    "fp16": "weights stay in fp32 and formats are chosen op by op, as there; --amp-level O2 is faster",
    "eval_steps": "--eval-iters batches of the validation part of --split, not a whole data set (--full-validation)",
}


def warmup(words, given):
    """Translate warmup_steps: a number of steps, or below 1 a share of them."""
    if float(words[0]) == 0 and "warmup_ratio" in given:
        raise NoEffect("warmup_ratio says how long warm-up is")
    share = 0 < float(words[0]) < 1
    return [("--lr-warmup-fraction" if share else "--lr-warmup-iters", [words[0]])]


def warmup_share(words, given):
    steps = given["warmup_steps"].value if "warmup_steps" in given else "0"
    if not re.fullmatch(r"-.*|[0.]+", steps):
        raise NoEffect(f"warmup_steps {steps} says how long warm-up is, there as well")
    return [("--lr-warmup-fraction", words)]


def resume(words, given):
    """Translate resume_from_checkpoint: a folder, or true for the newest checkpoint of output_dir."""
    newest = words[0].lower() == "true"
    if newest and "output_dir" not in given:
        raise ValueError("say --load DIR: there is no output_dir")
    return [("--load", given["output_dir"].words if newest else words)] * (words[0].lower() != "false")


def each_epoch(each, others):
    """Translate a strategy; its value `epoch` needs a training that is counted in epochs."""

    def computed(words, given):
        if words[0] == "epoch" and counts_steps(given, "max_steps"):
            raise ValueError(f"the training has max_steps: say {each[0][0].replace('epoch', 'interval')} STEPS")
        if words[0] not in ("epoch", *others):
            raise ValueError(f"'{words[0]}' is none of epoch, {', '.join(others)}")
        return each if words[0] == "epoch" else others[words[0]]

    return computed


def trackers(words, given):
    """Translate report_to: wandb needs a project, TensorBoard a folder; other trackers are refused."""
    flags = []
    for word in words:
        if word == "wandb" and not {"project", "WANDB_PROJECT"} & set(given):
            flags.append(("--wandb-project", ["huggingface"]))
        elif word == "tensorboard" and "logging_dir" not in given:
            raise ValueError("say --tensorboard-dir DIR")
        elif word not in ("wandb", "tensorboard", "none"):
            raise ValueError(f"'{word}' is no tracker of this suite: --wandb-project and --tensorboard-dir are")
    return flags


NEVER = [("--eval-iters", ["0"])]
AT_EPOCHS = [("--eval-epoch", ["1"]), ("--eval-interval", ["0"])]  # never in between


GPT2_CONFIG = dict(
    pair.split("=")
    for pair in """n_embd=--hidden-size n_layer=--num-layers n_head=--num-attention-heads vocab_size=--vocab-size
    n_positions=--max-position-embeddings n_inner=--ffn-hidden-size resid_pdrop=--hidden-dropout
    attn_pdrop=--attention-dropout""".split()
)


def overrides(words, given):
    """Translate run_clm.py's n_embd=1024,n_layer=24,n_head=16,n_positions=1024."""
    pairs = [pair.partition("=") for word in words for pair in word.split(",") if pair]
    unknown = [name for name, _, _ in pairs if name not in GPT2_CONFIG]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: known are {', '.join(GPT2_CONFIG)}")
    return [(GPT2_CONFIG[name], [value]) for name, _, value in pairs]


PROGRAMS = ("run_clm.py", "train.py")
CONFIGS = {"deepspeed": "deepspeed", "": "tree"}  # run_clm.py args.json
COMPUTED = {
    "warmup_steps": warmup,
    "warmup_ratio": warmup_share,
    "num_train_epochs": epochs_unless("max_steps"),
    "report_to": trackers,
    "resume_from_checkpoint": resume,
    "save_strategy": each_epoch([("--save-epoch", ["1"])], dict(no=[], steps=[])),
    "eval_strategy": each_epoch(AT_EPOCHS, dict(no=NEVER, steps=[])),
    "evaluation_strategy": each_epoch(AT_EPOCHS, dict(no=NEVER, steps=[])),
    "ddp_timeout": lambda words, given: [("--distributed-timeout-minutes", [f"{float(words[0]) / 60:g}"])],
    "tokenizer_name": lambda words, given: [
        ("--tokenizer-type", ["HuggingFaceTokenizer"]),
        ("--tokenizer-model", words),
    ],
    "config_overrides": overrides,
}
DEFAULTS = (
    Default("--lr", "5e-5"),
    Default("--weight-decay", "0"),
    Default("--micro-batch-size", "8"),
    Default("--log-interval", "500"),
    Default("--save-interval", "500", ("save_strategy=no", "save_strategy=epoch")),
    Default("--seed", "42"),
    Default("--eval-iters", "0", ("eval_strategy", "evaluation_strategy", "do_eval=true")),
    Default("--train-epochs", "3", ("max_steps=[1-9]*",)),
    Default("--dataloader-type", "cyclic"),
)
HF_TRAINER = Dialect(
    "hf-trainer",
    "Hugging Face Trainer",
    WORDS,
    CHANGED,
    IDLE,
    LOST,
    COMPUTED,
    DEFAULTS,
    programs=PROGRAMS,
    configs=CONFIGS,
    nearby={keys: text for keys, text, *_ in reversed(MEANT_HERE)},
)
