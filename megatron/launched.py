# SPDX-License-Identifier: Apache-2.0
"""Which rank of how many this process is: what torchrun, srun or `scripts/_launch.sh` say in the environment.

>>> ranks(dict(RANK="3", WORLD_SIZE="16"))
Ranks(rank=3, world_size=16, local_rank=0, local_world_size=None)
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from megatron.errors import SettingsError


@dataclass(frozen=True)
class Ranks:
    """A place in a job. Without a launcher: the only rank of a job of its own."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: Optional[int] = None  # ranks of this node, where the launcher says it


def ranks(env: Mapping[str, str] = os.environ) -> Ranks:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE. Raises SettingsError for one that is no number of ranks."""
    given = {}
    for name, least in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        if name in env:
            if not env[name].isdecimal() or int(env[name]) < least:
                what = "number of ranks" if least else "number"
                raise SettingsError(f"{name}={env[name]} in the environment is no {what}",
                                    "torchrun and srun set it for each rank",
                                    f"unset {name} to train in one process")  # fmt: skip
            given[name.lower()] = int(env[name])
    return Ranks(**given)
