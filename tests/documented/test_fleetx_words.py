# SPDX-License-Identifier: Apache-2.0
"""PaddleFleetX's keys, each with several values, from a file, by -o, and by -o over a file, in every command that reads it:
the value arrives, or a message names the key and where it stands.

What arrives where is written down here by hand; that no key is missing here is looked up in the reader's tables.
"""

from ast import literal_eval

import pytest

from megatron.inference.sampling import Sampling, Search
from megatron.settings.dialects import fleetx
from megatron.settings.dialects.table import sentence
from megatron.settings.reader import SettingsReader
from megatron.settings.schema import GROUPS, TokenizerSettings
from megatron.tasks import finetune_start
from megatron.tools.evaluate import EvaluateOptions
from megatron.tools.export import ExportOptions
from megatron.tools.generate import GenerateOptions

COMMANDS = dict(
    train=GROUPS,
    task={**GROUPS, **finetune_start.groups()},
    generate=dict(generate=GenerateOptions, sampling=Sampling, search=Search, tokenizer=TokenizerSettings),
    evaluate=dict(evaluate=EvaluateOptions, tokenizer=TokenizerSettings),
    export=dict(export=ExportOptions, sampling=Sampling, search=Search, tokenizer=TokenizerSettings),
)
ON, OFF = "true True TRUE yes Yes on 1".split(), "false False no off Off 0".split()

# key, setting, and values: as they are, or as text=value; `switch` is each word for true and false
TRAINING = """
Global.device device cpu gpu=cuda
Global.seed seed 7 8
Global.global_batch_size global_batch_size 16 32
Global.local_batch_size local_batch_size 4 8
Global.micro_batch_size micro_batch_size 2 4
Engine.max_steps train_iters 100 200
Engine.num_train_epochs train_epochs 2 3
Engine.accumulate_steps gradient_accumulation_steps 2 4
Engine.logging_freq log_interval 5 6
Engine.eval_freq eval_interval 11 12
Engine.eval_iters eval_iters 3 4
Engine.test_iters test_iters 5 6
Engine.run_mode full_validation epoch=True
Engine.mix_precision.enable precision switch:fp16/fp32
Engine.mix_precision.use_pure_fp16 precision switch:fp16/fp32
Engine.mix_precision.dtype precision float16=fp16 bfloat16=bf16
Engine.mix_precision.level amp_level O1 o1=O1 o2=O2 O2
Engine.mix_precision.scale_loss initial_loss_scale 1024=1024.0 2048.0
Engine.mix_precision.custom_black_list amp_custom_black_list [a,b]=['a','b'] ["c"]=['c']
Engine.mix_precision.custom_white_list amp_custom_white_list [a,b]=['a','b'] ["c"]=['c']
Engine.use_recompute recompute_granularity switch:full/None
Engine.save_load.save_steps save_interval 10 20
Engine.save_load.save_epoch save_epoch 1 2
Engine.save_load.output_dir save out 'a,b'=a,b
Engine.save_load.ckpt_dir load out other
Model.vocab_size vocab_size 100 200
Model.vocab_size_divisible_unit make_vocab_size_divisible_by 64 32
Model.hidden_size hidden_size 64 96
Model.num_layers num_layers 3 4
Model.num_attention_heads num_attention_heads 2 8
Model.ffn_hidden_size ffn_hidden_size 128 256
Model.hidden_dropout_prob hidden_dropout 0.2 0.3
Model.attention_probs_dropout_prob attention_dropout 0.2 0.3
Model.max_position_embeddings max_position_embeddings 64 128
Model.initializer_range init_method_std 0.01 0.006
Model.use_recompute recompute_granularity switch:full/None
Model.recompute_granularity recompute_granularity full core_attn full_attn
Model.no_recompute_layers no_recompute_layers [0,5]=0,5 [1]='1' "[0, 2]"=0,2
Model.fused_linear fused_linear switch
Model.fuse_attn_qkv fuse_attn_qkv switch
Model.fused_softmax_with_triangular masked_softmax_fusion switch
Model.sequence_parallel sequence_parallel switch
Model.virtual_pp_degree num_virtual_stages_per_pipeline_rank 1 2
Model.scale_qk_by_layer_num apply_query_key_layer_scaling switch
Model.use_flash_attn attention_backend switch:flash/None
Data.Train.dataset.input_dir data_path here=['here'] [a,b]=['a','b'] "c,d"=['c,d']
Data.Train.dataset.split split [949,50,1]=949,50,1 '[8,1,1]'=8,1,1 (7,2,1)=7,2,1
Data.Train.dataset.max_seq_len seq_length 512 256
Data.Train.loader.num_workers num_workers 1 3
Data.Train.loader.collate_fn collate_fn my.mod:fn my:other
Data.Train.collate_fn collate_fn my.mod:fn my:other
Data.Train.sampler.shuffle dataloader_type switch:cyclic/single
Data.Eval.dataset.input_dir valid_data_path there=['there'] [a,b]=['a','b']
Distributed.dp_degree dp_degree 2 4
Distributed.mp_degree tensor_model_parallel_size 2 4
Distributed.pp_degree pipeline_model_parallel_size 2 4
Distributed.schedule_mode pipeline_schedule 1F1B=1f1b F-then-B=gpipe zb-h1
Distributed.sharding.sharding_degree sharding_degree 2 16
Distributed.sharding.sharding_stage sharding_stage 1 2 3
Distributed.sharding.sharding_offload optimizer_cpu_offload switch
Distributed.sharding.comm_overlap overlap_grad_reduce switch
Distributed.sharding.reduce_overlap overlap_grad_reduce switch
Distributed.sharding.broadcast_overlap overlap_param_gather switch
Optimizer.name optimizer AdamW=adam FusedAdamW=adam
Optimizer.weight_decay weight_decay 0.1 0.2
Optimizer.beta1 adam_beta1 0.8 0.7
Optimizer.beta2 adam_beta2 0.95 0.99
Optimizer.epsilon adam_eps 1e-6 1e-7
Optimizer.lr.name lr_decay_style CosineAnnealingWithWarmupDecay=cosine LinearDecayWithWarmup=linear-from-start
Optimizer.lr.run_mode lr_step_unit epoch step=iter
Optimizer.lr.decay_steps lr_decay_iters 100 200
Optimizer.lr.warmup_rate lr_warmup_fraction 0.1 0.2
Optimizer.lr.warmup lr_warmup_fraction 0.1 0.2
Optimizer.lr.warmup lr_warmup_iters 500 10
Optimizer.lr.max_lr lr 1e-4 2.0e-4
Optimizer.lr.learning_rate lr 1e-4 2.0e-4
Optimizer.lr.min_lr min_lr 1e-6 2e-6
Optimizer.grad_clip.clip_norm clip_grad 0.5 2.0
Profiler.enable profile switch
Profiler.scheduler profile_step_start [1,5]=1 "[2, 6]"=2 (3,7)=3
Profiler.scheduler profile_step_end [1,5]=5 "[2, 6]"=6 (3,7)=7
Profiler.profiler_log profile_dir here there
Profiler.detailed profile_detailed switch
Compress.Quantization.enable quantization True=True
Quantization.enable quantization True=True
Quantization.channel_wise_abs_max weight_quantize_type switch:channel_wise_abs_max/abs_max
Quantization.freeze_embedding freeze True=['embedding.*']
Quantization.skip_tensor_map.block_3 quantization_skip [linear1]=blocks.3.mlp.up [linear2]=blocks.3.mlp.down
"""
GENERATION = """Generation.top_k top_k 5 6
Generation.top_p top_p 0.5 0.6
Generation.temperature temperature 0.5 0.6
Generation.max_dec_len tokens_to_generate 5 6
Generation.min_dec_len min_tokens_to_generate 1 2
Generation.num_return_sequences num_samples 2 3
Generation.repetition_penalty repetition_penalty 1.5 2.0
Generation.decode_strategy greedy greedy_search=True
Generation.num_beams num_beams 4 2
Generation.length_penalty length_penalty 0.6 1.0
Generation.num_beam_groups num_beam_groups 2 4
Generation.diversity_rate diversity_penalty 0.5 1.5
Generation.forced_bos_token_id forced_bos_token_id 5 6
Generation.forced_eos_token_id forced_eos_token_id 5 6
"""
ARRIVES = dict(
    train=TRAINING,
    task="""
Data.Train.dataset.name task SST2 CoLA
Data.Train.dataset.root task_data_path glue/SST-2=['glue/SST-2'] x=['x']
Data.Train.dataset.max_length seq_length 128 64
Data.Eval.dataset.split valid_data dev_mismatched=['dev_mismatched.tsv'] dev_matched=['dev_matched.tsv']
Model.pretrained pretrained_checkpoint ckpt other
Optimizer.lr.learning_rate lr 3e-5 1e-5
Engine.num_train_epochs train_epochs 2 3
Model.hidden_size hidden_size 64 96
Engine.mix_precision.use_pure_fp16 precision switch:fp16/fp32
""".replace("task_data_path", "data_path"),
    generate="""
Generation.use_cache use_cache switch
Global.device device cpu gpu=cuda
Global.seed sampling_seed 7 8
Distributed.mp_degree tensor_model_parallel_size 2 4
Distributed.pp_degree pipeline_model_parallel_size 2 4
Engine.save_load.ckpt_dir load out other
Inference.model_dir load out other
Inference.mp_degree tensor_model_parallel_size 2 4
Generation.use_cache use_cache switch
"""
    + GENERATION,
    evaluate="""
Global.device device cpu gpu=cuda
Distributed.mp_degree tensor_model_parallel_size 2 4
Distributed.pp_degree pipeline_model_parallel_size 2 4
Engine.save_load.ckpt_dir load out other
Inference.model_dir load out other
Inference.mp_degree tensor_model_parallel_size 2 4
Offline_Eval.eval_path valid_data wiki.tokens l.jsonl
Offline_Eval.cloze_eval task switch:LAMBADA/WIKITEXT103
Offline_Eval.overlapping_eval overlapping_eval 16 64
Offline_Eval.batch_size micro_batch_size 4 16
Offline_Eval.max_seq_len seq_length 512 256
""",
    export="""
Engine.save_load.ckpt_dir load out other
Engine.save_load.output_dir output out other
Distributed.mp_degree tensor_model_parallel_size 2 4
Inference.mp_degree tensor_model_parallel_size 2 4
"""
    + GENERATION,
)
QAT = ("channel_wise_abs_max", "freeze_embedding", "skip_tensor_map.block_3")
# What a key needs for an effect. Without it the key is named.
BEAMS, HALF = {"Generation.decode_strategy": "beam_search"}, {"Engine.mix_precision.enable": "True"}
NEEDS = {
    "Engine.num_train_epochs": {"Engine.max_steps": "-1"},
    "Engine.save_load.save_epoch": {"Engine.max_steps": "-1", "Engine.num_train_epochs": "2"},
    "Engine.mix_precision.dtype": HALF,
    "Engine.mix_precision.scale_loss": HALF,
    "Engine.mix_precision.custom_black_list": HALF | {"Engine.mix_precision.level": "O1"},
    "Engine.mix_precision.custom_white_list": HALF | {"Engine.mix_precision.level": "O1"},
    "Model.recompute_granularity": {"Model.use_recompute": "yes"},
    "Model.no_recompute_layers": {"Model.use_recompute": "True"},
    "Distributed.sharding.sharding_stage": {"Distributed.sharding.sharding_degree": "2"},
    "Profiler.scheduler": {"Profiler.enable": "True"},
    "Profiler.profiler_log": {"Profiler.enable": "on"},
    "Profiler.detailed": {"Profiler.enable": "1"},
    "Generation.num_beams": BEAMS,
    **{f"Quantization.{key}": {"Quantization.enable": "True"} for key in QAT},
    **{f"Generation.{key}": BEAMS | {"Generation.num_beams": "4"} for key in ("length_penalty", "num_beam_groups")},
    "Generation.diversity_rate": BEAMS | {"Generation.num_beams": "4", "Generation.num_beam_groups": "2"},
}
# Keys and values without effect, for whom; with ! they are refused.
NAMED = """
train Model.type_vocab_size 16
train! Model.name GPT-cn Ernie
train! Model.pretrained weights
train Model.use_memory_attn True
train Model.num_classes 2
train Model.loss.train.name CrossEntropyLoss
train Model.metric.eval.name Accuracy
train! Model.module GPTGenerationModule GPTEvalModule GPTFinetuneModule ErnieModule
train Engine.mix_precision.use_fp16_guard True
train! Engine.mix_precision.level O3 O4
train! Engine.run_mode often
train Engine.max_steps -1
train! Data.Train.dataset.name CoLA SST2 mnli LM_Eval_Dataset
train Data.Train.dataset.root glue
train Data.Train.dataset.max_length 128
train Data.Train.sample_split 2
train! Data.Train.collate_fn own
train! Data.Train.loader.collate_fn own
train Data.Train.loader.return_list True
train! Data.Train.sampler.name Other
train Data.Train.sampler.batch_size 32
train Data.Train.sampler.drop_last False no
train Data.Eval.dataset.name LM_Eval_Dataset
train Data.Eval.dataset.split [8,1,1]
train Data.Eval.dataset.max_seq_len 99
train Data.Eval.sampler.shuffle True on
train Data.Eval.sampler.drop_last False off
train Data.Eval.sampler.batch_size 4
train Data.Eval.loader.num_workers 9
train Data.Eval.loader.collate_fn own
train Data.Eval.sample_split 3
train Data.Test.dataset.input_dir elsewhere
train Data.Test.sampler.drop_last True
train! Distributed.pp_recompute_interval 2
train Distributed.fuse_sequence_parallel_allreduce True
train! Optimizer.name Lamb
train Optimizer.multi_precision True False
train Optimizer.tensor_fusion True
train! Optimizer.lr.name ViTLRScheduler
train Optimizer.lr.use_increments True False
train Engine.verbose 0 3
train! Optimizer.grad_clip.name ClipGradByNorm
train Profiler.record_shapes True False
train Profiler.profile_memory True False
train Profiler.summary.overview True False
train Fused.tensor_fusion True
train FusedPasses.enable True
train FusedPasses.fused_passes_list [x]
train Tuning.enable True
train Tuning.profile_start_step 1
train! Compress.pretrained weights
train Compress.Quantization.weight_bits 8
train! Compress.Prune.enable on 1
train Compress.Prune.ratio 0.1
train Compress.Distillation.Teacher.Model.hidden_size 8
train Quantization.weight_bits 8
train! Prune.enable True
train! Distillation.enable True
train! Compress.Distillation.enable True
train Quantization.pretrained 8
train Compress.Quantization.pretrained 8
train Quantization.weight_quantize_type 8
train Compress.Quantization.weight_quantize_type 8
train Quantization.weight_preprocess_type 8
train Compress.Quantization.weight_preprocess_type 8
train Quantization.activation_quantize_type 8
train Compress.Quantization.activation_quantize_type 8
train Quantization.activation_bits 8
train Compress.Quantization.activation_bits 8
train Quantization.activation_preprocess_type 8
train Compress.Quantization.activation_preprocess_type 8
train Quantization.quantizable_layer_type 8
train Compress.Quantization.quantizable_layer_type 8
train Quantization.onnx_format true
train Compress.Quantization.onnx_format true
train Quantization.channel_wise_abs_max True
train Compress.Quantization.channel_wise_abs_max False
train Quantization.freeze_embedding True
train Compress.Quantization.freeze_embedding True
train Quantization.skip_tensor_map.block_3 linear2
train Compress.Quantization.skip_tensor_map.block_3 [linear1]
generate Quantization.channel_wise_abs_max False
train Prune.cal_sens 8
train Compress.Prune.cal_sens 8
train Prune.criterion 8
train Compress.Prune.criterion 8
train Prune.ratio 8
train Distillation.distill_loss_ratio 8
train Compress.Distillation.distill_loss_ratio 8
train Distillation.T 8
train Compress.Distillation.T 8
train Distillation.distillation_loss_type 8
train Compress.Distillation.distillation_loss_type 8
train Distillation.Teacher.Model.hidden_size 8
train Generation.top_k 50
train Inference.model_dir x
train Inference.mp_degree 1
train Inference.dp_degree 1
train Offline_Eval.eval_path x
train Offline_Eval.logging_freq 10
task Data.Train.dataset.name GPTDataset
task Data.Train.dataset.input_dir x
task Data.Train.dataset.split test
task Data.Eval.sampler.drop_last True
task Model.num_classes 2
generate! Model.module GPTEvalModule GPTFinetuneModule
generate Inference.dp_degree 2
generate Distributed.dp_degree 2
generate! Generation.decode_strategy diverse
generate Generation.early_stopping True
generate Generation.early_finish False
generate Generation.bos_token_id 1
generate Generation.eos_token_id 1
generate Generation.pad_token_id 1
generate Generation.decoder_start_token_id 1
generate Generation.use_topp_sampling True
generate Generation.inference True
generate Compress.Quantization.enable True
evaluate Offline_Eval.logging_freq 10
evaluate Inference.dp_degree 2
evaluate! Model.module GPTGenerationModule
export Inference.model_dir x
export Inference.dp_degree 2
export Generation.use_cache True False
export Distributed.pp_degree 2
export! Model.module GPTFinetuneModule"""
# Values of switches that no command knows.
UNREADABLE = """Model.use_recompute Engine.use_recompute Engine.mix_precision.enable Engine.mix_precision.use_pure_fp16
    Model.sequence_parallel Model.fused_linear Model.use_flash_attn Data.Train.sampler.shuffle Profiler.enable
    Data.Train.sampler.drop_last Tuning.enable Compress.Prune.enable Distributed.sharding.comm_overlap""".split()


class Read:
    """What a command makes of files and overrides: `values` of settings, `where` they come from, and all that is `told`."""

    def __init__(self, command: str, argv: list[str]):
        reader = SettingsReader(COMMANDS[command])
        reader.read_command(argv)
        chosen = reader.resolve()
        self.values = {name: one.value for name, one in chosen.items()}
        self.where = {name: one.where for name, one in chosen.items()}
        self.problems = reader.problems
        self.told = [*reader.problems, *(place for places in reader.notices.values() for place in places)]


def a_file(folder, name: str, entries: dict[str, str]) -> str:
    """A YAML file of dotted keys, one line for each value."""

    def lines(entries: dict[str, str], depth: int = 0):
        for name in dict.fromkeys(key.partition(".")[0] for key in entries):
            yield f"{'  ' * depth}{name}: {entries.get(name, '')}"
            below = {key.partition(".")[2]: value for key, value in entries.items() if key.startswith(f"{name}.")}
            yield from lines(below, depth + 1)

    (folder / name).write_text("\n".join(lines(entries)) + "\n")
    return str(folder / name)


def ways(folder, key: str, value: str, other: str, needs: dict[str, str]):
    """(argv, where the value stands, as messages have it) of a file, -o, and later words over earlier ones."""
    file, over = a_file(folder, "one.yaml", {**needs, key: value}), a_file(folder, "other.yaml", {**needs, key: other})
    alone = a_file(
        folder, "needs.yaml", {**needs, "Global.seed": "1"} if key != "Global.seed" else {**needs, "Engine": ""}
    )
    in_file, on_command = f"{key}", f"-o {key}"
    yield ["-c", file], in_file
    yield ["-c", over, "-c", file], in_file
    yield ["-c", alone, "-o", f"{key}={value}"], on_command
    yield ["-c", over, "-o", f"{key}={value}"], on_command
    yield ["-c", file, "-o", f"{key}={other}", "-o", f"{key}={value}"], on_command


def rows(text: str):
    """(key, setting, [(text, value)], whether it is a switch) of the lists above."""
    for line in text.strip().splitlines():
        key, setting, *words = line.replace(", ", ",\0").split()
        if words[0].startswith("switch"):
            on, _, off = words[0].partition(":")[2].partition("/")
            values = [(word, read(on or "True")) for word in ON] + [(word, read(off or "False")) for word in OFF]
        else:
            pairs = [word.replace("\0", " ").partition("=") for word in words]
            values = [(text, read(value if equals else text)) for text, equals, value in pairs]
        yield key, setting, values


def read(word: str):
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def same(value, wanted) -> bool:
    """As settings hold it: 949,50,1 is a text there, and a tuple for Python."""
    if isinstance(value, str) and isinstance(wanted, tuple):
        wanted = ",".join(map(str, wanted))
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


CASES = [(command, *row) for command, text in ARRIVES.items() for row in rows(text)]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "command, key, setting, values", CASES, ids=[f"{command}-{key}-{setting}" for command, key, setting, _ in CASES]
)
def test_each_value_arrives(command, key, setting, values, tmp_path):
    needs = NEEDS.get(key, {})
    for text, wanted in values:
        others = [word for word, value in values if value != wanted] or ["null"]
        for argv, place in ways(tmp_path, key, text, others[0], needs):
            found = Read(command, argv)
            assert not found.problems, argv
            assert same(found.values.get(setting), wanted), (argv, found.values.get(setting))
            assert wanted is None or place in found.where[setting], (argv, found.where[setting])


# Words of the command line around an -o that changes a value that several keys of the file say; what counts is the last.
SHARDED = {"Distributed.sharding.sharding_degree": "16", "Distributed.sharding.sharding_stage": "2"}
JOINT = [
    ({"Model.use_recompute": "True"}, "--recompute-granularity full -o Model.use_recompute=False", None),
    ({"Model.use_recompute": "True"}, "-o Model.use_recompute=False --recompute-granularity full", None),
    (
        {"Model.recompute_granularity": "core_attn"},
        "--recompute-granularity full -o Model.use_recompute=1",
        "core_attn",
    ),
    (SHARDED, "--sharding-stage 1 -o Distributed.sharding.sharding_degree=8", 2),
    (SHARDED, "-o Distributed.sharding.sharding_degree=8 --sharding-stage 1", 1),
    (SHARDED, "--sharding-stage 3 -o Distributed.sharding.sharding_degree=1", 0),
    (HALF, "--precision fp16 -o Engine.mix_precision.dtype=bfloat16", "bf16"),
    (HALF, "-o Engine.mix_precision.dtype=bfloat16 --precision fp16", "fp16"),
    (HALF, "--precision bf16 -o Engine.mix_precision.enable=off", "fp32"),
]


@pytest.mark.parametrize("entries, words, wanted", JOINT)
def test_joint_values_stand_where_the_override_stands(entries, words, wanted, tmp_path):
    found = Read("train", ["-c", a_file(tmp_path, "one.yaml", entries), *words.split()])
    flag = next(word for word in words.split() if word.startswith("--"))
    assert not found.problems and found.values[flag[2:].replace("-", "_")] == wanted


@pytest.mark.parametrize("command, key, setting, values", [case for case in CASES if case[1] in NEEDS])
def test_what_a_key_needs_is_told(command, key, setting, values, tmp_path):
    for argv, place in ways(tmp_path, key, values[0][0], values[-1][0], {}):
        found = Read(command, argv)
        assert same(found.values.get(setting), values[0][1]) or any(place in told for told in found.told), argv


@pytest.mark.sampled(5)
@pytest.mark.parametrize("line", NAMED.strip().splitlines())
def test_each_key_that_does_nothing_is_named(line, tmp_path):
    command, key, *values = line.split()
    for value in values:
        for argv, place in ways(tmp_path, key, value, "null", {}):
            found = Read(command.rstrip("!"), argv)
            assert any(place in told for told in found.told), argv
            assert bool(found.problems) == command.endswith("!"), (argv, found.problems)


@pytest.mark.parametrize(
    "module, kind", [("GPTModule", "lm"), ("GPTEvalModule", "lm"), ("GPTGenerationModule", "generation")]
)
def test_an_export_is_a_program_of_the_files_module(module, kind, tmp_path):
    entries = {"Model.module": module, "Inference.mp_degree": "2", "Distributed.mp_degree": "8"}
    found = Read("export", ["-c", a_file(tmp_path, "one.yaml", entries)])
    wanted = dict(kind=kind, format="torch-export", tensor_model_parallel_size=2)
    assert not found.problems and {name: found.values.get(name, "lm") for name in wanted} == wanted
    named = Read("export", ["-c", a_file(tmp_path, "one.yaml", entries), "--format", "onnx", "--tp", "1"])
    assert (named.values["format"], named.values["tensor_model_parallel_size"]) == ("onnx", 1)


SIZES = "num_layers hidden_size num_attention_heads ffn_hidden_size max_position_embeddings"
OF_THE_SHAPE = [f"Model.{name}" for name in SIZES.split()]


def owners(key: str) -> set[str]:
    arrive = {command for command, text in ARRIVES.items() for row in rows(text) if row[0] == key}
    return arrive | ({"task"} if "train" in arrive else set())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("key", sorted({case[1] for case in CASES}))
def test_other_commands_name_it(key, tmp_path):
    """A file may serve several commands. The others name the keys of one, or compare its shape with the checkpoint."""
    value = next(values[0][0] for _, name, _, values in CASES if name == key)
    for command in set(COMMANDS) - owners(key):
        for argv, place in ways(tmp_path, key, value, "null", {}):
            found = Read(command, argv)
            compared = key in OF_THE_SHAPE and command in ("generate", "evaluate", "export")
            assert any(place in told for told in (found.where.values() if compared else found.told)), (command, argv)


@pytest.mark.parametrize("key", UNREADABLE)
def test_words_that_are_neither_true_nor_false(key, tmp_path):
    for argv, place in ways(tmp_path, key, "maybe", "null", {}):
        assert any(place in told and "maybe" in told for told in Read("train", argv).problems), argv


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_keys_are_errors_everywhere(command, tmp_path):
    for key in (
        "Model.hiden_size",
        "Engine.mix_precision.levle",
        "Generation.foo",
        "Offline_Eval.batch",
        "Data.Eval.x.y",
    ):
        for text in ("1", "null"):
            for argv, place in ways(tmp_path, key, text, "null", {}):
                assert any(f"{place} is no known key" in told for told in Read(command, argv).problems), argv
    no_blank = Read(command, ["-o", "Engine={max_steps:4}"]).problems  # YAML reads one key without a value
    assert no_blank and no_blank[0].startswith("-o Engine.max_steps:4 is no known key; did you mean Engine.max_steps?")
    sections = "Global Engine.mix_precision Data.Eval.sampler Profiler.summary Model.loss Optimizer.lr Compress.Prune"
    empty = a_file(tmp_path, "empty.yaml", dict.fromkeys(sections.split(), "null"))
    assert not Read(command, ["-c", empty]).problems


def test_no_key_is_missing_here():
    listed = {key for _, key, *_ in CASES} | {line.split()[1] for line in NAMED.strip().splitlines()}
    patterns = " ".join([*fleetx.IDLE.values(), *fleetx.REFUSED.values(), fleetx.COMPRESSION]).split()
    assert fleetx.KNOWN - listed == set()
    for pattern in patterns:
        assert any(sentence({"-": pattern}, key) for key in listed), pattern
