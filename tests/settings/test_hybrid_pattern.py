# SPDX-License-Identifier: Apache-2.0
"""Patterns of layers, against the examples in Megatron-LM's own documents, and each wrong one's message."""

import pytest

from megatron.errors import SettingsError
from megatron.settings.argv import split
from megatron.settings.hybrid_pattern import LayerPattern, read_pattern, spread_evenly

KINDS = {
    "*": "attention",
    "-": "an MLP",
    "E": "experts",
    "G": "gated delta nets",
    "M": "Mamba-2",
    "+": "latent attention",
}


# (pattern, stages, letters of a depth, depths), as Megatron-LM's hybrid_layer_allocation.py and its tests list them
@pytest.mark.parametrize(
    "text, stages, ahead, depths",
    [
        ("M*M*", ("M*M*",), "", 0),
        ("M*M*/MM/MM", ("M*M*",), "MM", 2),
        ("MMMM/*M/*M/*M", ("MMMM",), "*M", 3),
        ("M-M-|M-M*-/MM/MM", ("M-M-", "M-M*-"), "MM", 2),
        ("M-M*-|G-*E/*E", ("M-M*-", "G-*E"), "*E", 1),
        ("M*/", ("M*",), "", 0),
        ("||*-||", ("", "", "*-", "", ""), "", 0),
        ("|M|", ("", "M", ""), "", 0),
        ("*", ("*",), "", 0),
    ],
)
def test_patterns_of_megatron(text, stages, ahead, depths):
    pattern = read_pattern(text, KINDS)
    assert pattern == LayerPattern(stages, ahead, depths)
    assert pattern.letters == text.partition("/")[0].replace("|", "")
    assert [int(number) for number in pattern.stage_layers.split(",")] == [len(stage) for stage in stages]


@pytest.mark.parametrize(
    "text, said",
    [
        ("", ["lists no layer", "* (attention)"]),
        ("|", ["lists no layer"]),
        ("/MM", ["lists no layer"]),
        ("M2-", ["'2' (layer 1)", "repetition"]),
        ("(M-)", ["'(' (layer 0)", "repetition"]),
        ("M m", ["' ' (layer 1)", "nothing between them"]),
        ("'M-'", ["without quotes inside the value"]),
        ("M\u2013", ["'\u2013' (layer 1)", "not the one of a keyboard"]),
        ("M*/+", ["* and + are two kinds of attention"]),
        ("m-", ["'m' (layer 0)", "write M"]),
        ("M-x", ["'x' (layer 2)", "- (an MLP)"]),
        ("MD", ["D is sparse latent attention", "no such layers"]),
        ("CM", ["C is compressed sparse attention"]),
        ("HM", ["H is heavily compressed attention"]),
        ("WM", ["W is latent attention in a window"]),
        ("KM", ["K is Kimi's delta attention"]),
        ("P-", ["P is attention and Mamba-2 side by side"]),
        ("*-+-", ["* and + are two kinds of attention"]),
        ("M*/M|M", ["| after a /", "last stage"]),
        ("MM/M/*", ["the parts after / differ: M, *", "MM/M/M"]),
        ("MM/M/", ["differ: M, an empty one"]),
        ("MM//M", ["differ: an empty one, M", "MM/M/M"]),
        ("MM/Q", ["'Q' (layer 0)"]),
    ],
)
def test_a_wrong_pattern_has_one_clear_message(text, said):
    with pytest.raises(SettingsError) as error:
        read_pattern(text, KINDS)
    message = str(error.value)
    assert message.startswith("--hybrid-layer-pattern") and all(words in message for words in said), message


def test_a_kind_that_a_model_lacks_is_refused_by_name():
    few = {letter: KINDS[letter] for letter in "*-E"}
    for letter, words in {"M": "Mamba-2", "G": "gated delta nets", "+": "latent attention"}.items():
        with pytest.raises(SettingsError, match=f"{words}\n  this model has no such layers"):
            read_pattern(f"-{letter}", few)


def by_ratios(layers, attention, mlp):
    """Megatron-LM 0.16's rule as its documents say it: attention evenly spaced, Mamba at both ends; then MLPs evenly
    among the Mamba layers, to the right."""
    gaps, letters = (layers - round(layers * attention)) / (round(layers * attention) + 1), []
    room = gaps
    for _ in range(layers):
        letters.append("*" if room < 0.5 else "M")
        room += gaps if room < 0.5 else -1
    mlps = round(layers * mlp)
    gaps = room = (letters.count("M") - mlps) / mlps if mlps else layers
    for place, letter in enumerate(letters):
        if letter == "M" and mlps:
            letters[place] = "-" if room < 0.5 else "M"
            room += gaps if room < 0.5 else -1
    return "".join(letters)


@pytest.mark.parametrize("layers", [1, 2, 9, 10, 24, 48, 52])
def test_ratios_of_earlier_versions(layers):
    for tenths in range(11):
        for others in range(11 - tenths):
            letters = spread_evenly(layers, tenths / 10, others / 10)
            assert letters == by_ratios(layers, tenths / 10, others / 10)
            assert letters.count("*") == round(layers * tenths / 10)
    # the 8 B hybrid of arXiv:2406.07887 begins and ends with Mamba layers and has 4 of attention, 28 MLPs
    letters = spread_evenly(56, 0.08, 0.5)
    assert (letters.count("*"), letters.count("-"), letters[0]) == (4, 28, "M")


@pytest.mark.parametrize("text", ["-*-*", "-|*", "*-*-", "M-*E", "+-", "-+"])
def test_a_pattern_is_a_word_of_the_command_line(text):
    line = split(["--hybrid-layer-pattern", text, "--lr", "1"], {"--hybrid-layer-pattern", "--lr"})
    assert line.words == [("--hybrid-layer-pattern", [text]), ("--lr", ["1"])] and not line.problems
    line = split(["--hybrid-layer-pattern=-M*-"], {"--hybrid-layer-pattern"})
    assert line.words == [("--hybrid-layer-pattern", ["-M*-"])]
