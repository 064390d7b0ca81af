# SPDX-License-Identifier: Apache-2.0
"""The files of a Hugging Face tokenizer, read as transformers' AutoTokenizer reads their folder.

`tokenizer.json` describes a tokenizer of the library `tokenizers`. Beside it, tokenizer_config.json may change what it
does: add_bos_token, `legacy`, further special tokens, or a tokenizer_class that builds its own steps from the vocabulary. A
folder may also have a SentencePiece model and no tokenizer.json. In these cases transformers is asked; otherwise the file
says everything, and transformers is not needed.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from megatron.errors import DataError
from megatron.storage import hub
from megatron.tokenizer.byte_level import read_text

TOKENIZER, CONFIG, MODEL_CONFIG = "tokenizer.json", "tokenizer_config.json", "config.json"
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"  # of early versions of transformers
VOCABULARIES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")  # that transformers reads by themselves
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPLIT = "split_special_tokens"  # names of special tokens are text in prompts, too
FURTHER = ("additional_special_tokens", "extra_special_tokens")
OF_CLASS = ("model_input_names", "padding_side", "clean_up_tokenization_spaces")  # have values of their own in classes
PLAIN_CLASSES = (None, "PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend")
# Keys of tokenizer_config.json that do not change which tokens a text has.
WITHOUT_EFFECT = {
    *NAMED,
    *("tokenizer_class", "added_tokens_decoder", *FURTHER),
    *("chat_template", "model_max_length", "max_length", "padding_side", "truncation_side", "stride"),
    *("model_input_names", "clean_up_tokenization_spaces", "truncation_strategy", "processor_class", "errors"),
    *("name_or_path", "backend", "is_local", "local_files_only", "response_schema", "unk_id", "device_map"),
    *(SPLIT, "pad_to_multiple_of", "pad_token_type_id", "tokenizer_file", "special_tokens_map_file"),
    *("add_bos", "add_eos"),
}


@dataclass(frozen=True)
class TokenizerFiles:
    """text: the tokenizer.json that says everything; config: tokenizer_config.json, with the names of special tokens.

    replaced: the text of the folder's own tokenizer.json, if transformers reads it otherwise; changed: which parts
    """

    text: str
    config: Mapping[str, Any]
    replaced: Optional[str] = None
    changed: tuple[str, ...] = ()

    @cached_property
    def description(self) -> dict[str, Any]:
        """The content of `text`."""
        return json.loads(self.text)

    def name(self, token: str) -> Optional[str]:
        """The name of a special token such as eos_token; None if there is none."""
        return content_of(self.config.get(token))

    @property
    def named(self) -> list[str]:
        """All names of special tokens."""
        more = next(filter(None, map(self.config.get, FURTHER)), ())
        more = more.values() if isinstance(more, Mapping) else more
        return [name for one in (*(self.config.get(key) for key in NAMED), *more) if (name := content_of(one))]


def content_of(token: Any) -> Optional[str]:
    """The name of a token of tokenizer_config.json, which is a text or an object."""
    return token.get("content") if isinstance(token, Mapping) else token


def read_files(path: Path, notify: Callable[[str], None] = lambda message: None) -> TokenizerFiles:
    """The tokenizer of a folder, or of a tokenizer.json. Raises DataError."""
    folder = path if path.is_dir() else path.parent
    file = path / TOKENIZER if path.is_dir() else path
    config = tokenizer_config(folder)
    if path.is_dir() and not file.exists():
        return _asked(folder, config, None)
    files = TokenizerFiles(text := read_text(str(file), "--tokenizer-model"), config)
    try:
        files.description["model"]["type"]  # noqa: B018
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        cut = isinstance(error, json.JSONDecodeError)
        why = f"it is not JSON: {error}" if cut else "it has no model with a type"
        do = "get the whole file of the model" if cut else ""
        raise DataError(f"{file}: not a tokenizer.json", why, do) from None
    reason = file.name == TOKENIZER and _more_than_the_file(files, folder)
    if not reason:
        return files
    try:
        return _asked(folder, config, text)
    except (ImportError, DataError) as error:
        why = "transformers is not installed" if isinstance(error, ImportError) else error.why
        notify(f"{folder}: tokenizer.json is read alone, though {reason} may change what it does: {why}")
        return files


def tokenizer_config(folder: Path) -> dict:
    """tokenizer_config.json, and the names of special_tokens_map.json, which count if it does not list added tokens."""
    config = _config(folder / CONFIG)
    return config if "added_tokens_decoder" in config else config | _config(folder / MAP)


def _config(path: Path) -> dict:
    """The content of a JSON file; empty if there is none. Raises DataError for one that is none."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read", str(error), "repair or remove it") from None
    return content if isinstance(content, dict) else {}


def _more_than_the_file(files: TokenizerFiles, folder: Path) -> Optional[str]:
    """What may make transformers read a tokenizer.json otherwise than `tokenizers` does; None if nothing can."""
    config, added = files.config, {token["content"]: token for token in files.description.get("added_tokens") or ()}
    if kind := _config(folder / MODEL_CONFIG).get("model_type"):
        return f"model_type {kind}"
    if config.get("tokenizer_class") not in PLAIN_CLASSES:
        return f"tokenizer_class {config['tokenizer_class']}"
    if unknown := sorted(key for key, value in config.items() if key not in WITHOUT_EFFECT and value is not None):
        return ", ".join(unknown)
    if further := [name for name in files.named if not added.get(name, {}).get("special")]:
        return f"the special token {further[0]}"
    if "added_tokens_decoder" not in config and (late := _config(folder / ADDED).keys() - added.keys()):
        return f"{min(late)} of {ADDED}"
    listed = (config.get("added_tokens_decoder") or {}).values()
    keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token in listed:
        own = added.get(token["content"])
        if own is None or any(bool(own.get(key)) != bool(token.get(key)) for key in keys):
            return f"the added token {token['content']}"
    return None


def _asked(folder: Path, config: dict, own: Optional[str]) -> TokenizerFiles:
    """What transformers makes of a folder. own: the text of its tokenizer.json, if it has one."""
    theirs = auto_tokenizer(folder)
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise DataError(
            f"{folder}: transformers reads its tokenizer with {type(theirs).__name__}, which has no tokenizer.json"
        )
    backend.no_truncation()
    backend.no_padding()
    special = {str(token) for token in theirs.added_tokens_decoder.values() if token.special}
    config = {key: value for key, value in config.items() if key not in FURTHER}
    config |= {key: None if (name := getattr(theirs, key, None)) is None else str(name) for key in NAMED}
    config |= {key: value for key in OF_CLASS if (value := getattr(theirs, key, None)) is not None}
    if more := [name for name in map(str, getattr(theirs, "extra_special_tokens", None) or ()) if name in special]:
        config["additional_special_tokens"] = more
    template = getattr(theirs, "chat_template", None)
    if template and "chat_template" not in config:
        config["chat_template"] = template
    text = backend.to_str()
    if own is None:
        return TokenizerFiles(text, config)
    as_file, changed = json.loads(_canonical(own)), []
    for part, value in json.loads(text).items():
        same = part in ("truncation", "padding") or value == as_file.get(part)
        same = same or part == "decoder" and decodes_bytes(value) and decodes_bytes(as_file.get(part))
        if not same and not (part == "model" and _differ_in_unknown(value, as_file[part])):
            changed.append(part)
    return TokenizerFiles(text if changed else own, config, own if changed else None, tuple(changed))


def decodes_bytes(decoder: Optional[dict]) -> bool:
    """Whether a decoder of tokenizer.json makes bytes of letters: it has settings, which are of encoding alone."""
    return bool(decoder) and decoder.get("type") == "ByteLevel"


def _differ_in_unknown(model: dict, other: dict) -> bool:
    """Whether models differ in the unknown token alone, which no text has: each byte is a token."""
    kept = lambda one: {key: value for key, value in one.items() if key not in ("unk_token", "fuse_unk")}
    of_bytes = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return bool(of_bytes) and kept(model) == kept(other)


def _canonical(text: str) -> str:
    """A tokenizer.json as `tokenizers` writes it."""
    from tokenizers import Tokenizer

    return Tokenizer.from_str(text).to_str()


def auto_tokenizer(folder: Path):
    """AutoTokenizer on local files. Raises DataError if it cannot read them, ImportError without transformers."""
    hub.stay_offline()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # from any library that it uses
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{folder}: transformers cannot read its tokenizer", reason) from None


def write_files(files: TokenizerFiles, folder: Path) -> None:
    """Write a tokenizer that any version of transformers reads alike: its tokenizer.json says everything.

    transformers takes its own class for some types of models, whatever tokenizer_config.json says (Qwen 2): names that are
    null and add_prefix_space are for these.
    """
    kept = {*WITHOUT_EFFECT, "add_prefix_space"} - {"added_tokens_decoder"}
    content = {key: one for key, one in files.config.items() if key in kept and (one is not None or key in NAMED)}
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / TOKENIZER).write_text(files.text, encoding="utf-8")
    (folder / CONFIG).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
