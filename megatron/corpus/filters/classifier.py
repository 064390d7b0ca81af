# SPDX-License-Identifier: Apache-2.0
"""Filter documents by a user's fastText classifier: educational, toxic, of a topic ...

classifier = FastTextClassifier(model="quality.bin", keep={"hq": 0.9})
"""

from collections.abc import Mapping
from typing import Optional

from megatron.corpus.filters.language import PREFIX, labels_of, load_fasttext, one_line
from megatron.corpus.stage import Document, Verdict
from megatron.errors import SettingsError, did_you_mean


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
