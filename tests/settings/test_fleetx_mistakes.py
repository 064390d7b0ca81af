# SPDX-License-Identifier: Apache-2.0
"""Files of PaddleFleetX that ask for something else than what is there: each is refused with its key and its place."""

import re
from types import SimpleNamespace

import pytest

from megatron.data.formats import open_tokens
from megatron.errors import CheckpointError, DataError, SettingsError, UsageError, run_main
from megatron.model import linear_kinds
from megatron.model.quantization import with_quantization
from megatron.planner.problems import file_problems
from megatron.settings import from_checkpoint
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.general_rules import violations
from megatron.settings.parse import parse, parse_pretrain, parse_with_record
from megatron.settings.schema import GROUPS
from megatron.tasks import finetune_start
from megatron.tokenizer import embedding_rows
from megatron.tools import evaluate, generate, translate
from megatron.tools.export import ExportOptions

GPT = "Model: {name: GPT, num_layers: 2, hidden_size: 8, num_attention_heads: 2, vocab_size: 64}\n"
QAT = (
    "Compress:\n  Quantization:\n    enable: True\n    skip_tensor_map: {block_0: ['linear1'], block_1: ['linear2']}\n"
)
PRUNED = "Compress: {Prune: {enable: True, ratio: 0.5}}\n"
STSB = "Data.Train.dataset.name=STSB Data.Eval.dataset.name=STSB Model.num_classes=1"
GLUE = """
Model: {module: GPTFinetuneModule, name: GPT, num_layers: 2, hidden_size: 8, num_attention_heads: 2, num_classes: 2}
Data:
  Train: {dataset: {name: SST2, root: ./SST-2/, split: train, max_length: 64}}
  Eval: {dataset: {name: SST2, root: ./SST-2/, split: dev, max_length: 64}}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write(text)`: the path of a file, where no vocabulary is found."""
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))

    def to_file(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return to_file


@pytest.mark.parametrize(
    "main, words",
    [
        (evaluate.main, "-c {file}"),
        (generate.main, "-c {file}"),
        (evaluate.main, "--num-layers 2 --task LAMBADA --valid-data x.jsonl"),
    ],
)
def test_a_shape_without_a_checkpoint_is_a_missing_load(main, words, write):
    with pytest.raises(UsageError, match="missing: --load"):
        main(words.format(file=write(GPT)).split())


def test_a_mapping_replaces_that_of_the_file(write, capsys):
    """As in PaddleFleetX, whose override assigns the value to the key."""
    path = write(GPT + QAT + "Engine: {mix_precision: {enable: True, level: O2, scale_loss: 1024.0}}\n")
    of = lambda *words: parse_pretrain(["-c", path, *(part for word in words for part in ("-o", word))])
    assert of().model.quantization_skip == "blocks.0.mlp.up,blocks.1.mlp.down"
    made = of("Compress.Quantization.skip_tensor_map={'block_1': ['linear1']}")
    assert made.model.quantization_skip == "blocks.1.mlp.up" and made.model.quantization
    assert of("Compress.Quantization.skip_tensor_map={}").model.quantization_skip is None
    capsys.readouterr()
    made = of("Engine.mix_precision={'enable': True, 'dtype': 'float16', 'level': 'O1'}").precision
    assert (made.precision, made.amp_level, made.initial_loss_scale) == ("fp16", "O1", 32768)
    told = capsys.readouterr().err
    assert "-o Engine.mix_precision replaces the section, and leaves out what it says: scale_loss" in told
    made = of("Engine.mix_precision.scale_loss=2048", "Engine.mix_precision={'enable': True, 'dtype': 'bfloat16'}")
    assert made.precision.precision == "bf16"
    assert (
        "Engine.mix_precision.scale_loss=2048 is overridden by -o Engine.mix_precision={...}" in capsys.readouterr().err
    )


COMMANDS = dict(
    evaluate=dict(evaluate=evaluate.EvaluateOptions),
    generate=dict(generate=generate.GenerateOptions),
    export=dict(export=ExportOptions),
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "section, saved, refused",
    [
        (QAT, {}, "there is not quantized, and .*run.yaml:4: Compress.Quantization.enable is on"),
        (QAT, dict(quantization=True), ""),
        (PRUNED, {}, "there is not pruned, and .*run.yaml:2: Compress.Prune.enable is on"),
        (PRUNED, dict(num_attention_heads=1), ""),
        (PRUNED, dict(ffn_hidden_size=16), ""),
    ],
)
def test_a_compressed_model_is_not_replaced_by_a_whole_one(command, section, saved, refused, write, monkeypatch):
    model = dict(num_layers=2, hidden_size=8, num_attention_heads=2, kv_channels=4) | saved
    monkeypatch.setattr(from_checkpoint, "saved_record", lambda folder, step: ("there", dict(config=dict(model=model))))
    path = write(GPT + section)
    words = ["-c", path, "--load", "x"] + ["--output", "out"] * (command == "export")
    if refused:
        with pytest.raises(SettingsError, match=refused):
            parse_with_record(words, COMMANDS[command])
        switch = "Quantization" if section is QAT else "Prune"
        parse_with_record([*words, "-o", f"Compress.{switch}.enable=False"], COMMANDS[command])
    else:
        parse_with_record(words, COMMANDS[command])


@pytest.mark.parametrize(
    "text, words, told",
    [
        (
            "Optimizer: {name: AdamX}\n",
            "",
            "run.yaml:2: Optimizer.name: 'AdamX' is not supported.*; did you mean AdamW",
        ),
        ("Engine: {mix_precision: {enable: True, level: O4}}\n", "", "'O4' is not supported; there is: o1, o2"),
        ("", "-o Model.module=GPTModul", "'GPTModul' is not supported; .*did you mean GPTModule"),
        ("_base_: ./run.yml\n", "", "_base_: .*run.yml: no such file$"),  # not: did you mean this file
        ("_base_: ./bas.yaml\n", "", "_base_: .*bas.yaml: no such file; did you mean .*base.yaml"),
        ("Engine:\n  max_steps: 3\n   eval_freq: 2\n", "", "run.yaml:4: not YAML: this line is not indented as those"),
    ],
)
def test_a_mistake_is_named_as_it_was_written(text, words, told, write, tmp_path):
    (tmp_path / "base.yaml").write_text("Global: {seed: 1}\n")
    with pytest.raises(UsageError) as wrong:
        parse_pretrain(["-c", write(GPT + text), *words.split()])
    assert re.search(told, wrong.value.what, re.MULTILINE), wrong.value.what


def test_files_of_its_other_tree_are_refused_in_a_sentence(write, capsys):
    """examples/transformer/models/GPT: 17 to 25 keys of its Global were unknown, each with a line."""
    tree = "Global: {max_steps: 3, logging_freq: 1, mix_precision: {enable: True}, save_load: {output_dir: x}}\n"
    with pytest.raises(UsageError) as wrong:
        parse_pretrain(["-c", write(GPT + tree + "Optimizer: {other: 1}\n")])
    assert wrong.value.what.startswith(f"{write(GPT + tree)}:2: Global.max_steps is a key of examples/transformer")
    assert "ppfleetx/configs/nlp/gpt" in wrong.value.what and "problems" not in wrong.value.what
    with pytest.raises(UsageError, match="Global.max_steps: 3 is a key of examples/transformer"):
        translate.main(["--from", "fleetx", write(GPT + tree)])
    with pytest.raises(UsageError, match="-o Global.max_steps is no known key"):
        parse_pretrain(["-c", write(GPT), "-o", "Global.max_steps=3"])


def test_a_mistyped_file_has_the_nearest_name(write):
    with pytest.raises(UsageError, match="-c .*rum.yaml: no such file; did you mean .*run.yaml"):
        parse_pretrain(["-c", write(GPT).replace("run.yaml", "rum.yaml")])


@pytest.mark.parametrize(
    "words, world, found",
    [
        ("-o Distributed.dp_degree=8", ["--dry-run"], ["run on 8 ranks .*; to plan for them: --world-size 8"]),
        ("-o Distributed.dp_degree=1 -o Distributed.sharding.sharding_degree=2", [], ["2 ranks are needed, and this"]),
        ("-o Distributed.sharding.sharding_degree=2", ["--dry-run"], ["--sharding-degree 2 .*--world-size 2"]),
        ("-o Distributed.mp_degree=2", ["--dry-run"], ["the job that is planned: --world-size 2"]),
    ],
)
def test_too_few_ranks_are_one_message(words, world, found, write):
    data = "Data: {Train: {dataset: {max_seq_len: 8}}}\nOptimizer: {lr: {max_lr: 0.1}}\nEngine: {max_steps: 1}\n"
    argv = ["-c", write(GPT + data), *words.split(), *world, "--mock-data", "--tokenizer-type", "NullTokenizer"]
    told = [one for one in violations(parse_pretrain(argv), 1, ())[0]]
    assert len(told) == len(found) and all(re.search(*pair) for pair in zip(found, told, strict=True)), told


def test_a_mistyped_folder_of_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with pytest.raises(DataError, match="datta.idx: no such file") as wrong:
        open_tokens("./datta")
    assert wrong.value.why == "there is no folder ./datta; did you mean data?"
    assert "create_pretraining_data" in wrong.value.do
    [line] = file_problems(parse_pretrain([*SIZES, "--data-path", "./datta/", "--vocab-size", "9"]))[:1]
    assert line.startswith("--data-path: there is no folder ./datta/; did you mean data?")


SIZES = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8".split()


def test_gpt_cn_needs_its_vocabulary(write, tmp_path, capsys):
    """Also where GPT-2's is in the cache."""
    (tmp_path / "cache" / "gpt2").mkdir(parents=True)
    path = write(GPT.replace("name: GPT", "name: GPT-cn"))
    with pytest.raises(UsageError, match="run.yaml:1: Model.name: PaddleFleetX's GPT-cn has GPTChineseTokenizer"):
        parse_pretrain(["-c", path])
    made = parse_pretrain(["-c", path, "--tokenizer-model", "sentencepiece.model"])
    assert made.tokenizer.tokenizer_model == "sentencepiece.model"
    translate.main(["--from", "fleetx", path])
    text = capsys.readouterr().out
    assert "GPTChineseTokenizer" in text.partition("# no equivalent:")[2] and "--tokenizer-model gpt2" not in text


def test_a_vocabulary_that_is_not_found_names_both_places(write, tmp_path):
    config = parse_pretrain(["-c", write(GPT + "Data: {Train: {dataset: {input_dir: x, max_seq_len: 8}}}\n")])
    [said] = [one for one in violations(config, 1, ())[0] if "vocabulary" in one]
    assert f"{tmp_path}/cache/gpt2" in said and "~/.cache/ppfleetx" in said and "NullTokenizer" not in said


def test_translate_writes_the_vocabulary_of_the_cache(write, tmp_path, capsys):
    path = write(GPT)
    with pytest.raises(SettingsError, match="no equivalent"):
        translate.main(["--from", "fleetx", "--strict", path])
    assert "~/.cache/ppfleetx" in capsys.readouterr().out.partition("# no equivalent:")[2]
    (tmp_path / "cache" / "gpt2").mkdir(parents=True)
    translate.main(["--from", "fleetx", "--strict", path])
    text = capsys.readouterr().out
    assert re.search(r"--tokenizer-model gpt2 +# .*run.yaml: the vocabulary", text) and "no equivalent" not in text


def test_translate_prints_no_command_without_its_file(write, tmp_path, capsys):
    (tmp_path / "run.sh").write_text("log=x\npython tools/auto.py -c gone.yaml\n")
    with pytest.raises(SystemExit) as left:
        run_main(translate.main, ["--from", "fleetx", str(tmp_path / "run.sh")])
    out, told = capsys.readouterr()
    assert left.value.code == 2 and out == "" and "run.sh:2: not translated: -c gone.yaml: no such file" in told
    (tmp_path / "run.sh").write_text(f"python tools/auto.py -c gone.yaml\npython tools/train.py -c {write(GPT)}\n")
    with pytest.raises(UsageError, match="gone.yaml: no such file"):
        translate.main(["--from", "fleetx", str(tmp_path / "run.sh")])
    text = capsys.readouterr().out
    assert text.count("pretrain_gpt.py") == 1 and "not translated: -c gone.yaml" in text


@pytest.mark.parametrize(
    "words, refused",
    [
        ("Data.Eval.dataset.name=CoLA", "-o Data.Eval.dataset.name: 'CoLA' is not that of Data.Train.dataset.name"),
        ("Data.Eval.dataset.root=other", "-o Data.Eval.dataset.root: 'other' is not that of Data.Train.dataset.root"),
        ("Data.Eval.dataset.root=./SST-2", ""),
        ("Data.Eval.dataset.name=sst2", ""),
        ("Data.Eval.dataset.max_length=32", ""),
        ("Data.Train.dataset.name=STSB Data.Eval.dataset.name=STSB", "Model.num_classes: '2' does not fit STSB"),
        ("Data.Train.dataset.name=MNLI Data.Eval.dataset.name=MNLI Model.num_classes=3", ""),
        ("Data.Train.dataset.name=STSB Data.Eval.dataset.name=STSB Model.num_classes=1", ""),
        (
            "Model.loss.train.name=MSELoss",
            "-o Model.loss.train.name: 'MSELoss' does not fit SST2: say CrossEntropyLoss",
        ),
        ("Model.loss.eval.name=MSELoss", "-o Model.loss.eval.name: 'MSELoss' does not fit SST2"),
        (f"{STSB} Model.loss.train.name=CrossEntropyLoss", "'CrossEntropyLoss' does not fit STSB: say MSELoss"),
        (f"{STSB} Model.loss.train.name=MSELoss Model.loss.eval.name=MSELoss", ""),
        ("Data.Eval.dataset.split=train", "-o Data.Eval.dataset.split: 'train' is not supported for SST2"),
        ("Data.Eval.dataset.split=test", "-o Data.Eval.dataset.split: 'test' is not supported for SST2"),
        ("Data.Eval.dataset.split=dev_matched", "'dev_matched' is not supported for SST2"),
        ("Data.Train.dataset.name=MRPC Data.Eval.dataset.name=MRPC Data.Eval.dataset.split=test", ""),
    ],
)
def test_a_task_is_validated_on_its_own_data(words, refused, write, capsys):
    argv = ["-c", write(GLUE), *(part for word in words.split() for part in ("-o", word))]
    if refused:
        with pytest.raises(UsageError, match=refused):
            parse(argv, {**GROUPS, **finetune_start.groups()})
    else:
        parse(argv, {**GROUPS, **finetune_start.groups()})
        assert "Data.Eval.dataset.split" not in capsys.readouterr().err


@pytest.mark.parametrize("order", (1, -1))
def test_of_two_keys_the_wrong_one_is_named(order, write):
    keys = ["Distributed.sharding.sharding_stage=4", "Distributed.sharding.sharding_degree=2"][::order]
    with pytest.raises(UsageError, match="-o Distributed.sharding.sharding_stage: sharding_stage '4'"):
        parse_pretrain(["-c", write(GPT), *(part for key in keys for part in ("-o", key))])


def test_layers_that_a_model_lacks_are_one_problem(write):
    """A file for 6 blocks, and a model of 2: one line names the four that are missing."""
    skip = "".join(f"    block_{number}: [linear2]\n" for number in range(6))
    text = GPT + "Compress:\n  Quantization:\n   enable: True\n   skip_tensor_map:\n" + skip
    model = with_quantization(parse_pretrain(["-c", write(text)])).model
    weight = SimpleNamespace(matrices=1)
    tables = {layer: {"mlp.down.weight": weight, "mlp.up.weight": weight} for layer in range(2)}
    [found] = linear_kinds.problems(model, lambda: tables)
    missing = ", ".join(f"blocks.{number}.mlp.down" for number in range(2, 6))
    assert found.endswith(f": the model has no {missing}; its blocks are 0 to 1")


def test_a_pretrained_folder_that_is_not_there(tmp_path):
    said = dict(pretrained_checkpoint=str(tmp_path / "gone"))
    with pytest.raises(CheckpointError) as refused:
        finetune_start.beginning(said.get, lambda record: False)
    assert "there is no such folder" in str(refused.value) and ".pdparams" in str(refused.value)


def test_rows_without_a_token_are_a_note():
    tokens = lambda count: SimpleNamespace(vocab_size=count)
    assert embedding_rows.tokenless(tokens(8192), 50304).startswith(
        "42112 of 50304 rows of the embedding have no token"
    )
    assert embedding_rows.tokenless(tokens(50257), 50304) == "" == embedding_rows.tokenless(tokens(151669), 151936)


FILE = GPT + "Engine: {max_steps: 4}\nOptimizer: {name: AdamW, lr: {max_lr: 1.0e-3}}\n"
KINDS = {"true": "'banana' is neither true nor false", "3": "'banana' is not a whole number", "0.5": "is not a number"}


@pytest.mark.parametrize(
    "key, good",
    [  # no flag, a flag of another command, and a key beside a switch that is off
        ("Engine.verbose", "3"),
        ("Optimizer.multi_precision", "true"),
        ("Optimizer.lr.use_increments", "true"),
        ("Profiler.record_shapes", "true"),
        ("Profiler.profile_memory", "true"),
        ("Profiler.detailed", "true"),
        ("Profiler.scheduler", "3"),
        ("Model.type_vocab_size", "3"),
        ("Data.Train.sampler.batch_size", "3"),
        ("Data.Eval.sampler.batch_size", "3"),
        ("Data.Eval.loader.num_workers", "3"),
        ("Engine.mix_precision.scale_loss", "0.5"),
        ("Generation.top_k", "3"),
        ("Generation.temperature", "0.5"),
        ("Compress.Quantization.weight_bits", "3"),
    ],
)
def test_a_key_without_effect_has_a_value_of_its_kind(key, good, write, capsys):
    """As in PaddleFleetX, whose programs read the values of all keys."""
    path = write(FILE)
    assert parse_pretrain(["-c", path, "-o", f"{key}={good}"]) and f"-o {key} has no effect" in capsys.readouterr().err
    with pytest.raises(UsageError, match=rf"-o {re.escape(key)}: .*{KINDS[good]}"):
        parse_pretrain(["-c", path, "-o", f"{key}=banana"])


@pytest.mark.parametrize("key", ["Engine.max_steps", "Optimizer.lr.max_lr", "Data.Train.dataset.max_seq_len"])
def test_keys_of_training_are_read_by_the_commands_that_train_nothing(key, write):
    path = write(FILE.replace("name: GPT", "name: GPT, module: GPTGenerationModule"))
    with pytest.raises(UsageError, match=rf"-o {re.escape(key)}: 'banana' is not a"):
        generate.main(["-c", path, "-o", f"{key}=banana", "--load", "nowhere"])


@pytest.mark.parametrize("source", ["-o", "file"])
@pytest.mark.parametrize("part", ["Train", "Eval"])
def test_missing_token_files_are_named_with_the_key_that_names_them(part, source, write):
    """Not by this suite's flag, which nobody has typed."""
    paths = {"Train": "there/a", "Eval": "there/b"} | {part: "no/where"}
    section = "  {}: {{dataset: {{input_dir: {}}}}}\n"
    path = write(FILE + "Data:\n" + "".join(section.format(*row) for row in paths.items()))
    words, where = (
        (["-o", f"Data.{part}.dataset.input_dir=no/where"], "-o ")
        if source == "-o"
        else ([], f"{path}:{dict(Train=5, Eval=6)[part]}: ")
    )
    statements = parse_pretrain(["-c", path, *words]).statements
    with pytest.raises(DataError) as raised, failing_in_users_words(statements):
        open_tokens("no/where")
    assert raised.value.what.startswith(f"{where}Data.{part}.dataset.input_dir: no/where.idx: no such file")


def test_validation_with_files_of_its_own_asks_for_no_test(write):
    """PaddleFleetX tests ten times as many batches as it validates, where there is something to test."""
    path = write(FILE + "Data:\n  Train: {dataset: {input_dir: a}}\n")
    of = lambda *words: parse_pretrain(["-c", path, "-o", "Engine.eval_iters=3", *words]).batch.test_iters
    assert of() == 30 and of("-o", "Data.Eval.dataset.input_dir=b") is None
    assert of("-o", "Data.Eval.dataset.input_dir=b", "-o", "Data.Test.dataset.input_dir=c") == 30
