# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness with a model of ours: its answers against a plain network's, and scores of a local task by hand."""

import json
import math
import random
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megatron.errors import DataError, SettingsError
from megatron.inference.load import load_model, open_tokenizer
from megatron.mpu.initialize import join_job
from megatron.settings.schema import Kernels, Parallel
from tests.tasks.classification import SIZE, double, hidden, token_scores
from tests.tasks.test_requests import plain_figures, write_requests
from tests.training.plain_loop import EOD, LENGTH, VOCABULARY

installed = pytest.mark.skipif(find_spec("lm_eval") is None, reason="pip install '.[eval]'")


@pytest.fixture
def names(monkeypatch):
    """What the adapter takes of the harness, by name alone, where that is not installed."""
    if find_spec("lm_eval") is not None:
        return
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval.api", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", SimpleNamespace(TemplateLM=object))
    unused = SimpleNamespace(get_rolling_token_windows=None, make_disjoint_window=None)
    monkeypatch.setitem(sys.modules, "lm_eval.utils", unused)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    pretrain_gpt.main(f"{SIZE} --mock-data --train-iters 3 --lr 1e-1 --eval-iters 0 --save {folder}".split())
    return folder


def adapter(folder, tp: int = 1, pp: int = 1, batch_size: int = 3):
    from megatron.tasks.harness import HarnessModel

    parallel = Parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    context = join_job(parallel, Kernels(device="cpu"))
    loaded = load_model(str(folder), mesh=context.mesh)
    return HarnessModel(loaded.model, open_tokenizer(loaded), context, longest=LENGTH, batch_size=batch_size)


def words(ids) -> str:
    return " ".join(map(str, ids))


def asked(*arguments) -> list:
    return [SimpleNamespace(args=one) for one in arguments]


@installed
@pytest.mark.parametrize(
    "tp, pp, ranks", [(1, 1, 1), (3, 1, 3), (1, 2, 4), pytest.param(1, 1, 2, marks=pytest.mark.full)]
)
def test_answers_are_the_plain_networks(tp, pp, ranks, trained, run_ranks):
    draw = random.Random(1)

    def numbers(most):
        return [draw.randrange(EOD) for _ in range(draw.randrange(1, most))]

    pairs = [(numbers(LENGTH + 3), numbers(5)) for _ in range(8)] + [([], numbers(4))]
    weights = double(dict(load_model(str(trained)).model.named_parameters()))
    best = hidden(weights, pairs[0][0][-LENGTH:])[-1] @ weights["embedding.word.weight"][:VOCABULARY].T
    pairs.append((pairs[0][0], [best.argmax().item()]))  # the likeliest token: greedy
    pairs.append((pairs[0][0], [best.argmax().item(), best.argmin().item()]))  # the first of its tokens alone
    texts = [numbers(3 * LENGTH), numbers(LENGTH), numbers(3)]

    def body(rank):
        model = adapter(trained, tp, pp)
        found = model.loglikelihood(asked(*((words(a), f" {words(b)}" if a else words(b)) for a, b in pairs)), True)
        rolled = model.loglikelihood_rolling(asked(*((words(text),) for text in texts)), True)
        options = dict(until=["\n"], max_gen_toks=4)
        written = model.generate_until(asked(*((words(a[:5]), options) for a, _ in pairs[:4])), True)
        return found, rolled, written

    answers = [body(0)] if ranks == 1 else run_ranks(ranks, body)
    assert all(one == answers[0] for one in answers)
    found, rolled, written = answers[0]
    for (before, after), (score, greedy) in zip(pairs, found, strict=True):
        text = ((before or [EOD]) + after)[-LENGTH - 1 :]
        assert score == pytest.approx(token_scores(weights, text)[-len(after) :].sum().item(), abs=1e-4)
        scores = hidden(weights, text[:-1]) @ weights["embedding.word.weight"][:VOCABULARY].T
        assert greedy == (scores.argmax(-1)[-len(after) :].tolist() == after)
    assert found[-2][1] and not found[-1][1]
    for text, score in zip(texts, rolled, strict=True):
        whole = [EOD, *text]
        assert math.isfinite(score)
        if len(text) <= LENGTH:
            assert score == pytest.approx(token_scores(weights, whole).sum().item(), abs=1e-4)
        else:  # the first window, then windows whose first token is the only context of the next
            parts = [token_scores(weights, whole[: LENGTH + 1]).sum()]
            for start in range(LENGTH, len(whole) - 1, LENGTH):
                end = min(start + LENGTH, len(whole) - 1)
                begin = end - LENGTH
                parts.append(token_scores(weights, whole[begin : end + 1])[start - begin :].sum())
            assert score == pytest.approx(sum(parts).item(), abs=2e-4)
    for (before, _), text in zip(pairs[:4], written, strict=True):
        ids = list(before[:5])
        for _ in range(4):
            scores = hidden(weights, ids)[-1] @ weights["embedding.word.weight"][:VOCABULARY].T
            ids.append(scores.argmax().item())
            if ids[-1] == EOD:
                ids.pop()
                break
        assert [int(word) for word in text.split()] == ids[len(before[:5]) :]


def test_a_text_has_its_whole_context_and_ends_with_the_model(trained, names, capsys):
    model, contexts = adapter(trained), [[5, 6, 7], list(range(2, LENGTH)), [9] * (LENGTH - 1)]
    written = model.generate_until(asked(*((words(context), dict(until=["\n"])) for context in contexts)))
    assert (
        f"note: 3 of 3 texts end earlier than their task allows: the model can look at {LENGTH}"
        in capsys.readouterr().err
    )
    for context, text in zip(contexts, written, strict=True):
        ids = list(context)
        while len(ids) < LENGTH and ids[-1] != EOD:
            ids.append(model.model.logits(torch.tensor(ids)[:, None])[-1, 0].argmax().item())
        assert [int(word) for word in text.split()] == [id for id in ids[len(context) :] if id != EOD]
    model.generate_until(asked(*((words([5, 6]), dict(max_gen_toks=most)) for most in (4, LENGTH - 2))))  # it just fits
    assert capsys.readouterr().err == ""
    with pytest.raises(DataError, match=f"a text after {LENGTH} tokens, and the model can look at {LENGTH}"):
        model.generate_until(asked((words([1] * LENGTH), {})))


def test_texts_end_before_what_ends_them(trained, names, monkeypatch):
    """At the first of the strings, and no token is generated after it."""
    from megatron.tasks import harness

    model, context, made = adapter(trained), [5, 6, 7], []
    continued = harness.continued

    def noted(*arguments, **more):
        made.extend(answers := continued(*arguments, **more))
        return answers

    monkeypatch.setattr(harness, "continued", noted)
    options = [{}, dict(until=[], max_gen_toks=3), dict(until="")]
    whole, short, same = model.generate_until(asked(*((words(context), one) for one in options)))
    ids = whole.split()
    assert len(ids) == LENGTH - len(context) and same == whole and short.split() == ids[:3]
    made.clear()
    end = f" {ids[1]} {ids[2]}"
    [text] = model.generate_until(asked((words(context), dict(until=["no word", end]))))
    assert text == whole[: whole.find(end)] and 3 <= len(made[0].tokens) <= 4 < len(ids)
    assert harness.cut("a b\nc", ["\n", "b"]) == "a " and harness.cut("a b", []) == "a b"


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
def test_the_longest_texts_come_first_and_answers_in_the_order_of_requests(batch, names):
    """So a batch has texts of like lengths, and what does not fit into memory is met at once."""
    from megatron.tasks.harness import HarnessModel

    sizes, seen = [3, 9, 1, 9, 4, 2], []
    context = SimpleNamespace(
        mesh=SimpleNamespace(dp=SimpleNamespace(rank=0, size=1)), all_gather_object=lambda one: [one]
    )
    model = SimpleNamespace(batch=batch, context=context)
    work = lambda items: seen.append(items) or [10 * item for item in items]
    assert HarnessModel.shared(model, sizes, lambda item: item, work) == [10 * size for size in sizes]
    assert sum(seen, []) == sorted(sizes, reverse=True) and all(len(one) == batch for one in seen[:-1])


def test_texts_without_context_come_after_the_end_of_documents(names):
    """A tokenizer without one is refused, and not found out by the first of such texts."""
    from megatron.tasks.harness import HarnessModel

    with pytest.raises(SettingsError, match="the tokenizer has no end-of-document token"):
        HarnessModel(None, SimpleNamespace(eod=None), None, longest=8, batch_size=2)
    made = HarnessModel(None, SimpleNamespace(eod=0, begin=3), None, longest=8, batch_size=2)
    assert (made.eot_token_id, made.prefix_token_id, made.max_length, made.batch) == (0, 3, 8, 2)


def test_scores_of_continuations_are_the_plain_networks(trained, names):
    """Of texts of any length side by side, the longest of which are cut at the beginning."""
    draw, model = random.Random(4), adapter(trained)
    weights = double(dict(model.model.named_parameters()))
    numbers = lambda count: [draw.randrange(EOD) for _ in range(count)]
    pairs = [(numbers(before), numbers(after)) for before, after in [(1, 1), (LENGTH + 3, 2), (LENGTH - 1, 1), (4, 5)]]
    pairs += [(pairs[0][0], [one]) for one in range(3)]
    found = model._loglikelihood_tokens([(None, *pair) for pair in pairs])
    for (before, after), (score, greedy) in zip(pairs, found, strict=True):
        text = (before + after)[-LENGTH - 1 :]
        assert score == pytest.approx(token_scores(weights, text)[-len(after) :].sum().item(), abs=1e-4)
        scores = hidden(weights, text[:-1]) @ weights["embedding.word.weight"][:VOCABULARY].T
        assert greedy == (scores.argmax(-1)[-len(after) :].tolist() == after)


YAML = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: ""
metric_list:
  - metric: acc
"""


@installed
@pytest.mark.full
@pytest.mark.parametrize("tp, ranks", [(1, 1), (3, 3)])
def test_a_local_task_offline(tp, ranks, trained, tmp_path, run_ranks, monkeypatch):
    """Its accuracy is counted by hand, and is that of the same requests in the training loop."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    rows = [row for row in write_requests(tmp_path / "requests.jsonl", 20) if row["context"]]
    lines = [dict(context=row["context"], choices=row["continuations"], gold=row["gold"]) for row in rows]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "own.yaml").write_text(YAML.format(name="own_numbers", file=tmp_path / "docs.jsonl"))

    def body(rank):
        from megatron.tools import lm_eval

        own = f"--load {trained} --tasks {tmp_path / 'own.yaml'} --offline --device cpu --output {tmp_path / 'found.json'}"
        lm_eval.main(f"{own} --tensor-model-parallel-size {tp}".split())

    body(0) if ranks == 1 else run_ranks(ranks, body)
    found = json.loads((tmp_path / "found.json").read_text())["results"]["own_numbers"]
    weights = double(dict(load_model(str(trained)).model.named_parameters()))
    assert found["acc,none"] == pytest.approx(plain_figures(weights, rows)["accuracy"])


def test_wrong_uses(trained, tmp_path):
    from megatron.tools import lm_eval

    for line, error, told in (
        (f"--load {trained} --tasks {tmp_path / 'none.yaml'}", DataError, "no such file"),
        (
            f"--load {trained} --tasks a --tensor-model-parallel-size 2",
            SettingsError,
            "= 2 ranks, which do not divide the 1 ranks",
        ),
        (f"--load {trained} --tasks a --include-path {tmp_path / 'none'}", DataError, "no such folder"),
        (f"--load {trained} --tasks a --batch-size 0", SettingsError, "at least 1"),
    ):
        with pytest.raises(error, match=told):
            lm_eval.main(line.split())


@installed
def test_a_file_is_the_task_that_it_describes(tmp_path):
    """Not another file of the folder with a task of the same name; one that cannot be read ends with a message."""
    from megatron.tools import lm_eval

    def found(*names):
        options = lm_eval.HarnessOptions(load="", tasks=[str(tmp_path / name) for name in names])
        tasks, manager = lm_eval.find_tasks(options)
        return manager.load(tasks)["tasks"]["numbers"].config.doc_to_target

    (tmp_path / "docs.jsonl").write_text(json.dumps(dict(context="1", choices=["2", "3"], gold=0, other=1)) + "\n")
    one = YAML.format(name="numbers", file=tmp_path / "docs.jsonl")
    (tmp_path / "a.yaml").write_text(one.replace("doc_to_target: gold", "doc_to_target: other"))
    (tmp_path / "b.yaml").write_text(one)
    (tmp_path / "gone.yaml").write_text(one.replace("docs.jsonl", "nowhere.jsonl"))
    (tmp_path / "nameless.yaml").write_text("output_type: multiple_choice\n")
    assert (found("a.yaml"), found("b.yaml")) == ("other", "gold")
    with pytest.raises(DataError, match=r"gone.yaml cannot be loaded") as problem:
        found("gone.yaml")
    assert "nowhere.jsonl" in problem.value.why
    with pytest.raises(DataError, match="has no name"):
        found("nameless.yaml")
