# SPDX-License-Identifier: Apache-2.0
"""What the tasks do to text."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.errors import DataError
from megatron.tasks import lambada, zeroshot
from megatron.tasks.description import Task, one
from megatron.tasks.evaluation import write_probabilities
from megatron.tasks.examples import Examples, TaskExample
from megatron.tasks.soft_labels import with_soft_labels
from tests.tokenizer.plain import PlainTokenizer


@pytest.mark.parametrize(
    "split, natural",
    [
        ("It cost 1 @.@ 5 million , or 2 @,@ 000 .", "It cost 1.5 million, or 2,000 ."),
        ("a well @-@ known ( or not ) [ maybe ] thing", "a well-known (or not) [maybe] thing"),
        ('he said " hello there " twice', 'he said "hello there" twice'),
        ("the cats ' food", "the cats' food"),
        ("and Robert 's cat", "and Robert's cat"),
        (" = = History = = \n It began : here ; there", " == History ==\nIt began: here; there"),
    ],
)
def test_detokenize(split, natural):
    assert zeroshot.detokenize(split) == natural


def test_words_are_counted_as_published():
    assert zeroshot.count_words(" \n = A title = \n \n text \n ") == len("= A title = \n \n text".split(" "))
    assert zeroshot.token_ratio(109, 101) == pytest.approx(1.08)


def test_last_word():
    assert lambada.split_last_word("the mat on the mat") == ("the mat on the", "mat")
    assert lambada.split_last_word("he said\n  yes .") == ("he said\n  yes", ".")
    with pytest.raises(ValueError):
        lambada.split_last_word("word")


WORDS = "<pad> the cat sat on mat dog , hat".split()
tokenizer = PlainTokenizer(lambda text: [WORDS.index(word) for word in text.replace("cats", "cat ,").split()])


class Successor:
    """A model that always bets on the next id."""

    def parameters(self):
        return iter([torch.zeros(1)])

    def logits(self, tokens, wanted):
        return torch.nn.functional.one_hot((tokens[wanted] + 1) % len(WORDS), len(WORDS)).float()


def test_a_passage_that_is_too_long_loses_its_beginning():
    ends_right, starts_right = lambada.Example([5, 1, 2], 1), lambada.Example([1, 2, 5], 1)
    assert lambada.find_correct(Successor(), [ends_right], longest=1, batch_size=1).sum() == 1
    assert lambada.find_correct(Successor(), [starts_right], longest=1, batch_size=1).sum() == 0


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_accuracy_counts_whole_words(tmp_path, batch_size):
    texts = ["the cat", "on the cat", "mat the mat", "mat the dog hat", "the cats"]
    path = tmp_path / "lambada.jsonl"
    path.write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    strict = lambada.read_examples(path, tokenizer, strict=True)
    loose = lambada.read_examples(path, tokenizer, strict=False)
    assert strict[-1] == lambada.Example([1, 2, 7], 2) and loose[-1] == lambada.Example([1, 2, 7], 1)
    # right: "cat" after "the" (twice); "mat", "hat" are not successors; "cats" = cat + , of which only cat is right
    assert lambada.find_correct(Successor(), strict, longest=50, batch_size=batch_size).sum() == 2
    assert lambada.find_correct(Successor(), loose, longest=50, batch_size=batch_size).sum() == 2
    # Only the last two tokens
    assert lambada.find_correct(Successor(), strict, longest=1, batch_size=batch_size).sum() == 2


@pytest.mark.parametrize("longest", [3, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_ranks_share_the_passages_and_batches_have_like_lengths(batch_size, ranks, longest, monkeypatch):
    """Each passage is a rank's, those of other ranks are 0 in the sum; together they are what one rank finds."""
    lengths = [5, 2, 7, 2, 3, 6, 4]
    examples = [lambada.Example([1] * (n - 1) + [2 if n % 2 else 5], 1) for n in lengths]  # 2 comes after 1
    monkeypatch.setattr(lambada, "summed", lambda correct, model, axis: correct)
    seen = []

    class Batches(Successor):
        def logits(self, tokens, wanted):
            seen.append((len(tokens), tokens.shape[1]))
            return super().logits(tokens, wanted)

    counts, told = 0, []
    for rank in range(ranks):
        axis, progress = SimpleNamespace(rank=rank, size=ranks), lambda done, total: told.append((done, total))
        counts = counts + lambada.find_correct(
            Batches(), examples, longest=longest, batch_size=batch_size, axis=axis, progress=progress
        ).astype(int)
    assert counts.tolist() == [n % 2 for n in lengths]
    ordered = sorted(min(n, longest + 1) for n in lengths)  # the last token is not read
    batches = [ordered[at : at + batch_size] for at in range(0, len(ordered), batch_size)]
    shares = [batches[rank::ranks] for rank in range(ranks)]
    assert seen == [(max(batch) - 1, len(batch)) for share in shares for batch in share]
    rounds = [min(7, (n + 1) * ranks * batch_size) for share in shares for n in range(len(share))]  # of all ranks
    assert told == [(done, 7) for done in rounds]

    class Earlier(Successor):
        """A stage of a pipeline before the last, which has no scores: it adds nothing to the sum."""

        def logits(self, tokens, wanted):
            return None

    assert not lambada.find_correct(Earlier(), examples, longest=longest, batch_size=batch_size).any()


def test_bad_files(tmp_path):
    for name, text, words in (
        ("empty", "\n", "no passages"),
        ("words", '{"text": "a b"}\n\n[]\n', "line 3"),
        ("half", '{"text": "a \\ud83d"}', "line 1: .* half of"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=words):
            lambada.read_examples(
                tmp_path / name, PlainTokenizer(lambda text: list(map(len, text.split()))), strict=True
            )
    with pytest.raises(DataError, match="Is a directory"):
        lambada.read_examples(tmp_path, PlainTokenizer(lambda text: list(map(len, text.split()))), strict=True)


def test_lines_of_json_end_with_line_feeds_alone(tmp_path):
    (tmp_path / "lines").write_text('{"text": "one\u2028two three"}\n\n{"text": "four five"}\n', encoding="utf-8")
    found = lambada.read_examples(
        tmp_path / "lines", PlainTokenizer(lambda text: list(map(len, text.split()))), strict=True
    )
    assert [example.tokens for example in found] == [[3, 3, 5], [4, 4]]


@pytest.mark.parametrize("likeliest", [0.0, 14.7, 30.0])
def test_probabilities_that_were_written_are_read(tmp_path, likeliest):
    """Of many classes: thousands of them are rounded to 0. An id may hold any separator but the table's own."""
    task = Task("big", train=one("x"), valid=one("y"), labels=tuple(f"c{number}" for number in range(3000)))
    scores = np.zeros((2, 3000), np.float32)
    scores[:, 7] = likeliest
    examples = Examples(tuple(TaskExample("t", None, None, id) for id in ("q\u20281", "2")), {"": range(2)})
    write_probabilities(task, scores, [row.id for row in examples.rows], tmp_path / "p.tsv")
    path = tmp_path / "p.probabilities.tsv"
    for row in with_soft_labels(examples, [str(path)], task).rows:
        assert sum(row.shares) == pytest.approx(1)
        assert row.shares == pytest.approx(np.exp(scores[0]) / np.exp(scores[0]).sum(), abs=2e-3)
    path.write_text(path.read_text(encoding="utf-8").replace("\t0.000", "\t0.001"), encoding="utf-8")
    with pytest.raises(DataError, match="line 2: the probabilities add up to"):
        with_soft_labels(examples, [str(path)], task)
