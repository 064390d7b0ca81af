# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's generation_config.json beside a model: the settings that its authors recommend. Needs no torch.

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
        for name in ("length_penalty", "num_beam_groups", "diversity_penalty"):
            settings.pop(name, None)
    known = {*SAME, *RENAMED, *ELSEWHERE, "eos_token_id", "suppress_tokens", "bad_words_ids", "do_sample"}
    unknown = sorted(key for key, value in content.items() if key not in known and value not in (False, [], {}))
    return Recommended({name: value for name, value in settings.items() if name not in given}, unknown, ends)


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
