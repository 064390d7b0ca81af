# SPDX-License-Identifier: Apache-2.0
"""The settings of text generation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Optional

from megatron.errors import SettingsError
from megatron.settings.effects import Needs
from megatron.settings.schema import setting
from megatron.settings.statements import NONE, Statement, words_of


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token from the model's scores."""

    tokens_to_generate: int = setting(
        "longest continuation, in tokens",
        100,
        "--max-new-tokens",
        "--out-seq-length",
        "--decode-steps",
        "--max-dec-len",
    )
    min_tokens_to_generate: int = setting(
        "no text ends before it has this many new tokens", 0, "--min-new-tokens", "--min-dec-len"
    )
    greedy: bool = setting("always the most likely token", False)
    temperature: float = setting("below 1: closer to greedy; above 1: more surprising; 0: greedy", 1.0)
    top_k: int = setting("choose among this many most likely tokens; 0: all", 0, "--topk")
    top_p: float = setting(
        "choose among the fewest tokens that together have this probability; 0 or 1: all", 0.0, "--topp"
    )
    decoding_strategy: Optional[Literal["sampling", "topk_sampling", "topp_sampling"]] = setting(
        "PaddleNLP's: which of --top-k and --top-p counts; sampling: neither (default: both)", None
    )
    repetition_penalty: float = setting("above 1: tokens that occurred are less likely", 1.0)
    sampling_seed: int = setting("seed of the choices; the same seed gives the same text", 1234, "--seed")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen: with --greedy, or temperature 0."""
        return self.greedy or self.temperature == 0

    def normalized(self) -> tuple["Sampling", list[str]]:
        """(settings without those that --decoding-strategy ignores, notices for the user).

        >>> Sampling(top_k=10, top_p=0.9, decoding_strategy="topk_sampling").normalized()[1]
        ['--top-p 0.9 has no effect: --decoding-strategy topk_sampling']
        """
        if self.decoding_strategy is None:
            return self, []
        counts = dict(topk_sampling="top_k", topp_sampling="top_p").get(self.decoding_strategy)
        if counts and not getattr(self, counts):
            raise SettingsError(f"--decoding-strategy {self.decoding_strategy} needs --{counts.replace('_', '-')}")
        without = {name: getattr(self, name) for name in ("top_k", "top_p") if name != counts and getattr(self, name)}
        strategy = f"has no effect: --decoding-strategy {self.decoding_strategy}"
        notes = [f"--{name.replace('_', '-')} {value:g} {strategy}" for name, value in without.items()]
        return replace(self, **dict.fromkeys(without, 0)), notes

    def check(self, given: Mapping[str, Statement] = NONE) -> None:
        """Raise SettingsError for invalid values. given: setting -> its source, if known."""
        wrong = [
            f"{words_of(given, name, getattr(self, name))}: has to be {words}"
            for name, good, words in (
                ("tokens_to_generate", self.tokens_to_generate >= 1, "at least 1"),
                ("min_tokens_to_generate", self.min_tokens_to_generate >= 0, "0 or more"),
                ("temperature", self.temperature >= 0, "0 (always the most likely token) or above"),
                ("top_k", self.top_k >= 0, "0 or more"),
                ("top_p", 0 <= self.top_p <= 1, "between 0 and 1"),
                ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            )
            if not good
        ]
        if wrong:
            raise SettingsError("\n  ".join(wrong))
        if self.min_tokens_to_generate > self.tokens_to_generate:
            raise SettingsError(
                f"{words_of(given, 'min_tokens_to_generate', self.min_tokens_to_generate)} is more than "
                f"{words_of(given, 'tokens_to_generate', self.tokens_to_generate)}",
                do="lower one, or raise the other",
            )


def _draws(name: str, *neutral: float) -> Needs:
    """The condition for a sampling setting to have an effect, unless its value is one of `neutral`."""

    def met(s) -> bool:
        one_token = s.greedy or s.temperature == 0 or s.top_k == 1 or s.beams > 1
        return not one_token or getattr(s, name) in neutral

    return Needs("sampling, which --greedy, --temperature 0, --top-k 1 and --num-beams leave out", met)


IDLE = {
    "temperature": _draws("temperature", 0, 1),
    "top_k": _draws("top_k", 0, 1),
    "top_p": _draws("top_p", 0, 1),
    "sampling_seed": _draws("sampling_seed"),
}


def cut_off(rooms: Sequence[int], answers: Sequence[Sequence[int]], sampling: Sampling) -> list[str]:
    """Notices on texts that were cut at a limit. rooms: tokens that each prompt leaves for its answer."""
    limit, found = sampling.tokens_to_generate, []
    ended = [min(room, limit) for room, answer in zip(rooms, answers, strict=True) if len(answer) == min(room, limit)]
    asked = sum(length == limit for length in ended)
    for number, where in ((asked, f"--tokens-to-generate {limit}"), (len(ended) - asked, "the model's last position")):
        if number:
            found.append(f"{number} of {len(answers)} texts {'was' if number == 1 else 'were'} cut at {where}")
    return found


@dataclass(frozen=True)
class Search:
    """Settings of beam search, and of an encoder-decoder's start and end tokens."""

    num_beams: int = setting("beam search over this many texts; 1: greedy, or sampling", 1, "--beam-width")
    length_penalty: float = setting("beam search: a new text's score is divided by its length to this power", 1.0)
    decoder_start_id: Optional[int] = setting(
        "the token that targets begin with (default: the tokenizer's [CLS] or <s>, or 0)", None
    )
    decoder_end_id: Optional[int] = setting(
        "the token that ends targets (default: the tokenizer's [SEP] or </s>, or its end of document)", None
    )

    def check(self, sampling: Sampling, given: Mapping[str, Statement] = NONE) -> None:
        """Raise SettingsError for invalid values. given: as in `Sampling.check`."""
        beams, penalty = (words_of(given, name, f"{getattr(self, name):g}") for name in ("num_beams", "length_penalty"))
        if self.num_beams < 1:
            raise SettingsError(f"{beams}: has to be at least 1")
        if self.num_beams == 1 and self.length_penalty != 1:
            raise SettingsError(f"{penalty} is of beam search", do="add --num-beams, or leave it out")
        drawn = dict(top_k=sampling.top_k, top_p=sampling.top_p, temperature=sampling.temperature not in (0, 1))
        if self.num_beams > 1 and any(drawn.values()):
            idle = ", ".join(words_of(given, name, getattr(sampling, name)) for name, so in drawn.items() if so)
            raise SettingsError(f"{beams} draws nothing: {idle} has no place in it", do="leave it out")


GREEDY = Search()  # or sampling: no beams
