# SPDX-License-Identifier: Apache-2.0
"""A request for a continuation, and the tokens that answer it: what the generation engine takes and returns.

`tools.generate`, the Python API and the server all speak to the engine in these terms. Texts and stop strings are not part
of them: the engine knows token ids only.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Optional

from megatron.inference.sampling import Ends, Sampling, Search

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Request:
    """A prompt, and how to continue it.

    prompt           token ids, at least one
    sampling         how tokens are chosen; its seed, too
    index            the number of this text among those with the same seed: texts of different numbers draw differently
    end              the token that ends the text, or several; None: only its length does. It is not part of the answer
    logprobs         at each new token, report the log-probabilities of this many likeliest tokens; 0: of the new token
                     only; None: none
    prompt_logprobs  report those of the prompt's tokens as well
    adjusted         log-probabilities of new tokens are those after logit bias and bad words: for texts of one new token
    start            encoder-decoders, whose prompts are sources: the token that the target begins with
    search           beam search in place of one text (`searches.SearchingEngine`): its only output has the texts found
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    index: int = 0
    end: Ends = None
    logprobs: Optional[int] = None
    prompt_logprobs: bool = False
    adjusted: bool = False
    start: int = 0
    search: Optional[Search] = None

    @property
    def texts(self) -> int:
        """The texts that it may have at a time."""
        return 1 if self.search is None else self.search.num_beams


class FoundText(NamedTuple):
    """A text that beam search found. score: the sum of its log-probabilities, divided by a power of its length."""

    score: float
    tokens: tuple[int, ...]
    finish: FinishReason


@dataclass(frozen=True)
class TokenScore:
    """A token of a text: its log-probability, and the likeliest tokens in its place with theirs, best first.

    Log-probabilities are natural ones of the model's own distribution, before temperature, penalties and filters.
    """

    token: int
    logprob: Optional[float] = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Output:
    """What one step of the engine brought for one request.

    request  the number that `Engine.add` returned
    new      the new token; None if there is none: the text has ended with `end`, or was cancelled
    finish   why the text has ended; None while it goes on
    prompt   with the first output of a request with prompt_logprobs: the scores of its prompt; the first has no logprob
    cached   with the first output: tokens of the prompt that were found in the cache of another request
    found    of a beam search: its texts, best first
    """

    request: int
    new: Optional[TokenScore] = None
    finish: Optional[FinishReason] = None
    prompt: tuple[TokenScore, ...] = ()
    cached: int = 0
    found: tuple[FoundText, ...] = ()
