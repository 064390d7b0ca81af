# SPDX-License-Identifier: Apache-2.0
"""Words of other suites' commands that are another setting's here, or have one honest sentence."""

import pytest

from megatron.errors import Failure, UsageError
from megatron.settings.parse import parse_pretrain


def test_words_that_mean_a_setting(command):
    shuffled = lambda flags: parse_pretrain(command(flags)).data.dataloader_type
    assert shuffled("--dataloader-shuffle") == "cyclic" == shuffled("--dataloader_shuffle true")
    assert shuffled("--dataloader-shuffle false") == "single" == shuffled("")
    with pytest.raises(UsageError, match="--dataloader-shuffle and --dataloader-type single contradict each other"):
        shuffled("--dataloader-type single --dataloader-shuffle")

    def dropouts(flags):
        words = " ".join(command(flags)).replace("--hidden-dropout 0 --attention-dropout 0", "")
        model = parse_pretrain(words.split()).model
        return model.hidden_dropout, model.attention_dropout

    assert dropouts("") == (0.1, 0.1)
    assert dropouts("--check_accuracy true") == (0, 0) == dropouts("--check-accuracy")
    assert dropouts("--check_accuracy false") == (0.1, 0.1)
    assert dropouts("--check_accuracy --attention-dropout 0.2") == (0, 0.2)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--enable_addto true", "--enable-addto has no effect: gradients are added in place anyway"),
        ("--drop-last", "--drop-last has no effect: every step has a full batch"),
    ],
)
def test_words_without_effect_are_said(flags, words, command, capsys):
    parse_pretrain(command(flags))
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--no-drop-last", "--full-validation evaluates the last part"),
        ("--drop_last false", "--full-validation evaluates the last part"),
        ("--bf16 --amp-level O3", "say O2, which keeps fp32 ones beside them"),
    ],
)
def test_what_is_not_to_be_had_is_refused(flags, words, command):
    with pytest.raises(Failure) as caught:
        parse_pretrain(command(flags))
    assert words in str(caught.value) and caught.value.code in (2, 3)
