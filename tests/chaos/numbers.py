# SPDX-License-Identifier: Apache-2.0
"""Values that are not finite, and bits that flip in one of several copies: noticed before they are saved, and named.

A value is spoilt in one place on one rank in one step. The run has to stop before the update with exit code 8, to name
rank and place, and to leave checkpoints that go on, once the fault is gone, to the bits of a clean run.
"""

import random
import re
from functools import partial
from pathlib import Path

from megatron.errors import NumericsError
from tests.chaos.case import Case, Got
from tests.chaos.processes import ANY, TWO
from tests.chaos.runs import RECOVERED, Attempt, Job, restarted
from tests.chaos.victim import Fault

SPOILT = "NaN and Inf in one place on one rank"
STOPPED = f"stopped before the update and named; then {RECOVERED}"
# place -> what is spoilt (see victim.spoil), and what the message has to say
PLACES = {
    "embedding": ("embedding", "in the forward pass of embedding"),
    "attention": ("blocks.1.attention", "in the forward pass of blocks.1.attention"),
    "mlp": ("blocks.0.mlp", "in the forward pass of blocks.0.mlp"),
    "norm": ("final_norm", "in the forward pass of final_norm"),
    "gradient": ("blocks.1.mlp_norm<", "in the backward pass of blocks.1.mlp.up"),
    "weight": ("blocks.0.attention.qkv.weight=", "blocks.0.attention.qkv.weight"),
}
STAGES = dict(embedding=0, attention=1, mlp=0, norm=1, gradient=1, weight=0)  # where they lie in a pipeline of two
SHORT = {
    ("nan", "dp2", 1, "mlp"),
    ("nan", "dp2", 1, "weight"),
    ("inf", "zero1", 0, "gradient"),
    ("inf", "pp2", 1, "gradient"),
}
FLIPPED = dict(
    dp2="blocks.0.mlp.up.weight",
    zero1="blocks.1.attention.qkv.weight",
    tp2="final_norm.weight",
    pp2="embedding.word.weight",
)  # fmt: skip  held by both ranks


def cases() -> list[Case]:
    """All of them."""
    found = []
    for value in ("nan", "inf"):
        for layout in TWO:
            for rank in range(2):
                for place in PLACES:
                    if layout == "pp2" and STAGES[place] != rank:
                        continue
                    short = (value, layout, rank, place) in SHORT
                    found.append(
                        Case(
                            f"{value}/{layout}/{place}/rank{rank}",
                            SPOILT,
                            STOPPED,
                            partial(spoilt, layout, rank, place, value),
                            place,
                            rank,
                            short,
                        )
                    )
    for layout in TWO:
        rank = 1 if layout == "pp2" else 0
        found.append(
            Case(
                f"nan/{layout}/once",
                SPOILT,
                STOPPED,
                partial(spoilt, layout, rank, "norm", "nan", again=False),
                "norm",
                rank,
            )
        )
        for rank in range(2):
            found.append(
                Case(
                    f"flip/{layout}/rank{rank}",
                    "a bit flips in one of two replicas",
                    STOPPED,
                    partial(flipped, layout, rank),
                    "update",
                    rank,
                    (layout, rank) == ("dp2", 1),
                )
            )
    return found


def spoilt(layout: str, rank: int, place: str, value: str, folder: Path, seed: int, again: bool = True) -> Got:
    """One value of one rank is not finite in a random step; `again`: also when the guards repeat the step."""
    step = random.Random(f"{seed} {layout} {rank} {place} {value}").choice(ANY)
    module, words = PLACES[place]
    job = Job(layout, folder, folder.parent)
    first = job.start(
        Fault("value", str(folder / "marker"), rank=rank, step=step, action=value, module=module, again=again)
    )
    named = [
        f"iteration {step}: loss",
        "not finite",
        *([f"rank {rank}", words] if again else ["is finite: its arithmetic"]),
    ]
    return stopped(job, first, step, named)


def flipped(layout: str, rank: int, folder: Path, seed: int) -> Got:
    """The lowest bit of one weight flips on one rank behind a random step."""
    step = random.Random(f"{seed} {layout} {rank} flip").choice(ANY)
    job, name = Job(layout, folder, folder.parent), FLIPPED[layout]
    first = job.start(Fault("bit", str(folder / "marker"), rank=rank, step=step, module=name))
    return stopped(job, first, step, [f"iteration {step}: ranks that hold the same", f"{name} differs on ranks 0, 1"])


def stopped(job: Job, first: Attempt, step: int, named: list[str]) -> Got:
    """Whether a job that should have stopped in a step has done so, in these words; then whether it goes on."""
    code = first.codes[0]
    if first.codes != [NumericsError.code] * job.world:
        return Got(f"ranks ended with {first.codes}: {first.said[-300:]}", code)
    text = re.sub(r"\s+", " ", first.said)
    missing = [words for words in named if words not in text]
    if missing:
        return Got(f"not said: {missing}; said: {text[text.find('error:') :][:400]}", code)
    if first.saved >= step:
        return Got(f"a checkpoint of iteration {first.saved} was saved behind the fault in {step}", code)
    found = restarted(job, first)
    return Got(STOPPED if found == RECOVERED else found, code)
