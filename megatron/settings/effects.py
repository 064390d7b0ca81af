# SPDX-License-Identifier: Apache-2.0
"""Given settings without effect, each logged once at the start: harmless, and a sign that another one was forgotten.

A setting has an effect if its condition holds (`setting(needs=...)`), or if it has none.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Optional

from megatron.settings.declare import Needs, declared
from megatron.settings.statements import Statement


def without_effect(s: SimpleNamespace, table: Mapping[str, Needs]) -> dict[str, str]:
    """Name -> message, for each given setting that has no effect. s: `rules.record`"""
    return {
        name: f"{said.words} has no effect without {needs.words}"
        for name in s.settings.statements
        if (needs := table.get(name)) and (said := s.settings.given(name)) and said.is_request and not needs.met(s)
    }


def idle_flags(
    group: object, said: Mapping[str, Statement], table: Optional[Mapping[str, Needs]] = None, **more
) -> list[str]:
    """`without_effect` for a tool's group of settings.

    said: setting -> `Statement`; table: conditions in the place of those of the group; more: other inputs of conditions
    """
    record = SimpleNamespace(statements=said, given=said.get)
    table = declared("needs", group) if table is None else table
    own = {name: needs for name, needs in table.items() if hasattr(group, name)}
    return list(without_effect(SimpleNamespace(settings=record, **vars(group), **more), own).values())
