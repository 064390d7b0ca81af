# SPDX-License-Identifier: Apache-2.0
"""A dense checkpoint as a mixture of experts: the same function at step 0, by the command and by --moe-use-upcycling, in
one process and over ranks; settings that would change the function are refused.
"""

import pytest
import torch

import pretrain_gpt
from megatron.convert import upcycled
from megatron.errors import CheckpointError, SettingsError, UsageError
from megatron.inference.load import load_model
from megatron.model.kinds.experts.upcycling import experts_of
from megatron.settings.schema import Model
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import GPT2, LLAMA, S, V, loaded, save

SHAPE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --mock-data "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --lr 1e-3 "
    "--vocab-size 50 --device cpu --num-workers 0 --peak-tflops 1 --log-interval 1"
)
WAYS = {  # flags of the mixture -> the width of the dense model's MLP
    "--num-experts 4": 48,
    "--num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 4": 48,
    "--num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk 3 "
    "--moe-router-topk-scaling-factor 2.5 --moe-layer-freq [0]*1+[1]*3": 48,
}


def logits(folder) -> torch.Tensor:
    tokens = torch.randint(V, (S, 3), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return load_model(str(folder)).model.logits(tokens)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["biases", "gated"])
@pytest.mark.parametrize("flags", WAYS)
def test_the_mixture_computes_what_the_dense_model_does(flags, shape, tmp_path, capsys):
    save(tmp_path / "dense", dict(shape, ffn_hidden_size=WAYS[flags]))
    tool.main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "mixture"), *flags.split()])
    assert "the same function: logits differ by at most" in capsys.readouterr().out
    want, found = logits(tmp_path / "dense"), logits(tmp_path / "mixture")
    assert (found - want).abs().max() <= 1e-6 * max(1, want.abs().max())
    assert any(".experts." in name for name in loaded(tmp_path / "mixture"))


@pytest.mark.parametrize(
    "flags, text",
    [
        ("--num-experts 4 --moe-router-pre-softmax", "do not add up to 1"),
        ("--num-experts 4 --moe-router-load-balancing-type sinkhorn", "sinkhorn"),
        ("--num-experts 4 --moe-router-topk 1 --moe-router-score-function sigmoid", "one sigmoid is not 1"),
        ("--num-experts 4 --moe-shared-expert-intermediate-size 48", "no shared expert"),
        ("--num-experts 4 --moe-ffn-hidden-size 36", "must divide the MLP's width 48"),
        (
            "--num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 3",
            "--moe-router-topk 3: it must be a multiple of 2",
        ),
        ("--num-experts 9 --moe-ffn-hidden-size 24", "--num-experts 9: it must be a multiple of 2"),
        ("--moe-router-topk 2", "number of experts is missing"),
        ("--num-experts 1", "--num-experts 1: a mixture has at least 2 experts"),
        ("--num-experts 2 --moe-router-topk 4", "--moe-router-topk 4 is more than --num-experts 2"),
        ("--num-experts 2 --moe-router-topk 0", "--moe-router-topk 0 must be"),
        ("--num-experts 4 --moe-layer-freq [1]*9", "it is for 9 layers"),
    ],
)
def test_settings_that_change_the_function_are_named(flags, text, tmp_path):
    save(tmp_path / "dense", dict(LLAMA, ffn_hidden_size=48))
    with pytest.raises((SettingsError, UsageError)) as error:
        tool.main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "mixture"), *flags.split()])
    assert text in f"{error.value}"
    assert not (tmp_path / "mixture").exists()


def test_a_mixture_is_no_dense_model(tmp_path):
    save(tmp_path / "dense", dict(LLAMA, num_experts=4))
    with pytest.raises(SettingsError, match="has 4 experts already"):
        tool.main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "mixture"), "--num-experts", "8"])


def test_a_wrong_mixture_is_found(tmp_path, monkeypatch):
    """Outputs of segments that are not multiplied by their number."""
    save(tmp_path / "dense", dict(LLAMA, ffn_hidden_size=48))
    wrong = lambda name, *rest: experts_of(name, *rest) / (2 if ".down." in name else 1)
    monkeypatch.setattr(upcycled.upcycling, "experts_of", wrong)
    flags = "--num-experts 8 --moe-ffn-hidden-size 24 --moe-router-topk 4".split()
    with pytest.raises(CheckpointError, match="computes something else"):
        tool.main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "mixture"), *flags])
    assert not (tmp_path / "mixture").exists()


def test_an_expert_is_a_segment_of_the_mlp():
    model = Model(
        num_layers=1, hidden_size=2, num_attention_heads=1, ffn_hidden_size=6, num_experts=4, moe_ffn_hidden_size=3
    )
    down = torch.arange(12.0).view(2, 6)
    found = experts_of("blocks.0.mlp.experts.down.weight", down, model, 1, 2)
    assert found.tolist() == [(2 * down[:, 3:]).tolist(), (2 * down[:, :3]).tolist()]


MIXTURE = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-router-topk 4 --moe-use-upcycling --finetune"


@pytest.mark.full
@pytest.mark.parametrize("layout", ["", "--expert-model-parallel-size 2 --use-distributed-optimizer"])
def test_a_run_starts_from_a_dense_checkpoint(layout, tmp_path, run_ranks):
    """Its first loss is the dense run's next one, and its experts are those that the command writes."""
    pretrain_gpt.main(f"{SHAPE} --train-iters 2 --save {tmp_path}/dense".split())
    start = (
        f"{SHAPE} --load {tmp_path}/dense {MIXTURE} --save {tmp_path}/run --train-iters 1 --lr 1e-30 {layout}".split()
    )
    run_ranks(2 if layout else 1, lambda rank: pretrain_gpt.main(start))
    flags = MIXTURE.split(" --moe-use")[0].split()
    tool.main(["upcycle", str(tmp_path / "dense"), str(tmp_path / "mixture"), *flags])
    ours, theirs = loaded(tmp_path / "run"), loaded(tmp_path / "mixture")
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
