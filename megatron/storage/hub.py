# SPDX-License-Identifier: Apache-2.0
"""Names on the Hugging Face hub: `hf://` downloads their files into the hub's cache, by the package huggingface_hub.

    fetched("hf://Qwen/Qwen3-0.6B", MODEL_FILES)           a model
    fetched("hf://Qwen/Qwen3-0.6B@refs/pr/1", ...)         of another revision: a branch, a tag or a commit
    fetched("hf://datasets/ORG/NAME/data/train-*", ...)    some files of a dataset: a path in it, or a glob

Nothing is downloaded for a name without `hf://`. Files that are in the cache are not downloaded again, and are found
without a network.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.errors import DataError, MissingPackage, StorageError, UsageError

SCHEME = "hf://"
MODEL_FILES = (  # of a model, without pickled weights and other libraries' formats
    "config.json generation_config.json adapter_config.json model*.safetensors adapter_model.safetensors "
    "model.safetensors.index.json tokenizer* *.model vocab.* merges.txt special_tokens_map.json added_tokens.json "
    "chat_template* additional_chat_templates/* README.md LICENSE*"
).split()
TOKENIZER_FILES = [one for one in MODEL_FILES if "safetensors" not in one and one != "adapter_config.json"]
_PACKED = ("", ".gz", ".zst", ".xz", ".bz2")
DATA_FILES = [f"*{ending}{packed}" for ending in (".jsonl", ".json", ".txt") for packed in _PACKED]
DATA_FILES += ["*.parquet", "*.arrow", "*.tar", "*.tar.gz", "*.tgz"]
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_GLOB = re.compile(r"[*?\[]")


class HubName(NamedTuple):
    """What an `hf://` name means. revision: None for the newest. path: of a file, folder or glob inside; "" for all"""

    kind: str  # model or dataset
    name: str  # ORG/NAME
    revision: str | None
    path: str

    @property
    def page(self) -> str:
        """The address of its page."""
        return f"https://huggingface.co/{'datasets/' if self.kind == 'dataset' else ''}{self.name}"


def is_hub(text: str | os.PathLike) -> bool:
    """Whether a text asks for a download: `hf://...`."""
    return str(text).lower().startswith(SCHEME)


def parse(text: str) -> HubName:
    """The parts of a name. Raises UsageError for another form.

    >>> parse("hf://datasets/allenai/c4@main/en/*.json.gz")
    HubName(kind='dataset', name='allenai/c4', revision='main', path='en/*.json.gz')
    >>> parse("hf://Qwen/Qwen3-0.6B@refs/pr/1").revision
    'refs/pr/1'
    """
    rest = str(text)[len(SCHEME) :].strip("/")
    kind = "dataset" if rest.startswith("datasets/") else "model"
    rest = rest.removeprefix("datasets/").removeprefix("models/")
    found = re.fullmatch(rf"({_NAME.pattern})(?:@((?:refs/[^/]+/)?[^/]+))?(?:/(.*))?", rest)
    if not found:
        raise UsageError(
            f"{text}: no name of the Hugging Face hub",
            do="hf://ORG/NAME, hf://ORG/NAME@REVISION, hf://datasets/ORG/NAME or hf://datasets/ORG/NAME/PATH",
        )
    return HubName(kind, found[1], found[2], found[3] or "")


def fetched(text: str, patterns: Sequence[str]) -> Path:
    """Download the files of a name that a pattern matches (fnmatch), and return the folder, or the path or glob in it.

    Raises UsageError for another form of name, StorageError where the hub cannot be reached, DataError for a name or
    files that it does not have or does not give.
    """
    named = parse(text)
    inside = [named.path, f"{named.path}/*"] if named.path else list(patterns)
    folder = _download(named, inside)
    place = folder / named.path if named.path else folder
    if _GLOB.search(named.path):
        there = next(folder.glob(named.path), None)
    else:
        there = place.exists() and (place.is_file() or next(place.iterdir(), None))
    if not there:
        what = named.path if named.path else ", ".join(patterns[:8]) + " ..." * (len(patterns) > 8)
        raise DataError(f"{text}: no such files there", f"looked for {what}", f"{named.page}/tree/main lists the files")
    return place


def _download(named: HubName, patterns: list[str]) -> Path:
    text = f"{SCHEME}{'datasets/' if named.kind == 'dataset' else ''}{named.name}"
    try:
        import huggingface_hub
        from huggingface_hub import errors, utils
    except ImportError:
        raise MissingPackage(
            f"{text} needs the package huggingface_hub, which is not installed",
            do=f"pip install huggingface_hub (it comes with transformers); or git clone {named.page}, and give that folder",
        ) from None
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    print(f"{text}: getting its files; what the cache holds is not downloaded again", file=sys.stderr)
    try:
        folder = huggingface_hub.snapshot_download(
            named.name, repo_type=named.kind, revision=named.revision, allow_patterns=patterns
        )
    except errors.GatedRepoError:
        raise DataError(
            f"{text} is gated: its owners give it to those who accept their terms",
            do=f"accept them at {named.page}, then `hf auth login`, or HF_TOKEN=... in the environment",
        ) from None
    except errors.RepositoryNotFoundError:
        other = "models: hf://ORG/NAME" if named.kind == "dataset" else "data: hf://datasets/ORG/NAME"
        raise DataError(
            f"{text}: the hub has no such {named.kind}, or it is private",
            do=f"check the name ({other}); for a private one `hf auth login`, or HF_TOKEN=... in the environment",
        ) from None
    except errors.RevisionNotFoundError:
        raise DataError(f"{text} has no revision {named.revision}", do=f"{named.page}/tree/main lists them") from None
    except errors.HFValidationError as error:
        raise UsageError(f"{text}: {' '.join(str(error).split())}") from None
    except Exception as error:
        if not _of_network(error, errors):
            raise
        kind = " --repo-type dataset" if named.kind == "dataset" else ""
        raise StorageError(
            f"{text} is not in the cache of the hub, and the hub cannot be reached",
            "HF_HUB_OFFLINE is set"
            if huggingface_hub.is_offline_mode()
            else str(error.__cause__ or error).split("\n")[0],
            f"where there is a network: hf download {named.name}{kind} --local-dir DIR; then copy DIR here, and give it",
        ) from None
    return Path(folder)


def _of_network(error: Exception, errors) -> bool:
    """Whether an error of a download is the hub's or its connection's, and not the disk's. errors: huggingface_hub's"""
    if isinstance(error, (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, ConnectionError)):
        return True
    return any(kind.__module__.partition(".")[0] in ("httpx", "httpx2", "requests") for kind in type(error).__mro__)


def stay_offline() -> None:
    """Let transformers use local files only, unless the environment says HF_HUB_OFFLINE=0."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Which reads the environment once, perhaps for a download before
    read = sys.modules.get("huggingface_hub.constants")
    if read and os.environ["HF_HUB_OFFLINE"] == "1":
        read.HF_HUB_OFFLINE = True


DOWNLOAD = "hf://{0} downloads it (or hf download {0} --local-dir DIR)"


def hint(text: str | os.PathLike, download: str = DOWNLOAD) -> str | None:
    """What to do about a folder that is not there, if it looks like a name on the hub. download: the words, with {}

    >>> hint("meta-llama/Llama-3.2-1B", "from-hf hf://{} OUT")
    'a name on the Hugging Face hub? from-hf hf://meta-llama/Llama-3.2-1B OUT'
    >>> hint("runs/large/checkpoints") is None
    True
    """
    text = str(text)
    if not _NAME.fullmatch(text) or os.path.isdir(text.partition("/")[0]):  # runs/large: a folder that was mistyped
        return None
    return f"a name on the Hugging Face hub? {download.format(text)}"
