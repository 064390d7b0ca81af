# SPDX-License-Identifier: Apache-2.0
"""The source archive and the wheel: built without a network, one from the other, and run where no tree is."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("pretrain_gpt.py", "preprocess_data.py", "merge_datasets.py")
pytestmark = pytest.mark.full
TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data --vocab-size 50 --lr 1e-2 "
    "--micro-batch-size 1 --train-iters 1 --eval-iters 0 --device cpu --log-interval 1"
).split()


def test_the_license_as_setuptools_before_77_has_it(monkeypatch):
    """Its rules want a table, and the files of the license among the settings of setuptools."""
    from setuptools.config import pyprojecttoml

    called = []
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    monkeypatch.setattr(setuptools, "setup", lambda: called.append(pyprojecttoml.load_file(ROOT / "pyproject.toml")))
    monkeypatch.setattr(pyprojecttoml, "load_file", before := pyprojecttoml.load_file)
    runpy.run_path(str(ROOT / "setup.py"))
    [content], plain = called, before(ROOT / "pyproject.toml")
    assert content["project"]["license"] == dict(text=plain["project"]["license"])
    assert content["tool"]["setuptools"]["license-files"] == plain["project"]["license-files"]
    assert "license-files" not in content["project"]
    monkeypatch.setattr(setuptools, "__version__", "77.0.1")
    monkeypatch.setattr(pyprojecttoml, "load_file", before)
    runpy.run_path(str(ROOT / "setup.py"))
    assert called[1] == plain


@pytest.mark.full
def test_a_source_archive_by_the_python_below(tmp_path):
    """`python setup.py sdist` with the setuptools that comes with a plain Python."""
    python = Path(sys.base_prefix, "bin", "python3")
    known = subprocess.run([python, "-c", "import setuptools"], capture_output=True)
    if known.returncode:
        pytest.skip("it has no setuptools")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if not name.startswith(("tests/", "docs/")):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    done = subprocess.run([python, "setup.py", "-q", "sdist"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "dist").glob("megatron-*.tar.gz"))) == 1


def python(*words, cwd, **env) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=200,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "OMP_NUM_THREADS": "1", **env},
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that is built of the source archive that is built of a copy of the tree."""
    folder = tmp_path_factory.mktemp("distribution")
    tree = folder / "tree"
    shutil.copytree(ROOT / "megatron", tree / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*SCRIPTS, "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    python("setup.py", "-q", "sdist", "--dist-dir", folder, cwd=tree)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    offline = "-m pip wheel --no-build-isolation --no-deps --no-index --disable-pip-version-check -q -w".split()
    python(*offline, folder, source, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_every_module_and_no_other(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("/licenses/LICENSE") for name in archive.namelist())
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    own = {str(path.relative_to(ROOT)) for path in (ROOT / "megatron").rglob("*") if path.is_file()}
    assert names == {name for name in own if "__pycache__" not in name} | set(SCRIPTS)
    extras = set(re.findall(r"^Provides-Extra: (\S+)$", metadata, re.M))
    assert {"all", "openwebtext", "data", "dev"} <= extras
    (everything,) = re.findall(r"^Requires-Dist: megatron\[([\w,]+)\]; extra == \"all\"$", metadata, re.M)
    assert set(everything.split(",")) == extras - {"all", "dev"}
    assert re.search(r'^Requires-Dist: ftfy.*; extra == "openwebtext"$', metadata, re.M)


def test_it_is_installed_and_trains_where_no_tree_is(wheel, tmp_path):
    place, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    offline = "-m pip install --no-deps --no-index --disable-pip-version-check -q --target".split()
    python(*offline, place, wheel, cwd=empty)
    installed = dict(PYTHONPATH=str(place))
    where = python(
        "-c", "import megatron, pretrain_gpt as p; print(megatron.__file__, p.__file__)", cwd=empty, **installed
    )
    assert where.split() == [str(place / "megatron" / "__init__.py"), str(place / "pretrain_gpt.py")]
    said = python("-m", "pretrain_gpt", *TINY, "--save", tmp_path / "run", cwd=empty, **installed)
    assert "iteration        1/       1" in said and (tmp_path / "run" / "iter_0000001").is_dir()
    for name in ("preprocess_data", "merge_datasets", "megatron.tools.create_pretraining_data"):
        assert "--output" in python("-m", name, "--help", cwd=empty, **installed)
    assert not (tmp_path / "empty" / "megatron").exists()
