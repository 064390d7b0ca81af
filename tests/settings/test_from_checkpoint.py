# SPDX-License-Identifier: Apache-2.0
"""--use-checkpoint-args, and --finetune without a shape: the model's shape and its tokenizer are the checkpoint's."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import SettingsError, UsageError
from megatron.guard import command
from megatron.guard.resume_command import resumed
from megatron.model.command_line import parse_any
from megatron.settings import from_checkpoint, reader
from megatron.settings.from_checkpoint import shape_of
from megatron.settings.parse import said
from megatron.tools.generate import GenerateOptions
from tests.models import mlp_language_model

SHAPE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --num-query-groups 2 --group-query-attention --seq-length 12 "
    "--swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 500 --disable-bias-linear "
    "--hidden-dropout 0.25 --attention-dropout 0 --qk-layernorm"
)
REST = "--micro-batch-size 2 --lr 1e-2 --eval-iters 0 --device cpu --num-workers 0 --mock-data --lr-decay-iters 9"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    pretrain_gpt.main(f"{SHAPE} {REST} --vocab-size 50 --train-iters 1 --save {folder}".split())
    return folder


def model_of(folder: Path, iteration: int = 1) -> dict:
    with Reader(folder / f"iter_{iteration:07d}") as reader:
        return reader.state["config"]["model"]


@pytest.mark.parametrize("flag", ["--finetune", "--use-checkpoint-args", "--finetune --use-checkpoint-args"])
def test_the_shape_is_the_checkpoints(flag, saved, tmp_path, capsys):
    """The new checkpoint's own record of its model is compared with that of the first."""
    pretrain_gpt.main(f"{REST} --train-iters 2 --load {saved} --save {tmp_path} {flag}".split())
    iteration = 2
    assert model_of(tmp_path, iteration) == model_of(saved)
    with Reader(tmp_path / f"iter_{iteration:07d}") as new, Reader(saved / "iter_0000001") as old:
        assert new.state["config"]["tokenizer"] == old.state["config"]["tokenizer"]
        assert new.state["vocab_size"] == old.state["vocab_size"] == 51
        started = 0 if "--finetune" in flag else 1
        assert new.state["state"]["consumed_samples"] == 2 * (2 - started) + 2 * started
    origin = "--use-checkpoint-args" if "use" in flag else "--finetune"
    words = f"the shape of the model, and its tokenizer, are those of {saved / 'iter_0000001'} ({origin})"
    assert capsys.readouterr().err.count(words) == 1


def test_what_somebody_gives_wins(saved, tmp_path):
    (tmp_path / "run.yaml").write_text("rotary_base: 9000\nvocab_size: 77\n")
    line = (
        f"{REST} --load {saved} --use-checkpoint-args --seq-length 20 --hidden-dropout 0 --config {tmp_path}/run.yaml"
    )
    config = parse_any(line.split())
    found = config.model
    assert (found.seq_length, found.hidden_dropout, found.rotary_base) == (20, 0.0, 9000)
    assert (found.num_layers, found.swiglu, found.num_query_groups) == (2, True, 2)
    assert config.tokenizer.vocab_size == 77
    assert not config.given("num_layers") and config.given("seq_length")
    assert config.said("num_layers").origin.startswith("--use-checkpoint-args")
    other = parse_any(f"{REST} --load {saved} --finetune --tokenizer-type NullTokenizer".split())
    assert other.tokenizer.vocab_size is None  # nothing of the checkpoint's tokenizer
    with pytest.raises(SettingsError, match="--num-layers: 2 in the checkpoint, 3 now"):
        pretrain_gpt.main(f"{REST} --train-iters 1 --load {saved} --use-checkpoint-args --num-layers 3".split())


def test_files_of_the_tokenizer_may_have_moved():
    tokenizer = dict(tokenizer_type="GPT2BPETokenizer", vocab_file="a", merge_file="b", tokenizer_model=None)
    record = dict(config=dict(model={}, tokenizer=tokenizer))
    taken = lambda *given: {name for name in shape_of(record, {}, set(given)) if name != "model"}
    assert taken("vocab_file") == {"tokenizer_type", "merge_file"}
    assert taken("vocab_file", "merge_file") == {"tokenizer_type"}
    assert taken("tokenizer_model") == taken("tokenizer_type") == set()  # it is another one
    assert taken("vocab_size") == {"tokenizer_type", "vocab_file", "merge_file"}  # the rows of the embedding


def test_a_shape_that_is_given_stays_as_it_was(saved):
    """With --finetune alone a whole shape on the command line means what it meant: defaults for all else."""
    line = f"{REST} --load {saved} --finetune --num-layers 2 --hidden-size 16 --num-attention-heads 4"
    found = parse_any(line.split()).model
    assert (found.swiglu, found.seq_length, found.rotary_base) == (False, 1024, 10000.0)


def test_the_checkpoint_that_is_loaded_is_the_one_that_is_asked(saved, tmp_path):
    folder = tmp_path / "two"
    shutil.copytree(saved, folder)
    pretrain_gpt.main(
        f"{REST} --train-iters 2 --load {saved} --save {tmp_path / 'b'} --finetune --hidden-dropout 0".split()
    )
    shutil.copytree(tmp_path / "b" / "iter_0000002", folder / "iter_0000002")

    def dropout(flags):
        return parse_any(f"{REST} --load {flags} --use-checkpoint-args".split()).model.hidden_dropout

    assert dropout(folder) == 0.25  # the tracker says 1
    assert dropout(f"{folder} --ckpt-step 2") == 0.0 and dropout(folder / "iter_0000002") == 0.0
    (folder / "latest_checkpointed_iteration.txt").unlink()
    assert dropout(folder) == 0.0
    named = f"{REST} --model-name-or-path {folder} --finetune"
    assert parse_any(named.split()).model.hidden_dropout == 0.0


def test_settings_of_a_recipe_that_make_its_model(saved, tmp_path):
    mlp = "tests.models.mlp_language_model"
    line = f"--num-layers 1 --hidden-size 8 --seq-length 6 --mlp-window 3 --vocab-size 20 {REST} --train-iters 1"
    mlp_language_model.main([*line.split(), "--save", str(tmp_path)])
    found = parse_any(f"{REST} --model-type {mlp} --load {tmp_path} --finetune".split())
    assert found.extra["mlp"].mlp_window == 3 and found.model.hidden_size == 8
    with pytest.raises(UsageError, match=f"holds a model of type {mlp}, and this command trains GPT"):
        parse_any(f"{REST} --load {tmp_path} --finetune".split())
    with pytest.raises(UsageError, match=r'of type GPT, .* if it has starts_from=\("GPT",\)'):
        parse_any(f"{REST} --model-type {mlp} --mlp-window 3 --load {saved} --finetune".split())


def test_a_folder_in_place_of_a_shapes_name(tmp_path, saved):
    """PaddleNLP's --model_name_or_path: a name, or a checkpoint, which brings its shape."""
    config = parse_any(f"{REST} --model_name_or_path {saved}".split())
    assert config.model == replace(
        parse_any(f"{REST} --load {saved} --use-checkpoint-args".split()).model, model_name_or_path=str(saved)
    )
    assert config.checkpoint.load == str(saved) and config.model.num_layers == 2
    given = parse_any(f"{REST} --model_name_or_path {saved} --num-layers 5".split())
    assert (given.model.num_layers, given.model.hidden_size) == (5, config.model.hidden_size)
    with pytest.raises(UsageError) as refused:
        parse_any(f"{REST} --model_name_or_path {tmp_path}".split())
    said = (
        f"--model-name-or-path {tmp_path}: no shape of a model can be taken from --load: {tmp_path} holds no checkpoint"
    )
    assert said in str(refused.value)


def test_where_there_is_no_checkpoint(tmp_path, saved):
    with pytest.raises(UsageError) as refused:
        parse_any(f"{REST} --load {tmp_path} --finetune".split())
    assert f"no shape of a model can be taken from --load: {tmp_path} holds no checkpoint" in str(refused.value)
    assert "missing" not in str(refused.value)  # a shape would not help
    with pytest.raises(UsageError, match="has no checkpoint of iteration 7"):
        parse_any(f"{REST} --load {saved} --finetune --ckpt-step 7".split())
    with pytest.raises(UsageError, match="or the checkpoint.s: --finetune for a new run .* --use-checkpoint-args"):
        parse_any(f"{REST} --load {saved}".split())
    # A new run whose command goes on with itself.
    assert parse_any(f"{REST} {SHAPE} --load {tmp_path} --use-checkpoint-args".split()).model.num_layers == 2
    damaged = tmp_path / "damaged"
    shutil.copytree(saved, damaged)
    path = damaged / "iter_0000001" / "state.json"
    path.write_text(path.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(UsageError, match="is damaged"):
        parse_any(f"{REST} --load {damaged} --finetune".split())


def test_a_supervised_run_goes_on_with_the_shape(saved, tmp_path):
    words = f"torchrun pretrain_gpt.py {REST} --load {saved} --finetune --save {tmp_path}".split()
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    again = resumed(words, str(tmp_path))
    found = command.config_of(again)
    assert found.model.num_layers == 2 and found.model.rotary_base == 500
    assert (found.checkpoint.load, found.checkpoint.finetune) == (str(tmp_path), False)
    whole = f"torchrun pretrain_gpt.py {REST} {SHAPE} --load {saved} --finetune --save {tmp_path}".split()
    assert "--use-checkpoint-args" not in resumed(whole, str(tmp_path))


def test_what_from_hf_advises_trains(tmp_path, capsys):
    """The printed words, as they stand, behind data and a learning rate."""
    transformers = pytest.importorskip("transformers")
    from megatron.tools import checkpoint

    sizes = dict(vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "hf")
    checkpoint.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "own")])
    [advice] = [line for line in capsys.readouterr().out.splitlines() if "train on with" in line]
    flags = advice.partition("train on with ")[2].split()
    pretrain_gpt.main([*REST.split(), "--train-iters", "1", "--save", str(tmp_path / "new"), *flags])
    record = json.loads((tmp_path / "new" / "iter_0000001" / "state.json").read_text())
    found = record["config"]["model"]
    assert (found["num_layers"], found["hidden_size"], found["num_attention_heads"]) == (2, 16, 2)
    assert (found["seq_length"], record["vocab_size"], record["state"]["iteration"]) == (16, 60, 1)


@pytest.mark.parametrize(
    "line, is_refused",
    [
        ("--num-layers 3", False),  # those of the encoder
        ("--num-layers 5", True),  # of both together
        ("--window-size (4,0) --ffn-hidden-size 32 --max-position-embeddings 16", False),
        ("--window-size 5,0", True),
        ("--kv-channels 4 --num-query-groups 2 --swiglu false", False),
        ("--swiglu", True),
    ],
)
def test_what_is_said_of_a_model_is_compared_with_its_record(line, is_refused, monkeypatch):
    """A model of 3 encoder and 2 decoder layers. What it was made with, or has by default, is no other model."""
    model = dict(num_layers=5, hidden_size=8, num_attention_heads=2, seq_length=16, window_size="4,0")
    record = dict(config=dict(model=model, extra=dict(t5=dict(encoder_num_layers=3, decoder_num_layers=2))))
    monkeypatch.setattr(from_checkpoint, "saved_record", lambda folder, step: ("there", record))
    chosen = said(["--load", "x", *line.split()], dict(generate=GenerateOptions))
    shape = {name: one for name, one in chosen.items() if name in reader.SHAPE}
    assert len(shape) == line.count("--")
    if is_refused:
        with pytest.raises(SettingsError, match="there holds another model"):
            from_checkpoint.refuse_another_shape(shape, chosen)
    else:
        from_checkpoint.refuse_another_shape(shape, chosen)
