# SPDX-License-Identifier: Apache-2.0
"""The vocabulary that a plan is made for is the tokenizer's, of whatever type."""

import pytest

from megatron.planner.target import vocabulary_of
from megatron.settings.parse import parse_pretrain

FLAGS = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --train-iters 1 --lr 1e-3 --data-path x"


@pytest.mark.parametrize(("kind", "size"), [("BertWordPieceLowerCase", 4 + 2), ("BertTokenizer", 4)])
def test_a_type_that_is_given_is_taken(tmp_path, kind, size):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\na\nb\n")
    flags = f"{FLAGS} --tokenizer-type {kind} --vocab-file {tmp_path}/vocab.txt"
    assert vocabulary_of(parse_pretrain(flags.split())) == (size, "")


def test_sentinels_count():
    flags = f"{FLAGS} --tokenizer-type NullTokenizer --vocab-size 20"
    words = "vocabulary 21: --vocab-size 20, and the end of documents"
    assert vocabulary_of(parse_pretrain(flags.split())) == (21, words)
    more = parse_pretrain([*flags.split(), "--vocab-extra-ids", "10"])
    assert vocabulary_of(more) == (21 + 6 + 10, "")  # with six special tokens that it lacks
