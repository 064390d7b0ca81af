# SPDX-License-Identifier: Apache-2.0
"""Serve a trained model over HTTP: OpenAI's and Megatron-LM's interfaces, and a page.

    python -m megatron.tools.serve --load runs/quickstart/checkpoints
    python -m megatron.tools.serve --load runs/base runs/tuned --port 8000          # two models, also side by side
    python -m megatron.tools.serve --load runs/345M --replicas 4                    # four processes behind one address
    python -m megatron.tools.serve --follow runs/345M                               # newer checkpoints as they come
    python -m megatron.tools.launch --nproc-per-node 4 -m megatron.tools.serve --load runs/13B \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

It listens on this machine alone, unless --host says otherwise. docs/serving.md explains it.
"""

import importlib.util
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional

from megatron.errors import DataError, Failure, SettingsError, UsageError, run_main
from megatron.guard.job import on_ranks
from megatron.guard.processes import die_with_parent
from megatron.serving.answers import ServeLimits
from megatron.serving.weights import Weights, follow, names_of
from megatron.settings import rank_env
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import Parallel, TokenizerSettings, setting
from megatron.settings.statements import Statement, failing_in_users_words, given_values, words_of

PACKAGES = ("aiohttp", "jinja2", "prometheus_client", "pydantic", "starlette", "uvicorn")


@dataclass(frozen=True)
class ServeOptions:
    """The models, and where the server listens."""

    load: Optional[list[str]] = setting("folders of checkpoints, or checkpoints: each is a model", None)
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
    replica_of: Optional[int] = setting("process with which this replica ends (set by --replicas)", None)
    access_log: bool = setting("a line for each request on standard error", True)
    cache_gigabytes: Optional[float] = setting(
        "memory for keys and values, on each rank (default: enough for --max-batch texts of the greatest length)", None
    )
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting(
        "default: as trained", None, "--bf16=bf16", "--fp16=fp16"
    )
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp")
    pipeline_model_parallel_size: int = setting("ranks that share the layers", 1, "--pp")
    distributed_timeout_minutes: float = setting("a silent rank is given up after this long", 10.0)

    @property
    def folders(self) -> list[str]:
        return [*(self.load or ()), *([self.follow] if self.follow and self.follow not in (self.load or ()) else ())]


COMMON = tuple(
    """
    load follow served_model_name host port api_key_file chat_template max_batch max_queue max_answer_tokens device
    tensor_model_parallel_size pipeline_model_parallel_size
    """.split()
)


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    rank_env.adopt_launcher()
    groups, given = parse_with_record(
        argv,
        dict(serve=ServeOptions, limits=ServeLimits, tokenizer=TokenizerSettings),
        prog="python -m megatron.tools.serve",
        description="Serve a trained model over HTTP.",
        common=COMMON,
    )
    settings, limits = groups["serve"], groups["limits"]
    with failing_in_users_words(given):
        check(settings, limits, given)
        if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
            raise Failure(f"the server needs {', '.join(missing)}", do="pip install '.[serve]'")
        if settings.replica_of is not None:
            die_with_parent()
        keys = read_keys(settings.api_key_file)
        listener = listen(settings) if rank_env.ranks().rank == 0 else None
        if settings.replicas not in (None, ["1"]):
            serve_replicas(settings, limits, argv, listener)
            return
        tp, pp = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
        parallel = Parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            distributed_timeout_minutes=settings.distributed_timeout_minutes,
        )
        tokenizer = given_values(TokenizerSettings, given)
        on_ranks(parallel, settings.device, partial(work, settings, limits, keys, tokenizer, listener))


def check(settings: ServeOptions, limits: ServeLimits, given: Mapping[str, Statement]) -> None:
    """Raise UsageError or SettingsError for settings that cannot work, before torch is loaded."""
    folders = settings.folders
    check_replicas(settings)
    if not folders and not addresses_of(settings):
        raise UsageError("which model?", do="--load FOLDER, or --follow FOLDER to take newer checkpoints, too")
    names = settings.served_model_name or []
    if names and len(names) != len(folders):
        raise UsageError(f"--served-model-name has {len(names)} names for {len(folders)} models")
    if len(set(names)) != len(names) or len(set(folders)) != len(folders):
        raise UsageError("two models have the same name or folder")
    world = rank_env.ranks().world_size
    positive = ("max_batch", "max_answer_tokens", "max_body_bytes", "body_timeout", "request_timeout")
    for name, value, least in [
        *((name, getattr(limits, name), 1 if isinstance(getattr(limits, name), int) else 0.001) for name in positive),
        ("max_queue", limits.max_queue, 0),
        ("stop_timeout", limits.stop_timeout, 0),
        ("tensor_model_parallel_size", settings.tensor_model_parallel_size, 1),
        ("pipeline_model_parallel_size", settings.pipeline_model_parallel_size, 1),
        ("cache_gigabytes", 1.0 if settings.cache_gigabytes is None else settings.cache_gigabytes, 1e-6),
        # without work the first rank tells the others every minute to go on waiting
        ("distributed_timeout_minutes", settings.distributed_timeout_minutes, 2 if world > 1 else 1e-6),
    ]:
        if not least <= value < float("inf"):
            raise SettingsError(f"{words_of(given, name, value)}: has to be at least {least:g}")
    tp, pp = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    if tp * pp != world:
        raise SettingsError(
            f"the model is shared by tensor {tp} x pipeline {pp} = {tp * pp} ranks, and this job has {world}",
            do=f"{rank_env.launch_command(tp * pp)}, or give --tensor-model-parallel-size and "
            "--pipeline-model-parallel-size whose product is the number of ranks",
        )
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
            "--replicas with addresses, and a model: those servers have their own", do="leave out --load and --follow"
        )
    if settings.replicas == ["0"]:
        raise SettingsError("--replicas 0: has to be at least 1")
    if settings.replicas not in (None, ["1"]) and rank_env.ranks().world_size > 1:
        raise SettingsError(
            f"--replicas in a job of {rank_env.ranks().world_size} ranks",
            do="start each group of ranks as a server of its own, and a front of them: --replicas http://HOST:PORT ...",
        )


def serve_replicas(settings: ServeOptions, limits: ServeLimits, argv: list[str], listener) -> None:
    """Serve by several processes behind one address."""
    from megatron.serving.front import Front, front_app
    from megatron.serving.replicas import Child, Replica, Replicas
    from megatron.serving.server import is_local, web_server

    addresses = addresses_of(settings)
    if addresses:
        replicas = [Replica(address.partition("://")[2], address) for address in addresses]
    else:
        count, gpus = int(settings.replicas[0]), len(list(Path("/dev").glob("nvidia[0-9]*")))
        more = ["--replicas", "1", "--host", "127.0.0.1", "--port", "0", "--replica-of", str(os.getpid())]
        if settings.device == "auto" and gpus:  # one without a GPU must not fall back to the CPU
            more += ["--device", "cuda"]
        command = [sys.executable, "-m", "megatron.tools.serve", *argv, "--then", *more]
        replicas = [Child(command, str(number), environment_of(number, count)) for number in range(count)]
    log_to_stderr(access=True)
    announce(f"{len(replicas)} replicas", listener)
    web_server(front_app(Front(Replicas(replicas), limits), is_local(listener)), limits).run(sockets=[listener])


def environment_of(number: int, count: int) -> dict[str, str]:
    """A GPU for each replica, and its share of the cores."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = visible.split(",")[number : number + 1] if visible else [str(number)]
    share = str(max(1, (os.cpu_count() or 1) // count))
    return dict(CUDA_VISIBLE_DEVICES=",".join(own), OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", share))


def announce(what: str, listener) -> None:
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"serving {what}: {address}/v1, page {address}/  (Ctrl-C ends it)", flush=True)


def read_keys(path: Optional[str]) -> list[str]:
    """The keys of a file. Raises DataError if there are none: the server would be open."""
    if path is None:
        return []
    try:
        keys = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--api-key-file {path}: cannot be read", str(error)) from None
    if not keys:
        raise DataError(f"--api-key-file {path}: has no key", do="write one into it, or leave the flag out")
    return keys


def listen(settings: ServeOptions):
    from megatron.telemetry.web import listen

    return listen(settings.host, settings.port)


def work(
    settings: ServeOptions, limits: ServeLimits, keys: list[str], tokenizer: Mapping[str, Any], listener, context
) -> None:
    """Load the models on the ranks of a job (`mpu.initialize.RankContext`). The first serves, and the others follow it."""
    from megatron.inference.load import open_tokenizer

    whole = [weights_of(settings, limits, folder, context) for folder in settings.folders]
    if not context.is_rank_zero:
        for number in (signal.SIGTERM, signal.SIGINT):  # the first rank ends them, after the last answer
            signal.signal(number, signal.SIG_IGN)
        whole[0].take_part()
        return
    for weights in whole:
        for note in weights.loaded.notices:
            print(f"note: {note}", file=sys.stderr)
    tokenizers = [open_tokenizer(weights.loaded, tokenizer) for weights in whole]
    run(settings, limits, keys, whole, tokenizers, listener)
    whole[0].end()


def weights_of(settings: ServeOptions, limits: ServeLimits, folder: str, context) -> Weights:
    """The weights of a model, with the ways to load others and to make an engine. Raises SettingsError if it is no GPT."""
    from megatron.inference.engine import Engine
    from megatron.inference.load import load_model

    mesh, memory = context.mesh, settings.cache_gigabytes
    load = partial(load_model, device=context.device, precision=settings.precision, mesh=mesh)
    loaded = load(folder, step=settings.ckpt_step if folder in (settings.load or ()) else None)
    loaded.check_words()
    if not loaded.continues_texts:
        raise SettingsError(
            f"{folder} holds a model of type {loaded.config.model.model_type}, which does not continue texts",
            do="encoder-decoders answer in python -m megatron.tools.generate",
        )
    size = None if memory is None else int(memory * 1e9)

    def engine_of(loaded):
        return Engine(loaded.model, longest=loaded.longest, max_batch=limits.max_batch, memory=size)

    return Weights(load, engine_of, loaded, mesh.world if mesh.world_size > 1 else None)


def run(
    settings: ServeOptions, limits: ServeLimits, keys: list[str], whole: list[Weights], tokenizers: list, listener
) -> None:
    """Serve the models until the server is told to stop."""
    from megatron.serving.chat_template import find_template
    from megatron.serving.engine_thread import EngineThread
    from megatron.serving.metrics import ServeMetrics
    from megatron.serving.served_model import ServedModel
    from megatron.serving.server import Service, serve

    metrics, models, background = ServeMetrics(), {}, []
    names = settings.served_model_name or names_of(settings.folders)
    for name, folder, weights, tokenizer in zip(names, settings.folders, whole, tokenizers):
        meter = metrics.of(name)
        meter.iteration(weights.loaded.iteration)
        thread = EngineThread(weights.engine(), room=limits.room, version=weights.version, meter=meter)
        template = find_template(folders_of(folder, weights, tokenizer), tokenizer, settings.chat_template)
        models[name] = ServedModel(name, tokenizer, weights.loaded.longest, thread, template)
        if folder == settings.follow:
            background.append(follow(folder, models[name], weights))
    log_to_stderr(settings.access_log)
    announce(", ".join(models), listener)
    serve(Service(models, metrics, limits, keys, background), listener)


def folders_of(folder: str, weights: Weights, tokenizer) -> list[Path]:
    """Where a chat template may be: beside the tokenizer, and in the model's folder."""
    own = weights.loaded.config.tokenizer
    files = [Path(name) for name in (own.tokenizer_model, own.vocab_file) if name]
    places = [place if place.is_dir() else place.parent for place in files]
    return [*places, Path(folder), Path(str(weights.loaded.path))]


def log_to_stderr(access: bool) -> None:
    log = logging.getLogger("megatron.serving")
    log.setLevel(logging.INFO if access else logging.WARNING)
    log.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log.handlers = [handler]


if __name__ == "__main__":
    run_main(main)
