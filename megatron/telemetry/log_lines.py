# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: Megatron-LM's, so that existing parsers keep working, and short ones for a terminal."""

import math
from datetime import datetime

from megatron.telemetry.console import WIDTH
from megatron.telemetry.figures import duration, short_duration
from megatron.telemetry.step_metrics import Interval, RunSizes, StepMetrics


def console_line(
    step: StepMetrics, interval: Interval, run: RunSizes, rates: dict[str, float], log_throughput: bool = False
) -> str:
    """Megatron-LM's line for the steps since the last one, followed by our rates.

    log_throughput: give TFLOP/s in Megatron-LM's words and place, whatever the device is.
    Losses are means over the steps that were not skipped; without one there are none. Other values are of this step.
    """
    milliseconds = 1000 * interval.seconds / interval.steps
    losses = interval.means
    digits, throughput = 1 if run.device == "cuda" else 3, []
    if run.flops_per_token:
        unit = "GPU (TFLOP/s/GPU)" if log_throughput or run.device == "cuda" else "rank (TFLOP/s)"
        throughput = [f"throughput per {unit}: {rates['tflops_per_rank']:.{digits}f}"]
    parts = [
        f"[{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {step.iteration:8d}/{run.train_iters:8d}",
        f"consumed samples: {step.consumed_samples:12d}",
        *(f"epoch: {epoch:.3f}" for epoch in run.epoch(step.consumed_samples).values()),
        f"elapsed time per iteration (ms): {milliseconds:.1f}",
        *(throughput if log_throughput else []),
        f"learning rate: {step.learning_rate:.6E}",
        f"global batch size: {step.batch_size:5d}",
        *(f"{name}: {value:.6E}" for name, value in losses.items()),
        f"loss scale: {step.loss_scale:.1f}",
        *([] if step.grad_norm is None else [f"grad norm: {float(step.grad_norm):.3f}"]),
        *([] if step.num_zeros is None else [f"num zeros: {step.num_zeros}"]),
        *([] if step.params_norm is None else [f"params norm: {step.params_norm:.3f}"]),
        *([] if step.max_attention_logit is None else [f"max attention logit: {step.max_attention_logit:.3f}"]),
        f"number of skipped iterations: {interval.skipped:3d}",
        f"number of nan iterations: {interval.nan:3d}",
        f"tokens per second: {rates['tokens_per_second']:.1f}",
        *(_data_rates(rates) if log_throughput else throughput),
    ]
    if "mfu" in rates:
        parts.append(f"MFU: {rates['mfu']:.1%}")
    if run.flops_per_token and "tflops_per_rank_causal" in rates:
        parts.append(f"TFLOP/s with causal attention: {rates['tflops_per_rank_causal']:.{digits}f}")
    if "mfu_causal" in rates:
        parts.append(f"MFU with causal attention: {rates['mfu_causal']:.1%}")
    left = (run.train_iters - step.iteration) * interval.seconds / interval.steps
    return " " + " | ".join([*parts, f"ETA: {duration(left)}"]) + " |"


def _data_rates(rates: dict[str, float]) -> list[str]:
    """Rates other than tokens per second, as parts of Megatron-LM's line."""
    return [
        f"samples per second: {rates['samples_per_second']:.2f}",
        f"steps per second: {rates['steps_per_second']:.3f}",
        f"tokens per second per data rank: {rates['tokens_per_second_per_data_rank']:.1f}",
    ]


def format_rates(rates: dict[str, float]) -> str:
    """Rates of the whole job, of a data rank and of a rank, on one line."""
    parts = [
        f"{rates['samples_per_second']:.5g} samples/s",
        f"{rates['steps_per_second']:.5g} steps/s",
        f"{rates['tokens_per_second']:.5g} tokens/s",
        f"a data rank {rates['samples_per_second_per_data_rank']:.5g} samples/s and "
        f"{rates['tokens_per_second_per_data_rank']:.5g} tokens/s",
        f"a rank {rates['tflops_per_rank']:.4g} TFLOP/s",
    ]
    parts += [f"MFU {rates['mfu']:.1%}"] if "mfu" in rates else []
    if "tflops_per_rank_causal" in rates:
        mfu = f" and MFU {rates['mfu_causal']:.1%}" if "mfu_causal" in rates else ""
        parts.append(f"with causal attention {rates['tflops_per_rank_causal']:.4g} TFLOP/s{mfu}")
    return ", ".join(parts)


UNLABELLED = "none: its samples have no labels"


def evaluation_lines(iteration: int, split: str, final: bool, losses: dict, perplexities: dict) -> str:
    """Megatron-LM's three lines of an evaluation. final: at the end of training, with the name of the set."""
    label = f" on {split} set" if final else ""
    figures = "".join(
        f"{name} value: {value:.6E} | " + (f"{name} PPL: {perplexities[name]:.6E} | " if name in perplexities else "")
        for name, value in losses.items()
    )
    line = f" validation loss at iteration {iteration}{label} | {figures or f'{UNLABELLED} | '}"
    rule = "-" * (len(line) + 1)
    return "\n".join([rule, line, rule])


def short_line(
    step: StepMetrics, interval: Interval, run: RunSizes, rates: dict[str, float], width: int = WIDTH
) -> str:
    """A line for the steps since the last one in at most `width` columns; leaves out the least important values."""
    seconds = interval.seconds / interval.steps
    losses = list(interval.means.items())
    digits = len(str(run.train_iters))
    parts = [(0, f"iter {step.iteration:{digits}d}/{run.train_iters}")]
    parts += [(5 if at else 0, f"{short_name(name)} {value:6.4f}") for at, (name, value) in enumerate(losses)]
    parts.append((1, f"lr {step.learning_rate:.2e}"))
    if step.grad_norm is not None:
        parts.append((2, f"norm {_three_digits(float(step.grad_norm)):>4}"))
    parts.append((0, f"{_short_milliseconds(seconds):>8}"))
    parts.append((1, f"{short_count(rates['tokens_per_second']):>6} tok/s"))
    if "mfu" in rates:
        parts.append((3, f"MFU {rates['mfu']:3.0%}"))
    if "mfu_causal" in rates:
        parts.append((6, f"causal {rates['mfu_causal']:3.0%}"))
    parts.append((0, f"ETA {short_duration((run.train_iters - step.iteration) * seconds)}"))
    if interval.skipped:
        parts.append((1, f"skipped {interval.skipped}" + (f", nan {interval.nan}" if interval.nan else "")))
    return _fitted(parts, width)


def _fitted(parts: list[tuple[int, str]], width: int) -> str:
    """Join parts to one line. To fit into `width`, it has narrower columns, and leaves out parts with the highest numbers.

    >>> _fitted([(0, "loss  7.1"), (1, "lr 1e-3"), (0, "ETA 4s")], 20)
    'loss 7.1  ETA 4s'
    """
    for blanks in ("  ", " "):
        line = blanks.join(text for _, text in parts)
        if len(line) <= width:
            return line
    parts = [(rank, " ".join(text.split())) for rank, text in parts]
    for least in (9, 5, 4, 3, 2, 1, 0):
        line = "  ".join(text for rank, text in parts if rank <= least)
        if len(line) <= width:
            break
    return line[:width]


def short_evaluation(iteration: int, split: str, final: bool, losses: dict, perplexities: dict, seconds) -> str:
    """The losses of an evaluation, for a terminal."""
    parts = [
        f"{short_name(name)} {value:.4f}" + (f" (perplexity {perplexities[name]:.4g})" if name in perplexities else "")
        for name, value in losses.items()
    ]
    took = "" if seconds is None else f", in {seconds:.1f} s"
    figures = ", ".join(parts) or UNLABELLED
    return f"{'final ' * (final and split == 'validation')}{split} at iteration {iteration}: {figures}{took}"


def short_name(name: str) -> str:
    return "loss" if name == "lm loss" else name


def _three_digits(value: float) -> str:
    """
    >>> [_three_digits(value) for value in (0.0123456, 1.5, 123.4, 45678.0, math.inf)]
    ['0.0123', '1.50', '123', '4.6e+04', 'inf']
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if not 0.001 <= abs(value) < 9999.5:
        return f"{value:.1e}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def _short_milliseconds(seconds: float) -> str:
    """
    >>> [_short_milliseconds(seconds) for seconds in (0.00987, 0.0579, 2.272, 150)]
    ['9.87 ms', '57.9 ms', '2,272 ms', '150 s']
    """
    milliseconds = 1000 * seconds
    if milliseconds >= 99999.5:
        return f"{seconds:,.0f} s"
    return f"{milliseconds:,.0f} ms" if milliseconds >= 999.5 else f"{_three_digits(milliseconds)} ms"


def short_count(number: float) -> str:
    """
    >>> [short_count(number) for number in (870.4, 23456, 234567, 12345678, 3.2e9)]
    ['870', '23,456', '235k', '12.3M', '3.20G']
    """
    if number < 99999.5:
        return f"{number:,.0f}"
    for limit, unit in ((999_500, "k"), (999_500_000, "M"), (math.inf, "G")):
        if number < limit:
            return _three_digits(number / {"k": 1e3, "M": 1e6, "G": 1e9}[unit]) + unit
    return "inf"
