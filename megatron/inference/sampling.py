# SPDX-License-Identifier: Apache-2.0
"""The settings of text generation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Optional, Union

from megatron.errors import SettingsError
from megatron.settings.declare import Needs, dashed
from megatron.settings.schema import setting
from megatron.settings.statements import NONE, Statement, words_of

Ends = Union[int, Sequence[int], None]  # the tokens that end a text; None: only its length does


NUCLEUS = Needs("--top-p between 0 and 1", lambda s: 0 < s.top_p < 1)


def _draws(name: str, *neutral: float) -> Needs:
    """The condition for a sampling setting to have an effect, unless its value is one of `neutral`."""

    def met(s) -> bool:
        one_token = s.greedy or s.temperature == 0 or s.top_k == 1 or s.beams > 1
        return not one_token or getattr(s, name) in neutral

    return Needs("sampling, which --greedy, --temperature 0, --top-k 1 and --num-beams leave out", met)


@dataclass(frozen=True)
class Sampling:
    """Settings of one text: its length, and how its tokens are chosen from the model's scores.

    `choices.py` applies them in this order: logit bias, repetition penalty, frequency and presence penalties, bad words,
    minimum length, forced tokens; then, unless the most likely token is taken: temperature, top-k, top-p, min-p.
    """

    tokens_to_generate: int = setting(
        "longest continuation, in tokens",
        100,
        "--max-new-tokens",
        "--max-tokens",
        "--num-tokens-to-generate",
        "--out-seq-length",
        "--decode-steps",
        "--max-dec-len",
    )
    min_tokens_to_generate: int = setting(
        "no text ends before it has this many new tokens", 0, "--min-new-tokens", "--min-tokens", "--min-dec-len"
    )
    greedy: bool = setting(
        "always the most likely token",
        False,
        "--decode-strategy",
        also=dict(greedy_search=True, sampling=False, beam_search=False),
    )
    temperature: float = setting(
        "below 1: closer to greedy; above 1: more surprising; 0: greedy", 1.0, needs=_draws("temperature", 0, 1)
    )
    top_k: int = setting(
        "choose among this many most likely tokens; 0: all; 1: greedy", 0, "--topk", needs=_draws("top_k", 0, 1)
    )
    top_p: float = setting(
        "choose among the fewest tokens that together have this probability; 0 or 1: all",
        0.0,
        "--topp",
        needs=_draws("top_p", 0, 1),
    )
    top_p_decay: float = setting("multiply --top-p by this after each new token; 0: no decay", 0.0, needs=NUCLEUS)
    top_p_bound: float = setting(
        "--top-p-decay stops at this --top-p",
        0.0,
        needs=Needs("--top-p and --top-p-decay", lambda s: 0 < s.top_p < 1 and s.top_p_decay),
    )
    min_p: float = setting(
        "leave out tokens less likely than this share of the most likely one; 0: none", 0.0, needs=_draws("min_p", 0)
    )
    decoding_strategy: Optional[Literal["sampling", "topk_sampling", "topp_sampling"]] = setting(
        "PaddleNLP's: which of --top-k and --top-p counts; sampling: neither (default: both)", None
    )
    repetition_penalty: float = setting(
        "above 1: tokens that occurred in the prompt or the new text are less likely, by this factor", 1.0
    )
    frequency_penalty: float = setting(
        "subtract this from a token's score for each time it occurred in the new text", 0.0
    )
    presence_penalty: float = setting("subtract this from a token's score if it occurred in the new text", 0.0)
    logit_bias: Optional[list[str]] = setting(
        "add a number to the scores of tokens: TOKEN:NUMBER ..., -inf: never (for example 50256:-100)", None
    )
    bad_words_ids: Optional[list[str]] = setting(
        "sequences of tokens that no text has: TOKEN,TOKEN ... (25,198: after 25, 198 is impossible)", None
    )
    forced_bos_token_id: Optional[int] = setting("the first new token is this one", None)
    forced_eos_token_id: Optional[int] = setting("the last token of a text that reaches its longest length", None)
    stop: Optional[list[str]] = setting(
        "a text ends before any of these strings", None, "--stop-strings", "--stop-words", "--stop-sequences"
    )
    stop_token_ids: Optional[list[int]] = setting("tokens that end a text, beside those of the model", None)
    ignore_eos: bool = setting("the tokens with which the model ends texts do not end this one", False)
    sampling_seed: int = setting(
        "seed of the choices; the same seed gives the same text", 1234, "--seed", needs=_draws("sampling_seed")
    )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always chosen: with --greedy, temperature 0 or top-k 1."""
        return self.greedy or self.temperature == 0 or self.top_k == 1

    @property
    def biases(self) -> dict[int, float]:
        """The logit bias, as token -> number. Raises ValueError.

        >>> Sampling(logit_bias=["7:-100", "9:2.5"]).biases
        {7: -100.0, 9: 2.5}
        """
        given = self.logit_bias or ()
        pairs = given.items() if isinstance(given, Mapping) else (word.split(":") for word in given)
        return {int(token): float(bias) for token, bias in pairs}

    @property
    def bad_words(self) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that no text has. Raises ValueError.

        >>> Sampling(bad_words_ids=["25,198", "7"]).bad_words
        ((25, 198), (7,))
        """
        words = (word.split(",") if isinstance(word, str) else word for word in self.bad_words_ids or ())
        return tuple(tuple(map(int, word)) for word in words)

    def ends(self, end: Ends) -> frozenset[int]:
        """The tokens that end a text. end: those of the model."""
        own = () if end is None or self.ignore_eos else (end,) if isinstance(end, int) else end
        return frozenset((*own, *(self.stop_token_ids or ())))

    def top_p_at(self, new: int) -> float:
        """--top-p for the token after `new` new ones, by --top-p-decay (Megatron-LM's).

        >>> [Sampling(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3).top_p_at(new) for new in range(3)]
        [0.8, 0.4, 0.3]
        """
        if not (self.top_p and self.top_p_decay):
            return self.top_p
        return max(self.top_p * self.top_p_decay**new, min(self.top_p, self.top_p_bound))

    def normalized(self) -> tuple["Sampling", list[str]]:
        """(settings without those that --decoding-strategy ignores, notices for the user).

        >>> Sampling(top_k=10, top_p=0.9, decoding_strategy="topk_sampling").normalized()[1]
        ['--top-p 0.9 has no effect: --decoding-strategy topk_sampling']
        """
        if self.decoding_strategy is None:
            return self, []
        counts = dict(topk_sampling="top_k", topp_sampling="top_p").get(self.decoding_strategy)
        if counts and not getattr(self, counts):
            raise SettingsError(f"--decoding-strategy {self.decoding_strategy} needs {dashed(counts)}")
        without = {name: getattr(self, name) for name in ("top_k", "top_p") if name != counts and getattr(self, name)}
        strategy = f"has no effect: --decoding-strategy {self.decoding_strategy}"
        notes = [f"{dashed(name)} {value:g} {strategy}" for name, value in without.items()]
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
                *((name, 0 <= getattr(self, name) <= 1, "between 0 and 1") for name in SHARES),
                ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
                ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
                ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
                ("logit_bias", self._has_biases, "TOKEN:NUMBER ..., with token ids and numbers or -inf"),
                ("bad_words_ids", self._has_bad_words, "TOKEN,TOKEN ..., with token ids"),
                ("stop", all(self.stop or ()), "strings that are not empty"),
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

    @property
    def _has_biases(self) -> bool:
        try:
            return not any(math.isnan(bias) or bias == math.inf for bias in self.biases.values())
        except ValueError:
            return False

    @property
    def _has_bad_words(self) -> bool:
        try:
            return all(self.bad_words)
        except (TypeError, ValueError):
            return False

    def check_tokens(self, vocab_size: int, given: Mapping[str, Statement] = NONE) -> None:
        """Raise SettingsError for token ids that are not in a vocabulary."""
        own = {"logit_bias": list(self.biases), "bad_words_ids": [token for word in self.bad_words for token in word]}
        for name in ("forced_bos_token_id", "forced_eos_token_id", "stop_token_ids", *own):
            value = getattr(self, name)
            ids = own.get(name, value if isinstance(value, (list, tuple)) else [value])
            if wrong := [token for token in ids if token is not None and not 0 <= token < vocab_size]:
                raise SettingsError(
                    f"{words_of(given, name, _shown(value))}: there is no token {wrong[0]}",
                    f"the vocabulary has ids from 0 to {vocab_size - 1}",
                )


SHARES = ("top_p", "top_p_decay", "top_p_bound", "min_p")  # settings between 0 and 1


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


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
    """Settings of beam search (with groups: arXiv:1610.02424), and of an encoder-decoder's start and end tokens."""

    num_beams: int = setting("beam search over this many texts; 1: greedy, or sampling", 1, "--beam-width")
    length_penalty: float = setting("beam search: a new text's score is divided by its length to this power", 1.0)
    num_beam_groups: int = setting("beam search: groups of beams that search one after another, for diverse texts", 1)
    diversity_penalty: float = setting(
        "--num-beam-groups: subtract this from a token's score for each beam of earlier groups that has it there",
        0.0,
        "--diversity-rate",
    )
    decoder_start_id: Optional[int] = setting(
        "the token that targets begin with (default: the tokenizer's [CLS] or <s>, or 0)", None
    )
    decoder_end_id: Optional[int] = setting(
        "the token that ends targets (default: the tokenizer's [SEP] or </s>, or its end of document)", None
    )

    def check(self, sampling: Sampling, given: Mapping[str, Statement] = NONE) -> None:
        """Raise SettingsError for invalid values. given: as in `Sampling.check`."""
        beams, penalty, groups, diversity = (words_of(given, name, f"{getattr(self, name):g}") for name in BEAMS)
        if self.num_beams < 1:
            raise SettingsError(f"{beams}: has to be at least 1")
        if self.num_beams == 1 and asks_for_beams(given):
            raise SettingsError(f"{given['greedy'].words}: over how many beams?", do="add --num-beams 4")
        if self.num_beams == 1 and self.length_penalty != 1:
            raise SettingsError(f"{penalty} is of beam search", do="add --num-beams, or leave it out")
        if self.num_beam_groups < 1 or self.num_beams % self.num_beam_groups:
            raise SettingsError(f"{groups} does not divide {beams}", do="give as many beams to each group")
        if self.diversity_penalty < 0:
            raise SettingsError(f"{diversity}: has to be 0 or more")
        if self.diversity_penalty and self.num_beam_groups == 1:
            raise SettingsError(f"{diversity} is between groups of beams", do="add --num-beam-groups, or leave it out")
        if self.num_beam_groups > 1 and not self.diversity_penalty:
            raise SettingsError(f"{groups}: without a penalty all groups find the same", do="add --diversity-penalty")
        drawn = dict(top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p)
        drawn |= dict(temperature=sampling.temperature not in (0, 1))
        if self.num_beams > 1 and any(drawn.values()):
            idle = ", ".join(words_of(given, name, getattr(sampling, name)) for name, so in drawn.items() if so)
            raise SettingsError(f"{beams} draws nothing: {idle} has no place in it", do="leave it out")


def asks_for_beams(given: Mapping[str, Statement]) -> bool:
    """Whether PaddleNLP's --decode_strategy says beam_search. given: as in `Sampling.check`."""
    return "greedy" in given and "beam_search" in given["greedy"].words.split()


BEAMS = ("num_beams", "length_penalty", "num_beam_groups", "diversity_penalty")
GREEDY = Search()  # or sampling: no beams
