# SPDX-License-Identifier: Apache-2.0
"""Filters of documents by their names in recipes. See docs/corpus_filters.md; `registry.build_filter` makes one."""

_HERE = "megatron.corpus.filters"

FILTERS: dict[str, str] = {
    "url": f"{_HERE}.url:UrlFilter",
    "html": f"{_HERE}.html:HtmlToText",
    "gate": f"{_HERE}.repair:BinaryGate",
    "language": f"{_HERE}.language:LanguageFilter",
    "ftfy": f"{_HERE}.repair:TextRepair",
    "gopher": f"{_HERE}.gopher:Gopher",
    "gopher-chinese": f"{_HERE}.gopher:GopherChinese",
    "gopher-repetition": f"{_HERE}.repetition:GopherRepetition",
    "gopher-repetition-chinese": f"{_HERE}.repetition:GopherRepetitionChinese",
    "c4": f"{_HERE}.c4:C4",
    "c4-chinese": f"{_HERE}.c4:C4Chinese",
    "fineweb": f"{_HERE}.fineweb:FineWeb",
    "fineweb-chinese": f"{_HERE}.fineweb:FineWebChinese",
    "megatron": f"{_HERE}.tasks:ShortDocuments",
    "tasks": f"{_HERE}.tasks:CleaningTasks",
    "fasttext": f"{_HERE}.language:FastTextClassifier",
    "perplexity": f"{_HERE}.perplexity:PerplexityFilter",
}
