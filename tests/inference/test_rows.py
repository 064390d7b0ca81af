# SPDX-License-Identifier: Apache-2.0
"""Imports whose embedding has fewer rows than the tokenizer has tokens (Llama 2 with a token for padding), or more (Qwen):
every command takes the rows of the model; a token without a row is an error with its name.
"""

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import finetune
import preprocess_data
import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import DataError, SettingsError
from megatron.inference.load import load_model, open_tokenizer
from megatron.tools import checkpoint as tool
from megatron.tools import evaluate, export, generate, teacher_logits
from tests.inference.test_text_stream import TEXTS
from tests.tokenizer.matrix import llama

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.sampled(5)
SPECIAL = ("<eos>", "<user>", "<pad>")
TEMPLATE = "{% for m in messages %}{{ '<user>' if m.role == 'user' else '' }}{{ m.content }}{{ '<eos>' }}{% endfor %}"
RUN = "--device cpu --num-workers 0 --micro-batch-size 1 --eval-iters 0 --lr 1e-3 --log-interval 1"
SHAPE = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --swiglu --normalization RMSNorm
    --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --ffn-hidden-size 48
    --norm-epsilon 1e-6"""
BYTES = 256 + 40


class Import:
    """A model of transformers, our import of it, and token files. rows: of its embedding, beyond its tokenizer's tokens"""

    def __init__(self, folder: Path, more: int):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

        self.folder, self.theirs, self.ours = folder, folder / "theirs", folder / "ours"
        words = Tokenizer(models.BPE())
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        words.decoder, alphabet = decoders.ByteLevel(), pre_tokenizers.ByteLevel.alphabet()
        words.train_from_iterator(TEXTS * 5, trainers.BpeTrainer(vocab_size=BYTES, initial_alphabet=alphabet))
        words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
        self.tokens = words.get_vocab_size()
        self.rows = self.tokens + more
        torch.manual_seed(1)
        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        sizes |= dict(max_position_embeddings=64, initializer_range=0.3, eos_token_id=words.token_to_id("<eos>"))
        config = transformers.LlamaConfig(vocab_size=self.rows, pad_token_id=None, **sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(self.theirs)
        words.save(str(self.theirs / "tokenizer.json"))
        names = dict(eos_token="<eos>", pad_token="<pad>", chat_template=TEMPLATE)
        names |= dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=64)
        (self.theirs / "tokenizer_config.json").write_text(json.dumps(names))
        tool.main(["from-hf", str(self.theirs), str(self.ours)])
        lines = [dict(text=text) for text in TEXTS * 3]
        self.plain, self.padded = (
            self._preprocessed("plain", lines),
            self._preprocessed("padded", [dict(text="a<pad>b")]),
        )

    def _preprocessed(self, name: str, rows: list[dict]) -> Path:
        (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        line = f"--input {self.folder / name}.jsonl --output-prefix {self.folder / name} --append-eod --workers 1"
        preprocess_data.main(f"{line} {self.flags} --parse-special".split())
        return self.folder / f"{name}_text_document"

    @property
    def flags(self) -> str:
        """Its tokenizer, on the command line."""
        return f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {self.ours / 'tokenizer'}"

    def talks(self, file: Path, reply: str = "<pad>") -> Path:
        talk = [dict(role="user", content="the cat"), dict(role="assistant", content=reply)]
        file.write_text("".join(json.dumps(dict(messages=talk)) + "\n" for _ in range(4)))
        return file


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Import:
    """One token more than rows."""
    return Import(tmp_path_factory.mktemp("narrow"), -1)


@pytest.fixture(scope="module")
def spare(tmp_path_factory) -> Import:
    """Nine rows more than tokens."""
    return Import(tmp_path_factory.mktemp("spare"), 9)


@pytest.fixture(scope="module", params=["narrow", "spare"])
def model(request) -> Import:
    return request.getfixturevalue(request.param)


def rows_in(folder: Path) -> int:
    """The rows that a run's newest checkpoint has."""
    with Reader(sorted(folder.glob("iter_*"))[-1]) as reader:
        assert reader.tensors["embedding.word.weight"].shape[0] == reader.state["vocab_size"]
        return reader.state["vocab_size"]


def greedy(folder: Path, prompt: str = "the cat") -> list[int]:
    """What transformers writes."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    return found[0, ids.shape[1] :].tolist()


def written(folder: Path, capsys, *flags: str) -> list[int]:
    """What `generate` writes."""
    line = f"--device cpu --greedy --tokens-to-generate 12 --json {flags[0]} {folder}"
    generate.main([*line.split(), "--prompt", "the cat", *flags[1:]])
    return json.loads(capsys.readouterr().out)["tokens"]


# ---- use -------------------------------------------------------------------------------------------------------------


def test_texts_are_those_of_transformers(model, capsys):
    """From the import, from the folder itself, and after another turn there and back."""
    want = greedy(model.theirs)
    assert len(want) > 8 and written(model.ours, capsys, "--load") == want
    assert written(model.theirs, capsys, "--load-exported") == want
    tool.main(["to-hf", str(model.ours), str(model.folder / "again"), "--dtype", "fp32"])
    tool.main(["from-hf", str(model.folder / "again"), str(model.folder / "back")])
    assert greedy(model.folder / "again") == want and rows_in(model.folder / "back") == model.rows
    assert "back" in capsys.readouterr().out and written(model.folder / "back", capsys, "--load") == want


def test_the_import_names_tokens_without_a_row(narrow, tmp_path, capsys):
    tool.main(["from-hf", str(narrow.theirs), str(tmp_path / "ours"), "--unchecked"])
    assert f"has {narrow.rows} rows, and none for <pad> ({narrow.tokens - 1})" in capsys.readouterr().out


def test_a_token_without_a_row_is_named(narrow, capsys):
    """In a prompt, a text to score, a conversation and a token file: never an index out of range."""
    named = re.escape(f"holds <pad> (token {narrow.rows}), for which the model has no row")
    for load in (f"--load {narrow.ours}", f"--load-exported {narrow.theirs}"):
        with pytest.raises(DataError, match=named):
            generate.main([*f"--device cpu {load}".split(), "--prompt", "a<pad>b"])
    with pytest.raises(DataError, match=f"padded_text_document {named}"):
        evaluate.main(f"--device cpu --load {narrow.ours} --data-path {narrow.padded}".split())
    tokenizer = open_tokenizer(load_model(str(narrow.ours)))
    assert tokenizer.vocab_size == narrow.rows and tokenizer.encode("a<pad>b") == tokenizer.whole.encode("a<pad>b")
    for encode in (tokenizer.encode_prompt, tokenizer.encode_special, lambda text: tokenizer.encode_pair("a", text)):
        with pytest.raises(DataError, match=named):
            encode("a<pad>b")
    with pytest.raises(DataError, match=f"plain {named}"):
        tokenizer.refuse([1, narrow.rows], "plain")
    tokenizer.refuse([1, narrow.rows - 1])
    assert transformers.AutoTokenizer.from_pretrained(narrow.theirs)("a<pad>b")["input_ids"][1] == narrow.rows


@pytest.mark.parametrize(
    "tool_of, words",
    [
        (generate.main, "--load {ours} --prompt a"),
        (evaluate.main, "--load {ours} --data-path {plain}"),
        (teacher_logits.main, "--load {ours} --data-path {plain} --split 1,0,0 --train-samples 1 --output {new}"),
        (export.main, "--load {ours} --format hf --output {new}"),
        (tool.main, "to-hf {ours} {new}"),
    ],
)
def test_another_vocabulary_is_refused_by_each_tool(tool_of, words, narrow, vocabulary, tmp_path):
    """--vocab-file and --merge-file beside a model with a tokenizer.json: they are another one, and never ignored."""
    names = dict(ours=narrow.ours, theirs=narrow.theirs, plain=narrow.plain, new=tmp_path / "new")
    files = f" --vocab-file {vocabulary / 'vocab.json'} --merge-file {vocabulary / 'merges.txt'}"
    with pytest.raises((SettingsError, DataError), match="not the vocabulary that .* has learned|another vocabulary"):
        tool_of((words.format(**names) + files).split())


def test_a_tokenizers_flag_without_effect_is_told(narrow, capsys):
    evaluate.main(f"--load {narrow.ours} --device cpu --data-path {narrow.plain} --tiktoken-pattern gpt2".split())
    assert (
        "note: --tiktoken-pattern gpt2 has no effect without --tokenizer-type TikTokenizer" in capsys.readouterr().err
    )


def test_an_end_without_a_row_ends_nothing(narrow, tmp_path):
    """A generation_config.json may name it, and no model writes it."""
    shutil.copytree(narrow.ours, tmp_path / "ours")
    path = tmp_path / "ours" / "generation_config.json"
    path.write_text(json.dumps(dict(eos_token_id=[narrow.rows - 2, narrow.rows])))
    loaded = load_model(str(tmp_path / "ours"))
    assert loaded.ends == (narrow.rows - 2,)
    for more in (dict(), dict(num_beams=2)):
        assert loaded.generate("the cat", tokens_to_generate=3, min_tokens_to_generate=2, greedy=not more, **more)


def test_the_server_names_it(narrow):
    """Of a text, of ids, and of a chat template."""
    from megatron.inference.load import open_tokenizer
    from megatron.serving.errors import ApiError
    from megatron.serving.served_model import ServedModel
    from megatron.tokenizer.chat_template import find_template

    opened = open_tokenizer(load_model(str(narrow.ours)))
    template = find_template([narrow.theirs], opened)
    served = ServedModel("it", opened, 64, None, template=template)
    for prompt, said in (("a<pad>b", "holds <pad>"), ([5, narrow.rows], f"there is no token {narrow.rows}")):
        with pytest.raises(ApiError, match=said):
            asyncio.run(served.encode(prompt, "prompt"))
    broken = find_template([narrow.theirs], opened)
    broken = type(broken)(TEMPLATE.replace("<user>", "<pad>"), "it", opened, broken.tokens, broken.special)
    with pytest.raises(ApiError, match="holds <pad>"):
        served = ServedModel("it", opened, 64, None, template=broken)
        asyncio.run(served.conversation([dict(role="user", content="a")]))


def test_evaluation_scores_both(model, capsys):
    evaluate.main(f"--device cpu --load {model.ours} --data-path {model.plain}".split())
    assert "ppl:" in capsys.readouterr().out


def test_a_wrong_tokenizer_is_refused(narrow, spare, vocabulary):
    """Another vocabulary, whatever its size; and one that is larger where nobody knows what the model has learned."""
    loaded = load_model(str(narrow.ours))
    other = dict(tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocabulary / "vocab.json"))
    other |= dict(merge_file=str(vocabulary / "merges.txt"))
    for given in (other, dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(spare.folder / "other"))):
        if "tokenizer_model" in given:
            shutil.copytree(spare.ours / "tokenizer", given["tokenizer_model"], dirs_exist_ok=True)
            path = Path(given["tokenizer_model"]) / "tokenizer.json"
            path.write_text(path.read_text().replace("<user>", "<User>"))
        with pytest.raises(SettingsError, match="not the vocabulary that .* has learned"):
            open_tokenizer(loaded, given)
    loaded.record["vocabulary"] = None  # as in imports of earlier versions
    assert open_tokenizer(loaded).vocab_size == narrow.rows
    with pytest.raises(SettingsError, match=f"the tokenizer has {narrow.tokens} ids, the model {narrow.rows}"):
        open_tokenizer(loaded, dict(tokenizer_model=str(narrow.ours / "tokenizer")))


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["", "flags", "shape and flags"])
def test_training_keeps_the_rows(model, flags, tmp_path, capsys):
    """Without flags of a vocabulary, with those of the import's, and with the whole shape; then it goes on."""
    words = f"{model.flags if 'flags' in flags else ''} {SHAPE if 'shape' in flags else ''}"
    line = f"{RUN} {words} --data-path {model.plain} --save {tmp_path / 'run'} --split 1,0,0"
    pretrain_gpt.main(f"{line} --load {model.ours} --finetune --train-iters 2".split())
    assert rows_in(tmp_path / "run") == model.rows
    noted = f"and none for <pad> ({model.tokens - 1})" in capsys.readouterr().out
    assert noted == (model.rows < model.tokens)
    again = f"{line} --load {tmp_path / 'run'} --train-iters 3"
    pretrain_gpt.main(f"{again}{'' if 'shape' in flags else ' --use-checkpoint-args'}".split())
    assert rows_in(tmp_path / "run") == model.rows
    assert open_tokenizer(load_model(str(tmp_path / "run"))).whole.vocab_size == model.tokens


def test_rows_of_a_user_count(model, tmp_path):
    """As before: those of the checkpoint may be said, and others are an error."""
    line = f"{RUN} {model.flags} --data-path {model.plain} --split 1,0,0 --load {model.ours} --finetune --train-iters 1"
    pretrain_gpt.main(f"{line} --vocab-size {model.rows} --save {tmp_path}".split())
    assert rows_in(tmp_path) == model.rows
    with pytest.raises(SettingsError, match=f"of {model.rows}, this run one of {model.tokens + 2}"):
        pretrain_gpt.main(f"{line} --vocab-size {model.tokens + 2}".split())
    with pytest.raises(SettingsError, match="--vocab-size 200 is smaller than the tokenizer's"):
        pretrain_gpt.main(f"{line} --vocab-size 200".split())


def test_another_vocabulary_takes_no_rows(spare, vocabulary):
    """A smaller one would fit into the embedding, and mean other words."""
    words = f"--vocab-file {vocabulary / 'vocab.json'} --merge-file {vocabulary / 'merges.txt'}"
    line = f"{RUN} {words} --mock-data --load {spare.ours} --finetune --train-iters 1"
    with pytest.raises(SettingsError, match=f"the checkpoint has a vocabulary of {spare.rows}, this run one of"):
        pretrain_gpt.main(line.split())


def test_pretraining_has_the_rows_of_its_tokenizer(narrow, spare, tmp_path):
    for model in (narrow, spare):
        line = f"{RUN} {SHAPE} {model.flags} --mock-data --train-iters 1 --save {tmp_path / str(model.rows)}"
        pretrain_gpt.main(line.split())
        assert rows_in(tmp_path / str(model.rows)) == model.tokens


def test_a_sample_with_a_token_without_a_row_is_named(narrow):
    line = f"{RUN} --data-path {narrow.padded} --split 1,0,0 --load {narrow.ours} --finetune --train-iters 1"
    with pytest.raises(
        DataError, match=r"sample 0, which starts in document 0, holds <pad> \(token \d+\), for which the"
    ):
        pretrain_gpt.main(f"{line} --seq-length 2".split())


def test_adapters(model, tmp_path, capsys):
    line = f"{RUN} --data-path {model.plain} --split 1,0,0 --load {model.ours} --finetune --train-iters 1 --lora-rank 2"
    pretrain_gpt.main(f"{line} --save {tmp_path / 'run'}".split())
    tool.main(["merge-lora", str(tmp_path / "run"), str(tmp_path / "merged")])
    tool.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "fp32"])
    assert rows_in(tmp_path / "merged") == model.rows
    tool.main(["to-peft", str(tmp_path / "run"), str(tmp_path / "peft")])
    tool.main(["from-peft", str(tmp_path / "peft"), str(tmp_path / "again"), "--base", str(model.ours)])
    assert open_tokenizer(load_model(str(tmp_path / "again"))).vocab_size == min(model.rows, model.tokens)
    capsys.readouterr()
    want = greedy(tmp_path / "hf")
    assert written(tmp_path / "merged", capsys, "--load") == written(tmp_path / "run", capsys, "--load") == want


@pytest.mark.parametrize("task", ["chat", "dpo"])
def test_conversations(model, task, tmp_path):
    more = f"{RUN.replace('--eval-iters 0', '')} --train-iters 1 --global-batch-size 2 --load {model.ours}"
    good = model.talks(tmp_path / "talks.jsonl", "sat on the mat")
    if task == "dpo":
        pairs = [dict(prompt="the cat", chosen=" sat", rejected=f" {n} dogs") for n in range(2)]
        good.write_text("".join(json.dumps(row) + "\n" for row in pairs))
    line = f"--task {task} --train-data {good} {more} --save {tmp_path / 'run'}"
    finetune.main(line.split())
    assert rows_in(tmp_path / "run") == model.rows


def test_a_conversation_with_a_token_without_a_row_is_named(narrow, tmp_path):
    """A template that writes it. In a message its name is ordinary text."""
    more = f"{RUN.replace('--eval-iters 0', '')} --train-iters 1 --global-batch-size 2 --load {narrow.ours}"
    file = narrow.talks(tmp_path / "talks.jsonl")
    finetune.main(f"--task chat --train-data {file} {more} --save {tmp_path / 'run'}".split())
    (tmp_path / "pad.jinja").write_text(TEMPLATE.replace("<user>", "<pad>"))
    with pytest.raises(DataError, match="holds <pad> .* no row"):
        finetune.main(f"--task chat --train-data {file} --chat-template {tmp_path / 'pad.jinja'} {more}".split())


def test_a_task(model, tmp_path):
    """The vocabulary and the rows are the checkpoint's."""
    (tmp_path / "toy.yaml").write_text(
        "name: toy\ntrain: toy.tsv\nvalid: toy.tsv\ntext: text\nlabel: label\nlabels: [a, b]\n"
    )
    (tmp_path / "toy.tsv").write_text("text\tlabel\nthe cat\ta\nthe dog\tb\n")
    line = "--micro-batch-size 2 --global-batch-size 2 --train-iters 1 --device cpu --num-workers 0"
    task = f"--task {tmp_path / 'toy.yaml'} --data-path {tmp_path} --load {model.ours} --save {tmp_path / 'run'}"
    finetune.main(f"{task} {line}".split())
    assert rows_in(tmp_path / "run") == model.rows


def test_stored_logits_of_a_teacher(model, tmp_path):
    line = f"--load {model.ours} --output {tmp_path} --data-path {model.plain} --split 1,0,0 --train-samples 2"
    teacher_logits.main(f"{line} --micro-batch-size 1 --seq-length 8 --top-k 4 --device cpu".split())
    assert json.loads(next(tmp_path.glob("*.json")).read_text())["vocab_size"] == model.rows


def test_the_plan_counts_the_rows(model, capsys):
    from megatron.model.command_line import parse_any
    from megatron.planner.target import vocabulary_of

    config = parse_any(f"{RUN} {model.flags} --mock-data --train-iters 1 --load {model.ours} --finetune".split())
    assert vocabulary_of(config)[0] == model.rows


# ---- other programs --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize("form", ["hf", "gguf", pytest.param("torch-export", marks=pytest.mark.full)])
def test_exports(model, form, tmp_path, capsys):
    """The comparison before they appear, and the texts of what comes out. (GGUF: its likeliest tokens are compared.)"""
    for package in ["gguf", "xllamacpp"] * (form == "gguf"):
        pytest.importorskip(package)
    export.main(f"--load {model.ours} --output {tmp_path / 'out'} --format {form} --dtype fp32".split())
    said = capsys.readouterr().out
    assert "from the checkpoint's" in said
    if form == "gguf":
        missing = f"<pad> ({model.tokens - 1}): tokens without a row in the embedding, which model.gguf does not have"
        assert (missing in said) == (model.rows < model.tokens)
        client = llama.Process()  # in this process, with its many threads, llama.cpp once waited for ever
        try:
            [prompt] = client.ids(tmp_path / "out" / "model.gguf", [("the cat", False)])
        finally:
            client.end()
        assert prompt == transformers.AutoTokenizer.from_pretrained(model.theirs)("the cat")["input_ids"]
    else:
        assert written(tmp_path / "out", capsys, "--load-exported") == greedy(model.theirs)
