# SPDX-License-Identifier: Apache-2.0
"""Imported instruct models answer in the server token for token as in transformers' `generate`.

As they come, after they were tuned on conversations, two of them with LoRA, and after the export of that.
"""

import json

import pytest

import finetune
from megatron.tools import checkpoint as tool
from megatron.tools import generate
from tests.serving.test_tool import ask, serving
from tests.tokenizer.matrix.layouts import files_of, write

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

pytestmark = pytest.mark.sampled(5)

SIZES = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(max_position_embeddings=192, head_dim=12, initializer_range=0.2)
KINDS = dict(llama3="Llama", qwen3="Qwen3", gemma2="Gemma2")
TALKS = (
    [dict(role="user", content="Hello there")],
    [
        dict(role="user", content="What is  2+2, caf\u00e9?"),
        dict(role="assistant", content="Four."),
        dict(role="user", content="And <b>now</b>?\n"),
    ],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folder of each kind: `hf`, its import `our`, `tuned` on conversations, and the export `back` of that."""
    made = {}
    for kind, name in KINDS.items():
        folder = made[kind] = tmp_path_factory.mktemp(kind)
        hf = folder / "hf"
        files = {name: content for name, content in files_of(kind).items() if name != "config.json"}
        write(files, folder / "tokenizer")
        vocab = len(transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"))
        torch.manual_seed(len(made))
        settings = getattr(transformers, f"{name}Config")(vocab_size=vocab, **SIZES, pad_token_id=None)
        getattr(transformers, f"{name}ForCausalLM")(settings).save_pretrained(hf)
        write(files, hf)
        tool.main(["from-hf", str(hf), str(folder / "our")])
        talk = [*TALKS[0], dict(role="assistant", content="Good day, I think.")]
        (folder / "talks.jsonl").write_text("".join(json.dumps(dict(messages=talk)) + "\n" for _ in range(8)))
        words = "--task chat --train-iters 6 --micro-batch-size 2 --global-batch-size 2 --lr 0.01"
        words += " --lora-rank 4" * (kind != "qwen3")
        paths = ["--train-data", folder / "talks.jsonl", "--load", folder / "our", "--save", folder / "tuned"]
        finetune.main([*words.split(), "--device", "cpu", *map(str, paths)])
        tool.main(["to-hf", str(folder / "tuned"), str(folder / "back"), "--dtype", "fp32"])
    return made


def answer_of(folder, talk, count: int, bias: float) -> tuple[list[int], str]:
    """(the new tokens of transformers' `generate` without the one that ends them, their text).

    bias: is added to the logits of tokens that end an answer
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    ends = ends_of(folder)
    more = dict(max_new_tokens=count, do_sample=False, pad_token_id=0)
    more |= dict(sequence_bias={(end,): bias for end in ends}) if bias else {}
    new = model.generate(ids, attention_mask=torch.ones_like(ids), **more)[0, ids.shape[1] :].tolist()
    new = new[:-1] if new[-1] in ends else new
    return new, tokenizer.decode(new, skip_special_tokens=False)


def ends_of(folder) -> list[int]:
    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    return ends if isinstance(ends, list) else [ends]


@pytest.mark.sampled(10)
def test_answers_are_those_of_transformers(models, capsys):
    imports = {f"{kind}-{which}": folder / which for kind, folder in models.items() for which in ("our", "tuned")}
    exports = {f"{kind}-back": folder / "back" for kind, folder in models.items()}
    names = [*imports, *exports]
    words = ["--load", *map(str, imports.values()), "--load-exported", *map(str, exports.values())]
    finished = []
    with serving(*words, "--served-model-name", *names) as (url, _):
        for name in names:
            kind, which = name.split("-")
            theirs = models[kind] / ("hf" if which == "our" else "back")
            for talk in TALKS:
                for bias in (0.0, 4.0):
                    new, text = answer_of(theirs, talk, 24, bias)
                    biases = {str(end): bias for end in ends_of(theirs)}
                    asked = dict(model=name, messages=talk, max_tokens=24, temperature=0, logit_bias=biases)
                    [choice] = (found := ask(url, "/v1/chat/completions", **asked))["choices"]
                    finished.append(choice["finish_reason"])
                    assert (name, choice["message"]["content"]) == (name, text)
                    assert found["usage"]["completion_tokens"] == len(new)
    assert set(finished) == {"stop", "length"}
    for name, folder in imports.items():
        line = f"--load {folder} --device cpu --chat --json --greedy --tokens-to-generate 24 --prompt"
        generate.main([*line.split(), *(json.dumps(talk) for talk in TALKS)])
        theirs = models[name.split("-")[0]] / ("hf" if name.endswith("-our") else "back")
        found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(one["tokens"], one["text"]) for one in found] == [answer_of(theirs, talk, 24, 0.0) for talk in TALKS]
