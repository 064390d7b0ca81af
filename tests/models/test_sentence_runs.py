# SPDX-License-Identifier: Apache-2.0
"""T5 and BERT on files of sentences, and in mixtures: untrained they guess among all tokens, and layouts agree."""

import json
import math
import re

import pytest

import preprocess_data
from megatron.model.command_line import parse_any
from megatron.model.recipe import recipe_of
from megatron.planner.parity import compare, laid_out, parse_layout, trace

TEXT = """The old man walks home slowly. A young dog follows him there! The night is cold and nobody talks. It rains.
The boy runs to the house of his father. His mother waits there with bread and milk. They eat. Then all go to sleep.
In the morning the sun is warm again. The dog barks at the door. The old man laughs. Everybody is glad.""".split("\n")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    words = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(TEXT).lower())))
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    (folder / "text.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXT * 4))
    moods = [f"{text}\t{('night', 'morning')[number % 2]}\n" for number, text in enumerate(TEXT * 4)]
    (folder / "mood.tsv").write_text("".join(["text\tlabel\n", *moods]))
    vocabulary = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(folder / "vocab.txt")]
    files = ["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "text"), "--workers", "1"]
    preprocess_data.main([*files, *vocabulary, "--split-sentences", "--sentence-splitter", "sentencex"])
    run = f"""--hidden-size 32 --num-attention-heads 4 --seq-length 32 --global-batch-size 8 --train-iters 4
        --eval-iters 0 --lr 1e-3 --precision fp32 --device cpu --hidden-dropout 0 --attention-dropout 0
        --make-vocab-size-divisible-by 8
        --data-path {folder}/text_text_sentence --split 1,0,0"""
    mixture = f"--task-mixture masked=3 mood=1:{folder}/mood.tsv"
    return " ".join([*vocabulary, *run.split()]), mixture, len(words) + 5 + 2


T5 = "--model-type T5 --encoder-num-layers 2 --decoder-num-layers 2 --decoder-seq-length 24 --vocab-extra-ids 20"
BERT = "--model-type BERT --num-layers 2"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("model", "mixed", "layout"),
    [(T5, True, "pp2"), (BERT, False, "dp2-zero1")]
    + [
        pytest.param(*case, marks=pytest.mark.full)
        for case in ((T5, False, "tp2sp-pp2"), (BERT, True, "pp2-dp2-zero3"))
    ],
)
def test_files_of_sentences_train(flags, model, mixed, layout):
    common, mixture, tokens = flags
    layout, words = parse_layout(layout), f"{model} {common} {mixture if mixed else ''}"
    one, found = (
        trace(
            laid_out(config := parse_any(f"{words} --micro-batch-size {micro}".split()), each),
            recipe_of(config),
            ranks,
            2,
        )
        for each, micro, ranks in ((parse_layout(""), 8, 1), (layout, 2, layout.world_size))
    )
    tokens += 20 if model == T5 else 0
    assert one.losses[0] == pytest.approx(math.log(tokens), rel=0.02)  # with small weights all tokens are alike
    difference = compare(one, found)
    assert difference.passes("fp32"), difference
