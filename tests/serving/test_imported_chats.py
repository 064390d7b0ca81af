# SPDX-License-Identifier: Apache-2.0
"""Imported instruct models answer token for token as in transformers' `generate`, wherever they come from and go.

A model of transformers is imported, tuned on conversations, exported, imported again, tuned with LoRA, exported and
imported once more. Each of these folders answers in the server like the nearest folder of transformers.
"""

import json
from functools import cached_property, lru_cache
from typing import NamedTuple, Optional

import pytest

import finetune
from megatron.tools import checkpoint as tool
from megatron.tools import generate
from tests.serving.test_tool import ask, serving
from tests.tokenizer.matrix.layouts import files_of, write

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

SIZES = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SIZES |= dict(max_position_embeddings=192, head_dim=12, initializer_range=0.2)
# Kind of tokenizer, template and generation_config.json -> the model's class, and what its generation_config.json adds
KINDS = dict(
    llama3=("Llama", {}),
    qwen3=("Qwen3", dict(repetition_penalty=1.2)),
    gemma2=("Gemma2", {}),
    mistral3=("Mistral", dict(repetition_penalty=1.1, top_k=20)),
)
IN_BF16 = "mistral3"
TALKS = (
    [dict(role="user", content="Hello there")],
    [
        dict(role="user", content="What is  2+2, caf\u00e9?"),
        dict(role="assistant", content="Four."),
        dict(role="user", content="And <b>now</b>?\n"),
    ],
)
LEARNED = dict(chat="Good day, I think.", lora="Hello to you, too.")  # answers to the first of TALKS
LENGTH = 24
BIAS = 8.0  # of a token that ends answers
CLEAR = 1e-4  # logits of both differ by less; a smaller lead of the best token is a tie


class Answer(NamedTuple):
    """New tokens without the one that ends them, their text, that token, and the least lead of a token's logit."""

    tokens: list[int]
    text: str
    end: Optional[int]
    lead: float


class Journey:
    """A model that comes and goes: folders of this suite, and those of transformers (their names end with -hf)."""

    def __init__(self, kind: str, folder):
        self.kind, self.folder = kind, folder
        name, more = KINDS[kind]
        files = {name: content for name, content in files_of(kind).items() if name != "config.json"}
        files["generation_config.json"] |= more
        write(files, folder / "words")
        vocab = len(transformers.AutoTokenizer.from_pretrained(folder / "words"))
        torch.manual_seed(1 + list(KINDS).index(kind))
        settings = getattr(transformers, f"{name}Config")(vocab_size=vocab, **SIZES, pad_token_id=None)
        model = getattr(transformers, f"{name}ForCausalLM")(settings)
        model.to(torch.bfloat16 if kind == IN_BF16 else torch.float32).save_pretrained(folder / "hf")
        write(files, folder / "hf")
        self.convert("from-hf", "hf", "our")

    @cached_property
    def ends(self) -> list[int]:
        ends = json.loads((self.folder / "hf" / "generation_config.json").read_text())["eos_token_id"]
        return ends if isinstance(ends, list) else [ends]

    @cached_property
    def served(self) -> dict[str, str]:
        """A folder of this suite, or of transformers -> the folder of transformers with the answers that it has to give."""
        self.tune("our", "chat")
        self.convert("to-hf", "chat", "chat-hf", "--dtype", "fp32")
        self.convert("from-hf", "chat-hf", "chat-again")
        self.tune("chat-again", "lora", "--lora-rank", "4")
        self.convert("to-hf", "lora", "lora-hf", "--dtype", "fp32")
        self.convert("from-hf", "lora-hf", "lora-again")
        chat, lora = (dict.fromkeys((way, f"{way}-hf", f"{way}-again"), f"{way}-hf") for way in ("chat", "lora"))
        return dict(our="hf", hf="hf") | chat | lora

    def convert(self, command: str, source: str, out: str, *more: str) -> None:
        tool.main([command, str(self.folder / source), str(self.folder / out), *more])

    def tune(self, base: str, way: str, *more: str) -> None:
        talk = [*TALKS[0], dict(role="assistant", content=LEARNED[way])]
        path = self.folder / f"{way}.jsonl"
        path.write_text("".join(json.dumps(dict(messages=talk)) + "\n" for _ in range(4)))
        words = "--task chat --train-iters 40 --micro-batch-size 1 --global-batch-size 1 --lr 0.02 --seq-length 48"
        paths = ["--train-data", path, "--load", self.folder / base, "--save", self.folder / way]
        finetune.main([*words.split(), "--device", "cpu", *map(str, paths), *more])

    def answer(self, name: str, talk, likely: Optional[int] = None) -> Answer:
        """The answer of transformers' `generate`. name: of a folder of transformers. likely: a token with a bias"""
        tokenizer, model = _opened(self.folder / name)
        prompt = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        more = dict(max_new_tokens=LENGTH, do_sample=False, pad_token_id=0)
        more |= dict(output_scores=True, return_dict_in_generate=True)
        more |= dict(sequence_bias={(likely,): BIAS}) if likely is not None else {}
        made = model.generate(prompt["input_ids"], attention_mask=torch.ones_like(prompt["input_ids"]), **more)
        new = made.sequences[0, prompt["input_ids"].shape[1] :].tolist()
        best = torch.stack(made.scores).topk(2).values[:, 0]
        end = new.pop() if new[-1] in self.ends else None
        return Answer(new, tokenizer.decode(new), end, float((best[:, 0] - best[:, 1]).min()))


@lru_cache(4)
def _opened(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return transformers.AutoTokenizer.from_pretrained(folder), model


@pytest.fixture(scope="module")
def journey(tmp_path_factory):
    return lru_cache(None)(lambda kind: Journey(kind, tmp_path_factory.mktemp(kind)))


def in_the_terminal(folder, capsys, likely: Optional[int] = None) -> list[tuple[list[int], str]]:
    """The tokens and the texts of `generate --chat`. likely: a token with a bias"""
    line = f"--load {folder} --device cpu --precision fp32 --chat --json --greedy --tokens-to-generate {LENGTH}"
    line += f" --logit-bias {likely}:{BIAS}" if likely is not None else ""
    capsys.readouterr()
    generate.main([*line.split(), "--prompt", *(json.dumps(talk) for talk in TALKS)])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return [(one["tokens"], one["text"]) for one in found]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", KINDS)
def test_an_import_answers_in_the_terminal_as_in_transformers(journey, kind, capsys):
    """Also with each of the tokens that end an answer."""
    model = journey(kind)
    for likely in (None, *model.ends):
        answers = [model.answer("hf", talk, likely) for talk in TALKS]
        assert min(one.lead for one in answers) > CLEAR, "a tie: choose another seed"
        assert in_the_terminal(model.folder / "our", capsys, likely) == [one[:2] for one in answers]
        assert likely is None or likely in [one.end for one in answers]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_models_that_come_and_go_answer_as_in_transformers(journey, kind, capsys):
    model, finished = journey(kind), {}
    ours = [name for name in model.served if not name.endswith("hf")]
    theirs = [name for name in model.served if name.endswith("hf")]
    words = ["--load", *(str(model.folder / name) for name in ours)]
    words += ["--load-exported", *(str(model.folder / name) for name in theirs), "--precision", "fp32"]
    with serving(*words, "--served-model-name", *ours, *theirs) as (url, _):
        for name in (*ours, *theirs):
            for number, talk in enumerate(TALKS):
                for likely in (None, *model.ends):
                    wanted = model.answer(model.served[name], talk, likely)
                    biases = {} if likely is None else {str(likely): BIAS}
                    asked = dict(model=name, messages=talk, max_tokens=LENGTH, temperature=0, logit_bias=biases)
                    [choice] = (found := ask(url, "/v1/chat/completions", **asked))["choices"]
                    said = (
                        f"{kind}, {name}, conversation {number}, likely {likely}; the least lead is {wanted.lead:.1e}"
                    )
                    assert (choice["message"]["content"], said) == (wanted.text, said)
                    assert found["usage"]["completion_tokens"] == len(wanted.tokens), said
                    assert choice["finish_reason"] == ("length" if wanted.end is None else "stop"), said
                    finished[name, number, likely] = wanted
    for name in ours:
        wanted = [model.answer(model.served[name], talk)[:2] for talk in TALKS]
        assert in_the_terminal(model.folder / name, capsys) == wanted
    answers = {model.served[name]: finished[name, 0, None] for name in model.served}
    assert len({one.text for one in answers.values()}) == len(answers) == 3  # training counts
    assert answers["chat-hf"].end is not None  # it has learned where an answer ends
    assert {one.end for one in finished.values()} == {None, *model.ends}
