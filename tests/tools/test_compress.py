# SPDX-License-Identifier: Apache-2.0
"""Pruning, distillation and quantization as one command: its stages, what a second call does, and its report."""

import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.errors import Failure, SettingsError, UsageError
from megatron.inference.load import load_model
from megatron.tools import compress
from tests.inference.test_prune import TEXT, token_file
from tests.training.test_plain_loop import FLAGS, SIX

DATA = "--mock-data --vocab-size 100 --micro-batch-size 2 --device cpu --num-workers 0 --peak-tflops 1"
TRAIN = f"{FLAGS} {SIX} --lr 1e-3 --lr-decay-style constant"


def in_this_process(command) -> None:
    words = [str(word) for word in command[1:]]
    if words[0] == "-m":
        importlib.import_module(words[1]).main(words[2:])
    else:
        pretrain_gpt.main(words[1:])


@pytest.fixture
def ran(monkeypatch, capsys) -> list[list[str]]:
    """The commands of stages, which run in this process, as those that measure do."""
    commands = []

    def run(name, command):
        commands.append([name, *command])
        in_this_process(command)

    def output(command):
        capsys.readouterr()
        in_this_process(["python", *command])
        return capsys.readouterr().out

    monkeypatch.setattr(compress, "run", run)
    monkeypatch.setattr(compress, "output_of", output)
    return commands


@pytest.mark.full
def test_stages_follow_each_other_and_a_second_call_goes_on(tmp_path, ran, capsys, monkeypatch):
    base, out, text = tmp_path / "base", tmp_path / "out", token_file(tmp_path, TEXT)
    pretrain_gpt.main(f"{TRAIN} --save {base}".split())
    line = f"--load {base} --save {out} --data-path {text} --prune-ratio 0.4 --qat-iters 2"
    line += " --prompt-length 4 --output-length 2"
    words = f"{line} -- python pretrain_gpt.py {DATA} {SIX} --lr 1e-3 --train-iters 4".split()
    real = compress.figures
    monkeypatch.setattr(
        compress, "figures", lambda stage, options: 1 / 0 if stage.name == "distilled" else real(stage, options)
    )
    with pytest.raises(ZeroDivisionError):  # killed after the distillation
        compress.main(words)
    monkeypatch.setattr(compress, "figures", real)
    compress.main(words)
    assert [name for name, *_ in ran] == ["pruned", "distilled", "quantized"]
    assert f"--load {out / 'pruned'} --finetune" in " ".join(ran[1])
    assert f"--teacher-load {base}" in " ".join(ran[2])
    found = json.loads((out / "report.json").read_text())["measured"]
    assert list(found) == ["trained", "pruned", "distilled", "quantized"]
    for name in ("pruned", "distilled", "quantized"):
        model = load_model(str(out / name)).config.model
        assert (model.num_attention_heads, model.ffn_size) == (2, 58)
        assert found[name]["parameters"] < found["trained"]["parameters"]
    assert found["quantized"]["megabytes"] < found["distilled"]["megabytes"]
    assert found["distilled"]["loss"] != found["pruned"]["loss"]
    rows = (out / "report.md").read_text().splitlines()
    assert len(rows) == 6 and rows[-1].startswith(f"| quantized | {found['quantized']['parameters']:,} |")
    assert ">quantized<" in (out / "report.svg").read_text()
    with pytest.raises(SettingsError, match="pruned was made by another command"):
        compress.main([word.replace("0.4", "0.6") for word in words])
    shutil.rmtree(out / "distilled")  # and a training that was interrupted goes on by itself
    record = json.loads((out / "report.json").read_text())
    del record["done"]["quantized"]
    (out / "report.json").write_text(json.dumps(record))
    ran.clear()
    compress.main(words)
    assert [name for name, *_ in ran] == ["quantized"] and "--finetune" not in ran[0]


TRAINING = ["python", "pretrain_gpt.py", *f"{DATA} --num-layers 2 --lr 6e-4 --train-iters 200".split()]


def test_commands_of_stages_begin_where_the_one_before_ended(tmp_path):
    """Each trains with the words of the user, and where the tool has others, with these."""
    options = compress.CompressOptions(
        load="base", save="out", data_path=["held"], kd_alpha=0.3, kd_temperature=2.0, qat_iters=5, qat_lr=1e-5
    )
    calibrated = replace(options, calibration_data=["text"], calibration_samples=7)
    trained, pruned, distilled, quantized = compress.stages(calibrated, TRAINING, ["--prune-ratio", "0.4"])
    assert trained.folder == "base" and not trained.command and not trained.quantize
    assert pruned.command[3:] == (
        "--load base --save out/pruned --prune-ratio 0.4 --calibration-data text --calibration-samples 7".split()
    )
    assert not pruned.resume and quantized.quantize == ["--quantize", "int8"] and not distilled.quantize
    for stage, source, iterations, rate, rounds in (
        (distilled, "out/pruned", 200, 6e-4, False),
        (quantized, "out/distilled", 5, 1e-5, True),
    ):
        assert stage.command[: len(TRAINING)] == stage.resume[: len(TRAINING)] == TRAINING
        found, again = (words_of(command) for command in (stage.command, stage.resume))
        assert found.pop("finetune") and found.pop("load") == source and again.pop("load") == stage.folder
        assert found == again and found["save"] == stage.folder == f"out/{stage.name}"
        assert (int(found["train-iters"]), float(found["lr"])) == (iterations, rate)
        assert (found["teacher-load"], found["kd-alpha"], found["kd-temperature"]) == ("base", "0.3", "2.0")
        assert ("quantization" in found) == rounds
    few = compress.stages(replace(options, qat_iters=None), TRAINING, [])
    assert [stage.name for stage in few] == ["trained", "pruned", "distilled"] and "calibration" not in str(few)


def words_of(command) -> dict[str, object]:
    """Flag -> its value, of which the last one counts; True without one."""
    found, name = {}, None
    for word in command:
        if word.startswith("--"):
            name = word[2:]
            found[name] = True
        elif name:
            found[name] = word
    return found


def test_a_stage_is_made_once_and_goes_on_after_an_error(tmp_path, monkeypatch):
    ran = []

    def run(name, command):
        ran.append(command)
        if "fails" in command:
            raise Failure("no")

    monkeypatch.setattr(compress, "run", run)
    record = lambda: compress.Record(tmp_path / "report.json")
    training = compress.CompressionStage("distilled", str(tmp_path / "distilled"), ["new"], ["goes on"])
    pruning = compress.CompressionStage("pruned", str(tmp_path / "pruned"), ["prune"])
    with pytest.raises(Failure):
        record().make(replace(training, command=["fails"]))
    record().make(compress.CompressionStage("trained", "base"))
    assert ran == [["fails"]] and not record().done
    for stage in (training, pruning):
        (tmp_path / stage.name).mkdir()
        (tmp_path / stage.name / "latest_checkpointed_iteration.txt").write_text("3")
        record().make(stage)  # a training that was interrupted goes on, and a model that was pruned is complete
    assert ran[1:] == [["goes on"]] and set(record().done) == {"distilled", "pruned"}
    record().make(training)
    assert ran[2:] == []
    with pytest.raises(SettingsError, match="was made by another command"):
        record().make(replace(training, command=["other"]))
    record().make(compress.CompressionStage("quantized", str(tmp_path / "quantized"), ["first"], ["goes on"]))
    assert ran[2:] == [["first"]]


def test_each_stage_is_made_and_then_measured(tmp_path, monkeypatch):
    """One after another; the report is of all of them."""
    called, words = [], "--load base --data-path held --prune-ratio 0.4 --qat-iters 2"
    monkeypatch.setattr(compress.Record, "make", lambda record, stage: called.append(("make", stage.name)))
    monkeypatch.setattr(
        compress.Record, "measure", lambda record, stage, options: called.append(("measure", stage.name))
    )
    monkeypatch.setattr(compress, "write_report", lambda folder, measured: called.append((folder, measured)))
    compress.main([*words.split(), "--save", str(tmp_path / "out"), "--", *TRAINING])
    stages = ["trained", "pruned", "distilled", "quantized"]
    assert called == [(what, name) for name in stages for what in ("make", "measure")] + [(tmp_path / "out", {})]


def test_the_table_has_each_stage():
    one = dict(parameters=12345, megabytes=1.25, loss=2.0, tokens_per_second=99.6)
    rows = compress.table(dict(trained=one, pruned=dict(one, loss=25.0, lambada=0.5))).splitlines()
    assert rows[0] == "|  | parameters | weights, MB | loss | perplexity | LAMBADA | tokens/s |"
    assert rows[2] == "| trained | 12,345 | 1.2 | 2.0000 | 7.39 |  | 100 |"
    assert rows[3] == "| pruned | 12,345 | 1.2 | 25.0000 | 485165195.41 | 0.5000 | 100 |"  # e^20 at most
    assert "LAMBADA" not in compress.table(dict(trained=one))


def test_figures_are_of_all_tokens_and_measured_again_for_others(tmp_path, monkeypatch):
    """Files have different numbers of tokens; a report with other data, or with more of them, is not that of before."""
    lines = [dict(loss=2.0, tokens=30, accuracy=0.5), dict(loss=4.0, tokens=10)]
    asked = []

    def output_of(command):
        asked.append(" ".join(map(str, command)))
        if "--output" in command:
            file = Path(command[command.index("--output") + 1])
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return json.dumps(dict(weights=1.5, tokens_per_second=7.0))

    state = dict(config=None, vocab_size=None)
    monkeypatch.setattr(compress, "output_of", output_of)
    monkeypatch.setattr(compress, "saved_record", lambda folder: (folder, state))
    monkeypatch.setattr(compress, "config_of", lambda record: None)
    monkeypatch.setattr(compress, "facts_of", lambda config, vocab_size: SimpleNamespace(parameters=12))
    made, stage = compress.Record(tmp_path / "report.json"), compress.CompressionStage("trained", "base")
    options = compress.CompressOptions(load="base", save=str(tmp_path), data_path=["a", "b"])

    def measured(**more) -> int:
        before = len(asked)
        made.measure(stage, replace(options, **more))
        return len(asked) - before

    assert measured() == 2 and made.measured["trained"]["loss"] == pytest.approx((2 * 30 + 4 * 10) / 40)
    more = dict(max_tokens=5, data_path=["a"], valid_data="l", prompt_length=8, output_length=9, load="other")
    for name, value in more.items():  # each changed alone; with LAMBADA there is one more command
        measured()
        assert (measured(), measured(**{name: value})) == (0, 3 if name == "valid_data" else 2)
    assert measured(max_tokens=5, data_path=["a"]) == 2 and "--data-path a --max-tokens 5" in asked[-2]
    again = compress.Record(tmp_path / "report.json")
    assert again.measured == made.measured and again.measured["trained"]["parameters"] == 12


def test_what_cannot_be_is_said(tmp_path):
    line = f"--load x --save {tmp_path} --data-path y --prune-ratio 0.4"
    with pytest.raises(UsageError, match="the command that trains is missing"):
        compress.main(line.split())
    with pytest.raises(UsageError, match="--finetune after --: this tool sets it itself"):
        compress.main(f"{line} -- python pretrain_gpt.py --finetune".split())
    with pytest.raises(UsageError, match="taylor needs --calibration-data"):
        compress.main(f"{line} --prune-criterion taylor -- python pretrain_gpt.py".split())
    with pytest.raises(UsageError, match="--qat-lr: there is no quantization aware training"):
        compress.main(f"{line} --qat-lr 1e-4 -- python pretrain_gpt.py".split())
    for words, said in (("--qat-iters 0", "at least 1"), ("--qat-lr -1", "above 0"), ("--kd-alpha 2", "at most 1")):
        with pytest.raises(SettingsError, match=f"{words}.* must be .*{said}"):
            compress.main(f"{line} {words} -- python pretrain_gpt.py".split())
    with pytest.raises(Failure, match="ended with code 4") as error:
        compress.output_of(["-c", "raise SystemExit(4)"])
    assert error.value.code == 4
    with pytest.raises(Failure, match="the stage 'pruned' ended with code 3") as error:
        compress.run("pruned", ["sh", "-c", "exit 3"])
    assert error.value.code == 3
