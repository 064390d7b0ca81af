# SPDX-License-Identifier: Apache-2.0
"""All of PaddleFleetX's GPT files and of its scripts: each is read whole by the command that it is for, and translated."""

import re
import shlex
from os.path import relpath
from pathlib import Path

import pytest

from megatron.errors import SettingsError, UsageError
from megatron.model.pruning import PruningOptions, TargetSizes
from megatron.model.quantization import QuantizeOptions
from megatron.settings.dialects.fleetx_files import read
from megatron.settings.dialects.fleetx_keys import purpose_of, translate_entries
from megatron.settings.parse import parse
from megatron.settings.rules import range_problem
from megatron.tools import prune, translate
from megatron.tools.benchmark_inference import BenchmarkOptions
from tests.documented.test_fleetx_words import Read, a_file

HERE = Path(__file__).parent / "others"
CONFIGS = "ppfleetx/configs/nlp/gpt"
LINES = (HERE / "fleetx_files.txt").read_text().splitlines()[1:]
NAMES = {number: (name, base) for number, name, base in (line.split() for line in LINES if line[0].isdigit())}
STARTED = [line.partition(" ")[::2] for line in (HERE / "fleetx_commands.txt").read_text().splitlines()[1:]]
# Files of one command that their modules do not say
OTHERS = {"auto/export_gpt_fp16_single_card.yaml": "export", "prune_gpt_345M_single_card.yaml": "prune"}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with all of the files."""
    folder = tmp_path_factory.mktemp("fleetx")
    entries = {number: {} for number in NAMES}
    for line in LINES[len(NAMES) :]:
        setting, *numbers = line.split()
        for number in numbers:
            key, _, value = setting.partition("=")
            entries[number][key] = value
    for number, (name, base) in NAMES.items():
        path = folder / CONFIGS / name
        path.parent.mkdir(parents=True, exist_ok=True)
        below = {} if base == "-" else {"_base_": relpath(folder / CONFIGS / NAMES[base][0], path.parent)}
        a_file(path.parent, path.name, below | entries[number])
    return folder


def test_the_lists_are_whole():
    assert len(NAMES) == 40 and len({name for name, _ in STARTED}) == 32


@pytest.mark.parametrize("name", [name for name, _ in NAMES.values()])
def test_each_file_is_read_by_its_command(name, desk):
    path = str(desk / CONFIGS / name)
    entries = read(path)
    purpose = OTHERS.get(name) or purpose_of(entries)
    if purpose == "prune":
        assert not translate_entries(entries, "prune").problems
        return
    chinese = ["--tokenizer-model", "sentencepiece.model"] * ("_cn_" in name)  # which the file cannot name
    found = Read(purpose, ["-c", path, *chinese])
    assert found.problems == []
    assert [name for name, value in found.values.items() if range_problem(name, value)] == []


def translated(command: str, desk, monkeypatch, capsys) -> str:
    monkeypatch.chdir(desk)
    (desk / "gpt2").mkdir(exist_ok=True)
    monkeypatch.setenv("MEGATRON_CACHE", str(desk))
    translate.main(["--from", "fleetx", "--strict", command])
    return capsys.readouterr().out


PROGRAMS = {  # theirs -> ours, and whose settings its flags are
    "tools/train.py": ("pretrain_gpt.py", "train"),
    "tools/auto.py": ("pretrain_gpt.py", "train"),
    "tools/eval.py": ("-m megatron.tools.evaluate", "evaluate"),
    "tools/export.py": ("-m megatron.tools.export", "export"),
    "tools/auto_export.py": ("-m megatron.tools.export", "export"),
    "gpt/generation.py": ("-m megatron.tools.generate", "generate"),
    "gpt/inference.py": ("-m megatron.tools.generate", "generate"),
    "gpt/benchmark.py": ("-m megatron.tools.benchmark_inference", ""),
}


@pytest.mark.parametrize("script, command", STARTED, ids=[f"{n}-{name}" for n, (name, _) in enumerate(STARTED)])
def test_each_script_starts_the_same_job(script, command, desk, monkeypatch, capsys):
    command = command.replace("CONFIGS", CONFIGS)
    their = re.search(r"(\S*/)?(\w+/\w+\.py)", command)[2]
    ours, purpose = PROGRAMS[their]
    if script == "finetune_gpt_345M_single_card":
        ours, purpose = "finetune.py", "task"
    try:
        text = translated(command, desk, monkeypatch, capsys)
    except SettingsError:
        assert script.startswith("prune") and "tools.prune with this -c" in capsys.readouterr().out
        return
    except UsageError as error:  # a script with a misspelled path
        assert "nlp/gp/" in command and "no such file" in str(error) and not capsys.readouterr().out
        return
    last = text.splitlines()[max(n for n, line in enumerate(text.splitlines()) if not line.startswith("#"))]
    assert f" {ours} " in f"{last} "
    several = "--devices" in command and "," in command.partition("--devices ")[2].split()[0]
    assert ("torchrun" in last) == ("paddle.distributed.launch" in command and purpose != "export")
    assert not several or purpose == "export" or re.search(r"--nproc-per-node [28]", last)
    if purpose:
        start, _, words = last.partition(f"{ours} ")
        if "FLAGS" in words:
            body = [line.partition("  # ")[0] for line in text.splitlines() if line.startswith("    ")]
            words = " ".join(body)
        assert Read(purpose, shlex.split(words.replace("${MP}", "8"))).problems == []


@pytest.mark.parametrize("dialect", ["paddlenlp", "fleetx", "colossalai", "megatron-deepspeed", "llmacc"])
@pytest.mark.parametrize(
    "words", ["python -m paddle.distributed.launch x/other.py --lr 1", "torchrun -m my.job --lr 1"]
)
def test_no_job_becomes_another_one(dialect, words, capsys):
    for form in (words.split(), [words]):
        with pytest.raises(UsageError, match="is no program of|no command of"):
            translate.main(["--from", dialect, *form])
    assert "pretrain_gpt.py" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, wanted",
    [
        ("--test_iters -1", "--test-iters -1 must be at least 0"),
        ("--hidden_dropout_prob 1", "--hidden-dropout 1 must be at least 0 and below 1"),
        ("--micro_batch_size 0", "--micro-batch-size 0 must be at least 1"),
    ],
)
def test_a_value_that_our_command_refuses_has_no_equivalent(words, wanted, capsys):
    with pytest.raises(SettingsError, match="1 settings of PaddleNLP have no equivalent"):
        translate.main(f"--from paddlenlp --strict python run_pretrain.py --output_dir x {words}".split())
    text = capsys.readouterr().out
    assert wanted in text.partition("# no equivalent:")[2] and wanted.split(" must")[0] not in text.partition(")\n")[0]


def test_a_key_that_is_given_twice_with_one_value(tmp_path):
    (tmp_path / "a.yaml").write_text("Generation: {top_k: 5, top_k: 5}\n")
    assert Read("generate", ["-c", str(tmp_path / "a.yaml")]).values["top_k"] == 5
    for text in ("{top_k: 5, top_k: 6}", "{top_k: 5, top_k: {a: 5}}"):
        (tmp_path / "a.yaml").write_text(f"Generation: {text}\n")
        with pytest.raises(UsageError, match="Generation.top_k is given twice"):
            Read("generate", ["-c", str(tmp_path / "a.yaml")])


MIGRATING = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
SECTION = MIGRATING.partition("### PaddleFleetX's commands\n")[2].partition("\n### ")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:4]] for line in SECTION.splitlines() if line.startswith("| ")][1:]
FILES = {  # (page, their program) -> a file of that page
    ("single_card", "tools/train"): "pretrain_gpt_345M_single_card.yaml",
    ("single_finetune", "tools/train"): "finetune_gpt_345M_single_card_glue.yaml",
    ("auto_parallel", "tools/auto"): "auto/pretrain_gpt_1.3B_single_card.yaml",
    ("single_card", "tools/eval"): "eval_gpt_345M_single_card.yaml",
    ("single_card", "tasks/gpt/generation"): "generation_gpt_345M_single_card.yaml",
    ("inference", "tools/export"): "generation_qat_gpt_345M_single_card.yaml",
    ("auto_parallel", "tools/auto_export"): "auto/generation_gpt_345M_mp2.yaml",
    ("inference", "projects/gpt/inference"): "inference_gpt_345M_single_card.yaml",
    ("inference", "projects/gpt/benchmark"): "inference_gpt_345M_single_card.yaml",
    ("quantization_aware_training", "tools/train"): "qat_gpt_345M_single_card.yaml",
    ("structured_pruning", "tools/train"): "prune_gpt_345M_single_card.yaml",
}
OURS = {"pretrain_gpt.py": "train", "finetune.py": "task", "megatron.tools.benchmark_inference": "measure"} | {
    f"megatron.tools.{tool}": purpose
    for tool, purpose in dict(evaluate="evaluate", generate="generate", export="export", prune="prune").items()
}


def problems_of(command: str, file: str) -> list[str]:
    """What is wrong with the words of a documented command of ours."""
    words = shlex.split(re.sub(r"\bF\b", file, command).replace(" N", " 8"))
    place = next(n for n, word in enumerate(words) if word in OURS)
    if OURS[words[place]] == "measure":
        parse(words[place + 1 :], dict(benchmark=BenchmarkOptions, quantize=QuantizeOptions))
        return []
    if OURS[words[place]] == "prune":
        parse(words[place + 1 :], dict(tool=prune.ToolOptions, prune=PruningOptions, targets=TargetSizes))
        return []
    return Read(OURS[words[place]], words[place + 1 :]).problems


@pytest.mark.parametrize("page, there, here", ROWS, ids=[f"{row[0]}-{row[1].split()[0][1:]}" for row in ROWS])
def test_the_commands_of_its_pages(page, there, here, desk, monkeypatch, capsys):
    """Each documented command of ours takes its words, and is what a translation of theirs starts."""
    their = there.strip("`").split()[0]
    file = f"{CONFIGS}/{FILES[page.partition(',')[0], their]}"
    ours = [one for one in re.findall("`(.+?)`", here) if one.split()[0] in ("python", *OURS)]
    monkeypatch.chdir(desk)
    assert ours and all(problems_of(one, file) == [] for one in ours)
    if len(ours) == 1:
        command = f"python {there.strip('`').replace(their, f'{their}.py')}".replace(" F", f" {file}").replace(
            "_degree N", "_degree 8"
        )
        text = translated(command, desk, monkeypatch, capsys)
        assert next(one for one in OURS if one in ours[0].split()) in text


def test_the_words_for_a_tiny_file(desk, monkeypatch):
    words = shlex.split(re.search(r"tiny with `([^`]+)`", SECTION)[1])
    file = desk / CONFIGS / "pretrain_gpt_345M_single_card.yaml"
    found = Read("train", ["-c", str(file), *words])
    assert found.problems == [] and words.count("-o") == 9
    sizes = dict(num_layers=2, hidden_size=64, ffn_hidden_size=256, num_attention_heads=4, seq_length=64)
    assert sizes.items() < found.values.items() and (found.values["train_iters"], found.values["device"]) == (4, "cpu")
