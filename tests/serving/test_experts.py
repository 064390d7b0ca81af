# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts behind `megatron.tools.serve`, whose ranks hold different experts: many requests at a time, of which
a third leaves in mid-stream, have the texts that one process makes for each alone.
"""

import concurrent.futures
import json
import urllib.request

import pytest

import pretrain_gpt
from tests.serving.test_tool import ask, serving, texts_of

pytestmark = pytest.mark.full

LINE = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 48 --init-method-std 0.5 --mock-data
    --vocab-size 90 --tokenizer-type NullTokenizer --micro-batch-size 1 --train-iters 1 --lr 1e-9 --eval-iters 0
    --device cpu --num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-layer-freq [0]*1+[1]*3"""
LAYOUTS = {"tp2 ep2": (2, 1, 2), "tp4 ep2": (4, 1, 2), "tp2 pp2 ep2": (2, 2, 2)}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    pretrain_gpt.main([*LINE.split(), "--save", str(folder)])
    return str(folder)


def left_early(url: str, **body) -> str:
    """The beginning of a stream whose client closes the connection after three tokens."""
    data = json.dumps(body | dict(stream=True)).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
    text = ""
    with urllib.request.urlopen(request, timeout=60) as answer:
        for _ in range(3):
            line = answer.readline().strip() or answer.readline().strip()
            if line != b"data: [DONE]":
                text += json.loads(line.removeprefix(b"data: "))["choices"][0]["text"]
    return text


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_different_experts_serve_together(layout, mixture):
    tp, pp, ep = LAYOUTS[layout]
    sizes = dict(zip(("tensor-model", "pipeline-model", "expert-model"), (tp, pp, ep), strict=True))
    words = [word for name, size in sizes.items() for word in (f"--{name}-parallel-size", str(size))]
    launch = ["-m", "megatron.tools.launch", "--nproc-per-node", str(tp * pp)]
    prompts = [" ".join(str((7 * n + 5 * place) % 89) for place in range(1 + 5 * n % 17)) for n in range(24)]
    asked = [dict(prompt=prompt, max_tokens=4 + 3 * n % 20, seed=n) for n, prompt in enumerate(prompts)]
    with serving("--load", mixture, *words, launch=launch) as (url, _):
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            send = lambda n: left_early if n % 3 == 0 else lambda url, **body: ask(url, "/v1/completions", **body)
            answers = [pool.submit(send(n), url, **body) for n, body in enumerate(asked)]
            found = [answer.result() for answer in answers]
        after = ask(url, "/v1/completions", **asked[1])
    text_of = texts_of(mixture)
    for n, (body, answer) in enumerate(zip(asked, found, strict=True)):
        wanted = text_of(body["prompt"], tokens_to_generate=body["max_tokens"], sampling_seed=body["seed"]).strip()
        if n % 3 == 0:
            assert answer and wanted.startswith(answer.strip()), n
        else:
            assert answer["choices"][0]["text"].strip() == wanted, n
    assert after["choices"] == found[1]["choices"]
