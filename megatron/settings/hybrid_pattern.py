# SPDX-License-Identifier: Apache-2.0
"""Patterns of layers, as --hybrid-layer-pattern lists them: a character is one layer, a norm and what it normalizes for.

    >>> pattern = read_pattern("M-*-|M-*E", {"M": "Mamba-2", "*": "attention", "-": "an MLP", "E": "experts"})
    >>> pattern.letters, pattern.stage_layers
    ('M-*-M-*E', '4,4')

`|` cuts the layers into pipeline stages. After a `/` are the layers of a depth of multi-token prediction: `M*M*/MM/MM`.
Pure. The characters are those of the kinds that a model has (`model.kinds`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from megatron.errors import SettingsError
from megatron.settings.statements import Statement

FLAG = "--hybrid-layer-pattern"
# Characters of Megatron-LM and its relatives for kinds of layers; those of kinds that a model has are not looked up.
ELSEWHERE = {
    "M": "Mamba-2",
    "G": "gated delta nets",
    "+": "latent attention",
    "D": "sparse latent attention",
    "C": "compressed sparse attention",
    "H": "heavily compressed attention",
    "W": "latent attention in a window",
    "K": "Kimi's delta attention",
    "P": "attention and Mamba-2 side by side",
}
CUT, AHEAD = "|", "/"
DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"


@dataclass(frozen=True)
class LayerPattern:
    """stages: the characters of each pipeline stage, where an empty one has no layer; one stage: it is not cut.
    ahead: those of a depth of multi-token prediction, and depths: their number.
    """

    stages: tuple[str, ...]
    ahead: str = ""
    depths: int = 0

    @property
    def letters(self) -> str:
        """The characters of all layers of the network."""
        return "".join(self.stages)

    @property
    def uncut(self) -> str:
        """The pattern without its cuts."""
        return AHEAD.join([self.letters, *[self.ahead] * self.depths])

    @property
    def stage_layers(self) -> str:
        """The number of layers of each stage, as in --pipeline-stage-layers."""
        return ",".join(str(len(stage)) for stage in self.stages)


def read_pattern(text: str, kinds: Mapping[str, str]) -> LayerPattern:
    """The pattern that a text lists. Raises SettingsError.

    kinds: character -> the kind of layer in words, of those that the model has
    """
    network, *ahead = text.split(AHEAD)
    for part in (network.replace(CUT, ""), *ahead):
        _check_letters(text, part, kinds)
    if "*" in text and "+" in text:
        raise SettingsError(
            f"{FLAG} {text}: * and + are two kinds of attention",
            "the layers of a network have one of them, as in Megatron-LM",
            "use the one or the other",
        )
    if not network.strip(CUT):
        raise SettingsError(
            f"{FLAG} {text or repr(text)} lists no layer", do=f"give a character for each layer: {_known(kinds)}"
        )
    if any(ahead):
        _check_depths(text, ahead)
    return LayerPattern(tuple(network.split(CUT)), ahead[0] if ahead else "", len(ahead) if any(ahead) else 0)


def letters_of(text: str) -> str:
    """The characters of all layers that a pattern lists.

    >>> letters_of("M-|*-/M")
    'M-*-'
    """
    return text.partition(AHEAD)[0].replace(CUT, "")


def letters_ahead(text: str) -> str:
    """The characters of the layers of a depth of multi-token prediction; "" without depths.

    >>> letters_ahead("M-|*-/M*/M*"), letters_ahead("M-*-/")
    ('M*', '')
    """
    return text.partition(AHEAD)[2].partition(AHEAD)[0]


def number_of_layers(said: Mapping[str, Statement]) -> Optional[int]:
    """The default of --num-layers: the characters of a given pattern."""
    pattern = said.get("hybrid_layer_pattern")
    return len(letters_of(str(pattern.value))) if pattern and pattern.value else None


def shortened(letters: str, num_layers: int) -> str:
    """A pattern with so many layers, in the order of `letters`, which has all of its kinds if it is long enough.

    >>> shortened("M-M-M-*-M-M-", 4), shortened("*-", 4), shortened("MMMM*-", 3)
    ('M-*-', '*-*-', 'M*-')
    """
    if num_layers >= len(letters):
        return "".join(letters[place % len(letters)] for place in range(num_layers if letters else 0))
    kept = sorted(map(letters.index, dict.fromkeys(letters)))[:num_layers]  # the first of each kind
    others = [place for place in range(len(letters)) if place not in kept]
    more = num_layers - len(kept)
    kept += [others[(2 * number + 1) * len(others) // (2 * more)] for number in range(more)]
    return "".join(letters[place] for place in sorted(kept))


def _check_letters(text: str, part: str, kinds: Mapping[str, str]) -> None:
    for place, letter in enumerate(part):
        if letter == CUT:
            raise SettingsError(
                f"{FLAG} {text}: {CUT} after a {AHEAD}",
                "the layers of multi-token prediction are on the last stage",
                f"cut the layers before the first {AHEAD} alone",
            )
        if letter in kinds:
            continue
        what, why = f"{FLAG} {text}: there is no kind of layer {letter!r} (layer {place})", ""
        if letter in ELSEWHERE:
            what, why = f"{FLAG} {text}: {letter} is {ELSEWHERE[letter]}", "this model has no such layers"
        elif letter.isdigit() or letter in "()[]{}":
            why = "nothing stands for a repetition: each layer has its own character"
        elif letter in DASHES:
            why = "this dash is not the one of a keyboard, -; editors and web pages replace it"
        elif letter.isspace() or letter in "\"',;":
            why = "characters follow each other, with nothing between them and without quotes inside the value"
        raise SettingsError(what, why, f"the kinds are {_known(kinds)}{_upper(letter, kinds)}")


def _check_depths(text: str, ahead: Sequence[str]) -> None:
    if len(set(ahead)) > 1:
        raise SettingsError(
            f"{FLAG} {text}: the parts after {AHEAD} differ: {', '.join(part or 'an empty one' for part in ahead)}",
            "each is a depth of multi-token prediction, and all depths have the same layers",
            f"repeat one, as in {AHEAD.join([text.partition(AHEAD)[0], *[ahead[0] or ahead[-1]] * len(ahead)])}",
        )


def _known(kinds: Mapping[str, str]) -> str:
    return ", ".join(f"{letter} ({words})" for letter, words in sorted(kinds.items()))


def _upper(letter: str, kinds: Mapping[str, str]) -> str:
    return f"; write {letter.upper()}" if letter.upper() in kinds else ""


def spread_evenly(num_layers: int, attention: float, mlp: float) -> str:
    """The letters that Megatron-LM gave layers up to version 0.16 by --hybrid-attention-ratio and --hybrid-mlp-ratio:
    attention evenly between Mamba layers, then MLPs in the place of some of these, the last one included.

    >>> spread_evenly(10, 0.2, 0.3)
    'MM-*M-*MM-'
    """
    letters = ["M"] * num_layers
    wanted = round(num_layers * attention)
    for place in _spaced(range(num_layers), (num_layers - wanted) / (wanted + 1)):
        letters[place] = "*"
    if number := round(num_layers * mlp):
        rest = [place for place, letter in enumerate(letters) if letter == "M"]
        for place in _spaced(rest, (num_layers - wanted - number) / number):
            letters[place] = "-"
    return "".join(letters)


def _spaced(places: Sequence[int], gap: float) -> Iterator[int]:
    """Every so many places, one: between two of them are `gap` others on average."""
    left = gap
    for place in places:
        if left < 0.5:
            yield place
            left += gap
        else:
            left -= 1
