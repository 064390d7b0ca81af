# SPDX-License-Identifier: Apache-2.0
"""Distillation from stored logits: all of them equal the teacher itself, in other layouts, batches and seeds; few of them
equal the loss in plain PyTorch; interrupted writers go on; other data are refused.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.teacher_logits import LogitsStore, Predictions, StoredSettings, id_type
from megatron.errors import DataError, SettingsError
from megatron.mpu.cross_entropy import linear_cross_entropy
from megatron.mpu.distillation_loss import TopKLoss
from megatron.mpu.mesh import Mesh
from megatron.tools import teacher_logits
from tests.model.test_cross_entropy import PADDED, V, problem
from tests.training.test_distillation import LINE, TP3, pretrain, teacher, teacher_of_pairs, tensors  # noqa: F401
from tests.training.test_plain_loop import records

STORED = "--mock-data --vocab-size 100 --train-samples 48 --micro-batch-size 5 --device cpu"


def store(rank: int, words: str) -> None:
    teacher_logits.main(f"{STORED} {words}".split())


@pytest.fixture(scope="module")
def all_logits(tmp_path_factory, teacher) -> str:  # noqa: F811
    folder = tmp_path_factory.mktemp("all")
    store(0, f"--load {teacher} --output {folder} --top-k 500 --kd-temperature 2")
    return str(folder)


def difference(found, wanted, of=("lm loss", "kd loss", "grad_norm")) -> float:
    """The largest of the losses and norms of all steps, relative."""
    pairs = zip(records(found, "step"), records(wanted, "step"), strict=True)
    return max(abs(a[name] / b[name] - 1) for a, b in pairs for name in of)


@pytest.mark.sampled(2)
def test_all_logits_equal_the_teacher(teacher, all_logits, tmp_path):  # noqa: F811
    """With other batches and another seed, which changes the student's initial weights alone."""
    line = f"{LINE} --kd-temperature 2"
    for name, source in {"online": f"--teacher-load {teacher}", "stored": f"--teacher-logits {all_logits}"}.items():
        pretrain(0, f"{line} {source} --save {tmp_path / name}")
    assert difference(tmp_path / "online", tmp_path / "stored") <= 1e-6
    pretrain(0, f"{line} --teacher-logits {all_logits} --seed 5 --micro-batch-size 4 --train-iters 1")


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "world, flags",
    [
        pytest.param(3, f"{TP3} --sequence-parallel", marks=pytest.mark.full),
        (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --sharding-stage 2"),
        pytest.param(2, "--context-parallel-size 2 --sharding-stage 3", marks=pytest.mark.full),
    ],
)
def test_layouts_read_the_same(world, flags, all_logits, run_ranks, tmp_path):
    line = f"{LINE} --teacher-logits {all_logits} --kd-temperature 2"
    pretrain(0, f"{line} --save {tmp_path / 'one'}")
    run_ranks(world, pretrain, f"{line} {flags} --save {tmp_path / 'many'}")
    assert difference(tmp_path / "many", tmp_path / "one") < 2e-5


@pytest.mark.sampled(10)
def test_ranks_store_the_same(teacher_of_pairs, run_ranks, tmp_path, monkeypatch):  # noqa: F811
    """Two models of two tensor parallel ranks, and one process; files of 7 samples."""
    monkeypatch.setattr("megatron.data.teacher_logits.FILE_BYTES", 7 * 16 * (9 * 6 + 4))
    common = f"--load {teacher_of_pairs} --top-k 9 --tokenizer-type NullTokenizer"
    store(0, f"{common} --output {tmp_path / 'one'}")
    run_ranks(4, store, f"{common} --tensor-model-parallel-size 2 --output {tmp_path / 'many'}")
    one, many = (LogitsStore(tmp_path / name) for name in ("one", "many"))
    assert len(one.settings.starts) == 7 and one.settings == many.settings
    for start in one.settings.starts:
        a, b = one.open(start), many.open(start)
        assert (a["digests"] == b["digests"]).all() and (a["ids"] == b["ids"]).all()
        np.testing.assert_allclose(a["logits"], b["logits"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(a["log_sums"], b["log_sums"], rtol=1e-5, atol=1e-5)


def test_an_interrupted_writer_goes_on(teacher, tmp_path, monkeypatch, capsys):  # noqa: F811
    """Files that are there stay as they are; those of a killed writer are removed."""
    monkeypatch.setattr("megatron.data.teacher_logits.FILE_BYTES", 20 * 12 * (4 * 6 + 4))
    line = f"--load {teacher} --top-k 4 --output {tmp_path}"
    store(0, line)
    first, *others = sorted(tmp_path.glob("*.logits"))
    assert len(others) == 2
    before, changed = {path: path.read_bytes() for path in others}, first.stat().st_mtime_ns
    for path in others:
        path.unlink()
    (tmp_path / ".samples_0000020.logits.00.tmp").write_bytes(b"torn")
    with pytest.raises(DataError, match="2 of 3 files are"):
        pretrain(0, f"{LINE} --teacher-logits {tmp_path}")
    capsys.readouterr()
    store(0, line)
    assert "1 of 3 files are there" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in others} == before and first.stat().st_mtime_ns == changed
    assert not list(tmp_path.glob(".*.tmp"))
    with pytest.raises(SettingsError, match="holds logits of other settings: top_k 4 is 5 now"):
        store(0, line.replace("--top-k 4", "--top-k 5"))


def test_a_resumed_run_is_the_same_to_the_bit(all_logits, tmp_path):
    line = f"{LINE} --teacher-logits {all_logits} --kd-temperature 2"
    pretrain(0, f"{line} --save {tmp_path / 'whole'}")
    pretrain(0, f"{line} --save {tmp_path / 'part'} --exit-interval 3")
    pretrain(0, f"{line} --save {tmp_path / 'part'} --load {tmp_path / 'part'}")
    whole, resumed = (tensors(tmp_path / name, 6) for name in ("whole", "part"))
    assert [name for name, values in whole.items() if not torch.equal(values, resumed[name])] == []


@pytest.mark.parametrize(
    "flags, kind, said",
    [
        ("--kd-temperature 3", SettingsError, "the logits are for other settings: temperature 2.0, here 3.0"),
        ("--seq-length 11", SettingsError, "seq_length 12, here 11"),
        ("--vocab-size 99", SettingsError, "vocab_size 101, here 100"),
        ("--reset-attention-mask", SettingsError, "reset_attention_mask False, here True"),
        ("--train-iters 7", DataError, "has the logits of 48 samples, and this run trains on 56"),
        ("--teacher-load d", SettingsError, "are two sources of the same logits"),
        ("--teacher-logits {tmp}", DataError, "{tmp} holds no logits of a teacher"),
    ],
)
def test_mistakes_get_one_message(flags, kind, said, all_logits, tmp_path):
    with pytest.raises(kind) as error:
        pretrain(0, f"{LINE} --kd-temperature 2 --teacher-logits {all_logits} {flags}".format(tmp=tmp_path))
    assert said.format(tmp=tmp_path) in str(error.value)


def test_other_tokens_are_refused(tmp_path):
    settings = StoredSettings(2, 1.0, 3, 2, 4, 1, 100, None, False, False, "t", 1)
    made = LogitsStore.create(tmp_path, settings)
    tokens = np.arange(12).reshape(3, 4)
    for start, count in ((0, 2), (2, 1)):
        values = np.full((count, 4, 2), start, np.float32)
        from megatron.data.teacher_logits import digest_of

        digests = [digest_of(tokens[start + n]) for n in range(count)]
        made.write(start, digests, Predictions(values.astype(int), values, values[..., 0]))
    assert made.read(2, tokens[2]).logits.tolist() == [[2.0, 2.0]] * 4
    with pytest.raises(DataError, match="sample 1 has other tokens"):
        made.read(1, tokens[2])
    with pytest.raises(DataError, match="holds 3 samples, and the run needs sample 3"):
        made.read(3, tokens[2])


@pytest.mark.parametrize("words", [1, 65_535, 65_536, 65_537, 1 << 20])
def test_ids_have_the_narrowest_format_that_has_them_all(words):
    wanted = next(one for one in (np.uint16, np.uint32) if words - 1 <= np.iinfo(one).max)
    assert id_type(words) == wanted and id_type(words).type(words - 1) == words - 1


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "js"])
def test_a_teacher_that_is_certain(kind):
    """Its largest logits have all of the probability, or by rounding a little more: loss and gradients are numbers, and
    those of a student that agrees are 0.
    """
    ids, log_sums = torch.tensor([[0, 1], [2, 0]]), torch.tensor([50.0 - 1e-5, 50.0])
    logits = torch.tensor([[50.0, -50.0], [50.0, 0.0]])
    hidden = torch.eye(2).requires_grad_()
    for agrees in (True, False):
        weight = torch.tensor([[60.0, 0.0], [0.0, 0.0], [0.0, 60.0]] if agrees else [[0.0, 0.0]] * 3).requires_grad_()
        loss = TopKLoss(ids, logits, log_sums, False, Mesh().tp, kind=kind, temperature=1.0, alpha=1.0)
        found = linear_cross_entropy(
            hidden, weight, torch.tensor([0, 2]), vocab_size=3, tp=Mesh().tp, mask=torch.ones(2), teacher=loss
        )[-1]
        gradients = torch.autograd.grad(found, (hidden, weight))
        assert found.isfinite() and all(one.isfinite().all() for one in gradients)
        assert (found.abs() < 1e-3 and all(one.abs().max() < 1e-2 for one in gradients)) == agrees


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "kind, temperature", [("forward_kl", 1.0), ("forward_kl", 2.0), ("reverse_kl", 2.0), ("js", 1.5)]
)
def test_few_logits(run_ranks, kind, temperature):
    """Loss and gradients of k + 1 events in plain PyTorch, on one rank and over a vocabulary that is cut."""
    hidden, weight, labels, mask = problem()
    logits = 3 * torch.randn(len(labels), V, generator=torch.Generator().manual_seed(5))
    values, ids = logits.topk(7)
    log_sums = torch.logsumexp(logits / temperature, 1)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_q = F.log_softmax(exact[0] @ exact[1][:V].t() / temperature, -1)
    with_rest = lambda log: torch.cat((log, torch.log1p(-log.exp().sum(1, keepdim=True))), 1)
    log_q = with_rest(log_q.gather(1, ids))
    log_p = with_rest(values.double() / temperature - log_sums.double().unsqueeze(1))
    log_m = torch.log((log_p.exp() + log_q.exp()) / 2)
    kl = lambda a, b: (a.exp() * (a - b)).sum(1)
    wanted = dict(
        forward_kl=kl(log_p, log_q), reverse_kl=kl(log_q, log_p), js=(kl(log_p, log_m) + kl(log_q, log_m)) / 2
    )[kind]
    wanted = (wanted * mask.double()).sum() * temperature**2
    gradients = torch.autograd.grad(wanted, exact)

    def body(rank, tp):
        rows = slice(rank * PADDED // tp, (rank + 1) * PADDED // tp)
        own, mine = weight.detach()[rows].clone().requires_grad_(), hidden.detach().clone().requires_grad_()
        axis = Mesh(rank, tp=tp).tp
        how = dict(kind=kind, temperature=temperature, alpha=1.0)
        loss = TopKLoss(ids, values, log_sums, False, axis, **how)
        *_, found = linear_cross_entropy(mine, own, labels, vocab_size=V, tp=axis, mask=mask, chunk=16, teacher=loss)
        found.backward()
        return found.item(), mine.grad.numpy(), own.grad.numpy()

    for results in ([body(0, 1)], run_ranks(2, body, 2)):
        assert all(found == pytest.approx(wanted.item(), rel=1e-5) for found, _, _ in results)
        np.testing.assert_allclose(sum(r[1] for r in results), gradients[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(np.concatenate([r[2] for r in results]), gradients[1], rtol=1e-4, atol=1e-4)
