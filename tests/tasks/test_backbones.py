# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning of BERT and T5 against Hugging Face's models with a linear layer, each text by itself and without padding."""

import re
from functools import cache
from typing import Optional

import pytest
import torch
import torch.nn.functional as F

from megatron.convert.huggingface import from_hf
from megatron.errors import Failure
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of
from megatron.mpu.random import seed_of
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import state
from megatron.planner.parity import laid_out, parse_layout
from megatron.planner.traffic import totals, transfers
from megatron.tasks.finetune import recipe
from megatron.training.conversion_commands import fresh_state
from tests.planner.test_truth import counted_step
from tests.ranks import on_ranks
from tests.tasks.classification import LABELS, Toy, with_hidden_words
from tests.tasks.test_finetune import STEPS, TUNE, tune, weights_of
from tests.training.plain_loop import EOD, LENGTH
from tests.training.test_plain_loop import records

pytestmark = pytest.mark.sampled(10)

CLS, SEP, MASK, PAD, BOS, EOS = range(EOD + 1, EOD + 7)  # what --vocab-extra-ids adds, and one sentinel
SENTINEL = EOS + 1
VOCABULARY = SENTINEL + 1
DROPPED = {"BERT mean": 0.3, "T5": 0.3, "T5 mean": 0.3}  # --word-dropout
WORDS = f"--tokenizer-type NullTokenizer --vocab-size {EOD} --vocab-extra-ids 1"
LEFT_OUT = {  # of a T5 whose encoder is below the head
    "T5 mean": ("blocks.2.", "blocks.3.", "relative.decoder.", "final_norm."),
    "T5 mean deep": ("blocks.6.", "relative.decoder.", "final_norm."),
}
LAYOUTS = {
    "one process": (1, ""),
    "tp2 with sequence parallelism": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "zero3": (2, "--sharding-stage 3 --recompute-granularity full --recompute-method uniform"),
    "tp2": (2, "--tensor-model-parallel-size 2 --micro-batch-size 1"),
    "pp2 interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2",
    ),
    "pp3 zb-v": (3, "--pipeline-model-parallel-size 3 --pipeline-schedule zb-v"),
}
DEEP = ("pp2 interleaved", "pp3 zb-v")  # for kinds of six layers
CASES = [
    pytest.param(kind, layout, marks=() if layout in quick else pytest.mark.full)
    for kind, quick in {
        "BERT": ("tp2 with sequence parallelism",),
        "BERT mean": ("tp2 with sequence parallelism",),
        "BERT last": (),
        "T5": ("tp2 with sequence parallelism", "pp2"),
        "T5 1.0": (),
        "T5 mean": ("tp2 with sequence parallelism", "pp2", "zero3"),
        "T5 mean deep": ("pp2 interleaved",),
    }.items()
    for layout in LAYOUTS
    if ("deep" in kind) == (layout in DEEP)
]


def model_of(kind: str):
    """Hugging Face's, with weights that are large enough to make a difference."""
    transformers = pytest.importorskip("transformers")
    if kind.startswith("BERT"):
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            max_position_embeddings=LENGTH,
        )
        whole = transformers.BertForPreTraining(config)
    elif kind == "GPT":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        whole = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=6 if "deep" in kind else 2,
            num_decoder_layers=1 if "deep" in kind else 2,
            num_heads=2,
            dropout_rate=0.0,
            feed_forward_proj="relu" if kind == "T5 1.0" else "gated-gelu",
            tie_word_embeddings=kind == "T5 1.0",
        )
        whole = transformers.T5ForConditionalGeneration(config)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in whole.parameters():
            drawn = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(drawn * 0.2 if parameter.dim() > 1 else parameter + 0.1 * drawn)
    whole.tie_weights()
    return whole


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """kind -> a folder with a checkpoint, imported from Hugging Face's."""

    @cache
    def folder(kind):
        path = tmp_path_factory.mktemp("models") / kind.replace(" ", "-")
        model_of(kind).save_pretrained(path / "hf")
        from_hf(path / "hf", path / "ours", fresh_state())
        return path / "ours"

    return folder


def cut(first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
    """The longer text loses tokens until both fit."""
    first, second = list(first), list(second or [])
    while len(first) + len(second) > room:
        (second if len(second) >= len(first) else first).pop()
    return first, second


def scores_of(model, head, kind: str, row, sample: Optional[int] = None) -> torch.Tensor:
    """[c] of a text, or a pair. sample: its number in training, where words are hidden."""
    pair = row[1] is not None
    ids = lambda *parts: torch.tensor([[one for part in parts for one in part]])
    hidden = lambda ids: ids
    if sample is not None:
        special = dict(by=SENTINEL if kind.startswith("T5") else MASK, special=(CLS, SEP, EOS))
        hidden = lambda ids: torch.tensor([with_hidden_words(ids[0].tolist(), DROPPED.get(kind, 0), sample, **special)])
    if kind.startswith("BERT"):
        first, second = cut(*row[:2], LENGTH - 2 - pair)
        front, back = [CLS, *first, SEP], [*second, SEP] if pair else []
        types = ids([0] * len(front), [1] * len(back))
        states = model.bert(hidden(ids(front, back)), token_type_ids=types)[0][0]
        return (states.mean(0) if "mean" in kind else states[-1 if "last" in kind else 0]) @ head.T
    first, second = cut(*row[:2], LENGTH - 1 - pair)
    source = hidden(ids(first, [EOS], [*second, EOS] if pair else []))
    states = model.encoder(source)[0]  # what T5EncoderModel gives
    if "mean" in kind:
        return states[0].mean(0) @ head.T
    return model.decoder(torch.tensor([[BOS]]), encoder_hidden_states=states)[0][0, 0] @ head.T


def plain_loop(model, kind: str, trunk, outputs: int, rows: list, loss_of):
    """(head, [{loss, grad_norm} of each step]) of AdamW over shuffled epochs. trunk: the checkpoint that a run begins with;
    loss_of: (head, [(row, its number in training)]) -> the mean loss.
    """
    if kind.startswith("BERT"):
        model.bert.embeddings.word_embeddings.padding_idx = None  # number 0 is a token like others
    std = load_model(str(trunk)).config.model.init_method_std
    head = torch.empty(outputs, 16)
    head.normal_(0.0, std, generator=torch.Generator().manual_seed(seed_of(1234, "head.weight", 0))).requires_grad_()
    unused = ("cls.", "bert.pooler", "lm_head", *(["decoder."] if kind in LEFT_OUT else []))
    used = [p for name, p in model.named_parameters() if not name.startswith(unused)]
    groups = [
        dict(params=[p for p in (*used, head) if (p.dim() > 1) == decays], weight_decay=0.01 * decays)
        for decays in (True, False)
    ]
    adam, steps = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4), []
    orders = [torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in range(3)]
    for step in range(STEPS):
        loss = loss_of(head, [(rows[orders[n // len(rows)][n % len(rows)]], n) for n in range(step * 8, step * 8 + 8)])
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*used, head], 1.0).item()
        adam.step()
        steps.append({"loss": loss.item(), "grad_norm": norm})
    return head, steps


@cache
def theirs(kind: str, folder, pairs: bool):
    """([{loss, grad_norm} of each step], validation scores at the end) of a plain loop."""
    model, toy = model_of(kind), Toy(folder, pairs=pairs)

    def loss_of(head, samples):
        found = torch.stack([scores_of(model, head, kind, row, number) for row, number in samples])
        return F.cross_entropy(found, torch.tensor([row[2] for row, _ in samples]))

    head, steps = plain_loop(model, kind, folder.parent / "trunk", len(LABELS), toy.rows["train"], loss_of)
    with torch.no_grad():
        return steps, torch.stack([scores_of(model, head, kind, row) for row in toy.rows["valid"]])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind, layout", CASES)
def test_any_layout_is_hugging_faces_model_with_a_head(kind, layout, given, tmp_path, tmp_path_factory):
    world, words = LAYOUTS[layout]
    trunk, pairs = given(kind), layout != "pp2"
    toy = Toy(trunk.parent / f"toy{pairs}", pairs=pairs)
    (trunk.parent / "trunk").exists() or (trunk.parent / "trunk").symlink_to(trunk)
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {trunk} --save {tmp_path / 'run'} {TUNE} {WORDS} {words}"
    line += f" --seq-length {LENGTH} --no-best-checkpoint"
    line += f" --pooling {kind.split()[1]}" if kind.split()[1:2] in (["mean"], ["last"]) else ""
    line += f" --word-dropout {DROPPED[kind]}" if kind in DROPPED else ""
    on_ranks(world, tune, line)
    heads = ("head.", "binary.", "output.", *LEFT_OUT.get(kind, ()))
    assert set(weights_of(tmp_path / "run")) == {
        "head.weight",
        *(name for name in weights_of(trunk) if not name.startswith(heads)),
    }
    steps, scores = theirs(kind, toy.folder, pairs)
    found = records(tmp_path / "run", "step")
    assert [{name: step[name] for name in ("loss", "grad_norm")} for step in found] == [
        pytest.approx(step, rel=5e-5) for step in steps
    ]
    told = (tmp_path / "run" / "predictions" / "validation-toy.tsv").read_text().splitlines()[1:]
    assert [row.split("\t")[1] for row in told] == [LABELS[one] for one in scores.argmax(1).tolist()]


@pytest.mark.sampled(10)
def test_a_run_on_the_encoder_alone_is_like_any_other(given, tmp_path, capsys, run_ranks):
    """It begins with the encoder's weights, goes on in another layout, is evaluated, and is what a new head is put on."""
    trunk, toy = given("T5"), Toy(tmp_path / "toy")
    task = f"--task {toy.yaml} --data-path {toy.folder} {TUNE} {WORDS} --seq-length {LENGTH}"
    start = f"{task} --pretrained-checkpoint {trunk} --pooling mean --attention-dropout 0.2 --hidden-dropout 0.2"
    tune(0, f"{start} --lr 1e-30 --save {tmp_path}/still --decoder-seq-length 3 --decoder-num-layers 2")
    told = capsys.readouterr().out
    for name in ("decoder-seq-length 3", "decoder-num-layers 2"):
        assert re.search(f"--{name} has no effect without .*a --pooling other than mean", told)
    theirs, kept = weights_of(trunk), weights_of(tmp_path / "still")
    assert all(torch.equal(kept[name], theirs[name]) for name in kept if name != "head.weight")
    assert "blocks.1.encoder_norm.weight" in kept and "blocks.2.attention_norm.weight" not in kept

    tune(0, f"{start} --save {tmp_path}/whole")
    cut = f"{start} --save {tmp_path}/cut --load {tmp_path}/cut"
    tune(0, f"{cut} --exit-interval 3")
    run_ranks(2, tune, f"{cut} {LAYOUTS['tp2 with sequence parallelism'][1]}")
    both = [records(tmp_path / run, "step") for run in ("whole", "cut")]
    assert [step["loss"] for step in both[1]] == pytest.approx([step["loss"] for step in both[0]], rel=5e-5)

    tune(0, f"{task} --skip-train --load {tmp_path}/whole/best --predictions {tmp_path}/predicted")
    files = [tmp_path / "predicted", tmp_path / "whole" / "predictions"]
    assert len({(folder / "toy.probabilities.tsv").read_text() for folder in files}) == 1
    capsys.readouterr()
    tune(0, f"{task} --load {tmp_path}/whole --finetune --save {tmp_path}/again")
    assert "new, and not out of the checkpoint: head.weight" in capsys.readouterr().out
    for words in ("--pooling first", "--pet-pattern {text}{label}"):
        with pytest.raises(Failure, match=f"{words.split()[0]}.* needs all of a T5(.|\n)*holds the encoder alone"):
            tune(0, f"{task} --load {tmp_path}/whole --finetune {words}")


DROPOUT = f"""--backbone T5 --encoder-num-layers 2 --decoder-num-layers 2 --position-embedding-type relative
    --hidden-size 16 --num-attention-heads 2 --seq-length {LENGTH} --init-method-std 0.2 --hidden-dropout 0.1
    --attention-dropout 0.3 --no-best-checkpoint --make-vocab-size-divisible-by 8 {WORDS} {TUNE}"""


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "words", ["", "--pet-pattern {text}{label} --pet-verbalizer words.json --decoder-seq-length 3"]
)
def test_a_target_that_ranks_share_has_the_dropout_of_one_process(words, tmp_path, monkeypatch, run_ranks):
    """Of attention, too, whose masks have as many queries, and in the decoder keys, as the target has tokens."""
    monkeypatch.chdir(tmp_path)
    toy = Toy(tmp_path / "toy")
    (tmp_path / "words.json").write_text('{"red": "1", "green": "2", "blue": "3"}')
    line = f"--task {toy.yaml} --data-path {toy.folder} {DROPOUT} {words} --save {tmp_path}/run"
    tune(0, f"{line}1")
    run_ranks(2, tune, f"{line}2 {LAYOUTS['tp2 with sequence parallelism'][1]}")
    of = lambda run: [{name: step[name] for name in ("loss", "grad_norm")} for step in records(tmp_path / run, "step")]
    assert of("run2") == [pytest.approx(step, rel=5e-5) for step in of("run1")]


# ---- what the planner says of them -----------------------------------------------------------------------------------

SMALL = f"""--task SST2 --mock-data --hidden-size 32 --num-attention-heads 4 --seq-length 24 --num-layers 4
    --make-vocab-size-divisible-by 8 --lr 1e-3 --global-batch-size 8 --train-iters 10 --eval-iters 0 --micro-batch-size 2
    --save none {WORDS}"""
PLANNED = [
    ("BERT", "tp2sp"),
    ("T5", "tp2sp"),
    ("BERT options", "pp2"),
    ("BERT pattern", "tp2sp"),
    ("T5 mean", "tp2sp"),
    ("T5 mean", "pp2"),
]
MORE = [("BERT", "pp2"), ("BERT", "dp2-zero3"), ("T5", "pp2"), ("T5", "tp2"), ("GPT", "tp2"), ("GPT", "tp2sp")]
MORE += [("BERT pattern", "tp2"), ("T5 pattern", "tp2sp"), ("GPT pattern", "tp2"), ("BERT pattern", "pp2")]
MORE += [("T5 mean", "tp2"), ("T5 mean", "dp2-zero3"), ("BERT options", "tp2"), ("T5 options", "tp2sp")]
PLANNED += [pytest.param(*case, marks=pytest.mark.full) for case in MORE]


def settings_of(kind: str, layout: str):
    shared = "--tensor-model-parallel-size 2 --sequence-parallel" if "sp" in layout else ""
    kind, *more = kind.split()
    shared += " --pet-pattern {text}{label} --pet-verbalizer none.json" if "pattern" in more else ""
    shared += " --pooling mean --position-embedding-type relative" if "mean" in more else ""
    line = SMALL.replace("SST2", "C3") if "options" in more else SMALL
    shared += " --encoder-num-layers 2 --decoder-num-layers 2" * (kind == "T5")
    config = parse_any(f"{line} --backbone {kind} {shared}".split(), recipe=recipe())
    return laid_out(config, parse_layout(layout))


@pytest.mark.parametrize("kind, layout", PLANNED)
def test_ledgers_are_exact(kind, layout, run_ranks):
    config = settings_of(kind, layout)
    world = parse_layout(layout).world_size
    facts = facts_of(config, VOCABULARY)
    plan, job = Layout.of(config, world), Job.of(config, facts, dp=world, device="cpu")
    for place, memory, _, sent in run_ranks(world, lambda rank: counted_step()(config)):
        held, _ = state(job, plan, place["pp"], place)
        shared = 0 if held["main weights"] else memory["parameters"]
        assert sum(held.values()) == sum(memory.values()) - shared, place
        assert totals(transfers(job, plan, place["pp"], place)) == sent, place


def test_an_encoder_alone_has_its_own_layers_and_weights():
    line = f"{SMALL} --backbone T5 --encoder-num-layers 5 --decoder-num-layers 3 --pipeline-model-parallel-size 3"
    of = {}
    for pooling in ("first", "mean"):
        argv = [*line.replace("--num-layers 4", "").split(), "--pooling", pooling]
        config = of[pooling] = parse_any(argv, recipe=recipe())
        assert recipe().normalize_config(config) == config
    whole, alone = (facts_of(of[pooling], VOCABULARY) for pooling in ("first", "mean"))
    assert (of["mean"].model.num_layers, of["mean"].parallel.pipeline_stage_layers) == (5, "1,2,2")
    assert all(whole.weights[name].shape == placed.shape for name, placed in alone.weights.items())
    left_out = {name.split(".")[0] for name in whole.weights.keys() - alone.weights.keys() if "blocks" not in name}
    assert left_out == {"embedding", "final_norm"} and (alone.target, alone.seq_length) == (0, 24)


# ---- what cannot work ------------------------------------------------------------------------------------------------

BARE = f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1}"
WRONG = {  # kind, words -> what the message says
    ("BERT", BARE): "has no \\[CLS\\], no \\[SEP\\].*--vocab-extra-ids",
    ("T5", BARE): "has no \\[BOS\\], no \\[EOS\\].*--vocab-extra-ids",
    ("BERT", f"{WORDS} --backbone GPT"): "--backbone GPT: the checkpoint is of a BERT",
    ("BERT", f"{WORDS} --pooling middle"): "--pooling",
    ("T5", f"{WORDS} --pooling last"): "--pooling last: the head of a T5 sees one of first, mean",
    ("T5", f"{WORDS} --decoder-num-layers 3"): "--decoder-num-layers: 2 in the checkpoint, 3 now",
    ("T5", f"{WORDS} --decoder-num-layers 0"): "--decoder-num-layers 0: .* of both kinds",
    ("T5", f"{WORDS} --pooling mean --pipeline-model-parallel-split-rank 1"): "split-rank: there is no decoder",
    ("T5", f"{WORDS} --pooling mean --encoder-pipeline-model-parallel-size 1"): "parallel-size: there is no decoder",
    ("T5", f"{WORDS} --pooling mean --pipeline-model-parallel-size 3"): "2 encoder layers are fewer than the 3 stages",
    ("BERT", f"{WORDS} --seq-length 7"): "--seq-length 7 must be at least 8",
    ("T5", f"{WORDS} --seq-length 3"): "--seq-length 3 must be at least 4",
    ("T5", f"{WORDS} --decoder-seq-length 0"): "--decoder-seq-length 0 must be at least 1",
    ("BERT", f"{WORDS} --num-tokentypes 3"): "num-tokentypes: 2 in the checkpoint, 3 now",
}


@pytest.mark.parametrize("case", WRONG, ids=" ".join)
def test_what_cannot_work_is_told(case, given, tmp_path):
    kind, words = case
    toy = Toy(tmp_path / "toy")
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {given(kind)} {TUNE} --seq-length {LENGTH} {words}"
    with pytest.raises(Failure) as problem:
        tune(0, line)
    assert re.search(WRONG[case], str(problem.value), re.DOTALL)


def test_settings_of_another_kind_of_trunk_are_told(given, tmp_path, capsys):
    toy = Toy(tmp_path / "toy")
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {given('BERT')} {TUNE} {WORDS} --seq-length {LENGTH}"
    tune(0, f"{line} --decoder-seq-length 3 --train-epochs 1 --no-best-checkpoint")
    assert "--decoder-seq-length 3 has no effect without --backbone T5" in capsys.readouterr().out
