# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint in and out, against plain loops of PyTorch that train the same Llama (`plain_titan`)."""

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import pretrain_gpt
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.convert import torchtitan_names
from megatron.convert.dcp_files import DCPFolder
from megatron.convert.megatron_optimizer import MOMENTS
from megatron.errors import CheckpointError, SettingsError
from megatron.optimizer.scaler import LossScaler
from megatron.settings import schema
from megatron.settings.parse import parse_pretrain
from megatron.tools import checkpoint as tool
from megatron.training.loop import pretrain
from megatron.training.rules import resolve
from megatron.training.state import State
from tests.inference import plain_titan as plain
from tests.inference.test_convert import LAYERS, LLAMA, TIED, H, Runs, V, assert_same, loaded, save, weights_of

GEMMA = LLAMA | TIED | dict(swiglu=False, geglu=True, scale_embedding=True)


class Samples:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return plain.rows(100).numpy()[index]


@pytest.fixture(autouse=True)
def own_samples(monkeypatch):
    """Pretraining of GPTs here takes the plain loop's samples."""
    own = replace(pretrain_gpt.recipe(), build_datasets=lambda *_: (Samples(), None, None), own_data=True)
    monkeypatch.setattr(pretrain_gpt, "recipe", lambda: own)


def train_on(rank, folder, steps, *more):
    """Resume the checkpoint of a folder on this rank, up to so many steps."""
    own = pretrain_gpt.recipe()
    flags = (
        f"--use-checkpoint-args --load {folder} --save {folder} --vocab-size {plain.V - 1} --seq-length {plain.S} "
        f"--global-batch-size {plain.BATCH} --train-iters {steps} --lr {plain.LR} --lr-decay-style constant "
        f"--weight-decay {plain.DECAY} --adam-beta2 {plain.BETAS[1]} --adam-eps {plain.ADAM_EPS} --precision fp32 "
        f"--eval-iters 0 --log-interval 1 --device cpu --num-workers 0 --metrics-file {folder}/metrics.jsonl"
    )
    words = [*flags.split(), *more]
    settings = parse_pretrain(words, own.groups, defaults={"model_type": own.model_type})
    pretrain(resolve(settings, torch.distributed.get_world_size()), own)


def steps_of(folder) -> list[tuple[float, float]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["lm loss"], record["grad_norm"]) for record in records if "lm loss" in record]


def assert_near(found, wanted):
    assert len(found) == len(wanted) > 0
    for (loss, norm), (their_loss, their_norm) in zip(found, wanted, strict=True):
        assert loss == pytest.approx(their_loss, rel=1e-6) and norm == pytest.approx(their_norm, rel=1e-5)


def titan(fused):
    return lambda rank: plain.Trainer(rank, plain.Titan(fused))


def automodel(rank):
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(**plain.CONFIG, attn_implementation="sdpa")
    return plain.AutomodelTrainer(rank, transformers.LlamaForCausalLM(config))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "names, trainer", [("torchtitan-0.2", titan(False)), ("torchtitan", titan(True)), ("automodel", automodel)]
)
def test_a_run_goes_on_here_and_there_again(run_ranks, tmp_path, names, trainer, capsys):
    """Two steps there, two here over tp 2, two there: as six there."""
    if names == "automodel":
        pytest.importorskip("transformers")

    def there(rank):
        own = trainer(rank)
        own.train(2)
        own.save(tmp_path / "theirs")
        return own.train(4)

    [wanted, _] = run_ranks(2, there)
    (tmp_path / "config.json").write_text(json.dumps(plain.CONFIG))
    asked = ["--hf-config", str(tmp_path), "--global-batch-size", str(plain.BATCH)]
    tool.main(["from-dcp", str(tmp_path / "theirs"), str(tmp_path / "ours"), *asked])
    assert "optimizer state of iteration 2, after 2 updates and 8 samples" in capsys.readouterr().out
    run_ranks(2, train_on, tmp_path / "ours", 4, "--tensor-model-parallel-size", "2")
    assert_near(steps_of(tmp_path / "ours"), wanted[:2])
    tool.main(["to-dcp", str(tmp_path / "ours"), str(tmp_path / "back"), "--names", names])
    assert "read back" in capsys.readouterr().out

    def again(rank):
        own = trainer(rank)
        [folder] = (path for path in (tmp_path / "back").iterdir() if path.is_dir())
        own.load(folder)
        assert own.optimizer.param_groups[0]["betas"] == plain.BETAS and own.step == 4
        return own.train(2)

    assert_near(run_ranks(2, again)[0], wanted[2:])


# ---------------------------------------------------------------------------------------------------- there and back


def checkpoint(folder, model, moments=True, **settings):
    """A checkpoint of iteration 7 with Adam's state; returns its tensors."""
    own = weights_of(model)
    pairs = ((f"optimizer.{kind}.{name}", x.abs() + n) for n, kind in enumerate(MOMENTS) for name, x in own.items())
    own |= dict(pairs) if moments else {}
    pieces = [Piece(name, tuple(x.shape), Box.whole(x.shape), x) for name, x in own.items()]
    record = asdict(schema.from_record(dict(model=model, **settings)))
    state = State(LossScaler.of(schema.Precision()), iteration=7, consumed_samples=28, scheduled_samples=24).record()
    with Saver(folder) as saver:
        saver.write(7, [pieces], dict(config=record, vocab_size=V, optimizer_steps=6, state=state))
    return own


@pytest.mark.sampled(10)
@pytest.mark.parametrize("names", ["torchtitan", "torchtitan-0.2", "automodel"])
@pytest.mark.parametrize("model", [LLAMA, LLAMA | TIED, GEMMA], ids=["llama", "tied", "gemma"])
def test_there_and_back_keeps_every_bit(tmp_path, names, model, capsys):
    """With a schedule whose rate of the next step stands in the groups."""
    schedule = dict(lr=0.5, lr_decay_style="linear", lr_decay_iters=10, adam_beta1=0.8, weight_decay=0.25)
    batch = dict(global_batch_size=4, train_iters=10)
    own = checkpoint(tmp_path / "ours", model, model is not GEMMA, optimizer=schedule, batch=batch)
    words = ["to-dcp", str(tmp_path / "ours"), str(tmp_path / "out"), "--names", names]
    if model is GEMMA and names != "automodel":
        with pytest.raises(SettingsError, match="a gemma in torchtitan's names is not converted"):
            tool.main(words)
        return
    tool.main(words)
    batch = ["--global-batch-size", "4"]
    tool.main(["from-dcp", str(tmp_path / "out"), str(tmp_path / "back"), *batch])
    back = loaded(tmp_path / "back")
    if model is GEMMA:  # whose norms are 1 less in the files
        assert set(back) == set(own) and all(torch.allclose(back[name], x, atol=1e-6) for name, x in own.items())
        return
    assert_same(back, own)
    [path] = checkpoints(tmp_path / "back").values()
    with Reader(path) as reader:
        optimizer, state = reader.state["config"]["optimizer"], reader.state["state"]
        assert reader.state["optimizer_steps"] == state["iteration"] == 6 and state["consumed_samples"] == 24
        assert reader.state["vocab_size"] == V and reader.state["config"]["batch"] == {"global_batch_size": 4}
    assert (optimizer["lr"], optimizer["adam_beta1"], optimizer["weight_decay"]) == (0.5, 0.8, 0.25)
    folder = tmp_path / "out" / ("epoch_0_step_7" if names == "automodel" else "step-7")
    groups = DCPFolder(folder / "optim" if names == "automodel" else folder).groups
    norms = {name for name in groups if "norm" in name}
    assert len(norms) == 2 * LAYERS + 1 and all(
        groups[name]["weight_decay"] == (name not in norms) / 4 for name in groups
    )
    assert all(group["lr"] == pytest.approx(0.5 * (1 - 24 / 40)) for group in groups.values())
    assert "weight decay" not in capsys.readouterr().out
    tool.main(["from-dcp", str(tmp_path / "out"), str(tmp_path / "weights"), "--no-load-optim"])
    assert_same(loaded(tmp_path / "weights"), {name: x for name, x in own.items() if "optimizer" not in name})


def change(folder, edit):
    """Rewrite a folder of DCP after `edit` of its flat content."""
    content = {}
    reader, planner = dcp.FileSystemReader(folder), _EmptyStateDictLoadPlanner()
    _load_state_dict(content, storage_reader=reader, planner=planner, no_dist=True)
    flat, _ = flatten_state_dict(content)
    edit(flat)
    shutil.rmtree(folder)
    dcp.save(flat, checkpoint_id=folder, no_dist=True)


@pytest.mark.sampled(10)
def test_what_is_missing_or_other_is_named(tmp_path, capsys):
    checkpoint(tmp_path / "ours", dict(LLAMA, num_layers=2))
    tool.main(["to-dcp", str(tmp_path / "ours"), str(tmp_path / "out"), "--names", "torchtitan-0.2"])
    whole, batch = tmp_path / "out" / "step-7", ["--global-batch-size", "4"]

    def refused(told, edit=lambda flat: None, words=batch, of=CheckpointError, config=lambda text: text):
        folder = tmp_path / "changed"
        shutil.copytree(tmp_path / "out", folder)
        change(folder / "step-7", edit)
        (folder / "config.json").write_text(config((folder / "config.json").read_text()))
        with pytest.raises(of, match=told):
            tool.main(["from-dcp", str(folder), str(tmp_path / "back"), *words])
        assert not (tmp_path / "back").exists()
        shutil.rmtree(folder)

    name = "layers.1.attention.wk.weight"
    refused("how many samples a step has", words=[])
    refused("has no checkpoint of step 3; it has .7.", words=[*batch, "--ckpt-step", "3"])
    refused(f"{name}: missing", lambda flat: flat.pop(name))
    refused("extra.weight: unknown", lambda flat: flat.update({"extra.weight": torch.ones(2)}))
    refused("config.json says .40, 32.", config=lambda text: text.replace('size": 48', 'size": 40'))
    refused(f"has nothing for exp_avg_sq of {name}", lambda flat: flat.pop(f"optimizer.state.{name}.exp_avg_sq"))
    refused("lm_head.*which the model does not have", lambda flat: flat.update(more_state(flat)))
    refused("not the state of Adam", lambda flat: [flat.pop(key) for key in list(flat) if key.endswith(".exp_avg_sq")])
    step = f"optimizer.state.{name}.step"
    refused("does not say how many updates", lambda flat: flat.update({step: torch.tensor(9.0)}))
    runs = {f"optimizer.param_groups.{name}.lr": Runs(tmp_path / "ran")}
    refused("was refused", lambda flat: flat.update(runs))
    assert not (tmp_path / "ran").exists()

    (tmp_path / "alone").mkdir()
    whole = whole.rename(tmp_path / "alone" / whole.name)
    change(whole, lambda flat: flat.update({"optimizer.param_groups.norm.weight.weight_decay": 0.1}))
    tool.main(["from-dcp", str(whole), str(tmp_path / "decayed"), *batch, "--hf-config", str(tmp_path / "out")])
    assert "norms had weight decay 0.1: here they have none" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="does not say how many heads"):
        tool.main(["from-dcp", str(whole), str(tmp_path / "back")])
    next(whole.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        tool.main(["from-dcp", str(whole.parent), str(tmp_path / "back"), *batch, "--hf-config", str(tmp_path / "out")])


def more_state(flat):
    return {f"optimizer.state.lm_head.weight.{kind}": flat["norm.weight"].clone() for kind in MOMENTS}


def test_what_has_no_place_there_is_refused(tmp_path, monkeypatch):
    checkpoint(tmp_path / "gemma", GEMMA)
    with pytest.raises(SettingsError, match="moments are not exported"):
        tool.main(["to-dcp", str(tmp_path / "gemma"), str(tmp_path / "out"), "--names", "automodel"])
    save(tmp_path / "ours", LLAMA, {"optimizer.momentum_buffer.final_norm.weight": torch.ones(H)})
    with pytest.raises(SettingsError, match="not Adam alone"):
        tool.main(["to-dcp", str(tmp_path / "ours"), str(tmp_path / "out")])
    monkeypatch.setattr(torchtitan_names, "_pairs", lambda x, heads: x)
    with pytest.raises(CheckpointError, match=f"read back as another model: {LAYERS} differences"):
        tool.main(["to-dcp", str(tmp_path / "ours"), str(tmp_path / "out"), "--weights-only"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemma", "ours"]


def test_weights_of_a_plain_state_dictionary(tmp_path):
    """{"model": ...} in one folder, and an interleaved cut by columns that FSDP never makes."""
    torch.manual_seed(0)
    whole = plain.Titan(False).state_dict()
    dcp.save(dict(model=whole), checkpoint_id=tmp_path / "theirs", no_dist=True)
    dcp.save(whole, checkpoint_id=tmp_path / "flat", no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(plain.CONFIG))
    for name in ("theirs", "flat"):
        tool.main(["from-dcp", str(tmp_path / name), str(tmp_path / f"of_{name}"), "--hf-config", str(tmp_path)])
    assert_same(loaded(tmp_path / "of_theirs"), loaded(tmp_path / "of_flat"))
    assert torch.equal(
        loaded(tmp_path / "of_flat")["blocks.1.mlp.up.weight"][1], whole["layers.1.feed_forward.w3.weight"]
    )
