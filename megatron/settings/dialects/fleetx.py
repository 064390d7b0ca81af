# SPDX-License-Identifier: Apache-2.0
"""PaddleFleetX's keys, and flags for those that are translated one by one; `fleetx_keys.py` translates the others.

`fleetx_files.py` reads its files. What a key means depends on the command that reads it: a purpose.
"""

import re

from megatron.settings.declare import dashed
from megatron.settings.dialects.fleetx_files import SECTIONS
from megatron.settings.dialects.table import Default, Dialect, sentence

NAME = "Data.Train.dataset.name"
TEST_FILES = "Data.Test.dataset.input_dir"
MIXED = "Engine.mix_precision"
GLUE = "cola sst2 mrpc stsb qqp mnli qnli rte wnli".split()  # tasks of Data.Train.dataset.name
# Model.module begins with -> the command that the file is for
MODULES = dict(gptfinetune="task", gptgeneration="generate", gpteval="evaluate")
# The commands of a section, if those are not training and fine-tuning.
SECTION_OF = dict(
    Generation=["generate", "export"], Offline_Eval=["evaluate"], Inference=["generate", "evaluate", "export"]
)

# purpose -> keys whose last part is a flag here, by sections
SAME = dict(
    train="""
        Global: device seed global_batch_size local_batch_size micro_batch_size
        Engine: max_steps num_train_epochs accumulate_steps logging_freq eval_freq eval_iters test_iters
        Engine.save_load: save_steps save_epoch output_dir
        Model: vocab_size vocab_size_divisible_unit hidden_size num_layers num_attention_heads ffn_hidden_size
            max_position_embeddings sequence_parallel virtual_pp_degree scale_qk_by_layer_num use_flash_attn fused_linear
            fuse_attn_qkv recompute_granularity no_recompute_layers
        Data.Train: collate_fn
        Data.Train.dataset: input_dir split max_seq_len
        Data.Train.loader: num_workers collate_fn
        Distributed: mp_degree pp_degree dp_degree
        Distributed.sharding: sharding_degree sharding_stage sharding_offload reduce_overlap broadcast_overlap
        Optimizer: weight_decay
        Optimizer.lr: decay_steps warmup_rate warmup max_lr learning_rate min_lr""",
    task="",
    generate="""
        Global: device seed
        Generation: top_k top_p temperature min_dec_len repetition_penalty use_cache num_beams length_penalty
            num_beam_groups diversity_rate forced_bos_token_id forced_eos_token_id""",
    evaluate="""
        Global: device
        Offline_Eval: eval_path overlapping_eval batch_size""",
    export="""
        Generation: top_k top_p temperature min_dec_len repetition_penalty num_beams length_penalty
            num_beam_groups diversity_rate forced_bos_token_id forced_eos_token_id""",
)
SHAPE = [
    f"Model.{name}"
    for name in "num_layers hidden_size num_attention_heads ffn_hidden_size max_position_embeddings".split()
]
# Other keys, and single values of them (in lower case; true or false for switches).
OTHERS = dict(
    train="""
        Engine.save_load.ckpt_dir                        --load
        Engine.mix_precision.scale_loss                  --initial-loss-scale
        Engine.mix_precision.custom_black_list           --amp-custom-black-list
        Engine.mix_precision.custom_white_list           --amp-custom-white-list
        Model.hidden_dropout_prob                        --hidden-dropout
        Model.attention_probs_dropout_prob               --attention-dropout
        Model.initializer_range                          --init-method-std
        Model.fused_softmax_with_triangular              --masked-softmax-fusion
        Data.Train.sampler.shuffle=false                 --dataloader-type single
        Data.Train.sampler.shuffle=true                  --dataloader-type cyclic
        Distributed.schedule_mode                        --pipeline-schedule
        Distributed.schedule_mode=1f1b                   --pipeline-schedule 1f1b
        Distributed.schedule_mode=f-then-b|fthenb        --pipeline-schedule gpipe
        Distributed.sharding.comm_overlap                --overlap-grad-reduce
        Optimizer.name=adamw|fusedadamw                  --optimizer adam
        Optimizer.beta1                                  --adam-beta1
        Optimizer.beta2                                  --adam-beta2
        Optimizer.epsilon                                --adam-eps
        Optimizer.lr.name=cosineannealingwithwarmupdecay  --lr-decay-style cosine
        Optimizer.lr.name=lineardecaywithwarmup          --lr-decay-style linear-from-start
        Optimizer.lr.run_mode=step                       --lr-step-unit iter
        Optimizer.lr.run_mode=epoch                      --lr-step-unit epoch
        Optimizer.grad_clip.clip_norm                    --clip-grad
        Profiler.enable                                  --profile
        Profiler.profiler_log                            --profile-dir
        Profiler.detailed                                --profile-detailed""",
    task="""
        Data.Train.dataset.root                          --data-path
        Data.Train.dataset.max_length                    --seq-length
        Model.pretrained                                 --pretrained-checkpoint""",
    generate="""
        Distributed.mp_degree                            --tensor-model-parallel-size
        Distributed.pp_degree                            --pipeline-model-parallel-size
        Generation.max_dec_len                           --tokens-to-generate
        Generation.num_return_sequences                  --num-samples""",
    evaluate="""
        Distributed.mp_degree                            --tensor-model-parallel-size
        Distributed.pp_degree                            --pipeline-model-parallel-size
        Offline_Eval.max_seq_len                         --seq-length""",
    export="""
        Engine.save_load.ckpt_dir                        --load
        Engine.save_load.output_dir                      --output
        Distributed.mp_degree                            --tensor-model-parallel-size
        Generation.max_dec_len                           --tokens-to-generate
        Generation.num_return_sequences                  --num-samples""",
)
# Values that ask for the default behaviour.
DONE = """Engine.mix_precision.use_fp16_guard=false Model.name=gpt Model.use_memory_attn=false
    Data.Train.dataset.name=gptdataset Data.Train.sampler.name=gptbatchsampler Data.Train.loader.return_list=false
    Data.Train.sampler.name=distributedbatchsampler Data.Train.sampler.drop_last=true Optimizer.tensor_fusion=false
    Distributed.pp_recompute_interval=1 Distributed.fuse_sequence_parallel_allreduce=false Tuning.enable=false
    Optimizer.grad_clip.name=clipgradbyglobalnorm FusedPasses.enable=false Fused.tensor_fusion=false
    Generation.early_stopping=false Generation.early_finish=true"""
# sentence: keys, or those of their values that the tables above lack, that have no effect
# Most files have these, and no result changes.
USUAL = {
    "--micro-batch-size and --global-batch-size say how many samples a batch has": "Data.Train.sampler.batch_size",
    "weights and ops have the format of the level": "Engine.mix_precision.use_fp16_guard",
    "the tables are always those of operators, communication and memory": """Profiler.record_shapes
        Profiler.profile_memory Profiler.summary.*""",
    "sums over tensor parallel ranks are joined where that is faster": "Distributed.fuse_sequence_parallel_allreduce",
    "a GPT has no token types": "Model.type_vocab_size",
    "kernels are chosen by what is installed; fused or not, the result is the same": """Fused.tensor_fusion
        FusedPasses.enable FusedPasses.fused_passes_list Optimizer.tensor_fusion Model.use_memory_attn""",
    "it is the same choice by other kernels": "Generation.use_topp_sampling Generation.inference",
    "the log has what each step does": "Engine.verbose",
    "a terminal shows how far an evaluation is, and results are over all": "Offline_Eval.logging_freq",
}
IDLE = USUAL | {
    "every batch is full: samples are counted, and the last ones that fill none are left out": """
        Data.Train.sampler.drop_last""",
    "batches are tensors, made by the ranks that need them": "Data.Train.loader.return_list Data.Train.sample_split",
    "the optimizer's own weights and moments are fp32": "Optimizer.multi_precision",
    "schedules always count samples: steps x the batch of each": "Optimizer.lr.use_increments",
    "the search for a layout is --auto-parallel, with --tune-steps": "Tuning.*",
    "the task says its classes, its loss and its metrics": "Model.num_classes Model.loss.* Model.metric.*",
    "a beam search ends when no open beam can beat the finished texts": "Generation.early_stopping",
    "a text ends with its end of document": "Generation.early_finish",
    "the tokenizer says which tokens begin, end and fill up": """Generation.bos_token_id Generation.eos_token_id
        Generation.pad_token_id Generation.decoder_start_token_id""",
}
# The kinds of values of keys that become no flag of training.
KINDS = {
    bool: """Profiler.record_shapes Profiler.profile_memory Profiler.summary.* Optimizer.multi_precision
        Optimizer.lr.use_increments Generation.use_topp_sampling Generation.inference Generation.use_cache
        Model.use_recompute Engine.use_recompute Offline_Eval.cloze_eval *.enable *Quantization.onnx_format
        *Quantization.freeze_embedding *Quantization.channel_wise_abs_max""",
    int: """Engine.verbose Data.Train.sampler.batch_size Model.type_vocab_size Model.num_classes Profiler.scheduler
        Inference.mp_degree Inference.dp_degree Generation.*_token_id Generation.top_k Generation.m??_dec_len
        Generation.num_* Offline_Eval.logging_freq Offline_Eval.batch_size Offline_Eval.overlapping_eval
        Offline_Eval.max_seq_len
        *Quantization.weight_bits *Quantization.activation_bits""",
    float: """Generation.top_p Generation.temperature Generation.repetition_penalty Generation.length_penalty
        Generation.diversity_rate *Prune.ratio *Distillation.distill_loss_ratio *Distillation.T""",
}
# The values above as PaddleFleetX's files have them.
_WRITTEN = """AdamW FusedAdamW CosineAnnealingWithWarmupDecay LinearDecayWithWarmup GPTDataset GPTBatchSampler
    DistributedBatchSampler ClipGradByGlobalNorm GPT 1F1B F-then-B""".split()
WRITTEN = {name.lower(): name for name in _WRITTEN}
# What a message on another value adds: sentence -> key
BESIDES = {
    "; this suite's others by --optimizer NAME": "Optimizer.name",
    "; this suite's others by --lr-decay-style NAME": "Optimizer.lr.name",
}
# sentence -> keys that are refused
REFUSED = {"say --load DIR --finetune for weights to start from": "Model.pretrained"}
# What its engine does where nothing is said.
DEFAULTS = (
    Default("--train-iters", "500000", ("Engine.max_steps", "Engine.num_train_epochs", "Engine.run_mode=epoch")),
    Default("--log-interval", "1", ("Engine.logging_freq",)),
    Default("--eval-iters", "0", ("Engine.eval_iters", "Engine.run_mode=epoch")),
    Default("--eval-interval", "0", ("Engine.eval_freq",), where="Engine.eval_iters"),  # never
    *(
        Default("--initial-loss-scale", "32768", (f"{MIXED}.scale_loss", f"{MIXED}.dtype=bfloat16"), f"{MIXED}.{on}")
        for on in ("enable=[ty1]*", "use_pure_fp16=[ty1]*")
    ),
)
RECOMPUTED = "Model.recompute_granularity Model.no_recompute_layers Model.use_recompute Engine.use_recompute".split()
_COMPRESSION = """Quantization.enable Quantization.pretrained Quantization.weight_quantize_type Quantization.weight_bits
    Quantization.weight_preprocess_type Quantization.activation_quantize_type Quantization.activation_bits
    Quantization.activation_preprocess_type Quantization.quantizable_layer_type Quantization.onnx_format
    Quantization.channel_wise_abs_max Quantization.freeze_embedding Quantization.skip_tensor_map.* Prune.enable
    Prune.cal_sens Prune.criterion Prune.ratio Distillation.enable Distillation.distill_loss_ratio Distillation.T
    Distillation.distillation_loss_type""".split()
COMPRESSION = " ".join(["Compress.pretrained", *_COMPRESSION, *(f"Compress.{key}" for key in _COMPRESSION)])
TEACHER = " Distillation.Teacher.* Compress.Distillation.Teacher.*"
# Read by the functions below.
JOINT = """Model.module Model.use_recompute Engine.use_recompute Engine.run_mode Engine.mix_precision.enable
    Engine.mix_precision.use_pure_fp16 Engine.mix_precision.dtype Engine.mix_precision.level Profiler.scheduler
    Inference.model_dir Inference.mp_degree Inference.dp_degree Offline_Eval.cloze_eval Generation.decode_strategy
    Data.Eval.dataset.name"""
# What is said to other commands of keys that are for this one.
BELONGS = {
    "train": "settings of training, which this command does not do",
    "task": "this belongs to fine-tuning: python finetune.py --task NAME -c FILE",
    "generate": "this belongs to text generation: python -m megatron.tools.generate --load DIR -c FILE",
    "export": "this belongs to the export: python -m megatron.tools.export --load DIR -c FILE",
    "evaluate": "this belongs to evaluation: python -m megatron.tools.evaluate --load DIR -c FILE",
}


def _for(key: str) -> list[str]:
    """The commands that a section is for."""
    return SECTION_OF.get(key.partition(".")[0], ["train", "task"])


def _table(*purposes: str) -> Dialect:
    section, done = "", [row for row in DONE.split() if purposes[0] in _for(row)]
    rows = [f"{row}  -" for row in done]
    for word in " ".join(SAME[purpose] for purpose in purposes).split():
        section = word if word.endswith(":") else section
        rows += [f"{section[:-1]}.{word}  {dashed(word)}"] * (word != section)
    words = "\n".join(rows + [OTHERS[purpose] for purpose in purposes])
    more = dict(idle=IDLE, lost=REFUSED, defaults=DEFAULTS, programs=("train.py", "auto.py"))
    return Dialect("fleetx", "PaddleFleetX", words, **more)


TABLES = {purpose: _table(*of) for purpose, of in dict(train=["train"], task=["train", "task"]).items()}
TABLES |= {purpose: _table(purpose) for purpose in ("generate", "evaluate", "export")}
KNOWN = {row.partition("=")[0] for table in TABLES.values() for row in table.table} | {
    key for key in f"{JOINT} {COMPRESSION}".split() if "*" not in key
}
PATTERNS = " ".join([*IDLE.values(), *REFUSED.values(), COMPRESSION, TEACHER]).split()
PARTS = {key[: dot.start()] for key in (*KNOWN, *PATTERNS) for dot in re.finditer(r"\.", key)} | {*SECTIONS}


def keys_beside(key: str) -> tuple[str, list[str]]:
    """The innermost known section of a key, and the names in it; no section for another first word.

    >>> keys_beside("Optimizer.grad_clip.value")
    ('Optimizer.grad_clip', ['clip_norm', 'name'])
    """
    section = key.rpartition(".")[0]
    while section and section not in PARTS:
        section = section.rpartition(".")[0]
    inside = sorted(one for one in (*KNOWN, *PATTERNS) if section and one.startswith(f"{section}."))
    return section, list(dict.fromkeys(one[len(section) + 1 :].partition(".")[0] for one in inside))


def owners_of(key: str) -> list[str]:
    """The commands that a key is for; empty for an unknown key."""
    section, *rest = key.split(".")
    if section == "Data" and rest[0] in ("Eval", "Test") and key not in KNOWN:
        key = ".".join(["Data", "Train", *rest[1:]])
    known = key in KNOWN or sentence(IDLE | REFUSED | {"-": COMPRESSION + TEACHER}, key)
    if not known:
        return []
    return ["task"] if key in OTHERS["task"].split() and not sentence(REFUSED, key) else _for(key)
