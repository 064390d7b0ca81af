# SPDX-License-Identifier: Apache-2.0
"""Serve a trained model over HTTP: OpenAI's and Megatron-LM's interfaces, and a page.

    python -m megatron.tools.serve --load runs/quickstart/checkpoints
    python -m megatron.tools.serve --load runs/base runs/tuned --port 8000          # two models, also side by side
    python -m megatron.tools.serve --load-exported models/llama --quantize int8     # a folder of Hugging Face, in 8 bits
    python -m megatron.tools.serve --load runs/345M --replicas 4                    # four processes behind one address
    python -m megatron.tools.serve --follow runs/345M                               # newer checkpoints as they come
    python -m megatron.tools.launch --nproc-per-node 4 -m megatron.tools.serve --load runs/13B \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2

It listens on this machine alone, unless --host says otherwise. docs/serving.md explains it.
"""

import importlib.util
import os
import sys
from functools import partial
from itertools import chain
from pathlib import Path

from megatron.errors import MissingPackage, run_main
from megatron.guard.job import on_ranks
from megatron.inference.expert_ranks import expert_parallel
from megatron.mpu.cpu_memory import bound_kernel_caches
from megatron.mpu.cpu_threads import cores
from megatron.serving.settings import (
    ServeLimits,
    ServeOptions,
    ServeSettings,
    addresses_of,
    check,
    log_to_stderr,
    parsed,
    read_keys,
)
from megatron.settings import rank_env
from megatron.settings.declare import idle_flags
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.schema import Parallel
from megatron.storage.processes import die_with_parent
from megatron.telemetry.web import listen

PACKAGES = ("aiohttp", "jinja2", "prometheus_client", "pydantic", "starlette", "uvicorn")


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    rank_env.adopt_launcher()
    whole = parsed(argv)
    settings, limits, quantize, given = whole
    with failing_in_users_words(given):
        check(settings, limits, given)
        notes = [] if settings.replica_of else idle_flags(quantize, given)
        rank_env.print_notes(notes)
        if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
            raise MissingPackage(f"the server needs {', '.join(missing)}", do="pip install '.[serve]'")
        if settings.replica_of is not None:
            die_with_parent()
        read_keys(settings.api_key_file)
        listener = listen(settings.host, settings.port) if rank_env.ranks().rank == 0 else None
        log_to_stderr(settings.access_log)
        if settings.ray:
            serve_by_ray(settings, limits, argv, listener)
        elif settings.replicas not in (None, ["1"]):
            serve_by_replicas(settings, limits, argv, listener)
        else:
            parallel = Parallel(
                tensor_model_parallel_size=settings.tensor_model_parallel_size,
                pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
                **expert_parallel(settings.tensor_model_parallel_size, settings.expert_model_parallel_size),
                distributed_timeout_minutes=settings.distributed_timeout_minutes,
                batch_invariant_mode=settings.batch_invariant_mode,
            )
            bound_kernel_caches()
            models = settings.load or (), [settings.follow]
            on_ranks(parallel, settings.device, partial(serve_models, whole, listener), *chain(*models))


def serve_models(settings: ServeSettings, listener, context) -> None:
    """Load the models on the ranks of a job (`mpu.initialize.RankContext`). The first serves, and the others follow it."""
    from megatron.serving.models import load_all, service_of
    from megatron.serving.server import serve

    whole = load_all(settings, context)
    if not context.is_rank_zero:
        whole[0].take_part()
        return
    service = service_of(settings, whole)
    announce(", ".join(service.models), listener)
    serve(service, listener)
    whole[0].end()


def serve_by_replicas(settings: ServeOptions, limits: ServeLimits, argv: list[str], listener) -> None:
    """Serve by processes that are started here, or by the servers that --replicas names, behind one address."""
    from megatron.serving.replicas import Child, Replica

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
    run_front(limits, replicas, f"{len(replicas)} replicas", listener)


def serve_by_ray(settings: ServeOptions, limits: ServeLimits, argv: list[str], listener) -> None:
    """Serve by replicas on a cluster of Ray, behind one address."""
    from megatron.serving.models import application_of
    from megatron.serving.ray_replicas import on_ray

    count = int(settings.replicas[0])
    with on_ray(partial(application_of, argv), count, limits) as replica:
        run_front(limits, [replica], f"{count} replicas on Ray", listener)


def run_front(limits: ServeLimits, replicas: list, what: str, listener) -> None:
    """Serve by replicas until the front is told to stop."""
    from megatron.serving.front import Front, front_app
    from megatron.serving.replicas import Replicas
    from megatron.serving.server import is_local, web_server

    announce(what, listener)
    web_server(front_app(Front(Replicas(replicas), limits), is_local(listener)), limits).run(sockets=[listener])


def environment_of(number: int, count: int) -> dict[str, str]:
    """A GPU for each replica, and its share of the cores."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = visible.split(",")[number : number + 1] if visible else [str(number)]
    share = str(max(1, cores() // count))
    return dict(CUDA_VISIBLE_DEVICES=",".join(own), OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", share))


def announce(what: str, listener) -> None:
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"serving {what}: {address}/v1, page {address}/  (Ctrl-C ends it)", flush=True)


if __name__ == "__main__":
    run_main(main)
