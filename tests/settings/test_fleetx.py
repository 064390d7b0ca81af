# SPDX-License-Identifier: Apache-2.0
"""YAML of PaddleFleetX read as settings: sections, `_base_`, `-c` and `-o`."""

import math
import re

import pytest

from megatron.errors import SettingsError, UsageError
from megatron.inference.sampling import Sampling, Search
from megatron.model.command_line import parse_any
from megatron.model.pruning import PruningOptions
from megatron.optimizer.lr_schedule import Lengths, learning_rate
from megatron.optimizer.lr_schedule import problems as lr_problems
from megatron.settings.general_rules import violations
from megatron.settings.parse import parse, parse_pretrain, parse_with_record
from megatron.settings.schema import GROUPS
from megatron.tasks import finetune, finetune_rules, finetune_start
from megatron.tokenizer import resolved
from megatron.tools import evaluate, generate, prune
from megatron.tools.evaluate import EvaluateOptions
from megatron.tools.generate import GenerateOptions
from megatron.training.rules import filled

BASE = """
Global: {device: gpu, seed: 1024, global_batch_size: , local_batch_size: 1, micro_batch_size: 1}
Engine:
  max_steps: 500000
  num_train_epochs: 1
  accumulate_steps:
  logging_freq: 1
  eval_freq: 500
  eval_iters: 10
  test_iters:
  mix_precision:
    enable: True
    dtype: "float16"
    level: "O2"
    scale_loss: 32768.0
    custom_black_list: ["reduce_sum", "elementwise_div"]
  save_load: {save_steps: 1000, save_epoch: 1, output_dir: ./output, ckpt_dir: }
Model: {module: "GPTModule", name: "GPT", fused_linear: False, sequence_parallel: False}
Data:
  Train: &one
    dataset: {name: GPTDataset, input_dir: ./data/, split: [949, 50, 1], max_seq_len: 1024}
    sampler: {name: GPTBatchSampler, shuffle: False, drop_last: True}
    loader: {num_workers: 1, return_list: False, collate_fn: gpt_collate_fn}
  Eval: *one
Optimizer:
  name: FusedAdamW
  beta2: 0.95
  epsilon: 1.0e-8
  lr: {name: CosineAnnealingWithWarmupDecay, decay_steps: 360000, warmup_rate: 0.01, max_lr: 5.0e-5, min_lr: 1.0e-5}
  grad_clip: {name: "ClipGradByGlobalNorm", clip_norm: 0.5}
  tensor_fusion: False
Profiler: {enable: False, scheduler: [1, 5], profiler_log: profiler_log, detailed: False}
"""
OWN = """
_base_: ./base.yaml
Global: {local_batch_size: 8, micro_batch_size: 4}
Model:
  vocab_size: 50304
  hidden_size: 4096
  num_layers: 32
  num_attention_heads: 32
  ffn_hidden_size:
  hidden_dropout_prob: 0.2
  type_vocab_size: 16
  use_recompute: True
  recompute_granularity:
  no_recompute_layers: [0, 5]
Distributed:
  dp_degree: 2
  mp_degree: 4
  pp_degree: 2
  sharding: {sharding_degree: 16, sharding_stage: 2, sharding_offload: False, reduce_overlap: True}
"""


@pytest.fixture
def read(tmp_path, capsys):
    """`read("-o ...")`: the settings of a file that builds on another, and what was told on stderr."""
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "own.yaml").write_text(OWN)
    return lambda line="": (parse_pretrain(["-c", str(tmp_path / "own.yaml"), *line.split()]), capsys.readouterr().err)


def test_a_file_and_the_one_that_it_builds_on(read):
    config, told = read()
    m, p, b, o = config.model, config.parallel, config.batch, config.optimizer
    assert (m.num_layers, m.hidden_size, m.hidden_dropout, m.seq_length, m.ffn_hidden_size) == (
        32,
        4096,
        0.2,
        1024,
        None,
    )
    assert (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.dp_degree) == (4, 2, 2)
    assert p.asserted_data_parallel == 32
    assert (p.sharding_stage, p.sharding_degree, p.overlap_grad_reduce, p.overlap_param_gather) == (2, 16, True, False)
    assert (b.micro_batch_size, b.local_batch_size, b.train_iters, b.eval_interval) == (4, 8, 500000, 500)
    assert filled(config, 256).batch.global_batch_size == 8 * 32
    assert (o.optimizer, o.lr, o.min_lr, o.lr_decay_style, o.lr_decay_iters) == ("adam", 5e-5, 1e-5, "cosine", 360000)
    assert (o.lr_warmup_fraction, o.adam_beta2, o.clip_grad) == (0.01, 0.95, 0.5)
    assert (config.precision.precision, config.precision.amp_level) == ("fp16", "O2")
    assert (config.precision.initial_loss_scale, config.precision.amp_custom_black_list) == (32768, None)
    assert config.recompute.recompute_granularity == "full" and config.recompute.exempt_layers == {0, 5}
    assert (config.checkpoint.save, config.checkpoint.load, config.checkpoint.save_interval) == ("./output", None, 1000)
    assert config.data.split == "949,50,1" and config.kernels.device == "cuda" and not config.profiling.profile
    assert config.data.data_path == ["./data/"]
    assert "Engine.mix_precision.custom_black_list" in told and "Model.type_vocab_size" in told
    assert "sampler" not in told and "Data.Eval" not in told


def test_overrides(read):
    config, _ = read(
        "-o Model.hidden_size=1024 -o Engine.max_steps=3 Distributed.sharding.sharding_degree=1 "
        "-o Data.Train.dataset.split=[8,1,1] -o Engine.mix_precision.level=O1 -o Profiler.enable=True "
        "-o batch.eval_iters=0 --device cpu"
    )
    assert (config.model.hidden_size, config.batch.train_iters, config.data.split) == (1024, 3, "8,1,1")
    assert config.parallel.sharding_stage == 0 and config.parallel.dp_degree == 2
    assert config.precision.amp_custom_black_list == ["reduce_sum", "elementwise_div"]
    assert (config.profiling.profile_step_start, config.profiling.profile_step_end) == (1, 5)
    assert config.batch.eval_iters == 0 and config.kernels.device == "cpu"
    assert read("--num-layers 8 -o Model.num_layers=4")[0].model.num_layers == 4  # the last word wins
    assert read("-o Model.num_layers=4 --num-layers 8")[0].model.num_layers == 8


@pytest.mark.parametrize(
    "words, told",
    [
        ("Model.hiden_size=3", "-o Model.hiden_size is no known key; did you mean Model.hidden_size?"),
        (
            "Compress.Prune.enable=True",
            "-o Compress.Prune.enable is a step before training: python -m megatron.tools.prune",
        ),
        (
            "Optimizer.name=Lamb",
            "-o Optimizer.name: 'Lamb' is not supported; there is: AdamW, FusedAdamW; this suite's others by --optimizer",
        ),
        (
            "Optimizer.lr.name=Polynomial",
            "'Polynomial' is not supported; there is: CosineAnnealingWithWarmupDecay, LinearDecayWithWarmup; this suite's",
        ),
        ("Data.Train.dataset.name=GPTDatset", "'GPTDatset' is not supported; there is: GPTDataset"),
        ("Engine.run_mode=often", "-o Engine.run_mode: 'often' is neither step nor epoch"),
        ("Model.num_layers=many", "-o Model.num_layers: num_layers 'many' is not a whole number"),
        ("foo", "-o foo: Section.key=value is wanted"),
        ("model.layers=3", "unknown flag --layers"),
        ("Compress.X.enabl=yes", "-o Compress.X.enabl is no known key; did you mean Compress.Prune.enable?"),
        (
            "Quantization.weight_bit=8",
            "Quantization.weight_bit is no known key; did you mean Quantization.weight_bits?",
        ),
        (
            "Engine.max_steps=-5",
            "-o Engine.max_steps: '-5' is no number of steps; -1 stands for those of Engine.num_tr",
        ),
    ],
)
def test_what_cannot_be_read(read, words, told):
    with pytest.raises(UsageError) as error:
        read(f"-o {words}")
    assert told in str(error.value)


def test_pruning_is_a_command_of_its_own(tmp_path, capsys):
    """The tool reads the section Prune; commands that use the smaller model do not compare its sizes with the file's."""
    path = tmp_path / "prune.yaml"
    path.write_text(
        "Model: {num_attention_heads: 16}\n"
        "Compress: {pretrained: big, Prune: {enable: True, criterion: l2_norm, ratio: 0.125}}\n"
    )
    groups = dict(tool=prune.ToolOptions, prune=PruningOptions)
    made = parse_with_record(["-c", str(path), "--save", "small"], groups)[0]
    assert made["tool"].load == "big"
    assert made["prune"] == PruningOptions(prune_criterion="l2_norm", prune_ratio=0.125)
    parse_with_record(["-c", str(path), "--load", "small"], dict(evaluate=EvaluateOptions))
    told = capsys.readouterr().err
    assert "the checkpoint has the sizes of the pruned model" in told and "Model.num_attention_heads" in told


def test_no_compression_and_keys_without_effect_pass(read):
    plain, told = read()
    idle = "-o Compress.Prune.enable=False -o Compress.Prune.ratio=0.1 -o Quantization.weight_bits=8"
    config, more = read(idle)
    assert config == plain and set(told.splitlines()) < set(more.splitlines())
    assert "note: -o Compress.Prune.ratio has no effect: Compress.Prune.enable is not true" in more
    assert "note: -o Quantization.weight_bits has no effect: Quantization.enable is not true" in more
    told = read("-o Engine.run_mode=epoch -o Engine.max_steps=-5")[1]
    assert re.search("-o Engine.max_steps.* no effect: training is counted in epochs", told)
    unlimited, _ = read("-o Engine.max_steps=-1 -o Engine.num_train_epochs=")
    assert plain.batch.train_iters == 500000 and unlimited.batch.train_iters is None


def test_json_is_read(tmp_path):
    (tmp_path / "run.json").write_text('{"model": {"num_layers": 3, "hidden_size": 8}, "num_attention_heads": 2}')
    assert parse_pretrain(["--config", str(tmp_path / "run.json")]).model.num_layers == 3


def test_a_file_that_builds_on_itself(tmp_path):
    (tmp_path / "a.yaml").write_text("_base_: a.yaml\nModel: {num_layers: 1}\n")
    with pytest.raises(UsageError, match="builds on itself"):
        parse_pretrain(["-c", str(tmp_path / "a.yaml")])


AUTO = """
Engine: {max_steps: 50, num_train_epochs: 1, eval_freq: 1, mix_precision: {enable: , level: "o2"}}
Model: {module: "GPTModuleAuto", name: "GPT", num_layers: 2, hidden_size: 8, num_attention_heads: 2}
Distributed: {dp_degree: 16, sharding: {sharding_degree: 16, sharding_stage: 2}}
"""


def test_the_automatic_engine_counts_epochs(tmp_path):
    """Of steps_per_epoch = max_steps; its data parallelism has the sharding in it."""
    (tmp_path / "auto.yaml").write_text(AUTO)
    of = lambda *words: parse_pretrain(["-c", str(tmp_path / "auto.yaml"), *words])
    plain = of()
    assert (plain.batch.train_iters, plain.batch.eval_interval) == (50, 50)
    assert plain.parallel.asserted_data_parallel == 16 and plain.precision.precision == "fp16"
    longer = of("-o", "Engine.num_train_epochs=4", "-o", "Engine.eval_freq=2")
    assert (longer.batch.train_iters, longer.batch.eval_interval) == (200, 100)
    unlimited = of("-o", "Engine.max_steps=-1", "-o", "Engine.num_train_epochs=4", "-o", "Engine.eval_freq=2")
    assert (unlimited.batch.train_epochs, unlimited.batch.eval_epoch) == (4, 2)
    assert of("-o", "Model.module=GPTModule").batch.eval_interval == 1


MIX, AMP, LR = "Model: {%s}\nEngine: {mix_precision: {%s}}\n", "Engine.mix_precision.", "Optimizer.lr."
SHAPE = "num_layers: 2, hidden_size: 8, num_attention_heads: 2"
# of the file, overrides, the format, what is told
SWITCHES = [
    (
        "enable: False, use_pure_fp16: True",
        "",
        "fp16",
        "enable has no effect: Engine.mix_precision.use_pure_fp16 is true",
    ),
    (
        "enable: True, use_pure_fp16: False",
        "",
        "fp16",
        "use_pure_fp16 has no effect: Engine.mix_precision.enable is true",
    ),
    ("use_pure_fp16: True", f"-o {AMP}enable=False", "fp32", "2: Engine.mix_precision.use_pure_fp16"),  # -o counts
    ("enable: True", f"-o {AMP}use_pure_fp16=False", "fp32", "Engine.mix_precision.use_pure_fp16 is false"),
    (
        "use_pure_fp16: False, level: O1",
        "",
        "fp32",
        "level has no effect: mixed precision is off: Engine.mix_precision.use_",
    ),
]


@pytest.mark.parametrize("file, words, precision, told", SWITCHES)
def test_of_two_names_of_a_switch_the_other_is_named(file, words, precision, told, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(MIX % (SHAPE, file))
    assert parse_pretrain(["-c", str(tmp_path / "run.yaml"), *words.split()]).precision.precision == precision
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, hint",
    [
        ("-o Optimizer.grad_clip.threshold_of_all=3", "Optimizer.grad_clip has clip_norm, name"),
        ("-o Optimizer.foo.bar=3", "Optimizer has "),
        ("-o Global.xyz=3", "Global has device, global_batch_size, "),
        ("-o Model.hiden_size=3", None),  # the message has the nearest
        ("-o Model.num_layers=many", None),
        ("-o Zzz.foo=3", "there are Global, Engine, Model, "),
        ("-o model.zzzz=3", "python -m pytest --help model lists its settings"),
    ],
)
def test_an_unknown_key_is_answered_with_those_of_its_section(read, words, hint):
    with pytest.raises(UsageError) as refused:
        read(words)
    assert refused.value.do is None if hint is None else hint.split("pytest")[-1] in (refused.value.do or "")
    with pytest.raises(UsageError, match=r"^-c nothere\.yaml: no such file"):
        parse_pretrain(["-c", "nothere.yaml"])
    with pytest.raises(UsageError, match=r"^--config nothere\.yaml: no such file"):
        parse_pretrain(["--config", "nothere.yaml"])


def test_of_two_names_of_a_rate_the_one_of_the_command_line_counts(read):
    config, told = read("-o Optimizer.lr.learning_rate=1e-4 -o Optimizer.lr.warmup=10")
    assert (config.optimizer.lr, config.optimizer.lr_warmup_iters, config.optimizer.lr_warmup_fraction) == (
        1e-4,
        10,
        None,
    )
    assert re.search(r"Optimizer\.lr\.max_lr \(line \d+\): -o Optimizer\.lr\.learning_rate says it", told)
    assert re.search(r"Optimizer\.lr\.warmup_rate \(line \d+\): -o Optimizer\.lr\.warmup says it", told)


def test_who_set_it(read):
    words = [f"-o {AMP}{word}" for word in ("enable=True", "dtype=float16", "level=O2")]
    said = read(" ".join([*words, "-o Optimizer.grad_clip=null"]))[0].statements
    assert said["precision"].origin == f"-o {AMP}dtype" and said["amp_level"].origin == f"-o {AMP}level"
    assert said["clip_grad"].origin == "-o Optimizer.grad_clip" and said["clip_grad"].value == 0


def test_an_override_without_a_value_is_named(read):
    told = "-o Optimizer.grad_clip.name= is empty: Optimizer.grad_clip.name is left out"
    assert told in read("-o Optimizer.grad_clip.name=")[1]


def test_the_note_of_the_profiler_has_an_order(read):
    told = read("-o Profiler.profiler_log=x -o Profiler.detailed=True -o Profiler.enable=False")[1]
    assert re.search(
        r"Profiler\.profiler_log, -o Profiler\.detailed have? no effect: Profiler.enable is not true", told
    )


def test_a_file_that_inherits_nothing(tmp_path):
    (tmp_path / "base.yaml").write_text(MIX % (SHAPE, "enable: True") + "Optimizer: {beta1: 0.5}\n")
    own = f"_base_: base.yaml\n_inherited_: %s\nModel: {{{SHAPE}}}\n"
    for word, precision in (("False", "fp32"), ("True", "fp16")):
        (tmp_path / "run.yaml").write_text(own % word)
        assert parse_pretrain(["-c", str(tmp_path / "run.yaml")]).precision.precision == precision


REPLACED = [
    ("-c {a} -c {b}", "{a}:2: Model.num_layers=2 is overridden by {b}:1: Model.num_layers=4"),
    ("-c {a} -c {b}", "{a}:6: Engine.max_steps=3 by {b}:2: Engine.max_steps=null"),
    (
        "-c {a} -o Engine.max_steps=7 -o Engine.max_steps=8",
        "-o Engine.max_steps=7 is overridden by -o Engine.max_steps=8",
    ),
    (
        "-c {a} -o Engine.max_steps=9 -o max_steps=11",
        "--max-steps 9 (-o Engine.max_steps) is overridden by --max-steps 11",
    ),
    ("-c {a} -o Engine.max_steps=9 -o Engine=null", "-o Engine.max_steps=9 is overridden by -o Engine=null"),
    ("-c {a} -c {p} -c {q}", "--lr 1.0 ({p}:1) is overridden by --lr 2.0 ({q}:1)"),
    ("-c {a} --lr 1 --lr 2 --seed 3 --seed 4", "--lr 1.0 is overridden by --lr 2.0, --seed 3 by --seed 4"),
    ("-c {a} --use_amp true --use_amp false", "--use-amp true is overridden by --use-amp false"),
    ("-c {a} --bf16 --bf16 false", "--bf16 is overridden by --bf16 false"),
    ("-c {a} --bf16 false --bf16", "--bf16 false is overridden by --bf16"),
    # Another source, another turn, the same value, a word that says more: nothing is replaced.
    ("-c {a} -o Engine.max_steps=7", ""),
    ("-c {a} -o Engine.max_steps=7 --then -o Engine.max_steps=8", ""),
    ("-c {a} --lr 1 --then --lr 2", ""),
    ("-c {a} --lr 1 --lr 1.0", ""),
    ("-c {a} --use-sharding --sharding-stage 2", ""),
    ("-c {a} --bf16 false --fp16", ""),
]


@pytest.mark.parametrize("line, told", REPLACED)
def test_words_that_others_of_their_source_replace_are_named(line, told, tmp_path, capsys):
    files = dict(
        a="Model:\n  num_layers: 2\n  hidden_size: 8\n  num_attention_heads: 2\nEngine:\n  max_steps: 3\n",
        b="Model: {num_layers: 4}\nEngine: {max_steps: null}\n",
        p="lr: 1\nseed: 3\n",
        q="lr: 2\nseed: 3\n",
    )
    paths = {name: str(tmp_path / f"{name}.yaml") for name in files}
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    parse_pretrain(line.format(**paths).split())
    notes = capsys.readouterr().err
    assert told.format(**paths) in notes and notes.count("the last value of a setting counts:") == bool(told), notes


def test_a_list_that_is_given_twice_says_how_to_give_several(capsys):
    shape = "--num-layers 2 --hidden-size 8 --num-attention-heads 2"
    parse_pretrain(f"{shape} --data-path a --data-path b c --seed 1 --seed 2".split())
    [replaced, hint] = [line for line in capsys.readouterr().err.splitlines() if "--data-path" in line]
    assert "--data-path a is overridden by --data-path b c" in replaced
    assert hint == "note: several values follow one --data-path, as in Megatron-LM: --data-path A B"


def test_epochs(read):
    config, told = read(
        "-o Engine.run_mode=epoch -o Engine.num_train_epochs=3 -o Engine.eval_freq=2 -o Engine.save_load.save_epoch=1"
    )
    b = config.batch
    assert (b.train_epochs, b.eval_epoch, b.train_iters) == (3, 2, None) and config.data.full_validation
    assert config.checkpoint.save_epoch == 1 and config.checkpoint.save_interval is None
    assert "Engine.max_steps" in told and "Engine.save_load.save_steps" in told
    config, _ = read("-o Engine.max_steps=-1 -o Engine.num_train_epochs=3 -o Optimizer.lr.decay_steps=70")
    assert (config.batch.train_epochs, config.optimizer.lr_decay_iters) == (3, 70)


def test_no_validation(read):
    for often in ("-1", "0"):
        config, told = read(f"-o Engine.eval_freq={often}")
        assert config.batch.eval_iters == 0 and "Engine.eval_iters" in told


def test_validation_data_of_its_own(read):
    config, told = read("-o Data.Eval.dataset.input_dir=held_out")
    assert (config.data.data_path, config.data.train_data_path) == (None, ["./data/"])
    assert config.data.valid_data_path == ["held_out"]
    assert "Data.Train.dataset.split" in told and "Data.Eval.dataset.split" in told
    config, _ = read("-o Data.Eval.dataset.input_dir=held_out --data-path mine")
    assert (config.data.data_path, config.data.train_data_path) == (["mine"], None)


def test_one_folder_of_training_and_validation(read, tmp_path, monkeypatch):
    """./data/ of the base file, in other spellings; a folder that is left at the base file's value is warned of."""
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    monkeypatch.chdir(tmp_path)
    for same in ("./data", "data/", f"{tmp_path}/data", "link/"):
        config, told = read(f"-o Data.Train.dataset.input_dir={same}")
        assert (config.data.data_path, config.data.valid_data_path, config.data.split) == ([same], None, "949,50,1")
        assert config.batch.test_iters == 100 and "Data." not in told and "WARNING" not in told
    for words in ("copy", "copy -o Data.Train.sampler.shuffle=True"):
        config, told = read(f"-o Data.Train.dataset.input_dir={words}")
        assert (config.data.train_data_path, config.data.valid_data_path) == (["copy"], ["./data/"])
        [line] = [line for line in told.splitlines() if line.startswith("WARNING: ")]
        for part in ("is copy", "./data/", "without the split", "-o Data.Eval.dataset.input_dir=copy"):
            assert part in line
    assert "WARNING" not in read("-o Data.Train.dataset.input_dir=a -o Data.Eval.dataset.input_dir=b")[1]
    assert "WARNING" not in read("-o Data.Eval.dataset.input_dir=b")[1]
    config, told = read("-o Data.Train.dataset.input_dir=a -o Data.Eval.dataset.input_dir=a/")
    assert (config.data.data_path, config.data.valid_data_path) == (["a"], None) and "WARNING" not in told


def test_what_yaml_can_write(tmp_path):
    """Quotes, anchors, merges, empty values, lists; a section that does not inherit, and one that is emptied."""
    (tmp_path / "base.yaml").write_text(
        "Optimizer: {name: AdamW, beta1: 0.5, lr: {max_lr: 1.0e-4, min_lr: 1.0e-5}}\n"
        "Profiler: {enable: True, scheduler: [1, 5]}\nQuantization: {enable: True}\n"
        "Engine: {mix_precision: {enable: True, custom_black_list: []}, logging_freq: 3}\n"
    )
    (tmp_path / "own.yaml").write_text(
        "_base_: base.yaml\n"
        "Model:\n  <<: &shape {num_layers: 2, hidden_size: 8, num_attention_heads: 2}\n  hidden_size: '16'\n"
        'Data:\n  Train: &train\n    dataset: {input_dir: "a,b", split: \'[949, 50, 1]\', max_seq_len: "32"}\n'
        "  Eval:\n    <<: *train\n"
        "Optimizer:\n  _inherited_: False\n  beta2: .9\n"
        "Quantization:\nEngine: {logging_freq: ~, eval_freq: null}\n"
    )
    config = parse_pretrain(["-c", str(tmp_path / "own.yaml")])
    assert (config.model.num_layers, config.model.hidden_size, config.model.seq_length) == (2, 16, 32)
    assert (config.data.data_path, config.data.split) == (["a,b"], "949,50,1")
    assert (config.optimizer.adam_beta1, config.optimizer.adam_beta2, config.optimizer.lr) == (0.9, 0.9, None)
    assert config.logging.log_interval == 1 and config.batch.eval_iters == 0  # as where nothing is said
    assert (config.profiling.profile_step_start, config.profiling.profile_step_end) == (1, 5)
    words = ["-o", "Profiler={enable: no}", "-o", "Optimizer.lr="]
    assert not parse_pretrain(["-c", str(tmp_path / "own.yaml"), *words]).profiling.profile


@pytest.mark.parametrize(
    "text, words",
    [
        ("Global: {seed: 1}\n_base_: ./base.yaml\n", "run.yaml:2: _base_: {folder}/base.yaml: no such file"),
        (
            "Model: {num_layers: 1}\nModel: {hidden_size: 1}\n",
            "run.yaml:2: Model is given twice (also in {folder}/run.yaml:1: Model.num_layers)",
        ),
        (
            "_base_: run.yaml\n_base_: run.yaml\n",
            "run.yaml:2: _base_ is given twice (also in {folder}/run.yaml:1: _base_)",
        ),
        ("_base_: [a.yaml, b.yaml]\n", "run.yaml:1: _base_ names one file, and there are 2"),
        ("_inherited_: maybe\nModel: {num_layers: 1}\n", "run.yaml:1: _inherited_: 'maybe' is neither true nor false"),
        ("Engine: {_inherited_: maybe}\n", "run.yaml:1: Engine._inherited_: 'maybe' is neither true nor false"),
        ("Model: {num_layers: 1, num_layers: 2}\n", "Model.num_layers is given twice"),
        ("Model: {num_layers: [1, 2]}\n", "run.yaml:1: Model.num_layers: num_layers takes one value"),
    ],
)
def test_files_that_cannot_be_read(text, words, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(UsageError) as refused:
        parse_pretrain(["-c", str(tmp_path / "run.yaml")])
    assert words.format(folder=tmp_path) in str(refused.value)


GLUE = """
Engine: {run_mode: epoch, max_steps: -1, num_train_epochs: 3, eval_freq: 1, save_load: {save_steps: -1, save_epoch: 1}}
Model: {module: GPTFinetuneModule, name: GPT, pretrained: './ckpt', num_layers: 2, hidden_size: 8, num_attention_heads: 2}
Optimizer: {name: FusedAdamW, epsilon: 1e-6, lr: {name: LinearDecayWithWarmup, warmup: 0.1, learning_rate: 3e-5}}
Data:
  Train:
    dataset: {name: SST2, root: ./dataset/SST-2/, split: 'train', max_length: 64}
    sampler: {name: DistributedBatchSampler, shuffle: True, drop_last: True}
  Eval:
    dataset: {name: SST2, root: ./dataset/SST-2/, split: 'dev', max_length: 64}
    sampler: {name: DistributedBatchSampler, shuffle: False, drop_last: False}
"""


@pytest.fixture
def glue(tmp_path):
    (tmp_path / "glue.yaml").write_text(GLUE)
    return str(tmp_path / "glue.yaml")


def test_fine_tuning_reads_its_files(glue, capsys):
    names = [word for part in ("Train", "Eval") for word in ("-o", f"Data.{part}.dataset.name=CoLA")]
    made = parse(["-c", glue, *names], {**GROUPS, **finetune_start.groups()})
    task, batch = made["task"], made["batch"]
    assert (task.task, made["data"].data_path) == ("CoLA", ["./dataset/SST-2/"])
    assert made["checkpoint"].pretrained_checkpoint == "./ckpt"
    assert (made["model"].seq_length, made["optimizer"].lr, made["optimizer"].lr_warmup_fraction) == (64, 3e-5, 0.1)
    assert (batch.train_epochs, batch.eval_epoch, made["checkpoint"].save_epoch) == (3, 1, 1)
    assert made["data"].dataloader_type == "cyclic"
    told = capsys.readouterr().err
    assert "Data.Eval" not in told and "sampler" not in told and "split" not in told


def linear_decay_with_warmup(base, steps, warmup):
    """PaddleFleetX's LinearDecayWithWarmup.get_lr: the rate at step t, counted from 0."""
    first = warmup if isinstance(warmup, int) else math.floor(warmup * steps)
    return lambda t: base * t / max(1, first) if t < first else base * max(0.0, 1.0 - t / steps)


def cosine_annealing_with_warmup_decay(highest, lowest, steps, warmup, batch):
    """PaddleFleetX's CosineAnnealingWithWarmupDecay.get_lr, which counts samples."""
    end, first = steps * batch, warmup * steps * batch

    def rate(t):
        t *= batch
        if first > 0 and t <= first:
            return highest * t / first
        if t > end:
            return lowest
        return lowest + 0.5 * (math.cos(math.pi * (t - first) / (end - first)) + 1) * (highest - lowest)

    return rate


def rates_of(text, tmp_path, batch, steps):
    """The rates of so many steps, by our reading of the section Optimizer.lr."""
    shape = "Model: {num_layers: 1, hidden_size: 8, num_attention_heads: 1}\n"
    sizes = f"Global: {{global_batch_size: {batch}}}\nEngine: {{max_steps: {steps}}}\n"
    (tmp_path / "rates.yaml").write_text(f"{shape}{sizes}Optimizer: {{name: FusedAdamW, lr: {text}}}\n")
    config = parse_pretrain(["-c", str(tmp_path / "rates.yaml")])
    assert not lr_problems(config.optimizer, config.batch)
    lengths = Lengths.of(config.optimizer, config.batch)
    return [learning_rate(config.optimizer, lengths, batch * t) for t in range(steps + 2)]


@pytest.mark.parametrize("warmup", [0, 0.0, 1, 7, 0.1, 0.06, 0.25, 0.3, 0.999])
@pytest.mark.parametrize("steps", [10, 37, 300])
def test_linear_decay_with_warmup_is_theirs(warmup, steps, tmp_path):
    """The decay counts from step 0, and a share of the steps is rounded down."""
    found = rates_of(f"{{name: LinearDecayWithWarmup, warmup: {warmup}, learning_rate: 2.0e-5}}", tmp_path, 8, steps)
    assert found == [pytest.approx(linear_decay_with_warmup(2e-5, steps, warmup)(t)) for t in range(steps + 2)]


@pytest.mark.parametrize("warmup", [0.0, 0.01, 0.06, 0.25])
@pytest.mark.parametrize("steps, decay", [(40, 30), (37, 37), (20, 90)])
def test_cosine_annealing_with_warmup_decay_is_theirs(warmup, steps, decay, tmp_path):
    sizes = f"decay_steps: {decay}, warmup_rate: {warmup}, max_lr: 5.0e-5, min_lr: 1.0e-5, use_increments: True"
    found = rates_of(f"{{name: CosineAnnealingWithWarmupDecay, {sizes}}}", tmp_path, 8, steps)
    rate = cosine_annealing_with_warmup_decay(5e-5, 1e-5, decay, warmup, 8)
    assert found == [pytest.approx(rate(t)) for t in range(steps + 2)]


@pytest.mark.parametrize("name", ["CosineDecay", "ViTLRScheduler", "MultiStepDecay"])
def test_curves_of_vision_models_are_refused(name, tmp_path):
    with pytest.raises(UsageError, match=f"'{name}' is not supported; there is: CosineAnnealing"):
        rates_of(f"{{name: {name}, learning_rate: 1.0e-5}}", tmp_path, 8, 10)


def test_fine_tuning_says_which_command_a_file_of_pretraining_is_for(tmp_path):
    (tmp_path / "gpt.yaml").write_text("Model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}\n")
    with pytest.raises(UsageError, match="missing: --task; a file for pretraining: pretrain_gpt.py -c FILE"):
        parse(["-c", str(tmp_path / "gpt.yaml")], {**GROUPS, **finetune_start.groups()})


def test_fine_tuning_names_the_vocabulary_that_it_lacks(glue, tmp_path):
    for name in ("train.tsv", "dev.tsv", "test.tsv"):
        (tmp_path / name).write_text("sentence\tlabel\na b\t1\n")
    words = ["-c", glue, "-o", "Model.vocab_size=50304"]
    words += [word for part in ("Train", "Eval") for word in ("-o", f"Data.{part}.dataset.root={tmp_path}")]
    config = finetune.normalize_task_config(parse_pretrain(words, extra_groups=finetune_start.groups()))
    said, _ = violations(config, 1, finetune_rules.TASK_RULES)
    assert any(one.startswith("the task is text, and no vocabulary is given; --vocab-file") for one in said)


def test_pretraining_says_which_command_fine_tunes(glue):
    with pytest.raises(UsageError) as refused:
        parse_pretrain(["-c", glue])
    words = (
        "python finetune.py --task SST2 --data-path ./dataset/SST-2/ --pretrained-checkpoint ./ckpt, with the same -c"
    )
    assert refused.value.what.startswith(f"{glue}:7: Data.Train.dataset.name: fine-tuning is {words}")
    with pytest.raises(
        UsageError, match="-o Data.Train.dataset.name: fine-tuning is python finetune.py --task CoLA, with"
    ):
        parse_pretrain(["--preset", "gpt2", "-o", "Data.Train.dataset.name=CoLA"])


def test_a_task_that_nobody_knows_is_named(glue):
    with pytest.raises(UsageError, match="--task FOO .-o Data.Train.dataset.name.: there is no such task"):
        parse_any(["-c", glue, "-o", "Data.Train.dataset.name=FOO"], recipe=finetune.recipe())


@pytest.mark.parametrize(
    "main, words, text",
    [
        (generate.main, "-o Generation.top_p=1.5", "--top-p 1.5 (-o Generation.top_p): has to be between 0 and 1"),
        (generate.main, "-o Generation.num_return_sequences=0", "--num-samples 0 (-o Generation.num_return_sequences)"),
        (evaluate.main, "--data-path x -o Offline_Eval.batch_size=0", "--batch-size 0 (-o Offline_Eval.batch_size)"),
        (
            evaluate.main,
            "-o Offline_Eval.cloze_eval=1",
            "--task LAMBADA (-o Offline_Eval.cloze_eval) needs --valid-data",
        ),
    ],
)
def test_what_is_wrong_is_named_as_it_was_written(main, words, text, tmp_path):
    (tmp_path / "own.yaml").write_text(BASE)
    with pytest.raises((SettingsError, UsageError)) as refused:
        main(["-c", str(tmp_path / "own.yaml"), "--load", "x", *words.split()])
    assert refused.value.what.startswith(text)


def test_keys_of_training_are_one_line_and_listed_on_demand(tmp_path, capsys):
    """Of a file for pretraining that another command reads; --print-config names each key with its line."""
    (tmp_path / "own.yaml").write_text(BASE)
    words = ["-c", str(tmp_path / "own.yaml"), "--load", "x", "-o", "Optimizer.lr.max_lr=1"]
    parse(words, dict(evaluate=evaluate.EvaluateOptions))
    told = capsys.readouterr().err.splitlines()
    [head] = [line for line in told if "own.yaml" in line]
    count = int(head.split()[1])
    assert head.endswith("keys of own.yaml are of training and have no effect here (--print-config lists them)")
    assert any(line.startswith("note: -o Optimizer.lr.max_lr has no effect") for line in told) and len(told) == 2
    with pytest.raises(SystemExit):
        parse([*words, "--print-config"], dict(evaluate=evaluate.EvaluateOptions))
    told = capsys.readouterr().err
    listed = re.findall(r"(\S+) \(line\s+(\d+)\)", told)
    assert len({*listed}) == len(listed) == count > 20 and str(tmp_path) not in told
    lines = BASE.splitlines()
    assert all(key.rpartition(".")[2] in lines[int(line) - 1] for key, line in listed)
    assert max(map(len, told.splitlines())) <= 120


def test_usual_keys_without_effect_are_one_line_and_listed_on_demand(read, tmp_path, capsys):
    """A key that changes a result keeps its reason; --print-config gives each key its file, line and reason."""
    (tmp_path / "base.yaml").write_text(BASE.replace("drop_last: True", "drop_last: False"))
    _, told = read()
    [line] = [line for line in told.splitlines() if line.startswith("note: without effect here: ")]
    assert line.endswith(" (--print-config says where and why)") and "at level O2" not in told
    folded = line.removeprefix("note: without effect here: ").partition(" (")[0].split(", ")
    assert "drop_last" not in line and re.search(r"Data\.Train\.sampler\.drop_last .*: every batch is full", told)
    with pytest.raises(SystemExit):
        read("--print-config")
    told = " ".join(capsys.readouterr().err.split())
    [count] = re.findall(r"note: (\d+) keys of base\.yaml have no effect:", told)
    assert re.search(r"Engine\.mix_precision\.custom_black_list \(line 16\).*: at level O2", told)
    listed = re.findall(r"(\S+) \(line \d+\)", told)
    assert len(listed) == int(count) > 3 and {*listed} - {*folded} == {
        f"Data.{part}.sampler.drop_last" for part in ("Train", "Eval")
    }
    assert {*folded} - {*listed} == {"Model.type_vocab_size"}  # of own.yaml, in a note of its own


def test_generation_by_beams(tmp_path):
    """What sampling would draw with has no place in it."""
    (tmp_path / "g.yaml").write_text(
        "Model: {module: GPTGenerationModule}\nGeneration: {top_k: 50, top_p: 0.75, temperature: 1.0, max_dec_len: 20,\n"
        "  num_return_sequences: 1, decode_strategy: beam_search, num_beams: 4, early_stopping: False}\n"
    )
    made = parse(
        ["-c", str(tmp_path / "g.yaml"), "--load", "x"],
        dict(generate=GenerateOptions, sampling=Sampling, search=Search),
    )
    made["sampling"].check()
    made["search"].check(made["sampling"])
    assert (made["search"].num_beams, made["search"].length_penalty) == (4, 0)  # PaddleNLP's default
    assert (made["sampling"].top_k, made["sampling"].top_p, made["sampling"].tokens_to_generate) == (0, 0, 20)


def test_a_length_penalty_has_another_formula(tmp_path, capsys):
    line = "-o Generation.decode_strategy=beam_search -o Generation.num_beams=4 -o Generation.length_penalty="
    for value in ("0.6", "0", "0.0"):
        (tmp_path / "g.yaml").write_text("Model: {module: GPTGenerationModule}\n")
        groups = dict(generate=GenerateOptions, sampling=Sampling, search=Search)
        parse(["-c", str(tmp_path / "g.yaml"), "--load", "x", *f"{line}{value}".split()], groups)
        told = "-o Generation.length_penalty divides a text's score by its length n to this power; PaddleFleetX"
        assert (told in capsys.readouterr().err) == (value == "0.6")


def test_a_wrong_format_is_one_problem(read):
    with pytest.raises(UsageError) as refused:
        read("-o Engine.mix_precision.dtype=float32")
    text = "-o Engine.mix_precision.dtype: 'float32' is not supported; there is: float16, bfloat16"
    assert str(refused.value).splitlines()[0] == text


@pytest.mark.parametrize("more, named", [("", True), ("--tokenizer-model other", False), ("--mock-data", False)])
def test_its_vocabulary_is_gpt2s_of_the_cache(more, named, read, tmp_path, monkeypatch):
    """PaddleFleetX's GPTDataset asks for no other, and its files name none."""
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path))
    assert read(more)[0].tokenizer.tokenizer_model == ("other" if "other" in more else None)
    (tmp_path / "gpt2").mkdir()
    config, told = read(more)
    assert config.tokenizer.tokenizer_model == ("gpt2" if named else "other" if "other" in more else None)
    assert ("the vocabulary is GPT-2's of" in told) == named and config.tokenizer.vocab_size == 50304


def test_its_vocabulary_is_that_of_its_own_cache(read, tmp_path, monkeypatch):
    """PaddleFleetX keeps GPT-2's files under these names in ~/.cache/ppfleetx."""
    monkeypatch.delenv("MEGATRON_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "ppfleetx"
    folder.mkdir(parents=True)
    (folder / "gpt2-vocab.json").write_text("{}")
    assert read("")[0].tokenizer.tokenizer_model is None
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n")
    config, told = read("")
    assert f"the vocabulary is GPT-2's of {folder}" in told
    found = resolved(config.tokenizer)
    assert (found.vocab_file, found.merge_file) == (f"{folder}/gpt2-vocab.json", f"{folder}/gpt2-merges.txt")


@pytest.mark.parametrize("more, prompt", [("", ["Hi, GPT2. Tell me who Jack Ma is."]), ("--prompt other", ["other"])])
def test_a_prompt_that_its_program_has(more, prompt, tmp_path, capsys):
    (tmp_path / "g.yaml").write_text("Model: {module: GPTGenerationModule}\n")
    groups = dict(generate=GenerateOptions, sampling=Sampling, search=Search)
    found = parse(["-c", str(tmp_path / "g.yaml"), "--load", "x", *more.split()], groups)
    assert found["generate"].prompt == prompt
    assert ("the prompt is 'Hi, GPT2. Tell me who" in capsys.readouterr().err) == (not more)
    assert parse(["--load", "x"], groups)["generate"].prompt is None


@pytest.mark.parametrize(
    "words, text",
    [
        ("-o Model.hidden_size=33 -o Model.num_attention_heads=4", "--hidden-size 33 (-o Model.hidden_size)"),
        (
            "-o Data.Train.dataset.input_dir=gone",
            "--train-data-path (-o Data.Train.dataset.input_dir): there is no gone.idx",
        ),
        ("-o Engine.save_load.ckpt_dir=gone", "--load gone (-o Engine.save_load.ckpt_dir) holds no checkpoint"),
        ("-o Model.virtual_pp_degree=2 -o Distributed.pp_degree=1", "size (-o Distributed.pp_degree) of at least 2"),
        ("-o Model.vocab_size=7 {vocabulary}", "--vocab-size 7 (-o Model.vocab_size) is smaller than the tokenizer's"),
    ],
)
def test_problems_of_a_dry_run_are_named_as_they_were_written(words, text, read, tmp_path, capsys):
    """Rules, missing files and the vocabulary are checked in different places."""
    import pretrain_gpt

    (tmp_path / "vocab.json").write_text(
        '{"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5, "ab": 6, "<|endoftext|>": 7}'
    )
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    vocabulary = f"--vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt"
    small = "--num-layers 2 --world-size 256 --device cpu --dry-run"
    line = f"-c {tmp_path}/own.yaml {small} {words.format(vocabulary=vocabulary)}"
    with pytest.raises(SettingsError) as refused:
        pretrain_gpt.main(line.split())
    assert text in str(refused.value)
