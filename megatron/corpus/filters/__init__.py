# SPDX-License-Identifier: Apache-2.0
"""Filters of documents by their names in recipes. See docs/corpus_filters.md.

    keep_english = build_filter("language", keep=["en"])
    keep_english({"text": "..."})  # -> stage.Verdict

A filter is constructed once per process from its options: keyword arguments with defaults. Names may have underscores
instead of hyphens; a name with a colon, "package.module:Class", is a user's own filter.
"""

import importlib
import inspect

from megatron.corpus.stage import Filter
from megatron.errors import SettingsError, did_you_mean

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
    "megatron": f"{_HERE}.length:ShortDocuments",
    "tasks": f"{_HERE}.tasks:CleaningTasks",
    "fasttext": f"{_HERE}.language:FastTextClassifier",
    "perplexity": f"{_HERE}.perplexity:PerplexityFilter",
}


def filter_class(name: str) -> type:
    """The class of a filter in the table, or of "package.module:Class". Raises SettingsError for an unknown name."""
    place = FILTERS.get(name.replace("_", "-"), name)
    module, colon, attribute = place.partition(":")
    if not (module and colon and attribute):
        do = f"known: {', '.join(FILTERS)}; or one of your own as package.module:Class"
        raise SettingsError(f"{name!r} is no filter{did_you_mean(name, FILTERS)}", do=do)
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the filter's own module exists, and one of its imports is missing
        raise SettingsError(f"filter {name}: there is no module {error.name}", do="check PYTHONPATH") from None
    except AttributeError:
        raise SettingsError(f"filter {name}: the module {module} has no {attribute}") from None


def build_filter(name: str, **options) -> Filter:
    """A filter with its options. Raises SettingsError for an unknown name or option."""
    kind = filter_class(name)
    parameters = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and not takes_any:
            known = f"it has {', '.join(parameters)}" if parameters else "it has none"
            raise SettingsError(f"filter {name} has no option {option!r}{did_you_mean(option, parameters)}", do=known)
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.kind is p.KEYWORD_ONLY]
    missing = [option for option in missing if option not in options]
    if missing:
        raise SettingsError(f"filter {name} needs {' and '.join(missing)}")
    return kind(**options)
