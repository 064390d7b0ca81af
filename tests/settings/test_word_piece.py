# SPDX-License-Identifier: Apache-2.0
"""pretrain_bert.py and pretrain_t5.py read a --vocab-file alone as WordPiece, as Megatron-LM's examples expect."""

import pytest

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.model.command_line import parse_any

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --data-path d --train-iters 1".split()


@pytest.mark.parametrize(
    "recipe, flags, expected",
    [
        (pretrain_bert, "--vocab-file bert-vocab.txt", "BertWordPieceLowerCase"),
        (pretrain_t5, "--vocab-file bert-vocab.txt", "BertWordPieceLowerCase"),
        (pretrain_bert, "--vocab-file vocab.txt --tokenizer-type BertWordPieceCase", "BertWordPieceCase"),
        (pretrain_bert, "--vocab-file vocab.json --merge-file merges.txt", None),
        (pretrain_t5, "--tokenizer-model spiece.model", None),
        (pretrain_t5, "--mock-data --vocab-size 100", None),
        (pretrain_gpt, "--vocab-file bert-vocab.txt", None),
    ],
)
def test_the_type_of_a_vocab_file_alone(recipe, flags, expected):
    config = parse_any([*SHAPE, *flags.split()], recipe=recipe.recipe())
    assert config.tokenizer.tokenizer_type == expected


def test_the_record_says_who_set_it():
    config = parse_any([*SHAPE, "--vocab-file", "bert-vocab.txt"], recipe=pretrain_bert.recipe())
    assert config.said("tokenizer_type").origin == "the recipe"
