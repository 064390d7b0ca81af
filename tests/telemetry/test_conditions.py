# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/proof/conditions.md: its tests exist and check its events, and no kind is missing."""

import ast
import re

from megatron.telemetry.events import KINDS


def conditions(root):
    """(condition, kinds of events, file of the test, its name) of each row."""
    text = (root / "docs" / "proof" / "conditions.md").read_text(encoding="utf-8")
    found = []
    for file, table in re.findall(r"^## `([\w/]+\.py)`$(.*?)(?=^## |\Z)", text, re.S | re.M):
        rows = re.findall(r"^\| (.+) \| (.+) \| .* \| `(\w+)` \|$", table, re.M)
        found += [(what, re.findall(r"`(\w+)`", kinds), file, test) for what, kinds, test in rows]
    return found


def functions(path):
    """name -> source of each function of a module"""
    text = path.read_text(encoding="utf-8")
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) for node in nodes}


def test_every_condition_has_a_test_of_its_event(root):
    rows = conditions(root)
    assert len(rows) >= 25 + 1 and len({row[0] for row in rows}) == len(rows)
    sources = {file: functions(root / file) for file in {row[2] for row in rows}}
    for what, kinds, file, test in rows:
        assert test in sources[file], (what, file, test)
        assert kinds and {*kinds} <= KINDS.keys(), (what, kinds)
        text = sources[file][test]
        text += "".join(body for name, body in sources[file].items() if f"{name}(" in text)  # its helpers
        unnamed = [kind for kind in kinds if not re.search(rf"\b{kind}\b", text)]
        assert not unnamed, f"{file}::{test} checks no event {unnamed}"


def test_every_kind_of_event_has_a_condition(root):
    assert {kind for _, kinds, _, _ in conditions(root) for kind in kinds} == KINDS.keys()
