# SPDX-License-Identifier: Apache-2.0
"""docs/use.md is true: its five commands run as written, on a small checkpoint in the place of the quickstart's."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from megatron.tools import export, generate
from megatron.tools import serve as server

TOOLS = {"megatron.tools.generate": generate, "megatron.tools.export": export, "megatron.tools.serve": server}


@pytest.fixture(scope="module")
def commands(root):
    page = (root / "docs" / "use.md").read_text(encoding="utf-8")
    found = re.findall(r"^```bash\n# (\d)\. [^\n]*\n(.*?)^```$", page, re.S | re.M)
    assert [number for number, _ in found] == list("12345")
    return [command for _, command in found]


@pytest.fixture(scope="module")
def newcomer(checkpoint, tmp_path_factory):
    """A folder with runs/quickstart/checkpoints."""
    folder = tmp_path_factory.mktemp("use page")
    shutil.copytree(checkpoint, folder / "runs" / "quickstart" / "checkpoints")
    return folder


def words_of(command: str) -> tuple[str, list[str]]:
    """(module, its words) of `python -m module words...`."""
    python, dash_m, module, *words = shlex.split(command)
    assert (python, dash_m) == ("python", "-m") and module in TOOLS
    return module, words


def test_a_text(commands, newcomer, monkeypatch, capsys):
    monkeypatch.chdir(newcomer)
    generate.main(words_of(commands[0])[1])
    assert capsys.readouterr().out.startswith("The module")


@pytest.mark.sampled(10)
def test_a_server_and_its_client(commands, newcomer, root):
    """With a free port in the place of 8000, which another program may use."""
    for package in server.PACKAGES:
        pytest.importorskip(package, reason="needs the extra [serve]")
    curl = shutil.which("curl") or pytest.skip("curl is not installed")
    module, words = words_of(commands[1])
    env = os.environ | dict(PYTHONPATH=str(root))
    command = [sys.executable, "-m", module, *words, "--port", "0"]
    process = subprocess.Popen(command, cwd=newcomer, stdout=subprocess.PIPE, text=True, env=env)
    try:
        [address] = re.findall(r"http://[\d.]+:\d+", process.stdout.readline())[:1]
        asked = [curl, "-s", "--noproxy", "*", *shlex.split(commands[2])[1:]]
        asked = [word.replace("http://127.0.0.1:8000", address) for word in asked]
        answer = json.loads(subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout)
        assert answer["usage"]["completion_tokens"] > 0 and "text" in answer["choices"][0]
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.sampled(5)
def test_llama_cpp(commands, newcomer, monkeypatch, capsys):
    for package in ("gguf", "xllamacpp"):
        pytest.importorskip(package, reason="needs the extra [export]")
    monkeypatch.chdir(newcomer)
    export.main(words_of(commands[3])[1])
    assert "log-probabilities of llama.cpp differ by at most" in capsys.readouterr().out
    python = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}\n'
    done = subprocess.run(["bash", "-euc", python + commands[4]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
