# SPDX-License-Identifier: Apache-2.0
"""Check, before a job runs, that its layout computes the same training as one process.

    python -m megatron.tools.verify_layout --layouts tp2,pp2,tp2sp-pp2-dp2-zero1 --shrink <flags of the training>

Each layout trains a few steps on CPU processes of this machine, from the same weights and data as one process, and
the loss, gradient norm and every parameter are compared. Exit code 0: all agree; 1: one differs, or the model's own
code raises, which is reported with its file and line (--debug: with its traceback). With --collectives a wrong sum over
ranks is named: the line that adds up what ranks hold alike, or the layer before which a sum is missing.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from megatron.errors import SettingsError, UsageError, asks_for_debug, explain, run_main, with_place
from megatron.model.command_line import parse_with_options
from megatron.settings.batch import total_iterations
from megatron.settings.schema import Config, setting
from megatron.training.rules import layout_is_open, resolve

EXAMPLE = "--layouts tp2,pp2,tp2sp-pp2-dp2-zero1"


@dataclass(frozen=True)
class VerifyLayoutOptions:
    """Options of the comparison."""

    layouts: Optional[str] = setting(
        "layouts to check, such as tp2,pp2vp2,cp2a2a,tp2sp-dp2-zero1 (default: that of the flags)", None
    )
    steps: int = setting("optimizer steps to train", 10)
    collectives: bool = setting("check each sum over ranks in the first step, and name the wrong ones", False)
    shrink: bool = setting("compare in a shrunk job of the training that has all its features", False)


def main(argv: list[str]) -> None:
    """Print a line per layout; exit with 1 if one differs by more than rounding, or raises."""
    try:
        verify(argv)
    except Exception as error:
        if explain(error) or asks_for_debug(argv):
            raise
        print(row("all layouts", "", f"FAIL ({with_place(error)})"))
        sys.exit(1)


def verify(argv: list[str]) -> None:
    """See `main`. Raises errors of a recipe's code in this process, before ranks start."""
    config, asked = parse_with_options(argv, VerifyLayoutOptions, __doc__.splitlines()[0])
    if asked.steps < 1:
        raise SettingsError(f"--steps {asked.steps} must be at least 1")

    from megatron.planner.parity import ALONE, TOLERANCE, compare, one_process, rounding_of

    config, layouts = wanted(config, asked)
    precision = rounding_of(config.precision)
    if config.precision.precision == "auto":
        raise SettingsError("--precision auto is not a number format to compare in", do="say fp32 or bf16")
    if [layout.text for layout in layouts] == [ALONE] and not asked.layouts:
        raise UsageError("one process alone: nothing to compare", do=f"{EXAMPLE}, or the flags of a layout")
    settings, one = possible(config, layouts), one_process(config)
    steps = min(asked.steps, total_iterations(one.batch, 1))
    if steps < 1:
        raise SettingsError("training is shorter than a step: there is nothing to compare", do="raise --train-iters")
    model = config.model
    print(
        f"{steps} steps of {model.num_layers} layers x {model.hidden_size} hidden in {precision}, against one process; "
        "largest relative difference in"
    )
    print(row("layout", "ranks", "result (worst parameter)", "loss", "grad norm", "weights"))
    reference = trained(one, 1, steps, check_sums=asked.collectives)
    if isinstance(reference, str):
        print(row("one process", 1, f"FAIL ({reference})"))
        sys.exit(1)
    if not any(map(math.isfinite, reference.norms)):
        raise SettingsError(
            "all gradients overflow: no step is made that could be compared",
            f"in {precision}",
            "lower --loss-scale, or leave it out",
        )
    verdicts = []
    for layout, resolved in settings:
        more = dict(check_sums=asked.collectives, alone=reference)
        other, sizes = trained(resolved, layout.world_size, steps, reference.choices, **more), ()
        below = ""
        if raised := isinstance(other, str):
            worst = other
        else:
            differences = compare(reference, other)
            values = (differences.loss, differences.norm, differences.weight)
            worst, sizes = differences.worst, (f"{size:.1e}" for size in values)
        verdicts.append(not raised and differences.passes(precision) and not other.problems)
        result = f"{'PASS' if verdicts[-1] else 'FAIL'} ({worst})"
        if not raised:
            result += said_of_choices(reference, other)
            below = about_sums(other.problems, verdicts[-1]) * asked.collectives
        print(row(layout.text, layout.world_size, result, *sizes) + below, flush=True)
    limits = TOLERANCE[precision]
    print(
        f"limits for {precision}: loss {limits['loss']:g}, gradient norm {limits['norm']:g}, weights "
        f"{limits['weight']:g}: {sum(verdicts)} of {len(verdicts)} pass"
    )
    if reference.choices:
        print(
            "each token went to the experts that it chose in one process; at most "
            f"{limits['choices']:.0%} may prefer others, by rounding"
        )
    if not all(verdicts):
        sys.exit(1)


def about_sums(problems: Sequence[str], passed: bool) -> str:
    """Lines below the row of a layout, on its sums over ranks."""
    nothing = [] if passed else ["no sum over ranks was seen to be wrong"]
    return "".join(f"\n  {problem}" for problem in problems or nothing)


def said_of_choices(reference, other) -> str:
    """How many tokens would have gone to other experts; "" without experts."""
    return f"; {other.changed:.2%} of tokens would choose other experts" * bool(reference.choices)


def row(layout: str, ranks, result: str, loss: str = "-", norm: str = "-", weights: str = "-") -> str:
    """A row of the table."""
    return f"{layout:<24} {ranks:>5} {loss:>9} {norm:>9} {weights:>9}  {result}"


def possible(config: Config, layouts: list) -> list[tuple]:
    """Resolve the settings of each layout. Raises SettingsError that names all impossible ones."""
    from megatron.planner.parity import laid_out

    resolved, refused = [], {}
    for layout in layouts:
        try:
            resolved.append((layout, laid_out(config, layout)))
        except SettingsError as error:
            refused[layout.text] = error
    if len(layouts) == 1:
        for error in refused.values():
            raise error
    if refused:
        raise SettingsError(
            f"{len(refused)} of {len(layouts)} layouts cannot be:"
            + "".join(f"\n{text}: {error}" for text, error in refused.items())
        )
    return resolved


def trained(config: Config, world_size: int, steps: int, replayed=None, **checks):
    """The trace of a few steps, or a rank's error as text. A failure of settings, data or disk is raised.

    replayed, checks: see `parity.trace`
    """
    from megatron.model.recipe import recipe_of
    from megatron.mpu.forked import RankFailed
    from megatron.planner.parity import trace

    try:
        return trace(config, recipe_of(config), world_size, steps, replayed=replayed, **checks)
    except RankFailed as failed:
        if config.logging.debug:
            raise
        if failed.failure is None:
            return failed.brief
        raise failed.failure from None


def wanted(config: Config, asked: VerifyLayoutOptions) -> tuple[Config, list]:
    """The settings to compare in, and the layouts of --layouts, or else the one of the flags."""
    from megatron.planner.parity import layout_of, one_batch, parse_layout, replaced
    from megatron.planner.shrink import asked_ranks, narrowed, original, shrunk_job_of

    if not asked.layouts and asked.shrink:
        shrunk = shrunk_job_of(*original(config, print), asked.steps)
        for words in shrunk.lost:
            print(f"note: not part of the shrunk job: {words}")
        return shrunk.config, [layout_of(shrunk.config, shrunk.world_size)]
    if not asked.layouts:
        if layout_is_open(config):
            config, ranks = original(config, print)
        else:
            ranks = asked_ranks(config)
            resolve(config, ranks)
        layouts = [layout_of(config, ranks)]
        return one_batch(config, layouts), layouts
    try:
        layouts = [parse_layout(text) for text in asked.layouts.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(str(error), do=EXAMPLE) from None
    if not layouts:
        raise UsageError(f"--layouts {asked.layouts} names none", do=EXAMPLE)
    if lost := replaced(config, layouts):
        print(f"note: --layouts {asked.layouts} replaces {', '.join(lost)}")
    if asked.shrink:
        return narrowed(config, common_sizes(layouts), steps=asked.steps), layouts
    return one_batch(config, layouts), layouts


def common_sizes(layouts: list):
    """The sizes that a small model must be divisible by for all of the layouts."""
    from megatron.planner.shrink import Sizes

    tp, pp, dp, cp, stages = (
        math.lcm(*(getattr(layout, name) for layout in layouts)) for name in ("tp", "pp", "dp", "cp", "stages")
    )
    tp = math.lcm(tp, *(layout.etp or 1 for layout in layouts))
    return Sizes(tp, pp, dp, cp, stages, layers=max(1, math.ceil(2 / stages)))


if __name__ == "__main__":
    run_main(main)
