# SPDX-License-Identifier: Apache-2.0
"""Evaluation over several ranks says what one process says, to the bit, and says it once."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.data.indexed import write_index
from megatron.inference.scoring import score, windows
from megatron.model.gpt.module import GPT
from megatron.mpu import initialize
from megatron.mpu.mesh import Mesh
from megatron.tasks.lambada import Example, find_correct
from megatron.tools import evaluate as tool


# 10 batches, or 1: some ranks have less, or none
@pytest.mark.parametrize("ranks, tokens", [(2, 131), (3, 131), (3, 20)])
def test_ranks_share_the_windows_and_have_one_sum(small_gpt, run_ranks, ranks, tokens):
    model, ids = small_gpt(), np.random.RandomState(0).randint(0, 500, tokens)
    asked = dict(length=16, stride=7, batch_size=2)

    def body(rank):
        seen, whole = [], model.token_losses
        model.token_losses = lambda x, batch: seen.append(batch.tokens.shape[1]) or whole(x, batch)
        told = []
        found = score(model, ids, axis=Mesh(rank, replicate=ranks).dp, progress=lambda *at: told.append(at), **asked)
        return found, sum(seen), told

    alone = score(model, ids, **asked)
    found = run_ranks(ranks, body)
    assert [rank[0] for rank in found] == [alone] * ranks and alone.tokens == tokens - 1
    assert sum(rank[1] for rank in found) == len(list(windows(tokens, 16, 7)))
    assert found[0][2][-1] == (tokens - 1, tokens - 1)  # what the first rank shows ends at the end


def test_ranks_share_the_passages(small_gpt, run_ranks):
    model, generator = small_gpt(scale=3.0), torch.Generator().manual_seed(0)
    passages = [torch.randint(0, 400, (4 + number % 9,), generator=generator) for number in range(21)]
    best = [model.logits(tokens.unsqueeze(1))[-1, 0].argmax().item() for tokens in passages]
    examples = [
        Example([*tokens.tolist(), best[n] if n % 3 else (best[n] + 1) % 400], 1) for n, tokens in enumerate(passages)
    ]

    def body(rank):
        told, axis = [], Mesh(rank, replicate=3).dp
        count = lambda *at: told.append(at)
        return find_correct(model, examples, longest=32, batch_size=4, axis=axis, progress=count).sum(), told

    # Two of three are right. Two turns of the ranks do all: 12 passages, and the other 9, of which the last rank has none.
    assert run_ranks(3, body) == [(14, [(12, 21), (21, 21)])] * 3


def run(folder, *words) -> tuple[str, str]:
    """What the command writes to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        tool.main(["--load", str(folder), "--device", "cpu", *words])
    return out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with token files, a WikiText and a LAMBADA, none of which two or three ranks can share evenly."""
    folder = tmp_path_factory.mktemp("data")
    (np.arange(167) % 97 + 20).astype(np.uint16).tofile(folder / "tokens.bin")
    write_index(f"{folder}/tokens.idx", np.dtype("uint16"), np.array([70, 97], np.int32), np.arange(3))
    (folder / "wiki").write_text(" = The cat = \n \n the cat sat on the mat , they say . It is 1 @.@ 5 m . \n" * 5)
    passages = ["the cat sat on the mat", "a dog is a dog", "the hat and the " + "long " * 60 + "cat", "they say"] * 3
    (folder / "lambada").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in passages[:-1]))
    return folder


@pytest.mark.parametrize("kind", ["tokens", "WIKITEXT103", "LAMBADA"])
def test_the_first_rank_alone_says_what_one_process_says(checkpoint, data, run_ranks, tmp_path, monkeypatch, kind):
    words = ["--task", kind, "--valid-data", str(data / ("wiki" if kind == "WIKITEXT103" else "lambada"))]
    words = ["--data-path", str(data / "tokens")] if kind == "tokens" else words
    words += ["--micro-batch-size", "2", "--output"]
    devices, passes, whole = [], [], GPT._hidden
    monkeypatch.setattr(GPT, "_hidden", lambda self, x, batch: passes.append(1) or whole(self, x, batch))
    logits = GPT.logits
    monkeypatch.setattr(GPT, "logits", lambda self, *args, **more: passes.append(1) or logits(self, *args, **more))

    def body(rank):
        passes.clear()
        initialize.pick_device = lambda wanted, local_rank: devices.append((wanted, local_rank)) or torch.device("cpu")
        return run(checkpoint, *words, str(tmp_path / "together")), devices, len(passes)

    alone = run(checkpoint, *words, str(tmp_path / "alone"))
    found = run_ranks(2, body)
    assert sum(rank[2] for rank in found) == len(passes) and min(rank[2] for rank in found) > 0  # shared, not repeated
    assert " validation results on " in alone[0]
    assert [rank[0] for rank in found] == [alone, ("", "")]
    assert (tmp_path / "together").read_bytes() == (tmp_path / "alone").read_bytes()
    assert [rank[1] for rank in found] == [[("cpu", 0)], [("cpu", 1)]]  # each its own device


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", ["--tp 2", "--pp 2", pytest.param("--tp 2 --pp 2", marks=pytest.mark.full)])
def test_ranks_that_share_a_model_say_what_one_process_says(checkpoint, data, run_ranks, tmp_path, layout):
    """Also beside others that share the work; sums are of other partial sums where ranks have a part of each matrix."""
    kinds = dict(
        tokens=["--data-path", str(data / "tokens")],
        wiki=["--task", "WIKITEXT103", "--valid-data", str(data / "wiki")],
        lambada=["--task", "LAMBADA", "--valid-data", str(data / "lambada")],
    )
    line = ["--micro-batch-size", "2", *layout.split()]

    def body(rank):
        return [run(checkpoint, *words, *line, "--output", str(tmp_path / kind))[0] for kind, words in kinds.items()]

    found = run_ranks(4, body)
    assert all(bool(text) == (rank == 0) for rank, texts in enumerate(found) for text in texts)
    for kind, words in kinds.items():
        run(checkpoint, *words, *line[:2], "--output", str(tmp_path / "alone"))
        for one, whole in zip(*(records(tmp_path / name) for name in (kind, "alone")), strict=True):
            wanted = {n: pytest.approx(v, rel=1e-4) if isinstance(v, float) else v for n, v in whole.items()}
            assert one == wanted


def records(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ranks_evaluate_one_checkpoint_while_a_run_saves_another(checkpoint, data, run_ranks, tmp_path):
    [path] = checkpoints(checkpoint).values()
    with Reader(path) as reader, Saver(tmp_path) as saver:
        weights = {name: reader.read(name) for name in reader.tensors}
        for iteration in (7, 8):
            pieces = [Piece(n, tuple(x.shape), Box.whole(x.shape), x * (iteration - 6)) for n, x in weights.items()]
            saver.save(iteration, pieces, dict(reader.state))
    words = ["--data-path", str(data / "tokens"), "--micro-batch-size", "2"]

    def body(rank):
        newest = [] if rank == 1 else ["--ckpt-step", "7"]  # as if 8 had come after the first rank looked
        return run(tmp_path, *words, *newest)[0]

    assert run_ranks(2, body)[0] == run(tmp_path, *words, "--ckpt-step", "7")[0] != run(tmp_path, *words)[0]
