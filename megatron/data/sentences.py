# SPDX-License-Identifier: Apache-2.0
"""Split texts into sentences, for models that train on pairs of sentences.

`nltk` uses Punkt and gives exactly Megatron-LM's sentences; it needs its data on this machine. `sentencex` is fast and
needs no data. `auto` uses nltk if available, else sentencex, and logs which.
"""

import re
from collections.abc import Callable

from megatron.errors import DataError, MissingPackage, did_you_mean

ISO_CODES = dict(
    czech="cs",
    danish="da",
    dutch="nl",
    english="en",
    estonian="et",
    finnish="fi",
    french="fr",
    german="de",
    greek="el",
    italian="it",
    norwegian="no",
    polish="pl",
    portuguese="pt",
    russian="ru",
    slovene="sl",
    spanish="es",
    swedish="sv",
    turkish="tr",
    malayalam="ml",
    chinese="zh",
)
WORDS = dict(nltk="nltk's Punkt, as Megatron-LM does", sentencex="sentencex")
PIECE = 1_000_000  # characters that Megatron-LM splits at a time, to bound the time for a huge document


def make_splitter(
    library: str, language: str, keep_newlines: bool, log: Callable[[str], None] = lambda line: None
) -> Callable[[str], list[str]]:
    """A function `text -> sentences`. White space between sentences is dropped, or kept with `keep_newlines`.

    library: nltk, sentencex or auto. Raises DataError for an unknown language, or a library or data that is not installed.
    """
    if language.lower() not in ISO_CODES and not re.fullmatch("[a-z]{2,3}", language.lower()):
        near = did_you_mean(language, ISO_CODES)
        raise DataError(
            f"--lang {language}: there are no rules for sentences of this language{near}", do="--lang english"
        )
    why = ""
    if library == "auto":
        try:
            library, split = "nltk", _nltk(language, keep_newlines)
        except (DataError, MissingPackage) as error:
            library, split = "sentencex", _sentencex(language, keep_newlines)
            why = f" ({error.what}: Megatron-LM's sentences, by nltk's Punkt, differ in places)"
    else:
        split = dict(sentencex=_sentencex, nltk=_nltk)[library](language, keep_newlines)
    log(f"> splitting {language} sentences by {WORDS[library]}{why}")
    return lambda text: [sentence for at in range(0, len(text), PIECE) for sentence in split(text[at : at + PIECE])]


def _sentencex(language: str, keep_newlines: bool):
    try:
        import sentencex
    except ImportError:
        raise MissingPackage("--split-sentences needs the package sentencex", do="pip install sentencex") from None
    code = ISO_CODES.get(language.lower(), language.lower())
    if keep_newlines:
        return lambda text: sentencex.segment(code, text)
    return lambda text: [stripped for sentence in sentencex.segment(code, text) if (stripped := sentence.strip())]


def _nltk(language: str, keep_newlines: bool):
    try:
        from nltk.tokenize import punkt
    except ImportError:
        do = "pip install nltk, or use --sentence-splitter sentencex"
        raise MissingPackage("the package nltk is not on this machine", do=do) from None
    if not hasattr(punkt, "PunktTokenizer"):  # earlier versions run code from their data
        raise MissingPackage("the package nltk is older than 3.8.2", do="pip install --upgrade nltk")
    try:
        tokenizer = punkt.PunktTokenizer(language)
    except LookupError:
        do = "download it with `python -m nltk.downloader punkt_tab`, or use --sentence-splitter sentencex"
        raise DataError(f"nltk's punkt data for {language} is not on this machine", do=do) from None
    if keep_newlines:
        tokenizer = punkt.PunktSentenceTokenizer(train_text=tokenizer._params, lang_vars=_keep_newlines(punkt))
    return tokenizer.tokenize


def _keep_newlines(punkt):
    """Punkt's rules, with the white space after a full stop as part of the sentence before it."""

    class KeepNewlines(punkt.PunktLanguageVars):
        _period_context_fmt = r"""
            %(SentEndChars)s\s*
            (?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"""

    return KeepNewlines()
