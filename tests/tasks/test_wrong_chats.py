# SPDX-License-Identifier: Apache-2.0
"""Wrong settings and files of instruction tuning: one message each, with its exit code."""

import pytest

import finetune
from megatron.errors import Failure
from tests.tasks.chats import SHAPE, TUNE, talks, write_base, write_lines, write_vocabulary


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


def write(folder, *rows):
    return write_lines(folder / "talks.jsonl", rows)


NAMED_ANSWERS = ("b<|endoftext|>", "a <|endoftext> b", "<|endoftext|> c <|endoftext|>")
TALK = dict(messages=talks()[1])
TRAIN = "--task chat --train-data {file} --load {base} --global-batch-size 2 --train-iters 1 --chat-template plain"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "flags, rows, code, said",
    [
        ("--task chat --load {base}", [TALK], 3, "there are no conversations to learn"),
        (TRAIN.replace("plain", "chatm"), [TALK], 4, "no file or template of this name; did you mean chatml"),
        (TRAIN.replace("plain", "none.jinja"), [TALK], 4, "--chat-template none.jinja: there is no file"),
        (TRAIN.replace("--chat-template plain", ""), [TALK], 3, "there is no chat template"),
        (TRAIN.replace("plain", "chatml"), [TALK], 3, "needs the tokens <.im_start.> and <.im_end.>"),
        (TRAIN.replace("plain", "{base}/bad.jinja"), [TALK], 4, "not a chat template"),
        (TRAIN.replace("plain", "{base}/turns.jinja"), [TALK, dict(messages=TALK["messages"][1:])], 4, "line 2: .*turns"),
        (TRAIN.replace("{file}", "{file}x"), [TALK], 4, "talks.jsonlx: no such file; did you mean .*talks.jsonl?"),
        (TRAIN + " --seq-length 20", [TALK, TALK], 4, "-> give a longer --seq-length, or conversations"),
        (TRAIN, [dict(messages=TALK["messages"][:1])], 4, "-> conversations with an answer of the assistant"),
        (TRAIN, [TALK, dict(messages=[*TALK["messages"], dict(role="assistant", content="x", foo=1)])], 4, "foo: the chat"),
        (TRAIN, [TALK, dict(messages=TALK["messages"], tools=[dict(name="f")])], 4, "no place for them\n  -> no templa"),
        (TRAIN + " --data-path {file}", [TALK], 3, "both name what is learned"),
        (TRAIN.replace("--train-data {file}", "--data-path {base}"), [TALK], 4, "has no train.jsonl"),
        (TRAIN + " --reset-attention-mask", [TALK], 3, "--reset-attention-mask: conversations are kept apart"),
        (TRAIN + " --train-data-path x", [TALK], 3, "conversations are --train-data"),
        (TRAIN + " --mock-data", [TALK], 3, "--mock-data reads no files"),
        (TRAIN + " --no-full-validation", [TALK], 3, "--no-full-validation: all conversations"),
        (TRAIN.replace("chat --", "dpo --"), [TALK], 4, "line 1: no chosen and no rejected"),
        (TRAIN.replace("chat --", "dpo --") + " --packing", [TALK], 3, "--packing is of --task chat"),
        (TRAIN.replace("chat --", "dpo --") + " --train-on-prompt", [TALK], 3, "--train-on-prompt is of --task chat"),
        (TRAIN.replace("chat --", "dpo --") + " --dpo-beta 0", [TALK], 3, "--dpo-beta 0 must be above 0"),
        (TRAIN.replace("chat --", "dpo --") + " --dpo-label-smoothing 0.5", [TALK], 3, "at least 0 and below 0.5"),
        (TRAIN + " --chat-templat plain", [TALK], 2, "--chat-templat"),
        ("--model {base} --dataset {file}", [TALK], 2, "(?s)1. there is no --model: say --load.*2. --dataset is"),
        (TRAIN + " --save {base}", [TALK], 3, "holds the model that the run begins with"),
        (TRAIN.replace("--load {base}", "--load {file}.d"), [TALK], 5, "holds no checkpoint"),
    ],
)  # fmt: skip
def test_one_message(flags, rows, code, said, base, tmp_path):
    (base / "bad.jinja").write_text("{% for %}")
    (base / "turns.jinja").write_text(
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}"
        "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    line = flags.format(file=write(tmp_path, *rows), base=base) + f" {TUNE}"
    with pytest.raises(Failure, match=said) as error:
        finetune.main(line.split())
    assert error.value.code == code, error.value


def test_names_of_special_tokens_in_messages_are_noted(base, tmp_path, capsys):
    rows = [[dict(role="user", content="q"), dict(role="assistant", content=answer)] for answer in NAMED_ANSWERS]
    file = write(tmp_path, *(dict(messages=row) for row in rows))
    for _ in range(2):  # the second time from the index cache
        finetune.main(f"{TRAIN.format(file=file, base=base)} {TUNE} --eval-iters 0".split())
        said = [line for line in capsys.readouterr().out.splitlines() if "in a message" in line]
        [line] = said
        assert f"2 of 3 lines have <|endoftext|> in a message, which is text there ({file}, line 1; " in line


@pytest.mark.parametrize("flags, warned", [(SHAPE, True), ("--load {base}", False)])
def test_a_model_without_a_checkpoint(flags, warned, base, tmp_path, capsys):
    """A step at learning rate 0, the first one of a warm-up, changes nothing; nor does a random model answer."""
    line = TRAIN.replace("--load {base}", f"{flags} {write_vocabulary(tmp_path)}") + f" {TUNE} --lr-warmup-fraction 0.1"
    finetune.main(line.format(file=write(tmp_path, TALK, TALK), base=base).split())
    told = capsys.readouterr().out.splitlines()
    found = [line for line in told if line.startswith("warning: there is no --load: fine-tuning starts with random")]
    assert len(found) == warned
    [line] = [line for line in told if line.startswith("warning: no step of this launch changed a weight: ")]
    assert "the only one was at learning rate 0 (warm-up of 0.1 steps" in line


def test_what_is_cut_and_left_out_is_counted(base, tmp_path, capsys):
    """The log names how many conversations lose their end or are left out, and the first of them."""
    long = [dict(role="user", content="Say it."), dict(role="assistant", content="no " * 60)]
    late = [dict(role="user", content="no " * 60), dict(role="assistant", content="Yes.")]
    file = write(
        tmp_path, TALK, dict(messages=long, id=3), dict(messages=TALK["messages"][:1]), dict(messages=late), TALK
    )
    line = TRAIN.format(file=file, base=base).replace("batch-size 2", "batch-size 16") + f" {TUNE} --eval-iters 0"
    finetune.main(line.split())
    told = capsys.readouterr().out
    assert "> train: 3 conversations in 3 samples" in told
    assert f"note: training reads {file} more than 5 times" in told  # 16 samples are 5.3 passes over 3
    for words in (
        f"1 of 5 conversations have no answer, and are left out ({file}, line 3)",
        f"1 of 5 conversations are longer than --seq-length 120, and lose their end ({file}, line 2)",
        f"1 of 5 conversations have no answer within --seq-length 120, and are left out ({file}, line 4)",
        f"{file}: id of its lines are not used",
    ):
        assert f"note: {words}" in told, words
