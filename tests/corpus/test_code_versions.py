# SPDX-License-Identifier: Apache-2.0
"""A plan knows the code of its stages: a changed module is noticed, wherever among the imports it stands."""

import json
import subprocess
import sys

import pytest

from megatron.corpus import registry
from megatron.telemetry.own_code import own_files

FILTER = """
from megatron.corpus.stage import Verdict
import own_rules
class Mine:
    def __call__(self, document):
        return Verdict(document if own_rules.good(document["text"]) else None, "bad")
def rule(url):
    from own_package.late import reason
    return reason(url)
"""
EVERY_FILTER = """
import importlib, json, sys
found = {}
for name in sys.argv[1:]:
    for loaded in [m for m in sys.modules if m.startswith("megatron.corpus")]:
        del sys.modules[loaded]
    importlib.import_module(name)
    found[name] = [m for m in sys.modules if m.startswith("megatron.corpus") and not hasattr(sys.modules[m], "__path__")]
print(json.dumps(found))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's folder: a filter, what it imports at once and later, and a file that it does not import."""
    folder = tmp_path / "code"
    (folder / "own_package").mkdir(parents=True)
    (folder / "own_filter.py").write_text(FILTER)
    (folder / "own_rules.py").write_text(
        "from own_package import words\ngood = lambda text: text[:1] not in words.BAD\n"
    )
    (folder / "own_package" / "words.py").write_text("BAD = 'x'\n")
    (folder / "own_package" / "late.py").write_text("reason = lambda url: ''\n")
    (folder / "own_package" / "alone.py").write_text("")
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]
    registry.code_version.cache_clear()


@pytest.mark.parametrize("given", ["'own_filter:Mine'", "{url: {rule: 'own_filter:rule'}}"])
def test_a_change_of_what_a_filter_imports_changes_its_tasks(own, small_corpus, tmp_path, given):
    def folders():
        registry.code_version.cache_clear()
        plan = small_corpus.plan(tmp_path / "out", stages=f"stages:\n  - filter: [{given}]\n")
        return plan.phases["00-shards"], plan.phases["01-filter"]

    first = folders()
    for name, changes in [
        ("own_package/alone.py", False),
        ("own_rules.py", True),
        ("own_package/words.py", True),
        ("own_package/late.py", True),
        ("own_filter.py", True),
    ]:
        before = (own / name).read_text()
        (own / name).write_text(f"{before}\n# changed\n")
        shards, filtered = folders()
        assert shards == first[0] and (filtered != first[1]) == changes, name
        (own / name).write_text(before)
        assert folders() == first
    (own / "own_package" / "late.py").write_text("this is no Python\n")
    assert folders() != first, "nobody has to be able to read what is not imported yet"


def test_all_that_a_filter_of_ours_imports_counts(root):
    """Beside what Python itself has loaded after the import of its module alone."""
    modules = sorted({address.partition(":")[0] for address in registry.FILTERS.values()})
    done = subprocess.run(
        [sys.executable, "-c", EVERY_FILTER, *modules], cwd=root, capture_output=True, text=True, check=True
    )
    for module, loaded in json.loads(done.stdout).items():
        counted = own_files(module, inside="megatron.corpus")
        assert {f"{name.replace('.', '/')}.py" for name in loaded} <= set(counted), module
        assert all(path == root / name for name, path in counted.items())
    assert "megatron/corpus/filters/words.py" in own_files("megatron.corpus.filters.gopher", inside="megatron.corpus")


def test_what_a_filter_of_ones_own_imports_of_ours_counts(own, root):
    counted = own_files("own_filter", inside="megatron.corpus")
    assert counted["megatron/corpus/stage.py"] == root / "megatron" / "corpus" / "stage.py"
    assert counted.keys() >= {"own_filter.py", "own_rules.py", "own_package/words.py", "own_package/late.py"}


def test_a_version_stands_for_the_code(own):
    (own / "own_versioned.py").write_text("VERSION = 7\nclass A: VERSION = 'a'\nclass B: pass\n")
    assert [registry.code_version(f"own_versioned:{name}") for name in "AB"] == ["a", "7"]
