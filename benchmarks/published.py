# SPDX-License-Identifier: Apache-2.0
"""The planner's times against published runs of other suites, and the fit of its constants to a third of them.

python benchmarks/published.py          # all tables
python benchmarks/published.py --write  # the first one into docs/proof/planner.md
python benchmarks/published.py --fit    # the constants of megatron/planner/reached_speed.py; needs scipy
"""

import argparse
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.planner import reached_speed, speed  # noqa: E402
from megatron.planner.device import Device  # noqa: E402
from megatron.planner.published import PublishedRun, report, runs, summary  # noqa: E402
from megatron.telemetry.peak_flops import peak_flops  # noqa: E402

PAGE = ROOT / "docs" / "proof" / "planner.md"
TABLE = re.compile(r"(<!-- published -->\n).*?(\n<!-- end -->)", re.S)
START = {  # of the fit
    "linear Ampere": 0.8,
    "linear Hopper": 0.7,
    "attention Ampere": 0.5,
    "attention Hopper": 0.3,
    "tokens": 500.0,
    "backward": 4.0,
    "unfused": 1.5,
    "exposed": 0.5,
}
HELD = 0.02  # weight of a constant's logarithm: one that no run determines stays where it starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.fit:
        for name, value in fit([run for run in runs() if run.is_fitted]).items():
            print(f"{name:17} {value:.4g}")
    elif asked.write:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(TABLE.sub(lambda found: found[1] + summary(runs()) + found[2], text), encoding="utf-8")
    else:
        print(report())


def fit(fitted: list[PublishedRun]) -> dict[str, float]:
    """Constants with the least errors of the logarithm of tokens/s; a large error counts less than by its square."""
    from scipy.optimize import least_squares

    start = [math.log(value) for value in START.values()]

    def errors(logarithms):
        speed._stage.cache_clear(), speed._layer.cache_clear()
        made = dict(zip(START, map(math.exp, logarithms), strict=True))
        found = [math.log(run.tokens_on(device(run, made)) / run.tokens_per_second) for run in fitted]
        return found + [HELD * (one - other) for one, other in zip(logarithms, start, strict=True)]

    solved = least_squares(errors, start, loss="soft_l1", f_scale=0.05, diff_step=1e-3)
    return dict(zip(START, map(math.exp, solved.x), strict=True))


def device(run: PublishedRun, made: dict[str, float]) -> Device:
    """The device of a run with these constants."""
    own, peak = reached_speed.generation(run.gpu), peak_flops(run.gpu, "bf16")
    return replace(
        run.device,
        flops=dict(bf16=made[f"linear {own}"] * peak),
        attention=dict(bf16=made[f"attention {own}"] * peak),
        attention_tokens=made["tokens"],
        attention_backward=made["backward"],
        unfused=made["unfused"],
        exposed=min(1.0, made["exposed"]),
    )


if __name__ == "__main__":
    main()
