# SPDX-License-Identifier: Apache-2.0
"""The commands: a real model behind `megatron.tools.serve`, and Megatron-LM's client."""

import concurrent.futures
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.entry import start
from megatron.errors import CheckpointError, DataError, SettingsError, UsageError
from megatron.guard import processes
from megatron.inference.generation import generate
from megatron.inference.load import load_model, open_tokenizer
from megatron.inference.sampling import Sampling, Search
from megatron.model.recipe import named_recipe
from megatron.serving.settings import ServeLimits, read_keys
from megatron.tools import export, serve, text_generation_cli
from megatron.tools import generate as generate_tool

ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def serving(*words: str, launch=()):
    """(address, process) of a server. It is told to stop at the end, and has to end well."""
    command = [sys.executable, *launch, "-m", "megatron.tools.serve", "--port", "0", "--device", "cpu", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert (found := re.search(r"(http://[0-9.:]+)/v1", line)), line + process.stderr.read()
        yield found[1], process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def ask(url: str, path: str, method: str = "POST", key: str = "", **body) -> dict:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode() if body else None, headers, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@pytest.fixture(scope="module")
def expected(checkpoint):
    return texts_of(str(checkpoint))


def texts_of(folder: str):
    """`text(prompt, **sampling)`: the text that a model makes, without a server."""
    loaded = load_model(folder)
    tokenizer = open_tokenizer(loaded)

    def text(prompt: str, **sampling) -> str:
        more = dict(longest=loaded.longest, end=tokenizer.eod)
        return tokenizer.decode(generate(loaded.model, [tokenizer.encode(prompt)], Sampling(**sampling), **more)[0])

    return text


def beams_of(folder: str, prompt: str, length: int, beams: int) -> list[str]:
    """The texts of a beam search, without a server."""
    loaded = load_model(folder)
    tokenizer = open_tokenizer(loaded)
    ids, more = tokenizer.encode(prompt), dict(longest=loaded.longest, end=tokenizer.eod, best=beams)
    return [tokenizer.decode(text) for text in generate(loaded.model, [ids], Sampling(length), Search(beams), **more)]


@pytest.mark.sampled(2)
def test_a_model_is_served(checkpoint, expected, tmp_path):
    (tmp_path / "keys").write_text("first key\nsecond\n")
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    words = ["--load", str(checkpoint), "--served-model-name", "cats", "--api-key-file", str(tmp_path / "keys")]
    with serving(*words, "--chat-template", str(tmp_path / "chat.jinja")) as (url, process):
        asked = dict(prompt="the cat sat", max_tokens=8, seed=3)
        found = ask(url, "/v1/completions", key="second", model="cats", **asked)
        assert found["choices"][0]["text"] == expected("the cat sat", tokens_to_generate=8, sampling_seed=3)
        assert found["system_fingerprint"] == "iteration 7"
        talk = [dict(role="user", content="the dog")]
        found = ask(
            url, "/v1/chat/completions", key="second", messages=talk, temperature=0, max_tokens=5, logprobs=True
        )
        assert found["choices"][0]["message"]["content"] == expected("the dog", tokens_to_generate=5, greedy=True)
        assert len(found["choices"][0]["logprobs"]["content"]) == found["usage"]["completion_tokens"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(url, "/v1/models", method="GET")
        found = ask(url, "/api", "PUT", "first key", prompts=["the cat sat"], tokens_to_generate=6, beam_width=3)
        assert found["text"] == ["the cat sat" + text for text in beams_of(str(checkpoint), "the cat sat", 6, 3)]
        client = [sys.executable, "-m", "megatron.tools.text_generation_cli", url, "--top-k", "1"]
        client += ["--tokens-to-generate", "6", "--api-key-file", str(tmp_path / "keys")]
        done = subprocess.run(client, cwd=ROOT, input="the cat\na dog\n", capture_output=True, text=True, timeout=60)
        greedy = dict(tokens_to_generate=6, greedy=True)
        assert done.stdout == "".join(f"{one}{expected(one, **greedy)}\n" for one in ("the cat", "a dog")), done.stderr
        request = urllib.request.Request(url + "/metrics", headers=dict(authorization="Bearer second"))
        text = urllib.request.urlopen(request).read().decode()
        assert 'megatron_serve_iteration{model="cats"} 7.0' in text and 'engine{model="cats",what="blocks"}' in text


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind, how", [("checkpoint", "int8"), ("--load", "int8-dynamic"), ("--load-exported", "int4")])
def test_exports_and_quantized_models_answer_as_generate(checkpoint, kind, how, tmp_path, capsys):
    """The server's texts are those of tools.generate with the same flags."""
    if kind == "checkpoint":
        words = ["--load", str(checkpoint)]
    else:
        export.main(["--load", str(checkpoint), "--output", str(tmp_path / "hf"), "--dtype", "fp32", "--no-check"])
        words = [kind, str(tmp_path / "hf")]
    words += ["--quantize", how]
    words += ["--quantize-group-size", "8", "--quantize-skip", "*.mlp.*"] if how == "int4" else []
    texts, drawn = ["the cat sat", "a dog"], ["--tokens-to-generate", "9", "--seed", "5", "--json"]
    wanted = []
    for text in texts:
        capsys.readouterr()
        generate_tool.main([*words, "--device", "cpu", "--prompt", text, *drawn])
        wanted.append(json.loads(capsys.readouterr().out)["text"])
    with serving(*words, "--max-model-len", "20", "--max-num-seqs", "2", "--dtype", "float32") as (url, _):
        assert ask(url, "/v1/models", method="GET")["data"][0]["max_model_len"] == 20
        name = ask(url, "/v1/models", method="GET")["data"][0]["id"]
        found = [ask(url, "/v1/completions", model=name, prompt=text, max_tokens=9, seed=5) for text in texts]
    assert [answer["choices"][0]["text"] for answer in found] == wanted
    plain = texts_of(str(checkpoint))
    if how == "int4":  # coarse enough for other texts
        assert wanted != [plain(text, tokens_to_generate=9, sampling_seed=5) for text in texts]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_an_encoder_decoder_is_served(ranks, tmp_path, capsys):
    """Prompts are its sources: its answers are those of tools.generate, by both interfaces, and do not continue prompts."""
    flags = """--encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 12
        --decoder-seq-length 8 --mock-data --vocab-size 40 --tokenizer-type NullTokenizer --device cpu --lr 1e-2
        --init-method-std 0.6 --micro-batch-size 4 --train-iters 1 --eval-iters 0 --precision fp32"""
    start(f"{flags} --save {tmp_path / 'pair'}".split(), named_recipe("T5"))
    words = ["--load", str(tmp_path / "pair"), "--device", "cpu", "--json", "--seed", "5", "--tokens-to-generate", "6"]
    wanted = {}
    for name, more in {
        "drawn": [],
        "greedy": ["--greedy"],
        "beams": ["--num-beams", "3", "--num-samples", "3"],
    }.items():
        capsys.readouterr()
        generate_tool.main([*words, *more, "--prompt", "5 6 7 8"])
        wanted[name] = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    launch = ["-m", "megatron.tools.launch", "--nproc-per-node", "2"] if ranks > 1 else []
    layout = ["--pipeline-model-parallel-size", "2"] if ranks > 1 else []
    with serving("--load", str(tmp_path / "pair"), *layout, launch=launch) as (url, _):
        asked = dict(prompt="5 6 7 8", max_tokens=6)
        found = ask(url, "/v1/completions", **asked, seed=5, n=2, logprobs=2)
        assert found["choices"][0]["text"] == wanted["drawn"][0] != found["choices"][1]["text"]
        scores = found["choices"][0]["logprobs"]
        assert len(scores["tokens"]) == len(scores["token_logprobs"])
        assert all(len(top) >= 2 for top in scores["top_logprobs"])
        assert found["usage"]["prompt_tokens"] == 4
        greedy = ask(url, "/v1/completions", **asked, temperature=0)["choices"][0]["text"]
        assert [greedy] == wanted["greedy"] != wanted["drawn"]
        answers = ask(url, "/api", "PUT", prompts=["5 6 7 8", "9 10"], tokens_to_generate=6, top_k=1, logprobs=True)
        assert answers["text"][0] == greedy and len(answers["logprobs"][0]) == len(answers["segments"][0])
        beams = ask(url, "/api", "PUT", prompts=["5 6 7 8"], tokens_to_generate=6, beam_width=3)
        assert beams["text"] == wanted["beams"] and beams["scores"] == sorted(beams["scores"], reverse=True)
        model = ask(url, "/v1/models", method="GET")["data"][0]
        assert (model["max_model_len"], model["max_answer_len"]) == (12, 8)
        for body, why in (
            (asked | dict(echo=True), "echo: pair is an encoder-decoder"),
            (asked | dict(max_tokens=9), "max_tokens: 9 is more than the model's targets may have, 8"),
            (asked | dict(prompt="7 " * 13), "the prompt has 13 tokens; the encoder can look at 12"),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                ask(url, "/v1/completions", **body)
            assert why in json.loads(error.value.read())["error"]["message"]


def test_what_is_no_model_to_serve(checkpoint, tmp_path):
    """Each is refused by name before the server says that it serves."""
    export.main(["--load", str(checkpoint), "--output", str(tmp_path / "hf"), "--dtype", "fp32", "--no-check"])
    for words, error, why in (
        (["--follow", str(tmp_path / "hf")], SettingsError, "it is an export, which has no newer checkpoints"),
        (["--load", str(tmp_path / "hf"), "--ckpt-step", "3"], SettingsError, "is an export, which has one step"),
        (["--load-exported", "x", "--ckpt-step", "3"], UsageError, "there is no --load whose checkpoint"),
        (["--load-exported", "x", "--follow", "x"], UsageError, "an export has no newer checkpoints"),
        (["--load", str(checkpoint), "--quantize", "int4"], SettingsError, "--quantize-group-size"),
        (["--load-exported", str(tmp_path)], CheckpointError, "holds no export"),
        (
            [str(checkpoint), "--max-model-len", "33"],
            SettingsError,
            "--max-model-len 33: the context of .* has 32 tokens",
        ),
    ):
        with pytest.raises(error, match=why):
            serve.main([*words, "--port", "0", "--device", "cpu"])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2), (2, 2)])
def test_ranks_serve_together(new_checkpoint, tp, pp, tmp_path):
    """They take a newer checkpoint together, and end together."""
    new_checkpoint(tmp_path / "run")
    launch = ["-m", "megatron.tools.launch", "--nproc-per-node", str(tp * pp)]
    words = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    with serving("--follow", str(tmp_path / "run"), *words, launch=launch) as (url, _):
        asked = dict(prompt="the cat sat", max_tokens=12, temperature=0, n=3)
        one = ask(url, "/v1/completions", **asked)
        beams = ask(url, "/api", "PUT", prompts=["the cat sat"], tokens_to_generate=6, beam_width=3)["text"]
        new_checkpoint(tmp_path / "run", iteration=9, by=0.5)
        until = time.monotonic() + 60
        while (other := ask(url, "/v1/completions", **asked))["system_fingerprint"] == "iteration 7":
            assert time.monotonic() < until
            time.sleep(0.1)
    wanted = beams_of(str(tmp_path / "run" / "iter_0000007"), "the cat sat", 6, 3)
    assert beams == ["the cat sat" + text for text in wanted]
    for answer, step in ((one, 7), (other, 9)):
        text = texts_of(str(tmp_path / "run" / f"iter_{step:07}"))("the cat sat", tokens_to_generate=12, greedy=True)
        assert [choice["text"] for choice in answer["choices"]] == [text] * 3


@pytest.mark.sampled(5)
def test_a_newer_checkpoint_is_taken(new_checkpoint, expected, tmp_path):
    """Each answer is that of one set of weights, the one that it names; no request is lost meanwhile."""
    new_checkpoint(tmp_path / "run")
    with serving("--follow", str(tmp_path / "run")) as (url, _), concurrent.futures.ThreadPoolExecutor(4) as pool:
        done, found = threading.Event(), []

        def client(number: int) -> None:
            for seed in range(number, 1 << 20, 4):
                asked = dict(prompt="a dog", max_tokens=12, seed=seed)
                answer = ask(url, "/v1/completions", **asked)
                found.append((seed, answer["system_fingerprint"], answer["choices"][0]["text"]))
                if done.is_set():
                    return
                time.sleep(0.02)

        clients = [pool.submit(client, number) for number in range(4)]
        new_checkpoint(tmp_path / "run", iteration=9, by=0.5)
        until = time.monotonic() + 60
        while sum(version == "iteration 9" for _, version, _ in list(found)) < 8 and time.monotonic() < until:
            time.sleep(0.05)
        done.set()
        for one in clients:
            one.result()
    other = texts_of(str(tmp_path / "run"))
    texts = {"iteration 7": expected, "iteration 9": other}
    assert {version for _, version, _ in found} == set(texts)
    first_of_the_new = [version for _, version, _ in found].index("iteration 9")
    for seed, version, text in found[max(0, first_of_the_new - 12) : first_of_the_new + 12]:
        assert text == texts[version]("a dog", tokens_to_generate=12, sampling_seed=seed), (seed, version)


@pytest.mark.parametrize(
    "words, error, why",
    [
        ("", UsageError, "which model"),
        ("--load a b --served-model-name x", UsageError, "1 names for 2 models"),
        ("a --load b", UsageError, "a and --load: both name models"),
        ("a --max-model-len 1", SettingsError, "--max-model-len 1: has to be at least 2"),
        ("--load a --max-batch 0", SettingsError, "--max-batch 0: has to be at least 1"),
        ("--load a --request-timeout 0", SettingsError, "request-timeout 0"),
        (
            "--load a --tensor-model-parallel-size 2",
            SettingsError,
            "tensor 2 x pipeline 1 = 2 ranks, and this job has 1",
        ),
        ("--load a --api-key-file missing", DataError, "cannot be read"),
        ("--load a --port 99999", UsageError, "--port 99999"),
    ],
)
def test_wrong_settings(words, error, why, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=why):
        serve.main(words.split())


def test_keys_of_an_empty_file(tmp_path):
    (tmp_path / "keys").write_text("\n  \n")
    with pytest.raises(DataError, match="has no key"):
        read_keys(str(tmp_path / "keys"))


def test_the_client_names_what_is_wrong(toy, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    with pytest.raises(text_generation_cli.ServerRefused, match="answers 400: top_p: has to be"):
        text_generation_cli.main([toy.url, "--top-p", "2"])
    monkeypatch.setattr("sys.stdin", io.StringIO("x\n"))
    with pytest.raises(text_generation_cli.ServerRefused, match="does not answer"):
        text_generation_cli.main(["127.0.0.1:9"])


def test_the_limits_have_defaults_that_fit():
    assert ServeLimits().room == 80


@pytest.mark.full
def test_replicas_on_ray(checkpoint, expected):
    """A request goes on after kill -9 of its replica."""
    pytest.importorskip("ray.serve", reason="ray is not installed: pip install '.[scale]'")
    with serving("--load", str(checkpoint), "--replicas", "2", "--ray") as (url, process):
        found = ask(url, "/v1/completions", prompt="the cat sat", max_tokens=8, seed=3)
        assert found["choices"][0]["text"] == expected("the cat sat", tokens_to_generate=8, sampling_seed=3)
        names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes.descendants(process.pid)}
        replicas = [pid for pid, name in names.items() if b"ModelReplica" in name]
        assert len(replicas) == 2
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, url, "/v1/completions", prompt="a dog", max_tokens=20, seed=n) for n in range(40)]
            os.kill(replicas[0], signal.SIGKILL)
            for seed, answer in enumerate(asked):
                text = expected("a dog", tokens_to_generate=20, sampling_seed=seed)
                assert answer.result()["choices"][0]["text"] == text
