# SPDX-License-Identifier: Apache-2.0
"""Words of other suites where they are no flags: the message names the flag that is meant, or the command that takes it."""

import re
from pathlib import Path

import pytest
import torch

from megatron.errors import UsageError
from megatron.inference.sampling import Sampling
from megatron.settings import messages
from megatron.settings.dialects.hf_trainer import HF_TRAINER
from megatron.settings.dialects.megatron_lm import answer
from megatron.settings.dialects.nanogpt import MEANT
from megatron.settings.dialects.table import Word
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import GROUPS
from megatron.settings.spelling import spellings_of
from megatron.settings.statements import SaidBy
from megatron.tasks.chat_settings import ChatSettings

SHAPE = "--num-layers 2 --hidden-size 8 --num-attention-heads 2".split()
KNOWN = spellings_of(GROUPS)
UNKNOWN = [
    key
    for key in dict.fromkeys(HF_TRAINER.keys())
    if "." not in key and key.islower() and "--" + key.replace("_", "-") not in KNOWN
    and HF_TRAINER.flags_of_key(key) and answer("--" + key) is None
]  # fmt: skip


@pytest.mark.parametrize("key", [*UNKNOWN, *MEANT])
def test_the_flag_that_is_meant_is_named(key):
    flag = "--" + key.replace("_", "-")
    if flag in KNOWN:
        pytest.skip("a flag here, too")
    with pytest.raises(UsageError) as refused:
        parse_pretrain([*SHAPE, flag, "1"])
    meant = MEANT[key].split(" and ") if key in MEANT else HF_TRAINER.flags_of_key(key)
    assert all(one in str(refused.value) for one in meant)


PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
ROWS = PAGE.partition("## Words of Trainer, TRL and PEFT\n")[2].partition("\n## ")[0].splitlines()
CELLS = [[re.findall("`([^`]+)`", cell) for cell in row.split(" | ")] for row in ROWS if row.startswith("| `")]
FLAGS = {**spellings_of(dict(sampling=Sampling)), **spellings_of({**GROUPS, "chat": ChatSettings})}


@pytest.mark.parametrize("theirs, here", [pytest.param(*cells, id=cells[0][0]) for cells in CELLS])
def test_the_page_for_users_of_hugging_face_names_flags_that_there_are(theirs, here):
    """Each word is a flag of ours, or the message for an unknown one names what the page has beside it."""
    there = set(re.findall("--[a-z0-9-]+", " ".join(here)))
    assert there and there <= {*FLAGS, "--input"}, "flags of the page"
    for word in theirs:
        flag = "--" + word.replace("_", "-")
        ours = FLAGS.get(flag)
        said = f"{flag} {ours.setting.flag}" if ours else messages.unknown(Word(flag, [], SaidBy.COMMAND), FLAGS)
        assert there & set(re.findall("--[a-z0-9-]+", said)), (word, said)
        alone = messages.unknown(Word(flag, [], SaidBy.COMMAND), KNOWN)  # in pretrain_gpt.py
        assert "did you mean" not in alone or there & set(re.findall("--[a-z0-9-]+", alone)), (word, alone)


ELSEWHERE = [  # command, line, what the message says, what it must not say
    ("plan", "--model llama-3-8b --world-size 8", "no --model: say --model-name-or-path", "missing"),
    ("plan", "--gpus 8 --model-name-or-path gpt2", "no --gpus: say --world-size", "--nproc-per-node"),
    (
        "plan",
        "--device H100 --model-name-or-path gpt2",
        "none of auto, cpu, cuda, gpu; plan and --dry-run take",
        "mean",
    ),
    ("plan", "--gpu H100 --model-name-or-path gpt2", "no --gpu: say --device-name", "--nproc-per-node"),
    ("plan", "--model-name-or-path llama3-8b", "shape; did you mean llama-3-8b?", "missing|gpt2-small"),
    ("pretrain", "--gpus 8 --model-name-or-path gpt2", "--nproc-per-node N starts a process for each GPU", "world"),
    ("pretrain", "--torch_dtype bfloat16 --model-name-or-path gpt2", "no --torch-dtype: say --precision", "unknown"),
    ("pretrain", "--dataset_text_field text --model-name-or-path gpt2", "preprocess_data.py --json-keys", "unknown"),
    ("pretrain", "--do_train --model-name-or-path gpt2", "no --do-train: training is what is done", "--skip-train"),
    ("pretrain", "--train_file x --model-name-or-path gpt2", "token files are made by preprocess_data.py", "metrics"),
    ("pretrain", "--device cuda:1 --model-name-or-path gpt2", "cuda, gpu; CUDA_VISIBLE_DEVICES=1 in front", "did you"),
    ("finetune", "--task chat --train_file x", "no --train-file: say --train-data FILE", "preprocess_data"),
    ("finetune", "--task chat --max_prompt_length 9", "longer than --seq-length loses its end", "unknown"),
    (
        "generate",
        "--max_length 9 --load x --prompt y",
        "no --max-length: say --tokens-to-generate, which",
        "seq-length",
    ),
    ("generate", "--torch_dtype bfloat16 --load x --prompt y", "no --torch-dtype: say --precision", "unknown"),
    ("generate", "--model x --prompt y", "no --model: say --load, or --load-exported", "unknown"),
    ("checkpoint", "to-hf x y --torch_dtype bfloat16", "no --torch-dtype: say --dtype", "unknown"),
    ("preprocess", "--input x --output-prefix y --model z", "no --model: say --load, a folder", "exported"),
]


@pytest.mark.parametrize("command, line, said, unsaid", ELSEWHERE, ids=[f"{row[0]} {row[1]}" for row in ELSEWHERE])
def test_hints_are_those_of_the_command(command, line, said, unsaid):
    import finetune
    import preprocess_data
    import pretrain_gpt
    from megatron.tools import checkpoint, generate, plan

    tools = dict(plan=plan, pretrain=pretrain_gpt, finetune=finetune)
    tools |= dict(generate=generate, checkpoint=checkpoint, preprocess=preprocess_data)
    with pytest.raises(UsageError) as refused:
        tools[command].main(line.split())
    assert said in str(refused.value) and not any(one in str(refused.value) for one in unsaid.split("|"))


def test_every_word_of_trainer_has_an_answer(root):
    """Of a page of TrainingArguments and run_clm.py: what to say, or why there is nothing to say."""
    page = (root / "tests/documented/others/words.txt").read_text(encoding="utf-8")
    section = page.partition("[hf-trainer]")[2].partition("\n[")[0]
    words = {row.partition("=")[0] for line in section.splitlines() for row in line.partition("  ")[0].split(" & ")}
    plain = {f"--{word.replace('_', '-')}" for word in words if re.fullmatch("[a-z_0-9]+[a-wyz0-9]", word)} - set(KNOWN)
    said = {flag: messages.unknown(Word(flag, [], SaidBy.COMMAND), KNOWN) for flag in plain if answer(flag) is None}
    assert len(said) > 100
    assert not [words for words in said.values() if words.startswith("unknown flag")]


@pytest.mark.parametrize("word", ["bfloat16", "torch.bfloat16", "bf16"])
def test_number_formats_have_the_names_of_torch_too(word):
    """In each command that takes a format."""
    from megatron.serving.settings import ServeOptions
    from megatron.tools.evaluate import EvaluateOptions
    from megatron.training.conversion_commands import ToHFOptions

    assert parse_pretrain(["--precision", word, *SHAPE]).precision.precision == "bf16"
    assert parse_pretrain(["--exp-avg-dtype", word, *SHAPE]).optimizer.exp_avg_dtype == "bf16"
    for group, flag in ((ServeOptions, "--dtype"), (EvaluateOptions, "--precision"), (ToHFOptions, "--dtype")):
        assert spellings_of(dict(own=group))[flag].value([word]) == "bf16"
    with pytest.raises(UsageError, match="'float16' is none of fp32, bf16"):
        parse_pretrain(["--exp-avg-dtype", "float16", *SHAPE])


def test_words_of_paddle_in_the_other_command_for_data(capsys):
    import preprocess_data

    line = "--model_name gpt2 --tokenizer_name GPTTokenizer --data_format JSON --input_path x --append_eos --json_key t"
    with pytest.raises(UsageError) as refused:
        preprocess_data.main([*line.split(), "--output_prefix", "y", "--workers", "2"])
    for flag in ("--model-name", "--data-format", "--input-path", "--append-eos"):
        assert f"{flag} is a flag of python -m megatron.tools.create_pretraining_data" in str(refused.value)
    [line] = [line for line in str(refused.value).splitlines() if "--json-key " in line]
    assert "create_pretraining_data" in line and line.endswith("here it is --json-keys")


def test_translate_starts_the_command_that_takes_the_words(capsys):
    from megatron.tools import translate

    script = "python ppfleetx/data/data_tools/gpt/preprocess_data.py"
    translate.main(["--from", "fleetx", f"{script} --model_name gpt2 --input_path x --append_eos"])
    assert "python -m megatron.tools.create_pretraining_data --model_name gpt2 --input" in capsys.readouterr().out


def test_weights_of_norms_less_one_train_the_same(capsys):
    """Adam without decay: steps do not depend on the value itself, so w and 1 + v stay equal."""
    own, less = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    weights = [one.requires_grad_() for one in (own, less)]
    optimizers = [torch.optim.AdamW([one], lr=0.1, weight_decay=0.0) for one in weights]
    for step in range(5):
        for weight, optimizer, offset in zip(weights, optimizers, (0, 1), strict=True):
            optimizer.zero_grad()
            (((weight + offset) * torch.arange(4) - step) ** 2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(own, 1 + less)
    parse_pretrain([*SHAPE, "--apply-layernorm-1p", "--normalization", "RMSNorm"])
    assert "--apply-layernorm-1p has no effect: norms hold their weight" in capsys.readouterr().err
