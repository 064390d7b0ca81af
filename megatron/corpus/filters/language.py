# SPDX-License-Identifier: Apache-2.0
"""Keep documents in some languages, by one of three language detectors, or by a user's fastText classifier.

eldc        (default) n-grams in C, the model is in the package: 60 languages
fasttext    the user's lid.176.bin or lid.176.ftz: 176 languages, as in CCNet and FineWeb
langdetect  as in Megatron-LM's cleaning, with a fixed seed for reproducible results: 55 languages

A classifier says that a document is educational, toxic, of a topic ...

classifier = FastTextClassifier(model="quality.bin", keep={"hq": 0.9})
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Optional, Union

from megatron.corpus.stage import Document, Verdict
from megatron.errors import DataError, MissingPackage, SettingsError, did_you_mean

UNKNOWN = "unknown"
PREFIX = "__label__"  # of fastText's labels
Detector = Callable[[str], tuple[str, float]]  # text -> (language, score from 0 to 1)


class LanguageFilter:
    """Keeps documents in some languages, and stores the language of each under `key`.

    keep: codes of the detector, in upper or lower case; "zh" includes "zh-cn" and "zh-tw"; a list, or a text with commas.
        None keeps all documents with a language. A code that the detector does not have raises SettingsError
    min_score: minimal score of the detector; scores of different detectors are not comparable
    model: file of lid.176 for fasttext
    longest: characters to classify, from the beginning
    key: key of the document for the language; None for none
    """

    def __init__(
        self,
        keep: Optional[Union[Sequence[str], str]] = ("en",),
        min_score: float = 0.0,
        detector: Literal["eldc", "fasttext", "langdetect"] = "eldc",
        model: Optional[str] = None,
        longest: int = 100_000,
        key: Optional[str] = None,
    ):
        if detector not in DETECTORS:
            raise SettingsError(f"language detector {detector!r} is unknown", do=f"known: {', '.join(DETECTORS)}")
        self.min_score, self.longest, self.key = min_score, longest, key
        self.detect, codes = DETECTORS[detector](model, scored=min_score > 0)
        self.keep = None if keep is None else known_codes([keep] if isinstance(keep, str) else keep, codes, detector)

    def __call__(self, document: Document) -> Verdict:
        language, score = self.detect(document["text"][: self.longest])
        figures = {"language": language, "score": score}
        if language == UNKNOWN:
            return Verdict(None, "no_language", figures)
        if self.keep is not None and not {language, language.partition("-")[0]} & self.keep:
            return Verdict(None, "other_language", figures)
        if score < self.min_score:
            return Verdict(None, "unsure_language", figures)
        if self.key is not None:
            document = {**document, self.key: language}
        return Verdict(document, "", figures)


def known_codes(wanted: Iterable[str], codes: Iterable[str], detector: str) -> frozenset[str]:
    """The wanted codes in the detector's spelling. Raises SettingsError for one that it does not have, and for none.

    >>> sorted(known_codes(["EN, de", "zh"], ["de", "en", "zh-cn", "zh-tw"], "langdetect"))
    ['de', 'en', 'zh']
    """
    known = {code.lower(): code for one in codes for code in (one.partition("-")[0], one)}
    words = [word.strip() for entry in wanted for word in entry.split(",") if word.strip()]
    do = f"its codes are {', '.join(sorted(codes))}"
    for word in words:
        if word.lower() not in known:
            raise SettingsError(f"{detector} knows no language {word!r}{did_you_mean(word, known)}", do=do)
    if not words:
        raise SettingsError("no language is to be kept, so every document would be dropped", do=do)
    return frozenset(known[word.lower()] for word in words)


def _eldc(model: Optional[str], scored: bool) -> tuple[Detector, list[str]]:
    eldc = _package("eldc")
    eldc.init()

    def detect(text: str) -> tuple[str, float]:
        text = text.replace("\0", " ")  # C strings end there
        try:
            language = eldc.detect(text)
        except UnicodeEncodeError:  # lone surrogates
            text = text.encode("utf-8", "replace").decode()
            language = eldc.detect(text)
        if language == "und":
            return UNKNOWN, 0.0
        # The score takes a pass of its own: it is 1 unless there is a minimal score.
        return language, float(eldc.detect_details(text).scores.get(language, 0.0)) if scored else 1.0

    return detect, eldc.LANGUAGES


def _fasttext(model: Optional[str], scored: bool) -> tuple[Detector, list[str]]:
    if model is None:
        do = "give the path of lid.176.ftz or lid.176.bin (https://fasttext.cc/docs/en/language-identification.html)"
        raise SettingsError("the detector fasttext needs a model", do=do)
    predict = load_fasttext(model).predict

    def detect(text: str) -> tuple[str, float]:
        labels, scores = predict(one_line(text), k=1)
        return (labels[0].removeprefix(PREFIX), float(scores[0])) if len(labels) else (UNKNOWN, 0.0)

    return detect, labels_of(predict)


def _langdetect(model: Optional[str], scored: bool) -> tuple[Detector, list[str]]:
    langdetect = _package("langdetect")
    langdetect.DetectorFactory.seed = 0
    profiles = Path(langdetect.detector_factory.PROFILES_DIRECTORY)  # a file for each language

    def detect(text: str) -> tuple[str, float]:
        try:
            best = langdetect.detect_langs(text)[0]
        except langdetect.LangDetectException:  # no features in the text
            return UNKNOWN, 0.0
        return best.lang, best.prob

    return detect, [path.name for path in profiles.iterdir() if not path.name.startswith(("_", "."))]


DETECTORS = {"eldc": _eldc, "fasttext": _fasttext, "langdetect": _langdetect}


def one_line(text: str) -> str:
    """A text in fastText's form: one line, encodable."""
    return text.replace("\n", " ").encode("utf-8", "replace").decode()


def labels_of(predict) -> list[str]:
    """All labels of a fastText model, without their prefix."""
    return [label.removeprefix(PREFIX) for label in predict("a", k=-1, threshold=-1.0)[0]]


def load_fasttext(path: str):
    """Load a fastText model. Raises DataError for a file that is none."""
    fasttext = _package("fasttext", "fasttext-predict")
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise DataError(f"fastText model {path}: {error.strerror}") from None
    if magic != (793712314).to_bytes(4, "little"):
        raise DataError(f"{path} is no fastText model", "its first bytes are different", "give a .bin or .ftz file")
    try:
        return fasttext.load_model(path)
    except (ValueError, RuntimeError) as error:
        raise DataError(f"{path}: the fastText model cannot be read: {error}", do="copy or download it again") from None


def _package(name: str, install: str = ""):
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        do = "pip install '.[corpus]'"
        raise MissingPackage(f"this language detector needs the package {install or name}", do=do) from None


class FastTextClassifier:
    """Keeps documents with a label of `keep` at its score or more, or drops those with a label of `drop`.

    model: a .bin or .ftz file
    keep, drop: label (without __label__) -> minimal score; one of the two
    longest: characters to classify
    """

    def __init__(
        self,
        *,
        model: str,
        keep: Optional[Mapping[str, float]] = None,
        drop: Optional[Mapping[str, float]] = None,
        longest: int = 100_000,
    ):
        if bool(keep) == bool(drop):
            raise SettingsError("the fastText classifier needs either keep or drop: labels with their scores")
        self._predict = load_fasttext(model).predict
        self.keep, self.drop, self.longest = dict(keep or {}), dict(drop or {}), longest
        known = labels_of(self._predict)
        for label in (*self.keep, *self.drop):
            if known and label not in known:
                do = f"its labels: {', '.join(sorted(known)[:20])}"
                raise SettingsError(f"{model} has no label {label!r}{did_you_mean(label, known)}", do=do)

    def __call__(self, document: Document) -> Verdict:
        labels, values = self._predict(one_line(document["text"][: self.longest]), k=-1, threshold=-1.0)
        scores = {label.removeprefix(PREFIX): float(score) for label, score in zip(labels, values)}
        figures = {label: scores.get(label, 0.0) for label in (*self.keep, *self.drop)}
        if self.keep and not any(figures[label] >= least for label, least in self.keep.items()):
            return Verdict(None, "no_kept_label", figures)
        for label, least in self.drop.items():
            if figures[label] >= least:
                return Verdict(None, "dropped_label", figures)
        return Verdict(document, "", figures)
