# SPDX-License-Identifier: Apache-2.0
"""NeMo 1's YAML of a Megatron GPT (megatron_gpt_config.yaml), for `dialects.translate`."""

from megatron.settings.dialects.table import Dialect

WORDS = """
=  model.data.seq_length model.tokenizer.vocab_file model.tokenizer.merge_file model.data.num_workers
=  model.data.dataloader_type model.data.reset_position_ids model.data.reset_attention_mask model.data.eod_mask_loss
=  model.optim.lr model.optim.weight_decay model.optim.sched.min_lr
=  model.micro_batch_size model.global_batch_size model.rampup_batch_size model.tensor_model_parallel_size
=  model.pipeline_model_parallel_size model.context_parallel_size model.expert_model_parallel_size
=  model.num_layers model.hidden_size model.moe_router_topk
=  model.ffn_hidden_size model.num_attention_heads model.num_query_groups model.kv_channels model.max_position_embeddings
=  model.init_method_std model.hidden_dropout model.attention_dropout model.make_vocab_size_divisible_by
=  model.sequence_parallel model.hysteresis model.seed model.rotary_base model.masked_softmax_fusion
=  model.persist_layer_norm model.gradient_accumulation_fusion
trainer.max_steps                                           --train-iters
trainer.log_every_n_steps                                   --log-interval
trainer.gradient_clip_val                                   --clip-grad
trainer.accelerator=gpu                                     --device cuda
trainer.accelerator=cpu                                     --device cpu
trainer.precision=32                                        --precision fp32
model.megatron_amp_O2=true                                  --amp-level O2
exp_manager.explicit_log_dir                                --save
exp_manager.wandb_logger_kwargs.project                     --wandb-project
exp_manager.wandb_logger_kwargs.name                        --wandb-exp-name
exp_manager.checkpoint_callback_params.every_n_train_steps  --save-interval
exp_manager.checkpoint_callback_params.save_top_k           --keep-last
model.encoder_seq_length                                    --seq-length
model.virtual_pipeline_model_parallel_size                  --num-virtual-stages-per-pipeline-rank
model.num_moe_experts                                       --num-experts
model.apply_query_key_layer_scaling=true                    --apply-query-key-layer-scaling
model.position_embedding_type=learned_absolute              --position-embedding-type learned_absolute
model.position_embedding_type=rope                          --position-embedding-type rope
model.rotary_percentage                                     --rotary-percent
model.normalization=layernorm                               --normalization LayerNorm
model.normalization=rmsnorm                                 --normalization RMSNorm
model.activation=fast-swiglu|swiglu                         --swiglu
model.activation=fast-geglu|geglu                           --geglu
model.activation=squared-relu                               --squared-relu
model.bias=false                                            --disable-bias-linear
model.share_embeddings_and_output_weights=false             --untie-embeddings-and-output-weights
model.use_flash_attention=true                              --attention-backend flash
model.tokenizer.library=huggingface                         --tokenizer-type HuggingFaceTokenizer
model.tokenizer.library=sentencepiece                       --tokenizer-type SentencePieceTokenizer
model.tokenizer.type=gpt2bpetokenizer                       --tokenizer-type GPT2BPETokenizer
model.tokenizer.type|model.tokenizer.model                  --tokenizer-model
model.native_amp_init_scale                                 --initial-loss-scale
model.native_amp_growth_interval                            --loss-scale-window
model.activations_checkpoint_granularity=full               --recompute-granularity full
model.activations_checkpoint_granularity=selective          --recompute-granularity core_attn
model.activations_checkpoint_method                         --recompute-method
model.activations_checkpoint_num_layers                     --recompute-num-layers
model.resume_from_checkpoint                                --load
model.fp8=true                                              --fp8-format hybrid
model.nsys_profile.enabled=true                             --profile
model.nsys_profile.start_step                               --profile-step-start
model.nsys_profile.ranks                                    --profile-ranks
model.nsys_profile.gen_shape=true                           --profile-detailed
model.data.data_prefix                                      --data-path
model.data.index_mapping_dir                                --data-cache-path
model.data.splits_string                                    --split
model.optim.name=fused_adam|adamw                           --optimizer adam
model.optim.name=distributed_fused_adam|mcore_distributed_optim  --optimizer adam; --sharding-stage 1
model.optim.betas                                           --adam-beta1 --adam-beta2
model.optim.overlap_grad_sync                               --overlap-grad-reduce
model.optim.grad_sync_dtype=bf16                            --grad-reduce-in-bf16
model.optim.overlap_param_sync                              --overlap-param-gather
model.optim.sched.name=cosineannealing                      --lr-decay-style cosine
model.optim.sched.name=warmupannealing                      --lr-decay-style linear
model.optim.sched.warmup_steps                              --lr-warmup-iters
-  trainer.accumulate_grad_batches=1 exp_manager.create_wandb_logger=true|false model.mcore_gpt=true|false
-  model.activation=gelu model.bias=true model.share_embeddings_and_output_weights=true model.transformer_block_type=pre_ln
-  model.bias_activation_fusion=true|false model.tokenizer.library=megatron model.fp32_residual_connection=false
-  model.fp16_lm_cross_entropy=false model.optim.grad_sync_dtype=fp32
model.layernorm_epsilon                        --norm-epsilon
model.seq_len_interpolation_factor             --rotary-seq-len-interpolation-factor
model.bias_dropout_add_fusion                  --bias-dropout-fusion
"""

IDLE = {
    "scales of fp8 numbers are those of the numbers themselves, and gradients of outputs are e5m2": """model.fp8_hybrid
        model.fp8_margin model.fp8_interval model.fp8_amax_* model.reduce_amax""",
    "training is as long as --train-iters says": "trainer.max_epochs trainer.check_val_every_n_epoch",
    "this suite has its own loop, samplers, logs and files": """trainer.logger trainer.enable_checkpointing
        trainer.replace_sampler_ddp trainer.use_distributed_sampler trainer.benchmark trainer.enable_model_summary
        trainer.strategy name exp_manager.name exp_manager.log_* exp_manager.step_timing_kwargs.*
        exp_manager.create_tensorboard_logger exp_manager.create_checkpoint_callback
        exp_manager.checkpoint_callback_params.model_parallel_size exp_manager.checkpoint_callback_params.filename
        hydra.*""",
    "how it is computed and exchanged changes the speed alone": """model.grad_allreduce_chunk_size_mb
        model.grad_div_ar_fusion model.gradient_as_bucket_view model.use_cpu_initialization model.onnx_safe
        model.apex_transformer_log_level model.overlap_p2p_comm model.batch_p2p_comm model.pre_process
        model.post_process model.transformer_engine model.ub_tp_* model.gc_interval model.apply_rope_fusion
        model.cpu_offloading_* model.sync_batch_comm model.async_grad_allreduce model.get_attention_mask_from_fusion
        model.defer_embedding_wgrad_compute model.optim.bucket_cap_mb model.optim.contiguous_grad_buffer
        model.megatron_legacy""",
    ".bin/.idx files are always memory-mapped, and their index maps built in seconds": """model.data.data_impl
        model.data.skip_warmup model.data.validation_drop_last model.data.pad_samples_to_global_batch_size
        model.data.mock_dataset model.data.shuffle_documents model.data.no_seqlen_plus_one_input_tokens""",
    "a profile is of --profile-step-start up to --profile-step-end": "model.nsys_profile.*",
}
LOST = {
    ".nemo files are not read; weights of Hugging Face are, by python -m megatron.tools.checkpoint": """
        restore_from_path model.restore_from_path exp_manager.checkpoint_callback_params.always_save_nemo
        exp_manager.checkpoint_callback_params.save_nemo_on_train_end""",
    "checkpoints are kept by age (--keep-last), not by a figure": """exp_manager.checkpoint_callback_params.monitor
        exp_manager.checkpoint_callback_params.mode exp_manager.checkpoint_callback_params.*""",
    "gradient accumulation follows from --global-batch-size": "trainer.accumulate_grad_batches",
    "say --fp8-format e4m3 and other flags of docs/fp8.md": "model.fp8_*",
    "this is not part of --moe-*": "model.moe_*",
    "residuals and the loss have the format of --precision, the loss fp32": """model.fp32_residual_connection
        model.fp16_lm_cross_entropy""",
    "layers have the norms of --norm-position": "model.transformer_block_type",
    "the MLP has GeLU, --squared-relu, --swiglu, --geglu or --quick-geglu": "model.activation",
    "there is --normalization LayerNorm and RMSNorm": "model.normalization",
    "there is --lr-decay-style constant, linear, linear-from-start, cosine, inverse-square-root and WSD": """
        model.optim.sched.*""",
    "gradients are summed in fp32, or in bf16": "model.optim.grad_sync_dtype",
    "--optimizer says which there are": "model.optim.*",
    "the vocabulary is --tokenizer-type, --tokenizer-model, or --vocab-file and --merge-file": "model.tokenizer.*",
    "adapters and conversations are not part of this suite; finetune.py trains whole models": """model.peft.*
        model.data.chat* model.nemo_*""",
}
CHANGED = {
    "trainer.precision": "weights stay in fp32 and formats are chosen op by op, unless model.megatron_amp_O2",
    "model.optim.name": "weight decay is of matrices only, as in Megatron-LM",
    "exp_manager.checkpoint_callback_params.save_top_k": "the newest are kept, not those with the best figure",
}


def folder_of_runs(given):
    asked = [given[key].words for key in ("exp_manager.explicit_log_dir", "exp_manager.exp_dir") if key in given]
    return next((words for words in asked if words[0] not in ("", "null")), ["nemo_experiments"])


def precision(words, given):
    whole = given.get("model.megatron_amp_O2")
    name = words[0].removesuffix("-mixed")
    if name not in ("16", "bf16"):
        raise ValueError(f"{words[0]} is none of 16, bf16, 16-mixed, bf16-mixed, 32")
    level = "O2" if whole and whole.value.lower() == "true" else "O1"
    return [("--fp16" if name == "16" else "--bf16", []), ("--amp-level", [level])]


def resume(words, given):
    """Load the run's own checkpoints; a folder without any is an error unless resume_ignore_no_checkpoint is set."""
    ignored = given.get("exp_manager.resume_ignore_no_checkpoint")
    begins = "--auto-resume" if ignored and ignored.value.lower() == "true" else "--exit-on-missing-checkpoint"
    return [("--load", folder_of_runs(given)), (begins, [])] if words[0].lower() == "true" else []


def ranks(words, given):
    if "," in words[0] or len(words) > 1:
        numbers = ",".join(words)
        return [(f"CUDA_VISIBLE_DEVICES={numbers}", []), ("--nproc-per-node", [str(numbers.count(",") + 1)])]
    return [("--nproc-per-node", ["gpu" if words[0] in ("-1", "auto") else words[0]])]


def minutes(words, given):
    """Convert DD:HH:MM:SS to minutes."""
    days, hours, rest, seconds = (float(part) for part in words[0].split(":"))
    return [("--exit-duration-in-mins", [f"{days * 1440 + hours * 60 + rest + seconds / 60:g}"])]


def constant(words, given):
    """Translate constant_steps: NeMo's cosine decays over the steps before these, which stay at min_lr."""
    steps = given.get("trainer.max_steps")
    if steps is None:
        raise ValueError("trainer.max_steps is not said, less which these steps the decay is long")
    return [("--lr-decay-iters", [str(int(steps.value) - int(words[0]))])]


def batches(flag):
    """Translate a number of batches; a value with a decimal point is a share of the validation set."""

    def computed(words, given):
        if words[0] == "1.0" and flag == "--eval-iters":
            return [("--full-validation", [])]
        if "." in words[0]:
            raise ValueError(
                f"{words[0]} is a share of a data set; {flag} counts, and --full-validation takes all of it"
            )
        return [(flag, words)]

    return computed


COMPUTED = {
    "trainer.val_check_interval": batches("--eval-interval"),
    "trainer.limit_val_batches": batches("--eval-iters"),
    "trainer.limit_test_batches": batches("--test-iters"),
    "trainer.devices": ranks,
    "trainer.precision": precision,
    "exp_manager.exp_dir": lambda words, given: [("--save", words)] * (folder_of_runs(given) == words),
    "trainer.num_nodes": lambda words, given: [("--nnodes", words)],
    "trainer.max_time": minutes,
    "exp_manager.resume_if_exists": resume,
    "exp_manager.resume_ignore_no_checkpoint": lambda words, given: [],  # read by resume()
    "model.optim.sched.constant_steps": constant,
    "model.nsys_profile.end_step": lambda words, given: [("--profile-step-end", [str(int(words[0]) + 1)])],
}
NEMO = Dialect("nemo", "NeMo", WORDS, CHANGED, IDLE, LOST, COMPUTED, hydra=True)
