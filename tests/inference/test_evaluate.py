# SPDX-License-Identifier: Apache-2.0
"""Evaluation: sums are exact, nothing is counted twice or dropped, and the results are printed as users expect."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import finetune
from megatron.data.indexed import write_index
from megatron.errors import DataError, SettingsError, UsageError
from megatron.inference.scoring import ALONE, Score, score, windows
from megatron.tasks import zeroshot
from megatron.tasks.lambada import Example, find_correct
from megatron.tools import evaluate as tool
from megatron.tools import generate, tasks


@given(st.integers(0, 300), st.integers(1, 40), st.integers(1, 40))
def test_every_token_is_predicted_once(total, length, stride):
    stride = min(stride, length)
    seen = []
    for window in windows(total, length, stride):
        assert 0 <= window.start and 0 < window.counted <= window.length <= length
        assert window.start + window.length <= total - 1
        end = window.start + window.length
        seen += range(end - window.counted + 1, end + 1)  # targets
        if window.start:
            assert window.length - window.counted >= length - stride  # context of the first new one
    assert seen == list(range(1, total))


def test_score_is_the_sum_over_tokens_each_seen_alone(small_gpt):
    model = small_gpt()
    tokens = np.random.RandomState(0).randint(0, 500, 75)
    result = score(model, tokens, length=16, stride=5, batch_size=4)
    expected = 0.0
    for window in windows(len(tokens), 16, 5):
        logits = model.logits(torch.from_numpy(tokens[window.start :][: window.length]).unsqueeze(1))[:, 0]
        losses = torch.nn.functional.cross_entropy(
            logits, torch.from_numpy(tokens[window.start + 1 :][: window.length]), reduction="none"
        )
        expected += losses[window.length - window.counted :].double().sum().item()
    assert result.tokens == 74
    assert result.loss_sum == pytest.approx(expected, rel=1e-5)
    assert score(model, tokens, length=16, stride=5, batch_size=1).loss_sum == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("prefix", [[7], [7, 9]])
def test_each_window_begins_with_the_tokenizers_prefix(small_gpt, prefix):
    model, tokens = small_gpt(), np.random.RandomState(1).randint(0, 500, 40)
    chosen = np.arange(40) % 3 == 0
    found = score(model, tokens, length=16, stride=16, batch_size=3, part=chosen, prefix=prefix)
    expected, part = 0.0, 0.0
    for window in windows(len(tokens), 16 - len(prefix), 16 - len(prefix)):
        labels = torch.from_numpy(tokens[window.start + 1 :][: window.length])
        inputs = torch.tensor([*prefix, *tokens[window.start :][: window.length]])
        logits = model.logits(inputs.unsqueeze(1))[len(prefix) :, 0]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none").double()
        new = slice(window.length - window.counted, None)
        expected += losses[new].sum().item()
        part += (losses * torch.from_numpy(chosen)[window.start + 1 :][: window.length])[new].sum().item()
    assert found.loss_sum == pytest.approx(expected, rel=1e-5) and found.tokens == 39
    assert found.part.loss_sum == pytest.approx(part, rel=1e-5)


def test_megatrons_command_line_as_it_is_written(checkpoint, tmp_path, capsys):
    """Flags of the shape are compared with the checkpoint's, and those of training named once."""
    (tmp_path / "wiki").write_text("a plain text of some words and more of them\n")
    task = [
        "--task",
        "WIKITEXT103",
        "--valid-data",
        str(tmp_path / "wiki"),
        "--load",
        str(checkpoint),
        "--device",
        "cpu",
    ]
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    more = "--fp16 --log-interval 10 --no-load-optim --no-load-rng --micro-batch-size 8 --DDP-impl local"
    tasks.main([*task, *f"{shape} {more}".split()])
    heard = capsys.readouterr()
    assert "validation results on WIKITEXT103" in heard.out
    idle = "settings of training, which this command does not do"
    assert f"note: --log-interval, --no-load-optim have no effect: {idle}\n" in heard.err
    with pytest.raises(SettingsError, match="holds another model\n  --num-layers 7: [0-9]+ in the checkpoint"):
        tasks.main([*task, "--num-layers", "7"])
    for wrong in ("--num-layers seven", "--log-intervall 3", "orphan"):
        with pytest.raises(UsageError, match=wrong.split()[-1] if wrong == "orphan" else wrong.split()[0]):
            tasks.main([wrong, *task] if wrong == "orphan" else [*task, *wrong.split(), "--lr", "1"])


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("-c plain.yaml", "--num-layers 7 (plain.yaml:2): 2 in the checkpoint"),
        ("-c window.yaml", "--window-size 4,0 (window.yaml:1): None in the checkpoint"),
        ("-c fleetx.yaml", "--num-layers 7 (fleetx.yaml:1: Model.num_layers): 2 in the checkpoint"),
        (
            "-o Model.max_position_embeddings=7",
            "--max-position-embeddings 7 (-o Model.max_position_embeddings): 32 in the checkpoint",
        ),
        ("-c plain.yaml -o num_layers=2 --hidden-size 64", "--hidden-size 64: 32 in the checkpoint"),
        ("--normalization LayerNorm --num-query-groups 2", "--num-query-groups 2: 4 in the checkpoint"),
    ],
)
@pytest.mark.parametrize("main", [tool.main, generate.main])
def test_a_model_that_the_checkpoint_does_not_hold_is_refused(main, words, sentence, checkpoint, tmp_path, monkeypatch):
    """Also where a file for pretraining states it; where it is stated rightly, there is nothing to say."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.yaml").write_text("lr: 1.0e-3\nnum_layers: 7\n")
    (tmp_path / "window.yaml").write_text("window_size: [4, 0]\nnum_layers: 2\n")
    (tmp_path / "fleetx.yaml").write_text("Model: {num_layers: 7}\nEngine: {max_steps: 5}\n")
    what = ["--data-path", "x"] if main is tool.main else ["--prompt", "x"]
    with pytest.raises(SettingsError, match="holds another model") as refused:
        main([*words.split(), *what, "--load", str(checkpoint)])
    assert refused.value.why.splitlines()[0] == sentence
    assert refused.value.do.endswith("leave settings of the model out: they come from the checkpoint")
    assert ("say -o Model.num_layers=2, or" in refused.value.do) == ("fleetx" in words)
    assert ("say -o Model.max_position_embeddings=32, or" in refused.value.do) == ("embeddings" in words)


def test_weights_of_a_blend_are_named(checkpoint, tmp_path, capsys):
    """As a file for pretraining has them: each dataset is evaluated on its own."""
    one, two = (write_tokens(tmp_path / name, [np.arange(40) + 20]) for name in ("one", "two"))
    plain = f"--data-path {one} {two}"
    results = []
    for words in (plain, plain.replace(one, f"0.3 {one}").replace(two, f"0.7 {two}")):
        run(checkpoint, *words.split())
        heard = capsys.readouterr()
        assert ("the weights of --data-path have no effect" in heard.err) == ("0.3" in words)
        results.append([line for line in heard.out.splitlines() if "results on" in line])
    assert len(results[0]) == 2 and results[0] == results[1]


def test_generation_with_megatrons_words(checkpoint, capsys):
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    generate.main(
        [*f"--load {checkpoint} --prompt a --greedy --tokens-to-generate 3 {shape} --bf16 --recompute".split()]
    )
    heard = capsys.readouterr()
    assert heard.out.startswith("a") and "has no effect" not in heard.err


def test_a_misspelt_task_names_the_one_that_is_near(checkpoint):
    for main in (tasks.main, finetune.main):
        with pytest.raises(UsageError, match="did you mean LAMBADA"):
            main(["--task", "LAMBDA", "--load", str(checkpoint)])
    with pytest.raises(
        UsageError, match="--task LAMBADA: it is evaluated without training: python -m megatron.tools.eval"
    ):
        finetune.main(["--task", "LAMBADA", "--load", str(checkpoint)])


def test_a_model_without_opinions_has_the_vocabulary_as_perplexity(small_gpt):
    model = small_gpt(vocab_size=500, scale=0.0)
    result = score(model, np.arange(100), length=32, stride=32, batch_size=3)
    assert result.tokens == 99 and result.perplexity() == pytest.approx(500, rel=1e-5)
    assert Score(99 * math.log(500), 99).perplexity(0.5) == pytest.approx(math.sqrt(500))
    assert Score(1e9, 1).perplexity() == Score(1e9, 1).perplexity(0.5) == math.exp(20)
    assert Score(30.0, 1).perplexity(0.5) == math.exp(15)  # only the result is bounded


def write_tokens(prefix, documents) -> str:
    np.concatenate(documents).astype(np.uint16).tofile(f"{prefix}.bin")
    lengths = np.array([len(document) for document in documents], np.int32)
    write_index(f"{prefix}.idx", np.dtype("uint16"), lengths, np.arange(len(documents) + 1))
    return str(prefix)


def run(checkpoint, *words) -> None:
    tool.main(["--load", str(checkpoint), "--device", "cpu", *words])


def test_held_out_perplexity(checkpoint, tmp_path, capsys):
    documents = [np.arange(50) + 20, np.arange(90) + 40]
    prefix = write_tokens(tmp_path / "held_out_text_document", documents)
    run(checkpoint, "--data-path", prefix, "--output", str(tmp_path / "out" / "results.jsonl"))
    line = capsys.readouterr().out.splitlines()[-1]
    pattern = r" validation results on \S+ \| avg loss: (\S+) \| ppl: (\S+) \| tokens: 139 \|"
    loss, perplexity = map(float, re.fullmatch(pattern, line).groups())
    record = json.loads((tmp_path / "out" / "results.jsonl").read_text())
    assert record["iteration"] == 7 and record["tokens"] == 139
    assert record["loss"] == pytest.approx(loss, rel=1e-3) and math.exp(record["loss"]) == pytest.approx(
        perplexity, rel=1e-2
    )
    run(checkpoint, "--data-path", prefix, prefix, "--max-tokens", "60", "--micro-batch-size", "1")
    assert capsys.readouterr().out.count("tokens: 59 |") == 2


def test_wikitext(checkpoint, tmp_path, capsys):
    text = " \n = The cat = \n \n the cat sat on the mat , they say . It is 1 @.@ 5 m ( a dog ) . \n" * 6
    path = tmp_path / "wiki.valid.tokens"
    path.write_text(text)
    run(checkpoint, "--task", "WIKITEXT103", "--valid-data", str(path), "--output", str(tmp_path / "r.jsonl"))
    line = capsys.readouterr().out.splitlines()[-1]
    record = json.loads((tmp_path / "r.jsonl").read_text())
    assert re.fullmatch(
        r" validation results on WIKITEXT103 \| avg loss: \d\.\d{4}E[+-]\d\d \| ppl: \d\.\d{4}E[+-]\d\d \| "
        r"adjusted ppl: \d\.\d{4}E[+-]\d\d \| token ratio: \d+\.\d+ \|",
        line,
    )
    words = len(text.strip().split(" "))
    assert record["token_ratio"] == pytest.approx(record["tokens"] / (words - 1))
    assert record["adjusted_perplexity"] == pytest.approx(math.exp(min(20, record["loss"] * record["token_ratio"])))


@pytest.mark.parametrize("given, length, stride", [(None, 1024, 32), (None, 16, 16), (7, 1024, 7), (64, 16, 16)])
def test_windows_of_wikitext_advance_by_32_tokens(given, length, stride, tmp_path, monkeypatch):
    """The default of Megatron-LM's --overlapping-eval."""
    (tmp_path / "wiki.valid.tokens").write_text("the cat sat on the mat\n")
    options = dict(valid_data=str(tmp_path / "wiki.valid.tokens"), task="WIKITEXT103", micro_batch_size=1)
    words = SimpleNamespace(encode=lambda text: [1, 2, 3], prefix=())
    work = SimpleNamespace(options=SimpleNamespace(**options, overlapping_eval=given), tokenizer=words)
    vars(work).update(length=length, contained=None, loaded=SimpleNamespace(model=None), axis=ALONE, progress=str)
    asked = []
    monkeypatch.setattr(zeroshot, "score", lambda *_, **how: asked.append(how["stride"]) or Score(1.0, 2))
    zeroshot.wikitext(work)
    assert asked == [stride]


def test_lambada(checkpoint, tmp_path, capsys):
    passages = ["the cat sat on the mat", "a dog is a dog", "the hat and the " + "long " * 60 + "cat", "they say"]
    path = tmp_path / "lambada.jsonl"
    path.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in passages))
    words = ["--task", "LAMBADA", "--valid-data", str(path), "--output", str(tmp_path / "r.jsonl")]
    run(checkpoint, *words)
    strict, loose = capsys.readouterr().out.splitlines()[-2:]
    for line, mode in ((strict, "strict"), (loose, "non-strict")):
        assert re.fullmatch(
            rf" validation results on LAMBADA \({mode}\) \| number correct: [0-4] \| "
            r"total examples: 4 \| avg accuracy: \d\.\d{4}E[+-]\d\d",
            line,
        )
    both = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    run(checkpoint, *words, "--strict-lambada", "--batch-size", "1")
    assert json.loads((tmp_path / "r.jsonl").read_text()) == both[0]


def test_flags_without_effect_are_named(checkpoint, tmp_path, capsys):
    text, tokens = tmp_path / "wiki.txt", write_tokens(tmp_path / "tokens", [np.arange(100) % 50])
    text.write_text("the cat sat on the mat " * 9)
    words = f"--data-path {tokens} --strict-lambada --valid-data {text} --overlapping-eval 640"
    run(checkpoint, *words.split(), "--output", str(tmp_path / "r.jsonl"))
    said = capsys.readouterr().err
    assert "note: --strict-lambada has no effect without --task LAMBADA" in said
    assert f"note: --valid-data {text} has no effect without --task" in said
    assert "note: --overlapping-eval 640 is longer than a window: 32 is taken" in said
    assert "replaces" not in said
    task = f"--task WIKITEXT2 --valid-data {text} --max-tokens 9"
    run(checkpoint, *task.split(), "--output", str(tmp_path / "r.jsonl"))
    heard = capsys.readouterr()
    assert "validation results on WIKITEXT2 |" in heard.out
    assert "note: --max-tokens 9 has no effect without --data-path" in heard.err
    assert f"note: replaces {tmp_path / 'r.jsonl'}" in heard.err


@pytest.mark.parametrize(
    "kind, extra, do",
    [
        ("GPT", {}, None),
        (
            "megatron.tasks.chat",
            {"chat": {"task": "chat"}},
            "its task: finetune.py --task chat --skip-train --load {} --v",
        ),
        ("my_gpt", {"variant": None}, "its own data: python -m my_gpt, with the words of its training, --skip-train"),
    ],
)
def test_samples_of_a_model_of_its_own_are_evaluated_by_its_own_command(kind, extra, do, tmp_path, monkeypatch):
    record = dict(config=dict(model=dict(model_type=kind), extra=extra))
    monkeypatch.setattr(tool, "found_record", lambda folder: record)
    for more in ([], ["--valid-data", str(tmp_path)]):
        with pytest.raises(UsageError) as raised:
            run(tmp_path, *more)
        assert (raised.value.do or "").startswith(do.format(tmp_path) if do else "")
        assert bool(raised.value.do) == bool(do)


def test_mistakes(checkpoint, tmp_path):
    prefix = write_tokens(tmp_path / "tokens", [np.array([1, 2, 9999])])
    with pytest.raises(UsageError, match="not clear"):
        run(checkpoint)
    with pytest.raises(UsageError, match="needs --valid-data"):
        run(checkpoint, "--task", "LAMBADA")
    with pytest.raises(DataError, match="no such file"):
        run(checkpoint, "--task", "LAMBADA", "--valid-data", str(tmp_path / "missing"))
    with pytest.raises(DataError, match="token 9999"):
        run(checkpoint, "--data-path", prefix)
    with pytest.raises(DataError, match="holds 1 tokens"):
        run(checkpoint, "--data-path", prefix, "--max-tokens", "1")
    with pytest.raises(SettingsError, match="can look at 32"):
        run(checkpoint, "--data-path", prefix, "--seq-length", "64")
    (tmp_path / "bad.jsonl").write_text('{"text": "fine words"}\n{"text": "one"}\n')
    with pytest.raises(DataError, match="line 2"):
        run(checkpoint, "--task", "LAMBADA", "--valid-data", str(tmp_path / "bad.jsonl"))


@pytest.mark.parametrize("words", ["--task WIKITEXT103 --valid-data {}", "-o Offline_Eval.eval_path={}"])
def test_json_lines_are_no_text_of_wikitext(words, checkpoint, tmp_path):
    """LAMBADA's file without the switch for it: a perplexity of braces and keys."""
    path = tmp_path / "lambada_test.jsonl"
    path.write_text('\ufeff\n{"text": "fine words"}\n{"text": "more words"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="is JSON lines") as refused:
        run(checkpoint, *words.format(path).split())
    assert "--task LAMBADA" in refused.value.do and "-o Offline_Eval.cloze_eval=True" in refused.value.do
    path.write_text(" = A title = \n{ braces } of a text , and some more words \n")
    run(checkpoint, *words.format(path).split())


def test_a_tokenizer_flag_at_its_default_wins_over_the_checkpoints(new_checkpoint, tmp_path, capsys):
    """The run put 40 sentinels after its vocabulary, says its record; the model has learned none."""
    checkpoint = new_checkpoint(vocab_extra_ids=40)
    path = tmp_path / "wiki.valid.tokens"
    path.write_text(" the cat sat on the mat , they say . \n" * 9)
    words = ["--task", "WIKITEXT103", "--valid-data", str(path)]
    with pytest.raises(SettingsError, match="the tokenizer has 329 ids, the model 283"):
        run(checkpoint, *words)
    with pytest.raises(SettingsError, match="--vocab-size 7: the vocabulary has 283 tokens, the model 283"):
        run(checkpoint, *words, "--vocab-extra-ids", "0", "--vocab-size", "7")
    run(checkpoint, *words, "--vocab-extra-ids", "0")
    assert "validation results on WIKITEXT103" in capsys.readouterr().out
    generate.main(["--load", str(checkpoint), "--device", "cpu", "--prompt", "the cat", "--vocab-extra-ids", "0"])
    assert capsys.readouterr().out.startswith("the cat")


def test_lambada_with_a_real_model_equals_its_definition(small_gpt):
    model, generator = small_gpt(scale=3.0), torch.Generator().manual_seed(0)
    examples = []
    for number in range(30):
        tokens = torch.randint(0, 400, (5 + number % 9,), generator=generator)
        best = model.logits(tokens.unsqueeze(1))[-1, 0].argmax()
        examples.append(Example([*tokens.tolist(), best.item() if number % 3 else 7], 1 + number % 2))
    expected = 0
    for tokens, answer in examples:
        guess = model.logits(torch.tensor(tokens[:-1]).unsqueeze(1))[:, 0].argmax(dim=-1).tolist()
        expected += guess[-answer:] == tokens[-answer:]
    for batch_size in (1, 4, 64):
        assert find_correct(model, examples, longest=32, batch_size=batch_size).sum() == expected
