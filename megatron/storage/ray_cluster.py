# SPDX-License-Identifier: Apache-2.0
"""A cluster of Ray: that of RAY_ADDRESS, or one that is started on this machine (`pip install '.[scale]'`)."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Optional

from megatron.errors import MissingPackage, SettingsError


def import_ray(flag: str, module: str = "ray"):
    """A module of ray, without its reports of usage. Raises SettingsError, about `flag`, where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackage(f"{flag} needs the package ray", str(error), "pip install '.[scale]'") from None


def connect(ray, cores: Optional[int] = None) -> None:
    """Connect to the cluster of RAY_ADDRESS, or start one here with so many cores. Its workers get this process's import
    path.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(dict.fromkeys([root, *(path for path in sys.path if path)]))
    common = dict(log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": {"PYTHONPATH": paths}})
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        ray.init(num_cpus=cores, include_dashboard=False, object_store_memory=100 << 20, **common)
        return
    try:
        ray.init(address=address, **common)
    except ConnectionError as error:
        do = "check RAY_ADDRESS, and that RAY_AUTH_MODE is the same here and where `ray start` ran"
        raise SettingsError(f"no Ray cluster at {address}", str(error).splitlines()[0], do) from None
