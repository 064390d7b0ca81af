# SPDX-License-Identifier: Apache-2.0
"""Instruction tuning against plain torch, where each conversation is a text by itself: packed or not, in each layout."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import finetune
import pretrain_gpt
from megatron.convert.huggingface import to_hf
from megatron.convert.merged import merge
from megatron.convert.upcycled import upcycle
from megatron.errors import Failure, UsageError
from megatron.inference.answers import Asked, answered
from megatron.inference.load import load_model, open_tokenizer
from megatron.inference.sampling import Sampling
from megatron.model.recipe import facts_of, kind_of
from megatron.tokenizer.chat_template import find_template, template_folders
from megatron.tools import generate
from tests.ranks import on_ranks
from tests.tasks.chats import (
    EOD,
    RUN,
    TUNE,
    answer_losses,
    ids_of,
    plain_tokens,
    talks,
    train,
    tune,
    weights_of,
    write_base,
    write_lines,
)
from tests.training.test_plain_loop import records

LAYOUTS = {  # packed: 4 samples; 7 otherwise
    "one process": (1, "--packing --global-batch-size 4"),
    "not packed": (1, "--global-batch-size 7"),
    "tp3 with sequence parallelism": (
        3,
        "--packing --global-batch-size 4 --tensor-model-parallel-size 3 --sequence-parallel",
    ),
    "pp3": (3, "--packing --global-batch-size 4 --pipeline-model-parallel-size 3"),
    "pp3 zb-h1": (3, "--packing --global-batch-size 4 --pipeline-model-parallel-size 3 --pipeline-schedule zb-h1"),
    "cp2": (2, "--packing --global-batch-size 4 --context-parallel-size 2"),
    "zero2": (2, "--packing --global-batch-size 4 --sharding-stage 2"),
    "zero3 recomputed": (
        2,
        "--packing --global-batch-size 4 --sharding-stage 3 --recompute-granularity full --recompute-method uniform",
    ),
}
HEAD = ids_of("### Assistant\n")
FULL = ("tp3 with sequence parallelism", "pp3 zb-h1", "zero2", "cp2", "zero3 recomputed")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in LAYOUTS]
)
def test_any_layout_is_each_conversation_by_itself(layout, base, tmp_path):
    world, words = LAYOUTS[layout]
    file = write_lines(tmp_path / "talks.jsonl", [dict(messages=talk) for talk in talks()])
    line = f"--task chat --train-data {file} --chat-template plain --load {base} --save {tmp_path / 'run'} {TUNE}"
    line += f" --train-iters 3 {words}"
    on_ranks(world, tune, line)
    texts = [plain_tokens(talk) for talk in talks()]
    steps, weights = train(weights_of(base), lambda weights: answer_losses(weights, texts), 3, 1e-2)
    found = records(tmp_path / "run", "step")
    for step, wanted in zip(found, steps, strict=True):
        assert step["lm loss"] == pytest.approx(wanted["loss"], rel=1e-6)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=2e-5)
    for name, values in weights_of(tmp_path / "run").items():
        assert (values[: len(weights[name])].double() - weights[name]).abs().max() < 2e-5, name


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """A folder with a checkpoint that was trained on conversations."""
    folder = tmp_path_factory.mktemp("tuned")
    file = write_lines(folder / "talks.jsonl", [dict(messages=talk) for talk in talks()])
    line = f"--task chat --train-data {file} --chat-template plain --load {base} --save {folder} {TUNE}"
    finetune.main(f"{line} --train-iters 1 --global-batch-size 7".split())
    return folder


def test_the_server_finds_the_template(tuned):
    loaded = load_model(str(tuned))
    template = find_template(template_folders([tuned], loaded.config.tokenizer), open_tokenizer(loaded))
    assert template.encode(talks()[1][:1]) == [*plain_tokens(talks()[1][:1])[0], *HEAD]
    assert template.special[template.tokens["eos_token"]] == EOD and loaded.continues_texts


def test_the_command_line_answers_conversations(tuned, capsys, monkeypatch):
    """Prompts, whole conversations and what is typed: the model continues the text that the template `plain` writes."""
    loaded = load_model(str(tuned))
    how = dict(tokens_to_generate=6, greedy=True)

    def answer_to(*turns: str) -> str:
        ids = ids_of(
            "".join(f"### {role}\n{text}" for role, text in zip(turns[::2], turns[1::2], strict=True))
            + "### Assistant\n"
        )
        asked = Asked([""], Sampling(**how), ids=[ids], end=EOD)
        return answered(loaded, open_tokenizer(loaded), asked).answers[0].text

    def said(*words: str) -> list[dict]:
        line = f"--load {tuned} --device cpu --chat --json --tokens-to-generate 6 --greedy"
        generate.main([*line.split(), *words])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    turns = [dict(role="user", content="Why?"), dict(role="assistant", content="No."), dict(role="user", content="[1]")]
    whole = json.dumps(dict(messages=[*turns, dict(role="assistant", content="left out")]))
    found = said("--prompt", "Hello!", "[1]", whole, json.dumps(turns), "--system-prompt", "Be it.")
    alone = [answer_to("System", "Be it.\n", "User", f"{text}\n") for text in ("Hello!", "[1]")]
    assert [one["text"] for one in found[:2]] == alone
    assert [one["prompt"] for one in found] == ["Hello!", "[1]", "[1]", "[1]"] and found[2] == found[3]
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello!\n\nWhy?\n"))
    first, second = said()
    assert first["text"] == answer_to("User", "Hello!\n") and second["prompt"] == "Why?"
    template = find_template(template_folders([tuned], loaded.config.tokenizer), open_tokenizer(loaded))
    ids = template.encode(
        [*(dict(role="user", content="Hello!"), dict(role="assistant", content=first["text"])), turns[0]]
    )
    asked = Asked([""], Sampling(**how), ids=[ids], end=EOD)
    assert second["text"] == answered(loaded, open_tokenizer(loaded), asked).answers[0].text
    ids = template.encode([dict(role="system", content="Be it."), *turns])
    assert found[2]["text"] == answered(loaded, open_tokenizer(loaded), replace(asked, ids=[ids])).answers[0].text


def test_what_the_command_line_cannot_answer_is_named(tuned, base, capsys, monkeypatch):
    def said(words: str, *prompts: str) -> str:
        with pytest.raises(Failure) as refused:
            generate.main([*words.split(), "--device", "cpu", *(["--prompt", *prompts] if prompts else [])])
        return str(refused.value)

    chat = f"--load {tuned} --chat"
    assert f"--chat: {base} has no chat template\n  -> --chat-template FILE" in said(f"--load {base} --chat", "Hi")
    assert "prompt 2: only answers of the assistant" in said(chat, "Hi", '[{"role": "assistant", "content": "x"}]')
    assert "prompt 1[0]: no content" in said(chat, '[{"role": "user"}]')
    assert "prompt 1: messages[0].name: the chat template has no" in said(
        chat, '[{"role": "user", "content": "x", "name": "y"}]'
    )
    assert "--num-samples 2: messages that are typed have one answer each" in said(f"{chat} --num-samples 2 --top-k 3")
    assert "--output x: messages that are typed" in said(f"{chat} --output x")
    generate.main(f"--load {tuned} --device cpu --prompt a --system-prompt b --tokens-to-generate 1".split())
    assert "note: --system-prompt b has no effect without --chat" in capsys.readouterr().err


def test_a_run_that_goes_on_finds_the_template(tuned, tmp_path):
    line = f"--task chat --train-data {tuned / 'talks.jsonl'} --load {tuned} --save {tmp_path} {TUNE}"
    finetune.main(f"{line} --train-iters 2 --global-batch-size 7".split())
    assert [step["iteration"] for step in records(tmp_path, "step")] == [2]
    assert (tmp_path / "chat_template.jinja").read_text() == (tuned / "chat_template.jinja").read_text()


@pytest.mark.sampled(10)
def test_an_export_has_the_template(tuned, tmp_path):
    transformers = pytest.importorskip("transformers")
    to_hf(Path(tuned) / "iter_0000001", tmp_path / "hf", torch.float32, {}, check=False)
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "hf"))
    ids = theirs.apply_chat_template(talks()[0], return_dict=False)
    assert ids == plain_tokens(talks()[0])[0] and theirs.eos_token == "<|endoftext|>"
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"] == EOD


def test_a_tuned_model_is_a_gpt(tuned, tmp_path):
    """For `upcycle`, and in the words of exports."""
    _, compared, _ = upcycle(Path(tuned) / "iter_0000001", tmp_path / "mixture", dict(num_experts=4))
    loaded = load_model(str(tuned))
    assert compared.startswith("the same function") and kind_of(facts_of(loaded.config, loaded.vocab_size)) == "GPT"


def test_pretraining_goes_on_from_a_tuned_model(tuned, tmp_path):
    """With its weights, which a learning rate of next to nothing leaves as they are."""
    line = (
        f"--finetune --load {tuned} --use-checkpoint-args --save {tmp_path} --mock-data --eval-iters 0 --train-iters 1"
    )
    pretrain_gpt.main(f"{line} {RUN} --lr 1e-30 --weight-decay 0".split())
    now, before = weights_of(tmp_path), weights_of(tuned)
    assert now.keys() == before.keys() and all(torch.equal(now[name], before[name]) for name in now)
    assert load_model(str(tmp_path)).config.model.model_type == "GPT"
    with pytest.raises(UsageError, match="this command trains GPT; --finetune begins a new run with its weights"):
        pretrain_gpt.main(f"{line} {RUN}".removeprefix("--finetune ").split())


def test_a_merged_checkpoint_has_the_template(base, tmp_path):
    """Adapters that were trained on conversations, merged into the model: it answers as before."""
    file = write_lines(tmp_path / "talks.jsonl", [dict(messages=talk) for talk in talks()])
    line = f"--task chat --train-data {file} --chat-template plain --load {base} --save {tmp_path / 'run'} {TUNE}"
    finetune.main(f"{line} --train-iters 1 --global-batch-size 7 --lora-rank 2".split())
    merge(tmp_path / "run" / "iter_0000001", tmp_path / "merged")
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (tmp_path / "merged" / name).read_text() == (tmp_path / "run" / name).read_text()
