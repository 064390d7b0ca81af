# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face models: read and write safetensors tensor by tensor, and copy tokenizer files."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from megatron.checkpoint.store import CODES, as_bytes
from megatron.errors import CheckpointError, DataError, UsageError
from megatron.inference import generation_config
from megatron.settings import schema
from megatron.storage import hub
from megatron.storage.durable import storage_errors
from megatron.telemetry.progress import ProgressBar
from megatron.tokenizer.byte_level import END_OF_TEXT
from megatron.tokenizer.chat_template import FILE as TEMPLATE
from megatron.tokenizer.transformers_files import MODEL_CONFIG, NAMED, VOCABULARIES, content_of, read_files, write_files

FILE_BYTES = 5 * 10**9  # of one safetensors file, as transformers cuts them
WHOLE = "get its files again: hf download ORG/NAME --local-dir FOLDER, or a copy whose sizes are those of the source"
_PLAIN = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
_JSON_LIMIT = 1 << 28
_HEAD = 1 << 16  # characters of a README.md in which its license is looked for

# Files of a tokenizer, by kind of tokenizer: setting -> name in the folder.
TOKENIZER_FILES = dict(
    GPT2BPETokenizer=dict(vocab_file="vocab.json", merge_file="merges.txt"),
    HuggingFaceTokenizer=dict(tokenizer_model="tokenizer.json"),
    SentencePieceTokenizer=dict(tokenizer_model="tokenizer.model"),
    GPTSentencePieceTokenizer=dict(tokenizer_model="tokenizer.model"),
    Llama2Tokenizer=dict(tokenizer_model="tokenizer.model"),
)
_CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"
_COMPANIONS = (
    *(_CONFIG, "special_tokens_map.json", "added_tokens.json", TEMPLATE, "chat_template.json"),
    *("additional_chat_templates", GENERATION),
)
_UNITS = dict(KB=10**3, MB=10**6, GB=10**9, TB=10**12, KiB=2**10, MiB=2**20, GiB=2**30, TiB=2**40)

SAVE_AGAIN = (  # pickled weights as safetensors
    "python -c \"from transformers import AutoModelForCausalLM as M; f = '{}'; M.from_pretrained(f).save_pretrained(f)\" "
    "adds model.safetensors to it"
)


class TensorGroup(NamedTuple):
    """Tensors to write, in order, and the function that creates them on demand. dtypes: if they are not the file's."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    make: Callable[[], Iterable[torch.Tensor]]
    dtypes: tuple[torch.dtype, ...] = ()

    def sizes(self, dtype: torch.dtype) -> list[int]:
        """Bytes of each tensor in a file of `dtype`."""
        return [prod(shape) * one.itemsize for shape, one in zip(self.shapes, self.formats(dtype))]

    def formats(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """The format of each tensor."""
        return self.dtypes or (dtype,) * len(self.names)


def bytes_of(size: str) -> int:
    """The bytes of a size in transformers' words. Raises UsageError for another word.

    >>> bytes_of("5GB"), bytes_of("1.5 GiB")
    (5000000000, 1610612736)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)?", size.strip(), re.IGNORECASE)
    units = {name.lower(): unit for name, unit in _UNITS.items()}
    count = int(float(found[1]) * units.get((found[2] or "").lower(), 1)) if found else 0
    if count < 1:
        raise UsageError(f"--max-shard-size {size} is not a size", do=f"say 5GB; units are {', '.join(_UNITS)}")
    return count


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_tensors(
    folder: Path, planned: list[TensorGroup], dtype: torch.dtype, file_bytes: int = FILE_BYTES
) -> list[str]:
    """Write model.safetensors, or several files with an index. The tensors of one `make` are in memory at a time."""
    files: list[list[TensorGroup]] = [[]]
    room = file_bytes
    for plan in planned:
        size = sum(plan.sizes(dtype))
        if size > room and files[-1]:
            files.append([])
            room = file_bytes
        files[-1].append(plan)
        room -= size
    count = len(files)
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    names = ["model.safetensors"] if count == 1 else names
    with ProgressBar("writing", sum(sum(plan.sizes(dtype)) for plan in planned)) as done:
        for name, plans in zip(names, files):
            _write_file(folder / name, plans, dtype, done)
    if count > 1:
        where = {tensor: name for name, plans in zip(names, files) for plan in plans for tensor in plan.names}
        size = sum(sum(plan.sizes(dtype)) for plan in planned)
        index = dict(metadata=dict(total_size=size), weight_map=where)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return names


def _write_file(path: Path, plans: list[TensorGroup], dtype: torch.dtype, done: ProgressBar) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for plan in plans:
        for name, shape, size, one in zip(plan.names, plan.shapes, plan.sizes(dtype), plan.formats(dtype)):
            end = at + size
            header[name] = dict(dtype=CODES[one], shape=list(shape), data_offsets=[at, end])
            at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with storage_errors(path, at), open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for plan in plans:
            for tensor, shape, one in zip(plan.make(), plan.shapes, plan.formats(dtype)):
                assert tuple(tensor.shape) == shape, (plan.names, tensor.shape, shape)
                done(file.write(memoryview(as_bytes(tensor.to(one).contiguous()).numpy())))
        file.flush()
        os.fsync(file.fileno())


# ---- reading ---------------------------------------------------------------------------------------------------------


class TensorFiles:
    """The tensors of a folder's safetensors files, memory-mapped and read one by one. `shapes`: name -> shape."""

    def __init__(self, folder: Path):
        """Raises CheckpointError if there are none, a header is damaged, or a tensor differs between two files."""
        from safetensors import SafetensorError, safe_open

        names = _file_names(folder)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files = {}
        for name in names:
            try:
                file = safe_open(folder / name, framework="pt")
                for key in file.keys():
                    if key in self._files and not torch.equal(self.get(key), file.get_tensor(key)):
                        raise CheckpointError(f"{folder}: {key} is in two files, with other numbers", do=WHOLE)
                    self.shapes[key], self._files[key] = tuple(file.get_slice(key).get_shape()), file
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{folder / name} cannot be read: {error}", do=WHOLE) from None

    def get(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        return self._files[name].get_tensor(name)


def _file_names(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if (folder / "model.safetensors").exists():
            return ["model.safetensors"]
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        raise CheckpointError(
            f"{folder} has no model.safetensors",
            "it holds pickled weights, which are not opened" if pickled else None,
            SAVE_AGAIN.format(folder) if pickled else WHOLE,
        )
    if (folder / "model.safetensors").exists():
        raise CheckpointError(
            f"{folder} holds model.safetensors and {index.name}: which of them is the model?",
            do=f"remove model.safetensors, or {index.name} and its files; transformers reads model.safetensors",
        )
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{index} has no weight_map", do=WHOLE)
    names = sorted({str(name) for name in listed.values()})
    for name in names:
        if not _PLAIN.fullmatch(name):
            raise CheckpointError(f"{index} names {name!r}, which is no file of its folder", do=WHOLE)
    return names


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of bounded size. Raises CheckpointError if it is missing or invalid."""
    try:
        if path.stat().st_size > _JSON_LIMIT:
            raise CheckpointError(f"{path} is too large for what it should be", do=WHOLE)
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise CheckpointError(
                f"{path.parent}: no such folder", do=hub.hint(path.parent) or "check the path"
            ) from None
        raise CheckpointError(f"{path} cannot be read: No such file or directory", do=WHOLE) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", do="check its permissions") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", do=WHOLE) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object", do=WHOLE)
    return content


def about(folder: Path, config: Mapping[str, Any]) -> dict[str, Optional[str]]:
    """{name, license} of the model in a folder: by the cache of a hub, config.json and the head of README.md."""
    cached = (re.fullmatch(r"models--(.+?)--(.+)", part) for part in folder.resolve().parts)
    named = str(config.get("_name_or_path") or "")
    name = next((f"{found[1]}/{found[2]}" for found in cached if found), None)
    if name is None and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", named):
        name = named
    card = folder / "README.md"
    head = card.read_text(encoding="utf-8", errors="replace")[:_HEAD] if card.is_file() else ""
    stated = re.search(r"\A---\n(?:.*\n)*?license: *[\"']?([\w.-]+)", head)
    return dict(name=name or folder.resolve().name, license=stated and stated[1])


# ---- tokenizers ------------------------------------------------------------------------------------------------------


def import_tokenizer(source: Path, folder: Path, of_gpt2: bool) -> Optional[schema.TokenizerSettings]:
    """Write a model's tokenizer into `folder`; returns its settings, None without tokenizer.

    A tokenizer.json is written as AutoTokenizer reads the source (`tokenizer.transformers_files`). of_gpt2: see
    `tokenizer_of`.
    """
    there = tokenizer_of(source, of_gpt2)
    if there is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if there.tokenizer_type == "HuggingFaceTokenizer":
        write_files(read_files(source), folder)
        names = ("tokenizer.model", TEMPLATE, "chat_template.json")
        for name in names:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return schema.TokenizerSettings(there.tokenizer_type, tokenizer_model=str(folder / "tokenizer.json"))
    files = TOKENIZER_FILES[there.tokenizer_type]
    for name in files.values():
        shutil.copyfile(source / name, folder / name)
    _copy_others(source, folder)
    return schema.TokenizerSettings(
        there.tokenizer_type, **{setting: str(folder / name) for setting, name in files.items()}
    )


def tokenizer_of(folder: Path, of_gpt2: bool) -> Optional[schema.TokenizerSettings]:
    """The settings of the tokenizer in a folder of transformers; None without one.

    of_gpt2: vocab.json and merges.txt are GPT-2's. Other models have such files, and split texts as tokenizer.json says.
    """
    there = lambda kind: all((folder / name).is_file() for name in TOKENIZER_FILES[kind].values())
    as_settings = lambda kind: schema.TokenizerSettings(
        kind, **{setting: str(folder / name) for setting, name in TOKENIZER_FILES[kind].items()}
    )
    if of_gpt2 and there("GPT2BPETokenizer") and _says_no_more(folder):
        return as_settings("GPT2BPETokenizer")
    if there("HuggingFaceTokenizer"):
        return as_settings("HuggingFaceTokenizer")
    any_of = lambda *names: any((folder / name).is_file() for name in names)
    if any_of(_CONFIG, MODEL_CONFIG) and any_of(*VOCABULARIES):  # transformers chooses its class by either
        return schema.TokenizerSettings("HuggingFaceTokenizer", tokenizer_model=str(folder))
    if there("GPTSentencePieceTokenizer"):
        return as_settings("GPTSentencePieceTokenizer")
    return as_settings("GPT2BPETokenizer") if there("GPT2BPETokenizer") else None


def _says_no_more(folder: Path) -> bool:
    """Whether GPT-2's vocab.json and merges.txt are the whole tokenizer: nothing adds tokens, or a token to prompts."""
    config, whole = ({}, {})
    if (folder / _CONFIG).is_file():
        config = read_json(folder / _CONFIG)
    if (folder / "tokenizer.json").is_file():
        whole = read_json(folder / "tokenizer.json")
    added = {token.get("content") for token in whole.get("added_tokens") or ()}
    added |= {token.get("content") for token in (config.get("added_tokens_decoder") or {}).values()}
    added |= {content_of(config.get(name)) for name in NAMED}
    changes = any(config.get(name) for name in ("add_bos_token", "add_eos_token", "add_prefix_space"))
    return added <= {END_OF_TEXT, None} and not changes and not (folder / "added_tokens.json").is_file()


READ = ("fp8", "mxfp4", "compressed-tensors")  # formats of quantized weights, by their words in config.json


def refuse_other_formats(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for weights in a format that is not read, by config.json."""
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method not in (None, *READ):
        raise CheckpointError(
            f"{folder} holds weights quantized with {method} (quantization_config in config.json), which are not read",
            do="import the model that they were made from",
        )


def without_tokenizer(folder: Path) -> str:
    """A notice on a folder without a tokenizer, or with a part of one."""
    if not (folder / _CONFIG).is_file():
        return f"{folder} holds no tokenizer: commands that read text need --tokenizer-model, or --vocab-file"
    names = "tokenizer.json, tokenizer.model or vocab.json"
    return f"{folder} holds no tokenizer: {_CONFIG} is there without {names}; an incomplete download? {WHOLE}"


def import_generation_config(source: Path, folder: Path, config: dict[str, Any], vocab_size: int) -> list[str]:
    """Write a model's generation_config.json beside its checkpoint; returns notices for the user.

    Without one, transformers reads config.json. Raises CheckpointError for a damaged one.
    """
    if not (source / GENERATION).is_file():
        write_generation_config(folder, config, folder)
        return []
    try:
        found = generation_config.read(source)
    except DataError as error:
        raise CheckpointError(error.what, error.why, error.do) from None
    shutil.copyfile(source / GENERATION, folder / GENERATION)
    beyond = [end for end in found.ends or () if not 0 <= end < vocab_size]
    why = f"the model has {vocab_size:,}: it ends no text"
    notices = [f"{source / GENERATION}: eos_token_id {end} is no token, {why}" for end in beyond]
    return notices + generation_config.unknown_notices(source / GENERATION, found.unknown)


def _copy_others(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer of transformers that are not in `folder` yet."""
    names = {name for files in TOKENIZER_FILES.values() for name in files.values()}
    for name in sorted({*names, *_COMPANIONS}):
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)
        elif (source / name).is_dir():
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)


def write_generation_config(
    folder: Path, config: dict[str, Any], checkpoint: Path, end_of_turn: Optional[int] = None
) -> None:
    """Write generation_config.json: the one of the checkpoint, as `generate` finds it, with the ids of config.json that it
    lacks.

    end_of_turn: a further token that ends a text: that of an answer in a conversation
    """
    ids = {
        name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    }
    ends = ids["eos_token_id"]
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if end_of_turn is not None and end_of_turn not in ends:
        ids["eos_token_id"] = [end_of_turn, *ends]
    own = next(filter(None, (generation_config.file_in(place) for place in (checkpoint, checkpoint.parent))), None)
    ids = {name: id for name, id in ids.items() if id is not None}
    content = read_json(own) if own else dict(_from_model_config=True)
    (folder / GENERATION).write_text(json.dumps(ids | content, indent=2))
