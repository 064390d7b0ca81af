# SPDX-License-Identifier: Apache-2.0
"""The guards' arithmetic and words: spikes, exits, changed settings, stacks, command lines, accounts."""

import json
import random
import shlex
import textwrap
import traceback
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import sampler
from megatron.errors import SettingsError, UsageError
from megatron.guard import changes, command
from megatron.guard.beat_files import Beat
from megatron.guard.exits import Action, codes_in_log, judge
from megatron.guard.goodput import Attempt, account
from megatron.guard.resume_command import COMMAND, newest_checkpoint, resume_command, resumed
from megatron.guard.spikes import ENOUGH, Recent, robust_score
from megatron.guard.stacks import Frame, Standstill, explain, parse, parse_spied, spans
from megatron.mpu import collectives
from megatron.mpu.mesh import Axis
from megatron.planner import replan
from megatron.settings.schema import Checkpoint, from_record

# ---- the ledger ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**40), st.randoms())
@settings(max_examples=50)
def test_any_split_of_a_step_has_the_same_hash(parts, each, start, shuffle):
    rows = np.random.default_rng(start).integers(0, 50000, (parts * each, 9))
    places = list(range(start, start + len(rows)))
    whole = sampler.batch_hash(places, rows)
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    split = [sampler.batch_hash([places[i] for i in order[p::parts]], rows[order[p::parts]]) for p in range(parts)]
    assert sampler.sum_hashes(split) == whole
    as_fp64 = np.sum(np.array(split, np.float64), axis=0)  # as ranks add them up
    assert sampler.to_hex(as_fp64) == sampler.to_hex(whole)


def test_a_shifted_repeated_or_changed_sample_shows():
    rows = np.random.default_rng(0).integers(0, 50000, (4, 9))
    hashes = {
        "right": sampler.batch_hash(range(4), rows),
        "off by one": sampler.batch_hash(range(1, 5), rows),
        "swapped": sampler.batch_hash(range(4), rows[[1, 0, 2, 3]]),
        "repeated": sampler.batch_hash([0, 1, 2, 2], rows[[0, 1, 2, 2]]),
        "skipped": sampler.batch_hash(range(3), rows[:3]),
        "a token": sampler.batch_hash(
            range(4), rows + np.eye(4, 9, dtype=np.int64)[[0, 0, 0, 0]] * [[0], [1], [0], [0]]
        ),
    }
    assert len(set(hashes.values())) == len(hashes)


# ---- spikes ----------------------------------------------------------------------------------------------------------


def test_a_deviation_is_the_standard_deviation_of_normal_values():
    normal = NormalDist(mu=5, sigma=2)
    values = tuple(normal.inv_cdf((i + 0.5) / 1000) for i in range(1000))
    assert robust_score(normal.mean + 3 * normal.stdev, values) == pytest.approx((5, 3), rel=1e-2)


def _curve(count, noise, seed):
    source = random.Random(seed)
    return [(3 + 4 * 0.98**step + source.gauss(0, noise), 1 + abs(source.gauss(0, 0.2))) for step in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_a_falling_noisy_curve_has_no_spikes_and_a_jump_is_one(seed):
    recent, found = Recent(), []
    for step, (loss, norm) in enumerate(_curve(600, 0.05, seed)):
        spike = recent.spike(loss + (2 if step == 500 else 0), norm, threshold=10)
        found += [(step, spike.what)] if spike else []
        recent = recent.after(loss, norm, window=128)
    assert found == [(500, "loss")]
    assert len(recent.losses) == len(recent.norms) == 128


def test_the_window_survives_json_and_wild_values_do_not_move_it():
    recent = Recent()
    for step in range(ENOUGH + 8):
        recent = recent.after(1e9 if step % 10 == 3 else 2 + step / 1000, float("nan") if step == 5 else 1.0, window=64)
    again = Recent.of(json.loads(json.dumps(dict(losses=recent.losses, norms=recent.norms))))
    assert again == recent and again.spike(2.0, 1.0, 10) is None and again.spike(4.0, 1.0, 10).what == "loss"
    assert again.spike(2.0, 30.0, 10).what == "gradient norm"


# ---- exits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codes, action, code",
    [
        ([0, 0], Action.DONE, 0),
        ([7, 3], Action.STOP, 3),
        ([1, 4, -15], Action.STOP, 4),
        ([5], Action.STOP, 5),
        ([7, -9], Action.RESTART, -9),
        ([-15, 7], Action.RESTART, 7),
        ([9, 9], Action.PREEMPTED, 9),
        ([1], Action.RESTART, 1),
        ([9, -9], Action.RESTART, -9),
        ([8, 7], Action.STOP, 8),
        ([77], Action.RESTART, 77),
        ([-11], Action.RESTART, -11),
        ([6, 7], Action.RESTART, 6),
        ([10], Action.STOP, 10),
        ([7, 130], Action.PREEMPTED, 130),
    ],
)
def test_what_an_end_asks_for(codes, action, code):
    assert judge(codes)[::2] == (action, code)


def test_codes_are_read_from_torchruns_last_words():
    text = """
      rank      : 1 (local_rank: 1)
      exitcode  : 3 (pid: 4242)
    Root Cause (first observed failure):
      exitcode  : -9 (pid: 4243) (SIGKILL)
    """
    assert codes_in_log(text) == {4242: 3, 4243: -9}


# ---- changed settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["data_path", "train_data_path", "valid_data_path", "test_data_path"])
def test_one_place_of_data_by_several_names(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    saved = _record(_config(data={name: ["0.3", "./data", "0.7", "s3://bucket//data"]}))
    for first in ("data", "data/", "x/../data", f"{tmp_path}/data"):
        now = _config(data={name: ["0.3", first, "0.7", "s3://bucket//data"]})
        assert changes.changes(now, saved) == []
    for other in (["0.3", "data2", "0.7", "s3://bucket//data"], ["0.3", "data", "0.7", "s3://bucket/data"], ["data"]):
        assert [one.name for one in changes.changes(_config(data={name: other}), saved)] == [name]


def _config(**changed):
    model = dict(num_layers=2, hidden_size=8, num_attention_heads=2, max_position_embeddings=512)
    record = dict(model=model, data=dict(data_path=["a"]))
    for group, values in changed.items():
        record.setdefault(group, {}).update(values)
    return from_record(record)


def _record(config):
    from dataclasses import asdict

    return json.loads(json.dumps(asdict(config)))


@pytest.mark.parametrize(
    "group, name, value",
    [
        ("data", "data_path", ["b"]),
        ("data", "split", "1,1,1"),
        ("logging", "seed", 7),
        ("model", "seq_length", 99),
        ("tokenizer", "vocab_file", "x"),
        ("model", "num_layers", 3),
        ("data", "dataloader_type", "cyclic"),
    ],
)
def test_dangerous_changes_are_refused_unless_overridden(group, name, value):
    saved, flag = _record(_config()), name.replace("_", "-")
    with pytest.raises(SettingsError, match=f"--{flag}: "):
        changes.refuse_another_run(_config(**{group: {name: value}}), saved)
    advice = f"--override {flag}" + ("" if name in ("data_path", "vocab_file") else ",data-order")
    if name != "num_layers":  # of which there is no other run
        with pytest.raises(SettingsError, match=f"{advice} to continue"):
            changes.refuse_another_run(_config(**{group: {name: value}}), saved)
    allowed = _config(**{group: {name: value}}, guard=dict(override=f"--seed,{flag}"))
    changes.refuse_another_run(allowed, saved)
    assert any(flag in text and "(--override)" in text for text in changes.change_messages(allowed, saved))


def test_a_setting_that_the_checkpoint_does_not_know_had_its_default():
    saved = _record(_config())
    for group, name in (("model", "squared_relu"), ("model", "seq_length"), ("logging", "seed")):
        del saved[group][name]
    changes.refuse_another_run(_config(), {**saved, "logging": saved["logging"] | {"seed": 1234}})
    with pytest.raises(SettingsError, match="--squared-relu: "):
        changes.refuse_another_run(_config(model=dict(squared_relu=True)), saved)
    with pytest.raises(SettingsError, match="--seed: "):
        changes.refuse_another_run(_config(logging=dict(seed=7)), saved)


def test_a_model_alone_begins_a_run_with_finetune():
    """As from-hf writes it: it has no data, so --override would be the wrong advice."""
    with pytest.raises(SettingsError, match="--data-path: .*\n.*-> --finetune: the checkpoint holds a model alone"):
        changes.refuse_another_run(_config(), _record(_config(data=dict(data_path=None))))
    with pytest.raises(SettingsError, match="--override data-path"):
        changes.refuse_another_run(_config(), _record(_config(data=dict(data_path=None, mock_data=True))))


def test_settings_with_which_loaded_weights_compute_something_else_are_named():
    """By a run with --finetune: not lengths, kinds of linear layers and settings of training."""
    saved = _record(_config(model=dict(moe_router_topk=4, norm_epsilon=1e-6, linear=None, hidden_dropout=0.1)))
    named = [
        text.split()[0] for text in changes.other_arithmetic(_config(model=dict(activation_func_clamp_value=7)), saved)
    ]
    assert named == ["--norm-epsilon", "--moe-router-topk", "--activation-func-clamp-value"]
    same = _config(
        model=dict(
            seq_length=64,
            linear="*=lora",
            lora_rank=4,
            sparsity="2:4",
            weight_bits=4,
            use_dora=True,
            hidden_dropout=0.2,
        )
    )
    assert changes.other_arithmetic(same, _record(_config())) == []


def test_no_override_is_advised_where_weights_have_another_shape():
    """Learned positions are rows of a table; rotary ones are none."""
    for name, value in (("max_position_embeddings", 1024), ("max_position_embeddings", None)):
        now = _config(model={name: value}, guard=dict(override="max-position-embeddings"))
        with pytest.raises(
            SettingsError, match=f"of another model(.|\n)*512 in the checkpoint, {value} now"
        ) as refused:
            changes.refuse_another_run(now, _record(_config()))
        assert "--override" not in str(refused.value)
    rope = dict(position_embedding_type="rope")
    with pytest.raises(SettingsError, match="--override max-position-embeddings to continue"):
        changes.refuse_another_run(_config(model=rope | {name: 1024}), _record(_config(model=rope)))


@pytest.mark.parametrize(
    "tokenizer, was, now, advice",
    [
        (dict(tokenizer_type="NullTokenizer", vocab_size=100), 100, 101, "give --vocab-size 99"),
        (dict(vocab_size=90), 100, 90, "give --vocab-size 100"),
        (dict(tokenizer_type="GPT2BPETokenizer"), 120, 100, "give --vocab-size 120"),
        (dict(tokenizer_type="GPT2BPETokenizer"), 90, 100, "give the tokenizer of its run"),
    ],
)
def test_another_number_of_tokens_is_said_in_the_words_of_flags(tokenizer, was, now, advice):
    config = _config(tokenizer=tokenizer)
    with pytest.raises(SettingsError, match=f"a vocabulary of {was}, this run one of {now}(.|\n)*-> {advice}"):
        changes.refuse_other_rows(config, was, now)
    changes.refuse_other_rows(config, now, now)
    changes.refuse_other_rows(config, None, now)  # a checkpoint that does not say


def test_harmless_changes_are_told_and_unchanged_settings_are_not():
    saved = _record(_config(batch=dict(rampup_batch_size=[1, 2, 3])))
    assert changes.change_messages(_config(batch=dict(rampup_batch_size=[1, 2, 3])), saved) == []
    now = _config(batch=dict(rampup_batch_size=[1, 2, 3]), optimizer=dict(lr=0.5), data=dict(num_workers=9))
    changes.refuse_another_run(now, saved)
    assert changes.change_messages(now, saved) == ["--lr was None in the checkpoint, is 0.5 now"]


def test_other_samples_are_refused_and_unknown_overrides_too():
    with pytest.raises(SettingsError, match="differ from the checkpoint's .at 3, 9."):
        changes.refuse_other_samples(_config(), [3, 9])
    assert changes.refuse_other_samples(_config(guard=dict(override="data-order")), [3])
    assert changes.refuse_other_samples(_config(), []) == []
    with pytest.raises(UsageError, match="--override lr"):
        changes.overridden(_config(guard=dict(override="lr")))
    assert changes.probe_places(0) == [] and changes.probe_places(1) == [0] and len(changes.probe_places(1000)) == 8


# ---- stacks ----------------------------------------------------------------------------------------------------------

WAITING = """
Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f2 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2889 in all_reduce
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/x/megatron/mpu/collectives.py", line 25 in all_reduce
  File "/x/megatron/optimizer/zero.py", line 147 in finalize_grads
  File "/x/megatron/training/loop.py", line 77 in train_step
  File "/x/pretrain_gpt.py", line 49 in <module>
"""
LOADING = """
Thread 0x00007f1 (most recent call first):
  File "/x/megatron/data/gpt_dataset.py", line 105 in __getitem__
  File "/x/megatron/data/loader.py", line 116 in micro_batch
  File "/usr/lib/python3.11/concurrent/futures/thread.py", line 58 in run

Current thread 0x00007f2 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 451 in result
  File "/x/megatron/data/loader.py", line 107 in step
  File "/x/pretrain_gpt.py", line 49 in <module>
"""


def _still(rank, phase, text="", state="S", silent=74.0, op="", group=""):
    beat = Beat(rank, "n7", 100 + rank, 1, 5, phase, 17, op=op, group=group)
    return Standstill(beat, silent, state, parse(textwrap.dedent(text)))


def test_a_hang_is_told_in_plain_words_culprit_first():
    ranks = [_still(rank, "reduce", WAITING) for rank in range(8) if rank != 3] + [_still(3, "data", LOADING)]
    assert explain(ranks) == [
        "rank 3 on n7: in the data loader for 74 s, step 17 (data/gpt_dataset.py:105 in __getitem__)",
        "7 ranks (0-2, 4-7) wait in all_reduce (optimizer/zero.py:147 in finalize_grads), step 17",
    ]


def test_a_hang_names_the_group_and_the_op_of_the_schedule():
    group = dict(group="dp group 1", op="B5")
    ranks = [_still(rank, "B", WAITING, **group) for rank in range(8) if rank != 3] + [_still(3, "data", LOADING)]
    assert explain(ranks)[1] == (
        "7 ranks (0-2, 4-7) wait in all_reduce of dp group 1 (optimizer/zero.py:147 in finalize_grads), "
        "step 17, op B micro 5"
    )
    apart = [_still(0, "F", WAITING, group="tp group 0"), _still(1, "F", WAITING, group="tp group 1")]
    assert len(explain(apart)) == 3 and "the network between them" in explain(apart)[-1]
    assert "does not answer" in explain([_still(0, "B", state="?", op="B1.2")])[0]
    assert explain([_still(0, "B", state="?", op="B1.2")])[0].endswith("op B micro 1 chunk 2")


def test_the_main_thread_of_a_module_is_found_too():
    """`python -m module`: the thread of the heartbeat comes first in what faulthandler writes, and is not meant."""
    runpy = '  File "<frozen runpy>", line 88 in _run_code\n  File "<frozen runpy>", line 198 in _run_module_as_main'
    text = WAITING.replace("Current thread", "Thread").replace("<module>", f"<module>\n{runpy}")
    [line, _] = explain([_still(0, "reduce", text)])
    assert line.startswith("rank 0 on n7 waits in all_reduce (optimizer/zero.py:147 in finalize_grads)")


def _spied(*frames):
    """What py-spy writes of a process: another thread, and the main one with these frames."""
    frame = lambda file, line, name: dict(name=name, filename=file, line=line, locals=None)
    other = dict(pid=7, os_thread_id=8, frames=[frame("/usr/lib/python3.11/threading.py", 1, "wait")])
    return json.dumps([other, dict(pid=7, os_thread_id=7, frames=[frame(*entry) for entry in frames])])


def test_lines_that_wait_are_told_from_those_that_work(tmp_path):
    """Neither a wait for what was begun earlier nor one for a device has a frame of torch's Python code."""
    code = tmp_path / "megatron" / "optimizer" / "gradients.py"
    code.parent.mkdir(parents=True)
    code.write_text("def f():\n    work.wait()\n    return totals.tolist()\n    x = 1\n")
    for line, waits in ((2, "the end of a collective"), (3, "work on the device"), (4, None)):
        stacks = parse_spied(_spied((str(code), line, "f"), ("/x/pretrain_gpt.py", 4, "<module>")))
        assert stacks[0][0] == Frame(str(code), line, "f") and len(stacks) == 2
        assert Standstill(Beat(0, "n7", 1, 1, 5, "reduce", 17), 3.0, "S", stacks).waits_in == waits
    for wrong in ("no json", '[{"frames": []}]', '[{"pid": 7, "os_thread_id": 7, "frames": [3]}]'):
        with pytest.raises(ValueError):
            parse_spied(wrong)


def test_collectives_made_of_messages_are_told_by_their_names(monkeypatch):
    """The stacks are real ones, of the moment in which a message is waited for."""

    class Message:
        def wait(self):
            here = traceback.extract_stack()[-2::-1]
            stacks.append(tuple(Frame(frame.filename, frame.lineno, frame.name) for frame in here))

    stacks, axis = [], Axis("tp", (0, 1))
    monkeypatch.setattr(collectives, "LARGE", 0)
    for name in ("irecv", "isend"):
        monkeypatch.setattr(collectives.dist, name, lambda *args, **kwargs: Message())
    collectives.all_gather(torch.zeros(1, 2), axis)
    collectives.reduce_scatter(torch.zeros(2, 2), axis)
    collectives.start_all_gather(torch.zeros(2), torch.zeros(1), axis).wait()
    beat = Beat(0, "n7", 1, 1, 5, "F", 17)
    waits = [Standstill(beat, 3.0, "S", (stack,)).waits_in for stack in stacks]
    assert waits == ["all_gather"] * 2 + ["reduce_scatter"] * 2 + ["the end of a collective"] * 2


def test_a_backward_pass_on_a_gpu_waits_in_a_thread_of_its_own():
    main = (Frame("/s/site-packages/torch/autograd/graph.py", 979, "_engine_run_backward"), Frame("/x/a.py", 1, "f"))
    device = (
        Frame("/s/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce"),
        Frame("/x/megatron/mpu/collectives.py", 2, "all_reduce"),
        Frame("/s/site-packages/torch/autograd/function.py", 325, "apply"),
    )
    beat = Beat(0, "n7", 1, 1, 5, "B", 17, op="B2", group="tp group 3")
    assert Standstill(beat, 3.0, "S", (main, device)).waits_in == "all_reduce"
    assert Standstill(beat, 3.0, "S", (main,)).waits_in is None


def test_stopped_dead_and_mutual_waits_are_told():
    assert explain([_still(1, "F", state="T", op="F2"), _still(0, "reduce", WAITING)])[0] == (
        "rank 1 on n7, pid 101: is stopped by a signal (SIGSTOP), in a forward pass for 74 s, step 17, op F micro 2"
    )
    assert "is gone" in explain([_still(0, "B", state="")])[0]
    assert explain([_still(0, "reduce", WAITING), _still(1, "reduce", WAITING)])[-1].startswith("every rank waits")
    assert explain([_still(0, "x", "garbage")]) == ["rank 0 on n7: x for 74 s, step 17"]


@given(st.sets(st.integers(0, 60), min_size=1))
def test_spans_name_every_rank_once(numbers):
    named = []
    for part in spans(sorted(numbers)).split(", "):
        low, _, high = part.partition("-")
        named += range(int(low), int(high or low) + 1)
    assert named == sorted(numbers)


# ---- command lines ---------------------------------------------------------------------------------------------------

JOB = (
    "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 2 --hidden-size 32 --num-attention-heads 4 --mock-data "
    "--vocab-size 100 --lr 1e-3 --train-iters 5 --micro-batch-size 2"
).split()


def test_a_job_goes_on_from_its_own_checkpoint(tmp_path):
    words = [*JOB, "--save", str(tmp_path), "--load", "elsewhere", "--finetune", "--ckpt-step", "3"]
    assert resumed(words, str(tmp_path)) == words
    for name in ("iter_0000010", "iter_0000020", "iter_0000030", ".tmp-iter_0000040-ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").touch()
    (tmp_path / "iter_0000030" / "index.json").unlink()
    assert newest_checkpoint(str(tmp_path)) == 20
    settings = command.config_of(resumed(words, str(tmp_path))).checkpoint
    assert (settings.load, settings.finetune, settings.ckpt_step) == (str(tmp_path), False, None)
    words = [*JOB, "--save", str(tmp_path / "full")]  # never written: all that was saved is in the mirror
    assert resumed(words, str(tmp_path / "full"), (None, "rclone copy {} x")) == words
    again = resumed(words, str(tmp_path / "full"), (str(tmp_path), "rclone copy {} x"))
    assert command.config_of(again).checkpoint.load == str(tmp_path)


MODULES = ["-m pretrain_gpt", "-m finetune", "-m megatron.tools.launch --nproc-per-node 2 -m pretrain_gpt"]
MODULES += ["-m pretrain_t5", "finetune.py", "-m torch.distributed.run --nproc-per-node 2 finetune.py"]


@pytest.mark.parametrize("start", MODULES)
def test_a_training_is_known_by_its_module_too(start, tmp_path, monkeypatch):
    """From any folder, as `python -m` finds it: the job goes on from its own checkpoint, and no longer fine-tunes."""
    monkeypatch.chdir(tmp_path)
    own = f"--load a --save {tmp_path} --finetune --mock-data --train-iters 5".split()
    words = ["python", *start.split(), *own]
    at = command.script_at(words)
    assert (words[at], words[at + 1 :]) == (start.split()[-1], own)
    assert command.ranks_of(words) == (2 if "nproc" in start else 1)
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "iter_0000002" / "index.json").touch()
    monkeypatch.setenv(COMMAND, shlex.join(words))
    monkeypatch.delenv("RESUME_COMMAND", raising=False)
    again = shlex.split(resume_command(Checkpoint(load="a", save=str(tmp_path), finetune=True)))
    assert again[: at + 1] == words[: at + 1] and "a" not in again
    assert (command.value_of(again, "--load"), command.value_of(again, "--finetune")) == (str(tmp_path), "false")
    assert "--use-checkpoint-args" in again  # the shape is the checkpoint's


def test_the_settings_of_a_job_are_those_of_its_modules_recipe():
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --mock-data --vocab-size 90 --lr 1 --train-iters 5"
    for start, model_type, more in (
        ("-m pretrain_gpt", "GPT", ""),
        ("-m pretrain_t5", "T5", "--encoder-seq-length 32 --decoder-seq-length 16"),
        ("pretrain_bert.py", "BERT", ""),
        ("-m finetune", "megatron.tasks.chat", "--task chat"),
        ("finetune.py", "finetune", "--task SST2"),
    ):
        config = command.config_of(f"python {start} {shape} {more}".split())
        assert config is not None and config.model.model_type == model_type, start


def test_the_command_of_a_script_of_unknown_name_goes_on_too(monkeypatch):
    monkeypatch.setenv(COMMAND, "python own.py --finetune --load a --save b")
    monkeypatch.delenv("RESUME_COMMAND", raising=False)
    again = resume_command(Checkpoint(load="a", save="b", finetune=True))
    assert again == "python own.py --finetune --load a --save b --load b --finetune false --use-checkpoint-args"


def test_scripts_of_ones_own_are_not_run_to_ask_what_they_run(root, tmp_path):
    script = tmp_path / "pretrain_mine.sh"
    script.write_text('torchrun pretrain_gpt.py "$@" | tee log\n')
    words = ["bash", str(script), "--save", "x"]
    assert command.is_foreign(words) and command.expanded(words) == words and command.flags_of(words) == words[2:]
    script.write_text("torchrun pretrain_gpt.py --save x\n")
    with pytest.raises(SettingsError, match="does not pass its arguments on"):
        command.is_foreign(words)
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        command.is_foreign(["bash", str(tmp_path / "pretrain_none.sh")])
    ours = [path for name in ("pretrain", "auto") for path in (root / "scripts").glob(f"{name}_*.sh")]
    assert len(ours) > 20 and not any(command.is_foreign(["bash", str(path)]) for path in ours)


def test_fewer_ranks_keep_the_global_batch():
    ranks, words = replan.fewer_ranks([*JOB, "--global-batch-size", "24"], 4, 1)
    assert (ranks, command.ranks_of(words)) == (3, 3)
    assert command.config_of(words).batch.global_batch_size == 24
    assert replan.fewer_ranks(JOB, 4, 1)[0] == 2  # 4 x 2 samples: 3 ranks cannot share them
    ranks, words = replan.fewer_ranks([*JOB, "--tensor-model-parallel-size", "2"], 4, 1)
    assert ranks == 2 and command.config_of(words).batch.global_batch_size == 4
    with pytest.raises(SettingsError, match="no layout on 3 to 3 ranks"):
        replan.fewer_ranks(JOB, 4, 3)
    with pytest.raises(SettingsError, match=r"no training script[\s\S]*wrapper of your own, put supervise into it"):
        command.script_at(["torchrun", "train.py"])


def _layout(words):
    p = command.config_of(words).parallel
    return p.tensor_model_parallel_size, p.pipeline_model_parallel_size


@pytest.mark.sampled(2)
def test_a_layout_that_no_longer_fits_is_planned_anew():
    job = [
        *JOB,
        "--num-layers",
        "4",
        "--global-batch-size",
        "12",
        "--tp",
        "2",
        "--pp",
        "2",
        "--device",
        "cpu",
        "--device-memory-gb",
        "4",
    ]
    ranks, words = replan.fewer_ranks(job, 4, 1)
    assert (ranks, _layout(words)) == (3, (1, 1)) and command.config_of(words).batch.global_batch_size == 12
    ranks, words = replan.fewer_ranks([*job, "--global-batch-size", "8"], 4, 1)  # which 3 ranks cannot share
    assert (ranks, _layout(words)) == (2, (2, 1))
    chunks = [
        *job,
        "--num-layers-per-virtual-pipeline-stage",
        "1",
        "--sequence-parallel",
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        "8",
    ]
    ranks, words = replan.fewer_ranks(chunks, 4, 2)
    assert ranks == 2 and _layout(words) == (2, 1) and "--num-layers-per-virtual-pipeline-stage" not in words


def test_a_layout_without_the_memory_for_it_is_passed_over():
    """13 billion parameters: 5 GPUs of 80 GB hold what 8 have held, 2 do not."""
    job = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 40 --hidden-size 5120 --num-attention-heads 40 "
        "--seq-length 2048 --mock-data --vocab-size 50000 --lr 1e-4 --train-iters 5 --micro-batch-size 1 --bf16 "
        "--global-batch-size 64 --tp 8 --device-name A100-80GB --use-distributed-optimizer "
        "--recompute-granularity full"
    ).split()
    ranks, words = replan.fewer_ranks(job, 8, 1)
    assert (ranks, _layout(words)) == (5, (5, 1))
    ranks, words = replan.fewer_ranks(words, 5, 1)
    assert (ranks, _layout(words)) == (4, (4, 1))
    with pytest.raises(SettingsError, match="tp 2 pp 1 on 2 ranks would need 1[0-9]+ GB of each"):
        replan.fewer_ranks(words, 4, 1)


def test_machines_are_left_out_whole_and_only_from_one_place(monkeypatch):
    for name in ("SLURM_NNODES", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    torchrun = ["torchrun", "--nnodes", "4", *JOB[1:], "--global-batch-size", "32", "--micro-batch-size", "1"]
    assert command.ranks_of(torchrun) == 16
    with pytest.raises(SettingsError, match="one of 4 machines"):
        replan.fewer_ranks(torchrun, 16, 4)
    ranks, words = replan.fewer_ranks(["srun", "-N", "4", "--ntasks=4", *torchrun], 16, 4)
    assert ranks == 8 and words[:3] == ["srun", "--nodes=2", "--ntasks=2"] and "--nnodes=2" in words
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert command.with_ranks(["srun", *torchrun], 8)[:3] == ["srun", "--ntasks=2", "torchrun"]
    assert command.ranks_of(["srun", "pretrain_gpt.py"]) == 4
    with pytest.raises(SettingsError, match="does not give the number"):
        command.with_ranks(["python", "pretrain_gpt.py"], 2)


# ---- the account -----------------------------------------------------------------------------------------------------


def test_lost_time_is_counted_by_cause():
    attempts = [
        Attempt(
            0,
            2,
            launched=0,
            ended=20,
            cause="hung",
            code=7,
            first_step=1,
            last_step=100,
            silent=4,
            waited=1,
            phases=dict(model=5, data=1, F=3, B=4, reduce=2, save=1),
        ),
        Attempt(1, 2, launched=21, ended=23, cause="rank killed by SIGKILL", code=-9),
        Attempt(
            2, 2, launched=24, ended=44, cause="finished", first_step=51, last_step=150, phases=dict(index=10, F=10)
        ),
    ]
    found = account(attempts, "finished", 0, 44, checkpoints=3)
    assert (found.steps, found.repeated_steps, found.restarts) == (150, 50, 2)
    assert found.productive == 5 + 10 and found.lost["steps made again"] == 5
    assert found.lost["starting"] == 5 + 2 + 10 and found.lost["saving checkpoints"] == 1
    assert found.productive + sum(found.lost.values()) == pytest.approx(44) and found.lost["the supervisor itself"] == 1
    assert "50 steps were made again" in found.text() and json.loads(json.dumps(found.record()))["goodput"] > 0.3
