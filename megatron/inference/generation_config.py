# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's generation_config.json beside a model: the settings that its authors recommend. Needs no torch.

`defaults_of` reads it, `content_of` writes it.

>>> found = defaults_of(dict(do_sample=True, top_p=0.9, max_new_tokens=256, eos_token_id=[2, 7], guidance_scale=1.5))
>>> found.settings, found.ends, found.unknown
({'top_p': 0.9, 'tokens_to_generate': 256}, (2, 7), ['guidance_scale'])
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from megatron.errors import DataError, SettingsError
from megatron.inference.sampling import Sampling
from megatron.settings.declare import dashed
from megatron.settings.statements import NONE
from megatron.storage.urls import UrlPath, location

NAME = "generation_config.json"
SAME = """temperature top_k top_p min_p repetition_penalty num_beams length_penalty num_beam_groups diversity_penalty
    forced_bos_token_id forced_eos_token_id""".split()
RENAMED = dict(
    max_new_tokens="tokens_to_generate",
    min_new_tokens="min_tokens_to_generate",
    num_return_sequences="num_samples",
    stop_strings="stop",
)
DRAWN = ("temperature", "top_k", "top_p", "min_p")
SAMPLED = {field.name for field in fields(Sampling)}
# Keys that say nothing about the choice of tokens, or what the tokenizer says here.
ELSEWHERE = """bos_token_id pad_token_id decoder_start_token_id transformers_version use_cache cache_implementation
    output_attentions output_hidden_states output_scores output_logits return_dict_in_generate early_stopping""".split()


SEARCHED = ("num_beams", "length_penalty", "num_beam_groups", "diversity_penalty")


class Recommended(NamedTuple):
    """Settings by name, keys that have no equivalent here, and the tokens that end a text; None: the end of document."""

    settings: dict[str, Any]
    unknown: list[str]
    ends: Optional[tuple[int, ...]] = None


def defaults_of(content: Mapping[str, Any], given: frozenset[str] = frozenset()) -> Recommended:
    """The settings of a file. given: those of the user, which count instead."""
    settings: dict[str, Any] = {}
    content = {key: value for key, value in content.items() if value is not None and not key.startswith("_")}
    for key, value in content.items():
        if key in SAME or key in RENAMED:
            settings[RENAMED.get(key, key)] = value
    if isinstance(settings.get("stop"), str):
        settings["stop"] = [settings["stop"]]
    ends = content.get("eos_token_id")
    ends = ends if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    if wrong := [end for end in ends or () if not isinstance(end, int)]:
        raise ValueError(f"eos_token_id {wrong[0]!r} is no number of a token")
    if content.get("bad_words_ids"):
        settings["bad_words_ids"] = [",".join(map(str, word)) for word in content["bad_words_ids"]]
    if content.get("suppress_tokens"):
        settings["logit_bias"] = [f"{token}:-inf" for token in content["suppress_tokens"]]
    beams = settings.get("num_beams", 1) > 1
    if content.get("do_sample") is False and not beams and not given & {*DRAWN, "greedy"}:
        settings["greedy"] = True
    if beams or "num_beams" in given:
        settings = {name: value for name, value in settings.items() if name not in DRAWN}
    if "num_beams" in given:
        for name in SEARCHED[1:]:
            settings.pop(name, None)
    known = {*SAME, *RENAMED, *ELSEWHERE, "eos_token_id", "suppress_tokens", "bad_words_ids", "do_sample"}
    unknown = sorted(key for key, value in content.items() if key not in known and value not in (False, [], {}))
    return Recommended({name: value for name, value in settings.items() if name not in given}, unknown, ends)


def content_of(settings: Mapping[str, Any], below: Mapping[str, Any] = NONE) -> tuple[dict[str, Any], list[str]]:
    """(the content of a file that recommends these settings, those that it has no key for). below: the file that they
    change. What transformers would take by default (do_sample, top_k) is there, too, so that all readers do the same.

    >>> content_of(dict(top_p=0.75, tokens_to_generate=8, sampling_seed=1))
    ({'top_p': 0.75, 'max_new_tokens': 8, 'do_sample': True, 'top_k': 0}, ['sampling_seed'])
    >>> content_of(dict(greedy=True), dict(top_p=0.9, eos_token_id=2))[0]
    {'eos_token_id': 2, 'do_sample': False}
    """
    theirs = {name: key for key, name in RENAMED.items()} | {name: name for name in SAME}
    content = {theirs[name]: value for name, value in settings.items() if name in theirs and value is not None}
    unknown = [name for name in settings if name not in theirs and name != "greedy"]
    if content.get("top_p") == 0:  # there 1 is all
        content["top_p"] = 1.0
    beams = content.get("num_beams", 1) > 1
    greedy = settings.get("greedy") or content.get("temperature") == 0 or content.get("top_k") == 1
    if not beams and not greedy and not settings.keys() & {*DRAWN, "greedy"}:  # they leave the choice to what is below
        return {**below, **content}, unknown
    drawn = not beams and not greedy
    left_out = {*(() if drawn else DRAWN), *(() if beams else SEARCHED)}
    merged = {key: value for key, value in {**below, **content}.items() if key not in left_out}
    merged["do_sample"] = drawn
    return (merged | dict(top_k=merged.get("top_k", 0)) if drawn else merged), unknown


def recommend(folder: Path, settings: Mapping[str, Any]) -> None:
    """Put settings over those of the file in a folder. Raises SettingsError for one that the file has no key for."""
    path = folder / NAME
    if not path.is_file():
        raise SettingsError(f"{', '.join(map(dashed, settings))}: this model continues no text", do="leave it out")
    content, unknown = content_of(settings, json.loads(path.read_bytes()))
    if unknown:
        raise SettingsError(
            f"{', '.join(map(dashed, unknown))}: {NAME}, which recommends settings, has no such key",
            do="leave it out here, and give it to the program that generates",
        )
    path.write_text(json.dumps(content, indent=2))


def file_in(folder: Union[str, Path, UrlPath]) -> Optional[Union[Path, UrlPath]]:
    """The file in a folder, or, as in imports of earlier versions, beside its tokenizer; None if there is none."""
    places = (location(folder) / NAME, location(folder) / "tokenizer" / NAME)
    return next((place for place in places if place.is_file()), None)


def read(folder: Union[str, Path, UrlPath], given: frozenset[str] = frozenset()) -> Recommended:
    """`defaults_of` the file in a folder, or beside its tokenizer; nothing if there is none. Raises DataError."""
    path = file_in(folder)
    if path is None:
        return Recommended({}, [])
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a generation config", str(error), "repair or remove it") from None
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a generation config", "it is no object", "repair or remove it")
    try:
        found = defaults_of(content, given)
        Sampling(**{name: value for name, value in found.settings.items() if name in SAMPLED}).check()
        return found
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: not a generation config", str(error), "repair or remove it") from None
    except SettingsError as error:
        raise DataError(f"{path}: {error.what.removeprefix('--')}", do="repair or remove it") from None


def unknown_notices(path: Union[str, Path, UrlPath], unknown: Sequence[str]) -> list[str]:
    """A notice on the keys of a file that have no equivalent here; nothing if there are none."""
    return [f"{path}: {', '.join(unknown)}: there is no such setting here"] if unknown else []


def with_end(folder: Union[Path, UrlPath], end: int) -> dict[str, str]:
    """Name -> content of the file in a folder, with a further token that ends a text; nothing if it needs no change."""
    ends = read(folder).ends
    if ends is None or end in ends:
        return {}
    content = json.loads((folder / NAME).read_bytes())
    return {NAME: json.dumps(content | dict(eos_token_id=[end, *ends]), indent=2) + "\n"}


def ends_beside(path: Union[Path, UrlPath]) -> Optional[tuple[int, ...]]:
    """The tokens that end a text, by the file in the folder of a model, or in the folder of its checkpoints."""
    folders = (location(path), location(path).parent)
    return next((ends for folder in folders if (ends := read(folder).ends) is not None), None)
