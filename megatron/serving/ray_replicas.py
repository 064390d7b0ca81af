# SPDX-License-Identifier: Apache-2.0
"""Replicas on a cluster of Ray, by Ray Serve (`pip install '.[serve,scale]'`).

Ray Serve places them, checks their health, starts lost ones again, and divides the requests. Its proxy is one replica for
the front, which asks again if an answer is lost. RAY_ADDRESS is the address of a cluster; without it Ray is started here.
All nodes need this package and the files of the models under the same paths.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

from megatron.errors import Failure, SettingsError
from megatron.serving.replicas import Replica
from megatron.serving.settings import ServeLimits
from megatron.storage.ray_cluster import connect, import_ray

NAME = "megatron"  # of the application


@contextlib.contextmanager
def on_ray(build: Callable[[], Any], count: int, limits: ServeLimits) -> Iterator[Replica]:
    """Start replicas, and end them at the end. build: makes the application, in the process of a replica."""

    def application():  # Ray takes anything but a function for the application itself
        return build()

    ray, serve = _import()
    connect(ray)
    try:
        if serve.status().applications:
            raise SettingsError("Ray Serve on this cluster has other applications", do="take another cluster")
        port = _free_port()
        serve.start(http_options=dict(host="127.0.0.1", port=port, request_timeout_s=limits.request_timeout + 10))
        options = dict(
            num_replicas=count,
            max_ongoing_requests=2 * limits.room,  # the application refuses them before
            health_check_period_s=1,
            health_check_timeout_s=10,
            graceful_shutdown_timeout_s=limits.stop_timeout,
            ray_actor_options=dict(num_cpus=1, num_gpus=int(ray.cluster_resources().get("GPU", 0) > 0)),
        )
        replica = serve.deployment(**options)(serve.ingress(application)(type("ModelReplica", (), {})))
        try:
            serve.run(replica.bind(), name=NAME, route_prefix="/")
        except RuntimeError as error:
            raise Failure("the replicas do not start", str(error).strip().splitlines()[-1][:500]) from None
        yield Replica("ray", f"http://127.0.0.1:{port}", several=True)
    finally:
        serve.shutdown()
        ray.shutdown()


def _import():
    return import_ray("--ray"), import_ray("--ray", "ray.serve")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
