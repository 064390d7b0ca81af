# SPDX-License-Identifier: Apache-2.0
"""Filter documents by their perplexity under a small language model, as CCNet does for head, middle and tail.

The model is an ARPA file (KenLM's and SRILM's text format), or a user's own class, constructed from `model` if that is
given, and called with a text to return its perplexity.

    PerplexityFilter(model="en.arpa", most=1500)
    PerplexityFilter(scorer="my_filters:Perplexity", model="en.bin", most=1500)
"""

import math
import re
from typing import Optional

from megatron.corpus.filters.url import named_function
from megatron.corpus.stage import Document, Verdict
from megatron.errors import DataError, SettingsError

_HEADING = re.compile(r"\\([1-9])-grams:")


class PerplexityFilter:
    """Keeps texts with a perplexity from `least` to `most`.

    model: an ARPA file, or the argument of `scorer`
    scorer: "package.module:Class"; an object of it is called with a text and returns a number
    longest: characters to score
    """

    def __init__(
        self,
        model: Optional[str] = None,
        least: float = 0.0,
        most: float = math.inf,
        scorer: str = "megatron.corpus.filters.perplexity:ArpaModel",
        longest: int = 100_000,
    ):
        if model is None and scorer.endswith(":ArpaModel"):
            raise SettingsError("the perplexity filter needs a model, or a scorer of your own")
        kind = named_function(scorer)
        self.scorer = kind(model) if model is not None else kind()
        self.least, self.most, self.longest = least, most, longest

    def __call__(self, document: Document) -> Verdict:
        perplexity = float(self.scorer(document["text"][: self.longest]))
        figures = {"perplexity": perplexity}
        if not perplexity >= self.least:
            return Verdict(None, "low_perplexity", figures)
        if perplexity > self.most:
            return Verdict(None, "high_perplexity", figures)
        return Verdict(document, "", figures)


class ArpaModel:
    """An n-gram model with back-off (Katz 1987), from an ARPA file.

    Lines are sentences, and words are separated by spaces, as in KenLM. Perplexity includes the end of each sentence;
    unknown words count as <unk>, or as probability 1e-10 in a model without it.
    """

    def __init__(self, path: str):
        self.grams: dict[tuple[str, ...], tuple[float, float]] = {}  # words -> (log10 p, log10 of the back-off)
        self.order = 0
        try:
            with open(path, encoding="utf-8") as file:
                self._read(file, path)
        except OSError as error:
            raise DataError(f"ARPA model {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise DataError(f"{path} is no ARPA file", "it is not UTF-8", "give the text form of the model") from None
        if not self.order:
            raise DataError(f"{path} is no ARPA file", "it has no n-grams", "give the text form of the model")

    def _read(self, file, path: str) -> None:
        order = 0
        for number, line in enumerate(file, 1):
            line = line.strip()
            if heading := _HEADING.fullmatch(line):
                order = int(heading[1])
                self.order = max(self.order, order)
            elif order and line and not line.startswith("\\"):
                fields = line.split()
                try:
                    backoff = float(fields[order + 1]) if len(fields) > order + 1 else 0.0
                    self.grams[tuple(fields[1 : order + 1])] = float(fields[0]), backoff
                except ValueError:
                    raise DataError(f"{path}, line {number}: {line[:60]!r} is no n-gram") from None

    def __call__(self, text: str) -> float:
        """The perplexity of a text; infinite for one without words."""
        total, count = 0.0, 0
        for line in text.split("\n"):
            words = [word if (word,) in self.grams else "<unk>" for word in line.split()]
            if not words:
                continue
            history = ("<s>",)
            for word in (*words, "</s>"):
                total += self._log10(history[-(self.order - 1) :] if self.order > 1 else (), word)
                history = (*history[-self.order :], word)
            count += len(words) + 1
        return 10.0 ** min(-total / count, 300.0) if count else math.inf

    def _log10(self, history: tuple[str, ...], word: str) -> float:
        """log10 p(word | history), backing off to shorter histories."""
        backed_off = 0.0
        while True:
            entry = self.grams.get((*history, word))
            if entry is not None:
                return backed_off + entry[0]
            if not history:
                return backed_off - 10.0
            backed_off += self.grams.get(history, (0.0, 0.0))[1]
            history = history[1:]
