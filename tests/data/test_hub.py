# SPDX-License-Identifier: Apache-2.0
"""`hf://` names: huggingface_hub downloads from a hub of our own, an HTTP server with the answers of the real one."""

import hashlib
import json
import threading
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

from megatron.convert.hf_files import read_json
from megatron.data.json_input import find_sources, read_blocks
from megatron.errors import CheckpointError, DataError, MissingPackage, StorageError, UsageError
from megatron.settings.schema import TokenizerSettings
from megatron.storage import hub
from megatron.tasks.chat import files_of
from megatron.tasks.chat_settings import GROUP, ChatSettings
from megatron.tokenizer.vocabulary_folders import here

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")
SHA = "0123456789abcdef0123456789abcdef01234567"
MODEL = {
    name: name.encode()
    for name in "config.json model.safetensors tokenizer.json README.md pytorch_model.bin onnx/model.onnx".split()
}
DATA = {
    "README.md": b"# a card",
    "data/train-00000-of-00001.jsonl": b'{"text": "one"}\n{"text": "two"}\n',
    "data/test-00000-of-00001.jsonl": b'{"text": "three"}\n',
}
FILES = {"models/org/small": MODEL, "datasets/org/words": DATA}


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that a download asks: the commit, the list of files, and each file."""

    protocol_version = "HTTP/1.1"
    asked: list[str] = []

    def do_HEAD(self):
        path = unquote(urlsplit(self.path).path)
        type(self).asked.append(path)
        if "gated" in path or path.startswith("/api/models/org/none"):
            code = "GatedRepo" if "gated" in path else "RepoNotFound"
            return self._send(403 if "gated" in path else 404, b"{}", {"X-Error-Code": code})
        if path.startswith("/api/") and len(path.split("/")) < 5:
            return self._send(404, b"{}", {})  # about itself: the client lives without
        if path.startswith("/api/"):
            kind, name, what = path.split("/")[2], "/".join(path.split("/")[3:5]), path.split("/")[5:]
            files = FILES[f"{kind}/{name}"]
            if what[:1] != ["tree"]:
                if what[1:] not in ([], ["main"], [SHA]):
                    return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return self._json(dict(id=name, sha=SHA, siblings=[dict(rfilename=one) for one in files]))
            rows = [dict(type="file", path=one, size=len(text), oid=_sum(text)) for one, text in files.items()]
            return self._json(rows)
        name, _, inside = path.lstrip("/").partition("/resolve/")
        text = FILES[name if name.startswith("datasets/") else f"models/{name}"][inside.partition("/")[2]]
        self._send(200, text, {"X-Repo-Commit": SHA, "ETag": f'"{_sum(text)}"'})

    do_GET = do_HEAD

    def _json(self, value):
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, code, text, more):
        self.send_response(code)
        for name, value in {**more, "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text)

    def log_message(self, *words):
        pass


def _sum(text: bytes) -> str:
    return hashlib.sha1(text).hexdigest()


@pytest.fixture
def server(monkeypatch, tmp_path):
    running = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{running.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(Hub, "asked", [])
    yield running
    running.shutdown()
    running.server_close()


def test_the_files_of_a_model_are_downloaded_once(server, capsys):
    folder = hub.fetched("hf://org/small", hub.MODEL_FILES)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "README.md"}  # neither pickled nor ONNX
    assert all((folder / name).read_bytes() == MODEL[name] for name in found)
    files = [path for path in Hub.asked if "/resolve/" in path]
    assert hub.fetched("hf://org/small@main", hub.MODEL_FILES) == folder
    assert [path for path in Hub.asked if "/resolve/" in path] == files
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 2 and err.startswith("hf://org/small: ")  # no bars without a terminal


def test_the_files_of_a_tokenizer_are_downloaded_alone(server):
    found = Path(here(TokenizerSettings(tokenizer_model="hf://org/small")).tokenizer_model)
    names = {path.name for path in found.iterdir()}
    assert "tokenizer.json" in names and not names & {"model.safetensors", "pytorch_model.bin", "onnx"}


def test_lines_of_a_dataset_are_read(server, capsys):
    def texts(name):
        blocks = [block for source in find_sources([name]) for block, _ in read_blocks(source, 1 << 16)]
        return [json.loads(line)["text"] for line in b"".join(blocks).splitlines()]

    assert texts("hf://datasets/org/words") == ["one", "two"]
    assert "of several splits only train is taken (test: name the files, or their folder)" in capsys.readouterr().err
    assert texts("hf://datasets/org/words/data/train-*") == ["one", "two"]
    assert texts("hf://datasets/org/words/data/test-00000-of-00001.jsonl") == ["three"]
    assert texts(f"hf://datasets/org/words@{SHA}/data") == ["one", "two"]


def test_conversations_of_a_dataset_are_read(server, capsys):
    settings = ChatSettings("chat", ["hf://datasets/org/words"], ["a.jsonl"])
    chat = SimpleNamespace(extra={GROUP: settings})
    assert [Path(file).name for file in files_of(chat, "train")] == ["train-00000-of-00001.jsonl"]
    assert "note: --train-data hf://datasets/org/words: of several splits only train" in capsys.readouterr().err
    assert files_of(chat, "valid") == ["a.jsonl"] and files_of(chat, "test") == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        (
            "hf://org/none",
            DataError,
            "the hub has no such model, or it is private*hf://datasets/ORG/NAME*hf auth login*",
        ),
        ("hf://org/gated", DataError, "hf://org/gated is gated*huggingface.co/org/gated, then `hf auth login`*"),
        ("hf://org/small@other", DataError, "hf://org/small has no revision other*"),
        ("hf://org/small/weights", DataError, "hf://org/small/weights: no such files there*looked for weights*"),
        ("hf://small", UsageError, "hf://small: no name of the Hugging Face hub*hf://ORG/NAME, *"),
    ],
)
def test_what_the_hub_refuses_is_one_message(server, name, error, words):
    with pytest.raises(error) as raised:
        hub.fetched(name, hub.MODEL_FILES)
    assert fnmatch(str(raised.value).replace("\n", " "), f"*{words}")


def test_without_a_network_the_cache_serves_and_a_message_says_what_to_do(server, monkeypatch):
    folder = hub.fetched("hf://org/small", hub.MODEL_FILES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.fetched("hf://org/small", hub.MODEL_FILES) == folder
    with pytest.raises(StorageError, match="(?s)HF_HUB_OFFLINE is set.*hf download org/words --repo-type dataset"):
        hub.fetched("hf://datasets/org/words", hub.DATA_FILES)


def test_without_the_package_it_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(
        MissingPackage, match="(?s)pip install huggingface_hub.*git clone https://huggingface.co/org/small"
    ):
        hub.fetched("hf://org/small", hub.MODEL_FILES)


def test_a_name_in_the_place_of_a_folder(tmp_path, monkeypatch):
    """It is not looked up; the message says how to download it. Folders that were mistyped are no names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, words in (
        ("meta-llama/Llama-3.2-1B", "hf://meta-llama/Llama-3.2-1B downloads it"),
        ("runs/gtp", "check"),
    ):
        with pytest.raises(CheckpointError, match=f"(?s)no such folder.*{words}"):
            read_json(tmp_path.joinpath(name).relative_to(tmp_path) / "config.json")
