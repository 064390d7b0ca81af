# SPDX-License-Identifier: Apache-2.0
"""The command line: spellings, layers of settings, answers to what is wrong, help and the generated page."""

import re
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import UsageError
from megatron.settings.dialects import megatron_lm
from megatron.settings.help import config_text, value_text
from megatron.settings.parse import parse, parse_pretrain
from megatron.settings.schema import GROUPS, Model, Optimizer, TokenizerSettings, setting
from megatron.settings.spelling import settings_of, spellings_of
from megatron.tools import flag_docs
from preprocess_data import PreprocessOptions

ROOT = Path(__file__).resolve().parents[2]
SHAPE = "--num-layers 2 --hidden-size 8 --num-attention-heads 2".split()
NAMES = (ROOT / "tests" / "settings" / "megatron_flags.txt").read_text().split()


def read(line: str):
    return parse_pretrain(SHAPE + line.split())


def refused(line: str, shape=SHAPE) -> str:
    with pytest.raises(UsageError) as caught:
        parse_pretrain(shape + line.split())
    assert caught.value.code == 2
    return str(caught.value)


# Values and spellings -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kinds:
    """One field of each kind."""

    count: int = setting("a count", 1, "--number", "--seven=7")
    share: float = setting("a share", 0.5)
    word: str = setting("a word", "x")
    on: bool = setting("on by default", True)
    off: bool = setting("off by default", False, "--enable-off", "--without-off=false")
    choice: Literal["a", "B", 3] = setting("one of them", "a", "--be~=B", also=dict(bee="B"))
    numbers: Optional[list[int]] = setting("several", None)
    words: Optional[list[str]] = setting("several", None)
    maybe: Optional[int] = setting("a count or nothing", None)


@pytest.mark.parametrize(
    "line, name, value",
    [
        ("--count 3", "count", 3),
        ("--count=3", "count", 3),
        ("--count 1e3", "count", 1000),
        ("--number 4", "count", 4),
        ("--seven", "count", 7),
        ("--seven false", "count", 1),
        ("--share 1e-4", "share", 1e-4),
        ("--share -0.5", "share", -0.5),
        ("--share -1e-4", "share", -1e-4),
        ("--on", "on", True),
        ("--no-on", "on", False),
        ("--no-on true", "on", False),
        ("--no-on false", "on", True),
        ("--on false", "on", False),
        ("--on=off", "on", False),
        ("--off", "off", True),
        ("--off true", "off", True),
        ("--off False", "off", False),
        ("--no-off", "off", False),
        ("--enable_off=1", "off", True),
        ("--off --without-off false", "off", True),
        ("--without-off", "off", False),
        ("--choice 3", "choice", 3),
        ("--choice A", "choice", "a"),
        ("--choice bee", "choice", "B"),
        ("--be", "choice", "B"),
        ("--be --choice 3", "choice", 3),
        ("--numbers 1 2 3", "numbers", [1, 2, 3]),
        ("--words 0.5 a", "words", ["0.5", "a"]),
        ("--words --- a -----", "words", ["---", "a", "-----"]),
        ("--maybe 2", "maybe", 2),
        ("--count 1 --count 2", "count", 2),
        ("--count 2 --number 2", "count", 2),
        ("", "maybe", None),
        ("--count 1 --then --number 2", "count", 2),
        ("--number 1 --then --on", "count", 1),
        ("--on --then --no-on", "on", False),
        ("--choice a --then --be", "choice", "B"),
    ],
)
def test_a_flag_sets_its_field(line, name, value):
    found = getattr(parse(line.split(), {"kinds": Kinds})["kinds"], name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "line, words",
    [
        ("--count x", "--count 'x' is not a whole number"),
        ("--count 1.5", "--count '1.5' is not a whole number"),
        ("--share nan", "--share 'nan' is not a finite number"),
        ("--count", "--count takes one value (a whole number), got none"),
        ("--count 1 2", "--count takes one value (a whole number), got 2: 1 2"),
        ("--on maybe", "--on 'maybe' is neither true nor false"),
        ("--choice c", "--choice 'c' is none of a, B, 3"),
        ("--choice bb", "--choice 'bb' is none of a, B, 3, bee; did you mean B?"),
        ("--numbers", "--numbers needs at least one value"),
        ("--numbers 1 b", "--numbers 'b' is not a whole number"),
        ("--seven 8", "--seven '8' is neither true nor false"),
        ("--coutn 3", "unknown flag --coutn; did you mean --count?"),
        ("-count 3", "unknown flag -count; did you mean --count?"),
        ("stray --count 3", "'stray' belongs to no flag"),
        ("--count 1 --number 2", "--count 1 and --number 2 contradict each other (both set --count)"),
        ("--count 3 --then --count 1 --number 2", "--count 1 and --number 2 contradict each other"),
        ("--be --choice a", "--be and --choice a contradict each other"),
        ("stray other --count 3", "'stray', 'other' belong to no flag"),
        ("-- python -m pretrain_gpt --count 3", "takes the flags alone: leave '-- python -m pretrain_gpt' out"),
        ("--then stray --count 3", "'stray' belongs to no flag"),
        ("--num-layers 3", "--num-layers is a setting of pretraining; this command has no use for it"),
        ("--word=", "--word is empty"),
        (
            "--word --x-",
            "--word takes one value (a word), got none (of one that begins with a dash, both are one word: ",
        ),
    ],
)
def test_a_wrong_flag_is_answered(line, words):
    with pytest.raises(UsageError, match=re.escape(words)):
        parse(line.split(), {"kinds": Kinds}, prog="tool")


def test_all_problems_come_at_once():
    text = refused("--lr x --seq-length --bf16 --fp16 --frobnicate --mtp-hsm", shape=[])
    for words in (
        "6 problems",
        "--lr 'x'",
        "--seq-length takes one",
        "--bf16 and --fp16",
        "unknown flag --frobnicate",
        "--mtp-hsm is not supported",
        "missing: --num-layers, --hidden-size, --num-attention-heads",
    ):
        assert words in text


@pytest.mark.parametrize(
    "words, said",
    [
        ("--hybrid-layer-pattern a.py b.py", "got 2: a.py b.py (a value with * or spaces stands in quotes"),
        ("--hybrid-override-pattern -M*-", "--hybrid-override-pattern takes one value (a word), got none"),
    ],
)
def test_what_follows_from_a_wrong_value_is_not_missing(words, said):
    text = refused(words, shape=[])
    assert said in text and "missing: --hidden-size, --num-attention-heads" in text


def test_a_tilde_is_the_home_folder_in_flags_and_files(tmp_path, monkeypatch):
    """Shells leave it alone in --flag=~/x, and config files know no shell."""
    monkeypatch.setenv("HOME", "/users/me")
    config = read("--load=~/runs/a --data-path 0.5 ~/data/x 0.5 b~/y --save ~")
    assert config.checkpoint.load == "/users/me/runs/a" and config.checkpoint.save == "/users/me"
    assert config.data.data_path == ["0.5", "/users/me/data/x", "0.5", "b~/y"]
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.yaml").write_text("save: ~/runs/b\ntensorboard_dir: runs/~c\n")
    (tmp_path / "b.yaml").write_text("Engine: {save_load: {output_dir: ~/runs/c}}\n")
    config = read("--config=~/a.yaml")
    assert config.checkpoint.save == f"{tmp_path}/runs/b" and config.logging.tensorboard_dir == "runs/~c"
    assert read("-c ~/b.yaml").checkpoint.save == f"{tmp_path}/runs/c"


def test_what_is_misspelled_is_not_missing_as_well():
    text = refused("", shape=["--num-layer", "2", "--hidden-size", "x", "--num-attention-heads", "2"])
    assert "missing" not in text and "did you mean --num-layers" in text and "--hidden-size 'x'" in text


# Spellings of other systems -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, group, name, value",
    [
        ("--mp_degree 2", "parallel", "tensor_model_parallel_size", 2),
        ("--pp_degree 2", "parallel", "pipeline_model_parallel_size", 2),
        ("--dp_degree 2", "parallel", "dp_degree", 2),
        ("--model-parallel-size 2", "parallel", "tensor_model_parallel_size", 2),
        ("--use-distributed-optimizer", "parallel", "sharding_stage", 1),
        ("--use-distributed-optimizer --sharding-stage 2", "parallel", "sharding_stage", 2),
        ("--use_sharding true", "parallel", "sharding_stage", 1),
        ("--data-parallel-sharding-strategy optim_grads", "parallel", "sharding_stage", 2),
        ("--use_amp true", "precision", "precision", "fp16"),
        ("--use_amp true --bf16", "precision", "precision", "bf16"),
        ("--use_amp false", "precision", "precision", "fp32"),
        ("--max_lr 0.00015", "optimizer", "lr", 0.00015),
        ("--decay_steps 320000", "optimizer", "lr_decay_iters", 320000),
        ("--warmup .01", "optimizer", "lr_warmup_fraction", 0.01),
        ("--grad_clip 0.5", "optimizer", "clip_grad", 0.5),
        ("--lr-decay-style none", "optimizer", "lr_decay_style", "constant"),
        ("--optimizer adamw", "optimizer", "optimizer", "adam"),
        ("--calculate-per-token-loss", "optimizer", "loss_averaging", "token"),
        ("--max_steps 5", "batch", "train_iters", 5),
        ("--batch-size 5", "batch", "micro_batch_size", 5),
        ("--eval_freq 5", "batch", "eval_interval", 5),
        ("--logging_freq 5", "logging", "log_interval", 5),
        ("--save_steps 5", "checkpoint", "save_interval", 5),
        ("--output_dir x", "checkpoint", "save", "x"),
        ("--device gpu", "kernels", "device", "cuda"),
        ("--use-flash-attn true", "kernels", "attention_backend", "flash"),
        ("--attention-backend unfused", "kernels", "attention_backend", "explicit"),
        ("--max_seq_len 64", "model", "seq_length", 64),
        ("--encoder-seq-length 64", "model", "seq_length", 64),
        ("--layernorm-epsilon 1e-6", "model", "norm_epsilon", 1e-6),
        ("--use-rotary-position-embeddings --no-position-embedding", "model", "position_embedding_type", "rope"),
        ("--no-position-embedding", "model", "position_embedding_type", "none"),
        ("--use_amp true --amp-level o1", "precision", "amp_level", "O1"),
        (
            "--amp-custom-black-list reduce_sum,elementwise_div",
            "precision",
            "amp_custom_black_list",
            ["reduce_sum,elementwise_div"],
        ),
        ("--recompute-activations", "recompute", "recompute_granularity", "core_attn"),
        ("--recompute-granularity selective", "recompute", "recompute_granularity", "core_attn"),
        ("--use_recompute true", "recompute", "recompute_granularity", "full"),
        ("--use_recompute true --recompute_granularity full_attn", "recompute", "recompute_granularity", "full_attn"),
        ("--checkpoint-activations --checkpoint-num-layers 2", "recompute", "recompute_num_layers", 2),
        ("--activations-checkpoint-method uniform", "recompute", "recompute_method", "uniform"),
        ("--activations-checkpoint-method uniform", "recompute", "recompute_granularity", "full"),
        ("--no-recompute-layers 0,1,5", "recompute", "no_recompute_layers", "0,1,5"),
        ("--no-query-key-layer-scaling", "model", "apply_query_key_layer_scaling", False),
        ("--no-bias-gelu-fusion", "model", "bias_gelu_fusion", False),
        ("--scale_qk_by_layer_num true", "model", "apply_query_key_layer_scaling", True),
        ("--vocab_size_divisible_unit 64", "model", "make_vocab_size_divisible_by", 64),
        ("--reduce_overlap true", "parallel", "overlap_grad_reduce", True),
        ("--broadcast_overlap true", "parallel", "overlap_param_gather", True),
        ("--sharding_offload true", "optimizer", "optimizer_cpu_offload", True),
        ("--backend nccl", "parallel", "distributed_backend", "nccl"),
        ("--accumulate_steps 4", "batch", "gradient_accumulation_steps", 4),
        ("--local_batch_size 8", "batch", "local_batch_size", 8),
    ],
)
def test_other_systems_spellings(line, group, name, value):
    assert getattr(getattr(read(line), group), name) == value


def test_a_long_megatron_command_line_is_understood(capsys):
    """The flags that most of the published GPT command lines carry, together."""
    config = parse_pretrain(
        """--use-mcore-models --transformer-impl local --num-layers 12 --hidden-size 512 --num-attention-heads 8
        --log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard
        --log-memory-to-tensorboard --timing-log-level 2 --seq-length 1024 --max-position-embeddings 1024
        --micro-batch-size 4 --global-batch-size 32 --train-iters 50 --lr-decay-iters 320000 --save ckpt --load ckpt
        --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 --distributed-backend gloo --lr 0.00015
        --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01
        --log-interval 1 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --tensor-model-parallel-size 1
        --pipeline-model-parallel-size 1 --no-gradient-accumulation-fusion --deterministic-mode --ckpt-format torch
        --attention-softmax-in-fp32 --attention-backend unfused --data-cache-path cache --bf16 --data-path d
        --tensorboard-dir tb --dist-ckpt-strictness log_all --use-checkpoint-opt_param-scheduler""".split()
    )
    assert config.precision.precision == "bf16" and config.data.split == "949,50,1"
    notes = capsys.readouterr().err
    assert "note: --use-mcore-models, --transformer-impl have no effect: there is one implementation" in notes
    assert notes.count("note:") < 12 and "--log-memory-to-tensorboard" in notes
    assert config.logging.log_params_norm and config.logging.log_num_zeros_in_grad
    assert config.checkpoint.resume_schedule == "checkpoint"


# Answers for Megatron-LM's flags --------------------------------------------------------------------------------------


def test_every_megatron_flag_is_answered():
    spellings = spellings_of(GROUPS)
    known = {*spellings, *megatron_lm.DATA_FILES}
    silent = [n for n in NAMES if n.replace("_", "-") not in known and not megatron_lm.answer(n)]
    assert len(NAMES) > 1000 and not silent


def test_data_in_files(tmp_path, monkeypatch, capsys):
    """Megatron-LM's two files: words as on its command line, and JSON with a list, a text or nothing for each split."""
    monkeypatch.chdir(tmp_path)
    Path("blend.txt").write_text("0.3 one\n0.7\ttwo\n")
    Path("splits.json").write_text('{"train": [1, "one", 2, "two"], "valid": "three", "test": null}')
    assert read("--data-args-path blend.txt").data.data_path == ["0.3", "one", "0.7", "two"]
    data = read("--per_split_data_args_path splits.json").data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (
        ["1", "one", "2", "two"],
        ["three"],
        None,
    )
    Path("run.yaml").write_text("data_args_path: blend.txt\n")
    config = read("--config run.yaml")
    assert config.data.data_path[1] == "one" and config.given("data_path").where == "run.yaml:1 blend.txt"
    read("--data-args-path blend.txt --data-path three")
    assert "--data-path 0.3 one 0.7 two (--data-args-path blend.txt) is overridden by --data-path three" in (
        capsys.readouterr().err
    )
    for text, words in (
        ('{"train": ["one"], "vaild": ["two"]}', "'vaild' where {\"train\""),
        ("[1]", "list where {"),
        ("0.3 one", "Extra data"),
        ('{"train": []}', "no dataset is in it"),
    ):
        Path("splits.json").write_text(text)
        assert f"--per-split-data-args-path splits.json: {words}" in refused("--per-split-data-args-path splits.json")
    assert "--data-args-path none.txt: No such file" in refused("--data-args-path none.txt")
    assert "--data-args-path takes one file, got 2" in refused("--data-args-path blend.txt blend.txt")


def test_a_flag_of_training_is_not_its_own_suggestion(tmp_path):
    with pytest.raises(UsageError, match="^--encoder-num-layers is for training; this command has no use for it"):
        parse(["--encoder-num-layers", "2"], {"kinds": Kinds})
    (tmp_path / "t5.yaml").write_text("encoder_num_layers: 2\n")
    with pytest.raises(UsageError, match="t5.yaml:1: encoder_num_layers is for training"):
        parse(["--config", str(tmp_path / "t5.yaml")], {"kinds": Kinds})


def test_the_tables_say_one_thing_about_each_flag():
    ignored, refused_ = megatron_lm._IGNORED, megatron_lm._REFUSED
    settings = set(spellings_of(GROUPS))
    assert not (ignored.keys() & refused_) and not settings & (ignored.keys() | refused_)
    for table in (megatron_lm.IGNORED, megatron_lm.REFUSED):
        names = [name for names in megatron_lm.sentences(table).values() for name in names]
        assert len(names) == len(set(names))
    patterns = [p for p in (*ignored, *refused_) if "*" in p]
    theirs = [n.replace("_", "-") for n in NAMES]
    idle = [p for p in patterns if not any(fnmatchcase(n, p) for n in theirs)]
    assert set(idle) <= {"--amp-*", "--rdzv-*", "--soap-*", "--use-layer-wise-*"}  # of other systems


@pytest.mark.parametrize(
    "line, words",
    [
        ("--recompute-modules shared_experts", "say mlp, which recomputes experts and shared experts"),
        (
            "--recompute-modules gdn_norm_out",
            "'gdn_norm_out' is none of core_attn, layernorm, mlp_act, mlp, mla_up_proj",
        ),
        ("--train-tokens 300000000000", "--train-samples"),
        ("--nproc_per_node 8", "torchrun"),
        ("--fp8-output-proj", "attention and the output layer stay in the format of --precision"),
        ("--fp4-format e2m1", "say --fp8-format with --fp8-recipe tensorwise, blockwise or mxfp8"),
        ("--te-precision-config-file f.yaml", "are chosen by --fp8-layers and --fp8-skip"),
        ("--fp8-recipe custom", "'custom' is none of tensorwise, delayed, blockwise, mxfp8"),
        ("--deepspeed", "DeepSpeed"),
        ("--use_mcore_model", "did you mean --use-mcore-models"),
        ("--bf16;", "did you mean --bf16?"),
        ("--optimizer lamb", "'lamb' is none of adam"),
        ("--tokenizer-type Llama3Tokenizer", "; say TikTokenizer for its tokenizer.model, HuggingFaceTokenizer"),
        ("--disable-mamba-mem-eff-path", "layers are listed by --hybrid-layer-pattern"),
        ("--enable-gpt-oss", "say --model-name-or-path gpt-oss-20b"),
        ("--spec a b", "--model-type MODULE, docs/extending.md"),
        ("--adlr-autoresume", "supervise --on-preempt requeue"),
        ("--use-fsdp2", "use --sharding-stage 3"),
        ("--shard-strategy foo", "there is tensor and bucket"),
        ("--main-params-dtype fp16", "--main-params-dtype is not supported: main weights are fp32, because fp16 loses"),
        ("--main-grads-dtype fp16", "'fp16' is none of fp32, bf16; fp16 would need a scale for each tensor: say bf16"),
        ("--exp-avg-dtype fp16", "'fp16' is none of fp32, bf16; fp16 would need a scale for each tensor: say bf16"),
        ("--exp-avg-sq-dtype fp8", "'fp8' is none of fp32, bf16; fp8 is for products of linear layers (--fp8-format)"),
        (
            "--per-device-train-batch-size 8",
            "is Hugging Face Trainer's word: say --micro-batch-size (megatron.tools.tr",
        ),
        ("--max-grad-norm 1", "say --clip-grad (megatron.tools.translate --from hf-trainer reads a whole run)"),
        ("--block-size 64", "--block-size is nanoGPT's word: say --seq-length"),
        ("--dropout 0.1", "--dropout is nanoGPT's word: say --hidden-dropout and --attention-dropout"),
    ],
)
def test_what_is_not_supported_says_what_to_do(line, words):
    assert words in refused(line)


@pytest.mark.parametrize(
    "line, words",
    [
        ("--result-rejected-tracker-filename f", "results that --rerun-mode rejects"),
        ("--logging-level 20", "the log has one level"),
        ("--config-logger-dir d", "--print-config"),
        ("--train-sync-interval 5", "how far the host may run ahead"),
        ("--enable-one-logger", "no outside service"),
        ("--enable-experimental", "experimental in Megatron-LM, and changes nothing by itself"),
        ("--use-precision-aware-optimizer", "the formats of moments and gradients"),
        ("--perform-initialization", "initial weights depend on --seed"),
        ("--delay-grad-reduce", "when and how ranks exchange data"),
        ("--no-delay-grad-reduce", "when and how ranks exchange data"),
        ("--align-grad-reduce", "when and how ranks exchange data"),
        ("--align-param-gather", "when and how ranks exchange data"),
        ("--scatter-gather-tensors-in-pipeline", "when and how ranks exchange data"),
        ("--clone-scatter-output-in-embedding", "when and how ranks exchange data"),
        ("--create-attention-mask-in-dataloader", "causal masks are never stored"),
        ("--log-loss-scale-to-tensorboard", "every figure that the run logs goes to TensorBoard"),
        ("--microbatch-group-size-per-vp-stage 4", "the interleaved schedule groups"),
    ],
)
def test_what_has_no_effect_is_said_with_its_own_reason(line, words, capsys):
    read(line)
    said = capsys.readouterr().err
    assert f"note: {line.split()[0]} has no effect: " in said and words in said


def test_biases_are_asked_for_in_both_ways(capsys):
    assert not read("--add-bias-linear").model.disable_bias_linear
    assert capsys.readouterr().err == ""
    assert "contradict" in refused("--add-bias-linear --disable-bias-linear")


def test_a_part_of_a_flags_name_is_enough_for_a_hint():
    """Megatron-LM's older names of preprocess_data.py's flags."""
    groups = dict(preprocess=PreprocessOptions, tokenizer=TokenizerSettings)
    for words, hint in (("--vocab v.json", "--vocab-file"), ("--keys text", "--json-keys")):
        with pytest.raises(UsageError, match=f"unknown flag {words.split()[0]}; did you mean {hint}"):
            parse(["--input", "i", "--output-prefix", "o", *words.split()], groups)


def test_values_that_ask_for_nothing_pass_in_silence(capsys):
    read("--num-experts 1 --expert-model-parallel-size 1 --overlap-grad-reduce false")
    read("--main-grads-dtype fp32 --main-params-dtype fp32 --exp-avg-dtype fp32 --exp-avg-sq-dtype fp32")
    assert capsys.readouterr().err == ""


def test_only_rank_0_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    read("--transformer-impl local")
    assert capsys.readouterr().err == ""


# Layers: default < preset < file < command line -----------------------------------------------------------------------


def test_layers(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  num_layers: 3\n  hidden-size: 16\nlr: 1e-4\nbf16: true\nnum_query_groups: null\n")
    config = parse_pretrain(f"--config {file} --model-name-or-path gpt2-medium --num-layers 4".split())
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (4, 16, 16)
    assert config.optimizer.lr == 1e-4 and config.precision.precision == "bf16"
    assert parse_pretrain(f"--config {file} --preset gpt2 --fp16".split()).precision.precision == "fp16"


@pytest.mark.parametrize(
    "line, layers, hidden, lr",
    [
        ("--num-layers 5 --lr 1 --config {plain}", 5, 16, 1),  # the command line, anywhere in its turn
        ("--config {plain} --num-layers 5 --lr 1", 5, 16, 1),
        ("--num-layers 5 --lr 1 --then --config {plain}", 3, 16, 0.5),
        ("--config {plain} --then --num-layers 5 --lr 1", 5, 16, 1),
        ("--num-layers 5 --lr 1 --then --config {plain} --num-layers 7", 7, 16, 0.5),
        ("--num-layers 5 --max_lr 1 --then -c {theirs}", 4, 64, 0.25),  # PaddleFleetX's, with another spelling
        ("--num-layers 5 --max_lr 1 --then -c {theirs} -o Model.num_layers=9", 9, 64, 0.25),
        ("--max_lr 1 -c {theirs} --then --num-layers 5", 5, 64, 1),
        ("-c {theirs} --lr 1 --then --config {plain}", 3, 16, 0.5),
        ("--num-layers 5 --then --model-name-or-path gpt2-medium", 24, 1024, None),
        ("--model-name-or-path gpt2-medium --then --num-layers 5", 5, 1024, None),
        ("--num-layers 5 --hidden-size 8 --then --config {plain} --model-name-or-path gpt2-medium", 3, 16, 0.5),
    ],
)
def test_a_file_and_a_shape_belong_to_their_turn(line, layers, hidden, lr, tmp_path):
    """Scripts put --then between their own flags and the words of their caller."""
    plain, theirs = tmp_path / "plain.yaml", tmp_path / "theirs.yaml"
    plain.write_text("num_layers: 3\nhidden_size: 16\nlr: 0.5\n")
    theirs.write_text("Model: {num_layers: 4, hidden_size: 64}\nOptimizer: {lr: {max_lr: 0.25}}\n")
    config = parse_pretrain(f"--num-attention-heads 4 {line.format(plain=plain, theirs=theirs)}".split())
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (layers, hidden, lr)


def test_keys_without_a_value_are_named(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("seed:\nlr: 1e-4\nsave: null\nload: ~\ndata:\n")
    assert read(f"--config {file}").logging.seed == 1234
    [note] = [line for line in capsys.readouterr().err.splitlines() if "without a value" in line]
    assert note == f"note: {file}: without a value, and left out as by null: seed (line 1), data (line 5)"
    for nothing in ("", "null", "~"):
        file.write_text(f"lr: 1e-4\nnum_layer: {nothing}\n")
        assert f"{file}:2: unknown key num_layer; did you mean num_layers or mtp_num_layers?" in refused(
            f"--config {file}"
        )


def test_a_folder_as_model_name_is_loaded(tmp_path):
    assert read(f"--model-name-or-path {tmp_path}").checkpoint.load == str(tmp_path)
    assert read(f"--model-name-or-path {tmp_path} --load other").checkpoint.load == "other"
    assert "neither a folder nor a known shape (gpt2-small" in refused("--model-name-or-path gpt7")


@pytest.mark.parametrize(
    "text, words",
    [
        ("num_layer: 3", ":1: unknown key num_layer; did you mean num_layers or mtp_num_layers?"),
        ("\nlr: x", ":2: lr 'x' is not a number"),
        ("lr: 1\nlr: 2", ":2: lr is given twice (also in line 1)"),
        ("- 1", "expected lines of `key: value`"),
        ("a: [1\nb: 2", ":2: not YAML"),
        ("moe_apply_probs_on_input: true", ":1: moe_apply_probs_on_input is not supported"),
        ("bf16: true\nfp16: true", "contradict each other"),
    ],
)
def test_wrong_files(tmp_path, text, words):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert f"{words}" in refused(f"--config {file}")


def test_a_file_that_is_missing_or_no_text(tmp_path):
    assert "no such file" in refused("--config nowhere.yaml")
    assert "needs the name" in refused("--config")
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refused(f"--config {tmp_path}/run.yaml")


def test_a_file_may_serve_several_commands(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: 3\ncount: 5\nsplit: [1, 2, 3]\nwords: a\nnumbers: 16 16 1000\n")
    kinds = parse(["--config", str(file)], {"kinds": Kinds})["kinds"]
    assert (kinds.count, kinds.words, kinds.numbers) == (5, ["a"], [16, 16, 1000])


def print_config(line: str, capsys) -> str:
    with pytest.raises(SystemExit) as left:
        read(line + " --print-config")
    assert left.value.code == 0
    return capsys.readouterr().out


def test_print_config_refuses_values_that_a_run_would_refuse(capsys):
    with pytest.raises(UsageError) as wrong:
        read("--max-steps -1 --print-config")
    assert str(wrong.value).startswith("--max-steps -1 must be at least 0\n")
    assert "train_iters: -1 " in capsys.readouterr().out


def test_print_config_says_who_set_what_and_reads_back(tmp_path, capsys):
    line = (
        "--preset gpt2-medium --max-lr 1e-4 --data-path 0.3 a 0.7 b --no-bias-gelu-fusion --use-distributed-optimizer"
    )
    text = print_config(line, capsys)
    for words in (
        r"lr: 0.0001 +# --max-lr",
        r"num_layers: 2 +# --num-layers",
        r"seq_length: 1024 +# preset gpt2-medium",
        r"split: \"969,30,1\" +# default",
        r"sharding_stage: 1 +# --use-distributed-optimizer",
    ):
        assert re.search(words, text)
    (tmp_path / "run.yaml").write_text(text)
    again = print_config(f"--config {tmp_path}/run.yaml", capsys)
    assert re.search(rf"lr: 0.0001 +# {tmp_path}/run.yaml:\d+", again)
    values = [re.sub(r" +# .*", "", t) for t in (text, again)]
    assert values[0] == values[1]


@pytest.mark.sampled(5)
@given(st.one_of(st.text(max_size=12), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)))
def test_printed_values_are_yaml(value):
    import yaml

    loaded = yaml.safe_load(f"key: {value_text(value)}")["key"]
    assert loaded == value or (isinstance(value, float) and float(loaded) == value)


def test_config_text_of_every_setting():
    assert config_text(settings_of(GROUPS), {}).count("# default") == len(settings_of(GROUPS))


def test_extra_groups_of_a_recipe():
    config = parse_pretrain([*SHAPE, "--count", "5"], {"kinds": Kinds})
    assert config.extra["kinds"].count == 5 and config.model == Model(2, 8, 2)


# Help and docs --------------------------------------------------------------------------------------------------------


def helped(flag: str, capsys) -> str:
    with pytest.raises(SystemExit) as left:
        parse([flag], prog="pretrain_gpt.py", description="Pretrain a GPT.")
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_is_short_and_help_all_is_complete(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    short, long = helped("--help", capsys), helped("--help-all", capsys)
    assert 20 <= len(re.findall(r"^  --", short, re.M)) <= 40 and len(short.splitlines()) < 90
    for flag in ("model-name-or-path", "tokenizer-model", "tensor-model-parallel-size", "pipeline-model-parallel-size"):
        assert f"\n  --{flag} " in short
    assert "\nparallel:\n" in short and "\ntokenizer:\n" in short
    assert all(s.flag in long for s in settings_of(GROUPS)) and "\noptimizer:\n" in long
    assert max(map(len, (short + long).splitlines())) <= 118


def test_help_of_a_group_and_of_presets(capsys):
    assert helped("--help", capsys) == helped("-h", capsys)
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit):
            parse([flag, "recompute"], prog="pretrain_gpt.py")
        group = {s.flag for s in settings_of(GROUPS) if s.group == "recompute"}
        assert {line.split()[0] for line in re.findall(r"^  (--.*)", capsys.readouterr().out, re.M)} == group
    with pytest.raises(SystemExit):
        parse(["--help", "presets"], prog="pretrain_gpt.py")
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert rows["llama-3-8b"].split() == ["32", "4096", "32", "8192", "128256"]
    with pytest.raises(UsageError, match="did you mean parallel"):
        parse(["--help", "paralel"], prog="pretrain_gpt.py")


def test_docs_are_up_to_date():
    assert (ROOT / "docs" / "flags.md").read_text() == flag_docs.page(), (
        "run: python -m megatron.tools.flag_docs --output docs/flags.md"
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("argv, code", [(["--help"], 0), (["--help-all"], 0), (["--lr", "x"], 2), ([*SHAPE], 3)])
def test_answers_come_without_torch_or_numpy(argv, code):
    """What takes time is imports: none of the heavy ones happens before the settings are known to work."""
    program = (
        "import sys; sys.argv[0] = 'pretrain_gpt.py'\n"
        "import pretrain_gpt; from megatron.errors import run_main\n"
        "heavy = lambda: print('HEAVY', {'torch', 'numpy', 'yaml', 'tokenizers'} & set(sys.modules))\n"
        "import atexit; atexit.register(heavy)\n"
        f"run_main(pretrain_gpt.main, {argv!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "HEAVY set()" in done.stdout and "Traceback" not in done.stderr


def test_lengths_in_optimizer_are_flags_too():
    assert Optimizer().lr is None
    assert read("--lr-warmup-samples 1e6").optimizer.lr_warmup_samples == 1_000_000


@pytest.mark.parametrize(
    "line, words",
    [
        ("--use-distributed-optimizer --sharding-stage 0", "contradict each other"),
        ("--recompute-activations --recompute-granularity full", "contradict each other"),
        ("-o Modle.hidden_size=4", "-o Modle.hidden_size: there is no section Modle; did you mean Model?"),
        ("-o hidden_dropout=", "-o hidden_dropout=: is empty"),
    ],
)
def test_words_that_were_lost_in_silence(line, words):
    assert words in refused(line)


def test_checkpoint_args_without_a_checkpoint():
    assert "--use-checkpoint-args needs --load" in refused("--use-checkpoint-args", shape=[])


@pytest.mark.parametrize("words", (["-m", "megatron.pretrain"], ["pretrain_gpt.py"]))
def test_errors_cite_the_command_as_it_is_typed(words, root):
    done = subprocess.run([sys.executable, *words, "--foo"], cwd=root, capture_output=True, text=True)
    command = " ".join(["python", *words] if "-m" in words else words)
    assert done.returncode == 2 and f"-> {command} --help" in done.stderr
