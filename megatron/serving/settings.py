# SPDX-License-Identifier: Apache-2.0
"""The settings of the server, and what they have to be."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple, Optional

from megatron.convert.given_model import SAME_BITS
from megatron.errors import DataError, SettingsError, UsageError
from megatron.inference.expert_ranks import expert_parallel
from megatron.model.quantization import QuantizeOptions
from megatron.settings import rank_env
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import TokenizerSettings, setting
from megatron.settings.statements import Statement, words_of


@dataclass(frozen=True)
class ServeOptions:
    """The models, and where the server listens."""

    load: Optional[list[str]] = setting("folders of checkpoints, or checkpoints: each is a model", None, "--model")
    load_exported: Optional[list[str]] = setting(
        "folders that tools.export wrote, or models' folders of Hugging Face: each is a model", None
    )
    follow: Optional[str] = setting(
        "folder of checkpoints whose newest one is served, also when there is a newer one", None
    )
    served_model_name: Optional[list[str]] = setting(
        "names of the models for clients (default: of their folders)", None
    )
    host: str = setting(
        "address to listen on; 0.0.0.0: all networks of the machine. Without --api-key-file whoever reaches the address "
        "can use the models",
        "127.0.0.1",
    )
    port: int = setting("port to listen on; 0: a free one", 8000)
    api_key_file: Optional[str] = setting("file with keys, one a line: clients have to send one of them", None)
    chat_template: Optional[str] = setting(
        "Jinja file that writes conversations as prompts (default: the tokenizer's)", None
    )
    replicas: Optional[list[str]] = setting(
        "a number: so many processes serve the models, started again when they end; addresses: those servers do", None
    )
    ray: bool = setting("--replicas on a cluster of Ray: that of RAY_ADDRESS, or one that is started here", False)
    replica_of: Optional[int] = setting("process with which this replica ends (set by --replicas)", None)
    access_log: bool = setting("a line for each request on standard error, but healthy answers of /health", True)
    max_model_len: Optional[int] = setting(
        "longest text, in tokens of prompt and answer (default: the model's context); a shorter one needs less cache",
        None,
        "--inference-max-seq-length",
    )
    cache_gigabytes: Optional[float] = setting(
        "memory for keys and values, on each rank (default: enough for --max-batch texts of the greatest length)", None
    )
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting(
        "default: as trained", None, "--bf16=bf16", "--fp16=fp16", "--dtype"
    )
    batch_invariant_mode: bool = setting(SAME_BITS, False)
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp", "--tensor-parallel-size")
    expert_model_parallel_size: int = setting(
        "of these, ranks that hold different experts; the others divide each expert", 1, "--ep"
    )
    pipeline_model_parallel_size: int = setting("ranks that share the layers", 1, "--pp", "--pipeline-parallel-size")
    distributed_timeout_minutes: float = setting("a silent rank is given up after this long", 10.0)

    @property
    def folders(self) -> list[str]:
        named = [*(self.load or ()), *(self.load_exported or ())]
        return [*named, *([self.follow] if self.follow and self.follow not in named else ())]


@dataclass(frozen=True)
class ServeLimits:
    """What a server takes at most."""

    max_batch: int = setting("texts that are generated at a time", 16, "--max-num-seqs", "--inference-max-requests")
    max_queue: int = setting("texts that wait; further requests get status 429", 64)
    max_answer_tokens: int = setting("longest answer, in tokens, that a request may ask for", 4096)
    max_body_bytes: int = setting("longest body of a request", 1 << 20)
    body_timeout: float = setting("seconds for a client to send its request", 20.0)
    request_timeout: float = setting("seconds until an answer is given up", 600.0)
    stop_timeout: float = setting("seconds for running answers to end when the server is told to stop", 30.0)

    @property
    def room(self) -> int:
        """Texts that run and wait."""
        return self.max_batch + self.max_queue


def check(settings: ServeOptions, limits: ServeLimits, given: Mapping[str, Statement]) -> None:
    """Raise UsageError or SettingsError for settings that cannot work, before torch is loaded."""
    folders = settings.folders
    check_replicas(settings)
    if not folders and not addresses_of(settings):
        more = (
            "--load-exported FOLDER of tools.export or Hugging Face, or --follow FOLDER to take newer checkpoints, too"
        )
        raise UsageError("which model?", do=f"--load FOLDER, {more}")
    if settings.follow in (settings.load_exported or ()):
        raise UsageError(f"--follow {settings.follow}: an export has no newer checkpoints", do="leave out --follow")
    if settings.ckpt_step is not None and not settings.load:
        step = words_of(given, "ckpt_step", settings.ckpt_step)
        raise UsageError(f"{step}: there is no --load whose checkpoint it could choose", do="leave it out")
    names = settings.served_model_name or []
    if names and len(names) != len(folders):
        raise UsageError(f"--served-model-name has {len(names)} names for {len(folders)} models")
    if twice := {str(one) for given_ones in (names, folders) for one in given_ones if list(given_ones).count(one) > 1}:
        raise UsageError(f"two models have the same name or folder: {', '.join(sorted(twice))}", do="give each once")
    world = rank_env.ranks().world_size
    positive = ("max_batch", "max_answer_tokens", "max_body_bytes", "body_timeout", "request_timeout")
    for name, value, least in [
        *((name, getattr(limits, name), 1 if isinstance(getattr(limits, name), int) else 0.001) for name in positive),
        ("max_queue", limits.max_queue, 0),
        ("stop_timeout", limits.stop_timeout, 0),
        ("tensor_model_parallel_size", settings.tensor_model_parallel_size, 1),
        ("pipeline_model_parallel_size", settings.pipeline_model_parallel_size, 1),
        ("max_model_len", 2 if settings.max_model_len is None else settings.max_model_len, 2),
        ("cache_gigabytes", 1.0 if settings.cache_gigabytes is None else settings.cache_gigabytes, 1e-6),
        # without work the first rank tells the others every minute to go on waiting
        ("distributed_timeout_minutes", settings.distributed_timeout_minutes, 2 if world > 1 else 1e-6),
    ]:
        if not least <= value < float("inf"):
            raise SettingsError(f"{words_of(given, name, value)}: has to be at least {least:g}")
    tp, pp = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    expert_parallel(tp, settings.expert_model_parallel_size)
    rank_env.refuse_other_ranks(tp, pp)
    if world > 1 and len(folders) > 1:
        raise SettingsError(
            f"{world} ranks serve one model, and {len(folders)} are given", do="start a server for each"
        )


def addresses_of(settings: ServeOptions) -> list[str]:
    """The servers that --replicas names; [] if it is a number."""
    words = settings.replicas or []
    return [] if len(words) == 1 and words[0].isdecimal() else [word.rstrip("/") for word in words]


def check_replicas(settings: ServeOptions) -> None:
    """Raise UsageError or SettingsError for replicas that cannot work."""
    addresses = addresses_of(settings)
    if wrong := next((one for one in addresses if not re.fullmatch(r"https?://[^/\s]+", one)), None):
        raise UsageError(
            f"--replicas {wrong}: neither a number nor an address", do="--replicas 2, or http://HOST:PORT ..."
        )
    if addresses and settings.folders:
        raise UsageError(
            "--replicas with addresses, and a model: those servers have their own",
            do="leave out --load, --load-exported and --follow",
        )
    if settings.ray and not (settings.replicas and settings.replicas[0].isdecimal()):
        raise UsageError("--ray needs the number of replicas", do="--replicas 4 --ray")
    if settings.replicas == ["0"]:
        raise SettingsError("--replicas 0: has to be at least 1")
    if settings.replicas not in (None, ["1"]) and rank_env.ranks().world_size > 1:
        raise SettingsError(
            f"--replicas in a job of {rank_env.ranks().world_size} ranks",
            do="start each group of ranks as a server of its own, and a front of them: --replicas http://HOST:PORT ...",
        )


def read_keys(path: Optional[str]) -> list[str]:
    """The keys of a file. Raises DataError if there are none: the server would be open."""
    if path is None:
        return []
    try:
        keys = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--api-key-file {path}: cannot be read", getattr(error, "strerror", None) or str(error)
        ) from None
    if not keys:
        raise DataError(f"--api-key-file {path}: has no key", do="write one into it, or leave the flag out")
    return keys


COMMON = tuple(
    """
    load load_exported follow quantize served_model_name host port api_key_file chat_template max_batch max_queue
    max_answer_tokens device tensor_model_parallel_size pipeline_model_parallel_size
    """.split()
)


class ServeSettings(NamedTuple):
    """The settings of a command line, and who gave them."""

    serve: ServeOptions
    limits: ServeLimits
    quantize: QuantizeOptions
    given: Mapping[str, Statement]


def parsed(argv: list[str]) -> ServeSettings:
    """The settings of a command line. Folders before its first flag are those of --load."""
    folders = list(takewhile(lambda word: not word.startswith("-"), argv))
    if folders and any(word.partition("=")[0] in ("--load", "--model") for word in argv):
        raise UsageError(f"{folders[0]} and --load: both name models", do="give all of them to --load")
    argv = [*(["--load", *folders] if folders else []), *argv[len(folders) :]]
    groups, given = parse_with_record(
        argv,
        dict(serve=ServeOptions, limits=ServeLimits, quantize=QuantizeOptions, tokenizer=TokenizerSettings),
        prog="python -m megatron.tools.serve",
        description="Serve a trained model over HTTP.",
        common=COMMON,
    )
    return ServeSettings(groups["serve"], groups["limits"], groups["quantize"], given)


def log_to_stderr(access: bool) -> None:
    log = logging.getLogger("megatron.serving")
    log.setLevel(logging.INFO if access else logging.WARNING)
    log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.handlers = [handler]
