# SPDX-License-Identifier: Apache-2.0
"""README and guides against the tree: paths, functions, packages and floors that they name are there."""

import ast
import hashlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.name != "flags.md"),
]
# Files that a page lets its reader write.
OF_THE_READER = {
    "my_gpt.py",
    "my_filters.py",
    "own_model.py",
    "pretrain_my_model.py",
    "my_variant.py",
    "variant_b.py",
    "run_clm.py",
    "pretrain_llama.py",
    "run_recipe.py",
    "train.py",
}
FOLDERS = "megatron|tests|benchmarks|scripts|docs"


def table_after(text: str, heading: str) -> list[list[str]]:
    """Rows of the first table behind a heading, as cells, without its head."""
    lines = text[text.index(f"\n{heading}\n") :].splitlines()[2:]
    start = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_the_licence_is_apaches():
    """To the byte what the Apache Software Foundation publishes as LICENSE-2.0.txt."""
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert all(f"({name})" in README for name in ("LICENSE", "CONTRIBUTING.md"))


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a module defines: functions, classes, `Class.method`, and names at its top level."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
        for target in getattr(node, "targets", []):
            found |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
    return frozenset(found)


# ---- paths and modules -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page):
    """Every word that is a path of a Python file, or lies in one of the project's folders."""
    text = page.read_text(encoding="utf-8")
    everywhere = {path.name for home in ("megatron", "tests", "benchmarks") for path in (ROOT / home).rglob("*.py")}
    missing = []
    for word in sorted(set(re.findall(r"(?<![\w./$-])[\w.*-]+(?:/[\w.*-]+)*", text))):
        name = re.sub(r"^([ab]/(?=megatron/)|(\.\./)+)", "", word.rstrip(".-"))  # as a patch, and a link, have it
        inside = re.match(rf"({FOLDERS})/\w", name)
        if not inside and not name.endswith(".py") or name in OF_THE_READER or name.startswith("runs/"):
            continue
        found = [path for home in (ROOT, ROOT / "megatron") for path in home.glob(name)]
        if not found and (inside or "/" in name or name not in everywhere):
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_modules_exist(page):
    modules = set(
        re.findall(r"(?:python -m |`)((?:megatron|tests|pipeline|tools)(?:\.\w+)+)", page.read_text(encoding="utf-8"))
    )
    aliases = (ROOT / "megatron" / "__init__.py").read_text(encoding="utf-8")

    def exists(name: str) -> bool:
        """A module or package, from the top or from `megatron`, or a name that one of them defines."""
        for full in (name, f"megatron.{name}"):
            path = ROOT.joinpath(*full.split("."))
            if path.with_suffix(".py").exists() or (path / "__init__.py").exists() or f'"{full}"' in aliases:
                return True
            module = path.parent.with_suffix(".py")
            if module.exists() and path.name in names_in(module):
                return True
        return False

    assert [name for name in sorted(modules) if not name.endswith(".NAME") and not exists(name)] == []


def test_pages_that_the_code_names_are_there():
    """Also the headings: docs/planning.md#search-a-layout."""
    sources = [path for home in ("megatron", "scripts", "benchmarks", "tests") for path in (ROOT / home).rglob("*.*")]
    wrong = []
    for path in [*sources, *ROOT.glob("*.py")]:
        if path.suffix not in (".py", ".sh", ".sbatch") or path == Path(__file__):
            continue
        for page, heading in re.findall(
            r"(?<![\w/])(docs/(?:proof/|tasks/)?\w+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8")
        ):
            text = (ROOT / page).read_text(encoding="utf-8") if (ROOT / page).exists() else ""
            headings = re.findall(r"^#+ +(.*)$", text, re.M)
            anchors = {re.sub(r"[^\w -]", "", one.lower()).strip().replace(" ", "-") for one in headings}
            anchors |= set(re.findall(r'<a id="([\w-]+)">', text))
            if not text or heading and heading not in anchors:
                wrong.append(f"{path.relative_to(ROOT)}: {page}#{heading}")
    assert wrong == []


# ---- the tour --------------------------------------------------------------------------------------------------------


def test_the_tour_names_every_package_once_in_the_order_of_floors():
    from tests.test_floors import FLOORS

    rows = table_after(README, "## A tour in a minute")
    named = [row[0].strip("`") for row in rows]
    there = {path.parent.name for path in (ROOT / "megatron").glob("*/__init__.py")}
    assert sorted(named) == sorted(there)
    floor = {name: number for number, row in enumerate(FLOORS) for name in row.split()}
    assert [floor[name] for name in named] == sorted(floor[name] for name in named)
    for package, _, files in rows:
        for name in re.findall(r"`([\w.]+)`", files):
            assert (ROOT / "megatron" / package.strip("`") / name).exists(), f"{package}: {name}"


# ---- ten questions ---------------------------------------------------------------------------------------------------

QUESTIONS = table_after(DESIGN, "## Where to look")


def test_there_are_ten_questions_and_the_readme_leads_to_them():
    assert len(QUESTIONS) == 10
    assert "docs/design.md#where-to-look" in README
    first = README[README.index("## Where to go from here") :]
    assert re.search(r"\]\((docs/[\w.]+)\)", first)[1] == "docs/tutorial.md"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("row", QUESTIONS, ids=[row[0].rstrip("?") for row in QUESTIONS])
def test_a_reader_of_the_readme_finds_it_in_three_files(row):
    """README -> a file that the tour names -> one that the tour or that file names; each has what the row says."""
    tour = {
        f"megatron/{package.strip('`')}/{name}"
        for package, _, files in table_after(README, "## A tour in a minute")
        for name in re.findall(r"`([\w.]+)`", files)
    }
    steps = [re.fullmatch(r"`([\w/.]+)`: `([\w.]+)`", cell).groups() for cell in row[1:] if cell]
    assert 1 <= len(steps) <= 2, "with the README these are three files"
    before = README
    for path, name in steps:
        assert name in names_in(ROOT / path), f"{path} has no {name}"
        stem = re.escape(Path(path).stem)
        assert path in tour or re.search(rf"\b{stem}\b", before), f"nothing leads to {path}"
        before = (ROOT / path).read_text(encoding="utf-8")
