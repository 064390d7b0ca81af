# SPDX-License-Identifier: Apache-2.0
"""Folders of transformers through the commands: damaged files are named, and an export says what the source said."""

import ast
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import preprocess_data
import pretrain_gpt
from megatron.checkpoint.lineage import imported_config, lineage, source_config
from megatron.convert import fitted, hf_blocks, hf_files, huggingface, peft
from megatron.errors import Failure, StorageError, UsageError
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling
from megatron.model.gpt import hf_settings
from megatron.tools import checkpoint as tool
from megatron.tools import dump_samples, generate
from megatron.training.conversion_commands import fresh_state
from tests.inference.test_families import CASES, COMMON

transformers = pytest.importorskip("transformers")
END, BEGIN = 40, 41
RANGE = 0.2
SAID = dict(bos_token_id=BEGIN, eos_token_id=END, pad_token_id=BEGIN, initializer_range=RANGE)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny Qwen3 whose config.json has other ids than its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("source") / "qwen"
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.add_special_tokens([*(f"<u{n}>" for n in range(len(letters), END)), "<end>", "<pad>"])
    files = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
    files.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8)
    sizes |= dict(num_key_value_heads=1, max_position_embeddings=16, vocab_size=48)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **SAID))
    model.generation_config.update(bos_token_id=BEGIN, eos_token_id=[END])
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(source, tmp_path):
    return shutil.copytree(source, tmp_path / "copy")


def imported(folder, out):
    return huggingface.from_hf(folder, out, fresh_state(), check=False)


def refused(*words) -> Failure:
    with pytest.raises(Failure) as raised:
        tool.main(list(map(str, words)))
    return raised.value


def test_a_damaged_generation_config_is_refused(copy, tmp_path):
    file = copy / "generation_config.json"
    for text in (file.read_text()[:40], "[1]", '{"bad_words_ids": 3}'):
        file.write_text(text)
        error = refused("from-hf", copy, tmp_path / "out")
        assert error.code == 5 and str(error).startswith(f"{file}: not a generation config")
        assert "repair or remove it" in str(error) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named_with_what_to_do(copy, tmp_path, name):
    """Cut, as by a download that ended, and empty."""
    content = (copy / name).read_bytes()
    for part in (content[:60], b""):
        (copy / name).write_bytes(part)
        error = refused("from-hf", copy, tmp_path / "out")
        assert error.code in (4, 5) and str(error).startswith(str(copy / name)) and error.do, error


def test_every_message_about_files_of_hugging_face_says_what_to_do():
    for module in (fitted, hf_blocks, hf_files, peft, hf_settings):
        tree = ast.parse(Path(module.__file__).read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        raised = [call for call in calls if getattr(call.func, "id", "") in ("CheckpointError", "DataError")]
        without = [
            ast.unparse(one) for one in raised if len(one.args) < 3 and "do" not in {k.arg for k in one.keywords}
        ]
        assert without == [] and (len(raised) > 0), module.__name__


def test_unknown_keys_of_a_generation_config_are_named(copy, tmp_path):
    file = copy / "generation_config.json"
    file.write_text(json.dumps(dict(temprature=0.5, typical_p=0.9, no_repeat_ngram_size=3, top_p=0.9)))
    said = imported(copy, tmp_path / "out")
    named = f"{file}: no_repeat_ngram_size, temprature, typical_p: there is no such setting here"
    assert named in said
    shutil.copy(file, tmp_path / "out")
    kinds = dict(load=SimpleNamespace(value=tmp_path / "out"))
    own = [note for note in generate.recommended_for(kinds).notices(Sampling()) if "no such setting" in note]
    assert own == [named.replace(str(copy), str(tmp_path / "out"))]


def test_an_export_has_the_special_ids_of_the_source(source, tmp_path):
    imported(source, tmp_path / "ours")
    huggingface.to_hf(tmp_path / "ours" / "iter_0000000", tmp_path / "theirs", torch.float32, {}, check=False)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "theirs")
    assert {name: getattr(config, name) for name in SAID} == SAID
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "theirs")
    assert (generation.bos_token_id, generation.eos_token_id) == (BEGIN, [END])


def test_training_beyond_the_positions_of_an_import_is_said_and_exported(source, tmp_path, capsys):
    imported(source, tmp_path / "ours")
    words = f"--load {tmp_path / 'ours'} --finetune --mock-data --train-iters 1 --eval-iters 0"
    said = {}
    for length in (16, 24):
        run = f"--seq-length {length} --micro-batch-size 1 --lr 1e-3 --device cpu --save {tmp_path / str(length)}"
        pretrain_gpt.main([*words.split(), *run.split()])
        said[length] = [line for line in capsys.readouterr().out.splitlines() if "positions of the model" in line]
    assert said[16] == [] and len(said[24]) == 1 and "--seq-length 24 is more than the 16 positions" in said[24][0]
    huggingface.to_hf(tmp_path / "24" / "iter_0000001", tmp_path / "theirs", torch.float32, {}, check=False)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "theirs").max_position_embeddings == 24


def test_an_import_that_was_tuned_on_short_texts_keeps_its_context(source, tmp_path):
    """Its logits at all positions of the source are those of transformers; a model that began here has its own length."""
    imported(source, tmp_path / "ours")
    run = "--mock-data --train-iters 1 --eval-iters 0 --micro-batch-size 1 --lr 1e-3 --device cpu --seq-length 8"
    pretrain_gpt.main([*run.split(), "--finetune", "--load", str(tmp_path / "ours"), "--save", str(tmp_path / "tuned")])
    path = tmp_path / "tuned" / "iter_0000001"
    huggingface.to_hf(path, tmp_path / "theirs", torch.float32, {}, check=False)
    model, tokens = load_model(path), torch.randint(48, (16, 2), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32)
    with torch.no_grad():
        wanted = theirs(tokens.t()).logits.transpose(0, 1)
        assert (model.model.logits(tokens) - wanted).abs().max() < 1e-4 and model.longest == 16
    shape = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 48 --position-embedding-type rope"
    pretrain_gpt.main(
        [*run.split(), *shape.split(), "--max-position-embeddings", "16", "--save", str(tmp_path / "own")]
    )
    assert load_model(tmp_path / "own").longest == 8


def test_token_files_of_an_import_have_the_ids_of_transformers(source, tmp_path, capsys):
    """By --load, of an import and of a run; and by --tokenizer-model with the folder of the import."""
    imported(source, tmp_path / "ours")
    (tmp_path / "text.jsonl").write_text('{"text": "abc"}\n{"text": "xyz"}\n')
    run = "--finetune --mock-data --train-iters 1 --eval-iters 0 --micro-batch-size 1 --lr 1e-3 --device cpu"
    pretrain_gpt.main([*run.split(), "--load", str(tmp_path / "ours"), "--save", str(tmp_path / "run")])
    theirs = transformers.AutoTokenizer.from_pretrained(source)
    expected = [id for text in ("abc", "xyz") for id in (*theirs(text)["input_ids"], END)]
    for number, words in enumerate((["--load", "ours"], ["--load", "run"], ["--tokenizer-model", "ours"])):
        out = tmp_path / f"out{number}"
        given = [words[0], str(tmp_path / words[1])]
        line = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(out), "--append-eod", "--workers", "1"]
        preprocess_data.main([*line, *given])
        assert np.fromfile(f"{out}_text_document.bin", np.uint16).tolist() == expected, words
    show = f"--data-path {out}_text_document --train-samples 2 --seq-length 3 --split 1,0,0 --first 1 --text"
    dump_samples.main([*show.split(), "--load", str(tmp_path / "ours")])
    (shown,) = map(json.loads, capsys.readouterr().out.splitlines()[-1:])
    assert shown["text"] == theirs.decode(shown["tokens"])
    for folder, said in ((source, f"--tokenizer-model {source} reads"), (tmp_path / "none", "holds no checkpoint")):
        with pytest.raises(Failure) as raised:
            preprocess_data.main([*line, "--load", str(folder)])
        assert said in str(raised.value)


def test_special_ids_of_a_gguf_are_those_of_llama_cpps_converter(source, tmp_path):
    """Which reads them with `SpecialVocab`: the tokenizer's, and those of config.json where it has none (Qwen's begin)."""
    gguf = pytest.importorskip("gguf")
    from megatron.tools import export

    imported(source, tmp_path / "ours")
    export.main(f"--load {tmp_path / 'ours'} --output {tmp_path / 'out'} --format gguf --no-check".split())
    fields = gguf.GGUFReader(tmp_path / "out" / "model.gguf").fields
    found = {name: fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("bos", "eos", "padding")}
    theirs = gguf.SpecialVocab(source).special_token_ids
    assert found == dict(bos=theirs["bos"], eos=theirs["eos"], padding=theirs["pad"])
    assert theirs["bos"] == BEGIN != theirs["eos"]


def test_trained_models_keep_what_their_source_said():
    """Special ids belong to the tokenizer: with another one they are left out."""
    source = dict(name="org/model", license=None) | source_config({**SAID, "vocab_size": 48}, "print")
    record = dict(source=source, state=dict(iteration=0))
    tuned = lineage(record, "runs/base")
    again = lineage(tuned, "runs/tuned")
    of_peft = dict(source=dict(name="adapters", license=None), **lineage(record, "runs/base"))
    for one in (record, tuned, again, of_peft):
        assert imported_config(one, "print") == SAID
        assert imported_config(one, "other") == dict(initializer_range=RANGE)
    earlier = dict(source=dict(name="org/model", license=None))
    assert imported_config({}, "print") == imported_config(earlier, "print") == {}


def test_the_base_of_adapters_is_named_where_it_is_known(source):
    def base(name, iteration=0, folder="/nowhere", **more):
        reader = object.__new__(peft.ReaderWithBase)
        said = dict(name=name, license=None) | source_config(SAID, None)
        state = dict(source=said, iteration=iteration, origin=f"Hugging Face qwen3 in {folder}", **more)
        reader.base = SimpleNamespace(state=state)
        return peft._base_of(reader)

    assert base("org/model") == "org/model"
    assert base("qwen", folder=source) == str(source)
    assert base("qwen") is None
    # Trained since
    assert base("org/model", iteration=5) is base("org/model", started_from=dict(path="runs/a")) is None


def test_a_folder_without_a_model_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    error = refused("from-hf", tmp_path / "empty", tmp_path / "out")
    assert error.code == 5 and "empty: not a model's folder: no config.json" in str(error)
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    assert "from-peft imports adapters" in str(refused("from-hf", tmp_path / "empty", tmp_path / "out"))


def test_other_paths_are_named(source, tmp_path):
    imported(source, tmp_path / "ours")
    for path, said in (
        (source / "model.safetensors", "not a model's folder, but a file\n  -> give the folder with config.json"),
        (tmp_path / "ours", f"it holds a checkpoint of this suite: --load {tmp_path / 'ours'}"),
        (tmp_path / "ours" / "iter_0000000", "it holds a checkpoint of this suite"),
    ):
        error = refused("from-hf", path, tmp_path / "out")
        assert said in str(error) and error.code == 5
    exported = failure_of(lambda: generate.main(["--load-exported", str(tmp_path / "ours"), "--prompt", "a"]))
    assert f"it holds a checkpoint of this suite: --load {tmp_path / 'ours'}" in str(exported)


def weights_with(folder, change) -> str:
    """Change the first matrix of attention in the files; returns its name."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if "q_proj" in name)
    weights[name] = change(weights[name])
    save_file(weights, file, dict(format="pt"))
    return name


def with_hole(weight):
    weight[1, 2] = float("nan")
    return weight


@pytest.mark.parametrize(
    "change, said",
    [(with_hole, "NaN or infinity in {}: the model cannot compute"), (torch.Tensor.char, "is in int8: whole numbers")],
)
def test_numbers_that_are_no_weights_are_named(copy, tmp_path, change, said):
    name = weights_with(copy, change)
    error = str(refused("from-hf", copy, tmp_path / "out"))
    assert name in error and said.format(name) in error and "get its files again" in error
    assert not (tmp_path / "out").exists()


def config_with(folder, name="config.json", **more):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | more))


@pytest.mark.parametrize(
    "more, said",
    [
        (
            dict(quantization_config=dict(quant_method="gptq", bits=4)),
            "weights quantized with gptq .*, which are not read",
        ),
        (dict(hidden_size="16"), "transformers cannot run this model\n  .*'hidden_size' expected int"),
    ],
)
def test_a_config_that_cannot_be_is_named(copy, tmp_path, more, said):
    config_with(copy, **more)
    assert re.search(said, str(refused("from-hf", copy, tmp_path / "out")))


@pytest.mark.parametrize(
    "more, said",
    [
        (dict(eos_token_id="</s>"), "eos_token_id '</s>' is no number of a token"),
        (dict(temperature=-1.0), "temperature -1.0: has to be 0"),
        (dict(top_p="much"), "not supported between"),
    ],
)
def test_a_generation_config_that_cannot_be_is_named(copy, tmp_path, more, said):
    """By the import, and by what reads an import."""
    imported(copy, tmp_path / "ours")
    for folder in (copy, tmp_path / "ours"):
        config_with(folder, "generation_config.json", **more)
    other = tmp_path / "ours" / "generation_config.json"
    reads = lambda: generate.main(["--load", str(tmp_path / "ours"), "--prompt", "a", "--device", "cpu"])
    for file, error in ((copy / other.name, refused("from-hf", copy, tmp_path / "out")), (other, failure_of(reads))):
        assert str(error).startswith(str(file)) and said in str(error) and "-> repair or remove it" in str(error)


def failure_of(call):
    with pytest.raises(Failure) as raised:
        call()
    return raised.value


def test_what_an_import_lacks_is_said(copy, tmp_path):
    """An end that the model does not have; a tokenizer of which a part is there."""
    config_with(copy, "generation_config.json", eos_token_id=[END, 4800])
    (copy / "tokenizer.json").unlink()
    said = "\n".join(imported(copy, tmp_path / "out"))
    assert "generation_config.json: eos_token_id 4800 is no token, the model has 48: it ends no text" in said
    assert "holds no tokenizer: tokenizer_config.json is there without tokenizer.json" in said
    (copy / "tokenizer_config.json").unlink()
    assert f"{copy} holds no tokenizer: commands that read text need --tok" in "\n".join(
        imported(copy, tmp_path / "two")
    )


def test_a_chat_template_that_is_no_text_is_named(copy, tmp_path):
    config_with(copy, "tokenizer_config.json", chat_template=5)
    said = str(refused("from-hf", copy, tmp_path / "out"))
    assert said.startswith(f"{copy / 'tokenizer_config.json'}: chat_template is no text") and "repair" in said


def test_a_cut_tokenizer_is_named_with_the_place(copy, tmp_path):
    file = copy / "tokenizer.json"
    file.write_text(file.read_text()[:60])
    said = str(refused("from-hf", copy, tmp_path / "out"))
    assert said.startswith(f"{file}: not a tokenizer.json") and "line" in said and "column" in said
    assert "--tokenizer-model" not in said


def test_a_broken_chat_template_has_a_line(copy, tmp_path):
    (copy / "chat_template.jinja").write_text("a\n{% if x %}\n{{ 3 + }}\n{% endif %}")
    said = str(refused("from-hf", copy, tmp_path / "out"))
    assert "not a chat template" in said and "line 3: " in said
    assert "repair" in said and "--chat-template" not in said  # which from-hf does not have


def test_a_mistyped_flag_of_a_command_with_few_lists_them(tmp_path):
    said = str(refused("from-hf", tmp_path, tmp_path / "out", "--dtyp", "bf16"))
    assert "unknown flag --dtyp; there are --ckpt-step, --mtp-num-layers, --unchecked" in said


def test_generate_downloads_a_name_of_the_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="hf://Org/Nope is not in the cache of the hub"):
        generate.main(["--load-exported", "hf://Org/Nope", "--prompt", "a"])
    with pytest.raises(UsageError, match="import it: .*need no import: --load-exported hf://Org/Nope"):
        generate.main(["--load", "hf://Org/Nope", "--prompt", "a"])


def test_pickled_weights_are_refused_with_a_command_that_saves_them_again(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(Failure) as refused:
        hf_files.TensorFiles(tmp_path)
    assert f"f = '{tmp_path}'; M.from_pretrained(f).save_pretrained(f)" in str(refused.value)


def test_parameters_are_counted_as_transformers_counts_them(tmp_path, capsys):
    """Counters of a router are none: of an import, and of its checkpoint."""
    config = transformers.AutoConfig.for_model("mixtral", **COMMON | CASES["mixtral"])
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "hf")
    tool.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "ours"), "--unchecked"])
    assert f" of {theirs.num_parameters():,} parameters" in capsys.readouterr().out
    tool.main(["inspect", str(tmp_path / "ours")])
    assert f"  {theirs.num_parameters():,} parameters, " in capsys.readouterr().out
