# SPDX-License-Identifier: Apache-2.0
"""Going on with other settings than those that a checkpoint was trained with, and on other numbers of ranks.

What would make another run of it is refused and named; what may change is noted, or concerns nobody, and trains on.
"""

import json
import math
from functools import partial
from pathlib import Path

from megatron.errors import PeerLost, SettingsError
from tests.chaos.case import Case, Got
from tests.chaos.runs import STEPS, Job, clean_run, record

REFUSED, NOTED, SILENT = "refused and named", "noted, and trained to the end", "trained to the end"
ELASTIC = "the samples of the clean run, losses equal up to rounding"
HALF = 6  # steps behind which the run was stopped
DANGEROUS = """
--num-layers 3 / --hidden-size 64 / --num-attention-heads 2 / --ffn-hidden-size 64 / --kv-channels 16 / --swiglu /
--normalization RMSNorm / --position-embedding-type rope / --untie-embeddings-and-output-weights / --disable-bias-linear /
--qk-layernorm / --seq-length 8 / --vocab-size 120 / --seed 5 / --split 7,3,0 / --dataloader-type cyclic / --eod-mask-loss /
--reset-position-ids / --reset-attention-mask / --norm-epsilon 1e-3 / --max-position-embeddings 64
"""
HARMLESS = """
--lr 2e-2 / --min-lr 1e-3 / --weight-decay 0.1 / --clip-grad 0.5 / --lr-decay-style cosine / --lr-warmup-iters 2 /
--adam-beta1 0.8 / --adam-eps 1e-7 / --micro-batch-size 4 / --hidden-dropout 0 / --attention-dropout 0 / --bf16 /
--check-replicas-interval 2 / --on-nan skip / --spike-threshold 9 / --eval-interval 4 / --eval-iters 1 /
--loss-averaging micro-batch / --init-method-std 0.03
"""
UNSEEN = """
--num-workers 0 / --log-interval 1 / --save-interval 2 / --recompute-granularity full / --use-distributed-optimizer
"""
# how many ranks went on, in which layout, and whether that can be
WORLDS = (
    ("dp2", "one", 1),
    ("one", "dp2", 2),
    ("dp2", "dp2", 4),
    ("tp2", "one", 1),
    ("zero1", "pp2", 2),
    ("pp2", "tp2", 4),
)
IMPOSSIBLE = (("dp2", 3), ("tp2", 3), ("tp2", 1), ("pp2", 3), ("pp2", 1), ("zero1", 3))


def cases() -> list[Case]:
    """All of them."""
    found = []
    for text, expected in ((DANGEROUS, REFUSED), (HARMLESS, NOTED), (UNSEEN, SILENT)):
        for flag in (words.strip() for words in text.split("/")):
            name = flag.replace(" ", "=").lstrip("-")
            short = flag in ("--seed 5", "--hidden-size 64", "--lr 2e-2")
            found.append(
                Case(
                    f"settings/{name}",
                    "a setting changed at a resume",
                    expected,
                    partial(changed, flag, expected),
                    short=short,
                )
            )
    for then, now, ranks in WORLDS:
        found.append(
            Case(
                f"world/{then}-to-{now}-on-{ranks}",
                "another number of ranks, or layout",
                ELASTIC,
                partial(moved, then, now, ranks),
                short=(then, now) == ("tp2", "one"),
            )
        )
    for layout, ranks in IMPOSSIBLE:
        found.append(
            Case(
                f"world/{layout}-on-{ranks}",
                "a number of ranks that cannot be",
                REFUSED,
                partial(impossible, layout, ranks),
                short=(layout, ranks) == ("tp2", 3),
            )
        )
    found.append(
        Case("world/a-rank-too-few", "a number of ranks that cannot be", "ends, and says who is missing", too_few)
    )
    return found


def half_way(layout: str, common: Path) -> Path:
    """The folder of a run that was stopped behind step HALF; made once."""
    folder = common / f"half-{layout}"
    job = Job(layout, folder, common, f"--exit-interval {HALF}")
    if not folder.exists():
        codes = job.start().codes
        assert codes == [0] * job.world, codes
    return job.save


def changed(flag: str, expected: str, folder: Path, seed: int) -> Got:
    """One process goes on from the middle of a run with one setting changed."""
    job = Job("one", folder, folder.parent, f"--load {half_way('one', folder.parent)} {flag}")
    [code] = (attempt := job.start()).codes
    name = flag.split()[0].replace("--bf16", "--precision")
    if expected == REFUSED:
        good = (
            code == SettingsError.code
            and f"{name}: " in attempt.said
            and not job.save.joinpath("iter_0000009").exists()
        )
    else:
        good = code == 0 and attempt.resumed == HALF and (f"note: {name} was " in attempt.said) == (expected == NOTED)
    return Got(expected if good else f"ended with {code}: {attempt.said[-400:]}", code)


def moved(then: str, now: str, ranks: int, folder: Path, seed: int) -> Got:
    """A run goes on in another layout."""
    more = "--micro-batch-size 1" if ranks == 4 and now == "dp2" else ""
    job = Job(now, folder, folder.parent, f"--load {half_way(then, folder.parent)} {more}", ranks=ranks)
    attempt = job.start()
    if attempt.codes != [0] * ranks or attempt.resumed != HALF:
        return Got(f"ended with {attempt.codes}: {attempt.said[-400:]}", attempt.codes[0])
    clean, found = clean_run(then, folder.parent), record(job.save)
    expected = {n: value for n, value in clean.ledger.items() if int(n) > HALF}
    if found.ledger != expected:
        return Got(f"other samples: {found.ledger} instead of {expected}")
    was, now = _losses(next(folder.parent.glob(f"clean-{then}-[0-9]*")) / "save"), _losses(job.save)
    wrong = [n for n in range(HALF + 1, STEPS + 1) if not math.isclose(was[n], now[n], rel_tol=1e-4)]
    return Got(f"losses of steps {wrong} differ" if wrong else ELASTIC)


def _losses(save: Path) -> dict[int, float]:
    steps = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return {step["iteration"]: step["lm loss"] for step in steps if step["kind"] == "step"}


def impossible(layout: str, ranks: int, folder: Path, seed: int) -> Got:
    """A run goes on with a number of ranks that its layout cannot have."""
    job = Job(layout, folder, folder.parent, f"--load {half_way(layout, folder.parent)}", ranks=ranks)
    attempt = job.start()
    good = attempt.codes == [SettingsError.code] * ranks and f"{ranks}" in attempt.said
    return Got(REFUSED if good else f"ended with {attempt.codes}: {attempt.said[-400:]}", attempt.codes[0])


def too_few(folder: Path, seed: int) -> Got:
    """Two ranks come of three that were said to come."""
    job = Job("dp2", folder, folder.parent, "--distributed-timeout-minutes 0.05 --global-batch-size 12", claimed=3)
    attempt = job.start()
    good = attempt.codes == [PeerLost.code] * 2 and "could not join the job" in attempt.said
    return Got("ends, and says who is missing" if good else f"{attempt.codes}: {attempt.said[-400:]}", attempt.codes[0])
