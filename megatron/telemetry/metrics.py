# SPDX-License-Identifier: Apache-2.0
"""One record per step -> the log (console.py), metrics.jsonl, TensorBoard, Weights & Biases, Prometheus.

    with Metrics(config.logging, run, header=run_record(config, mesh.logged_sizes), active=mesh.rank == 0) as metrics:
        ...
        metrics.record(StepMetrics(iteration, consumed, size, {"lm loss": 7.2}, learning_rate=1e-4, grad_norm=1.3))
        with metrics.paused():                      # evaluation and checkpoints are not part of a step's time
            losses = evaluate()
        metrics.record_eval(iteration, consumed, losses)

The line of the log is Megatron-LM's, so that existing parsers keep working, followed by tokens/s, TFLOP/s, MFU and ETA;
a terminal gets `short_line` instead. Output only: training never depends on these values.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Optional

from megatron.errors import Failure
from megatron.settings.schema import Logging
from megatron.storage.urls import local_folder
from megatron.telemetry import trackers
from megatron.telemetry.console import Console
from megatron.telemetry.log_lines import (
    console_line,
    evaluation_lines,
    format_rates,
    short_count,
    short_evaluation,
    short_line,
    short_name,
)
from megatron.telemetry.progress_log import ProgressLog
from megatron.telemetry.prometheus import Prometheus
from megatron.telemetry.run_folder import METRICS, last_saved, point_to
from megatron.telemetry.run_record import JsonLines, now
from megatron.telemetry.step_metrics import Interval, RunSizes, StepMetrics, load_ends, step_record, step_tags
from megatron.telemetry.timers import Timers, spans, table
from megatron.telemetry.trackers import TensorBoard, VisualDL, WeightsAndBiases


class Metrics:
    """Writes the log, the metrics and the curves of a run. Does nothing on ranks without `active`.

    header: the run record, written first. iteration: where this launch starts. save: folder of checkpoints, the default
    place of metrics.jsonl and train.log. wandb_run: id that an earlier launch has at Weights & Biases. timers: collected
    with every line of the log; given on all ranks, or on none. console: the console used so far. files: False: only log to
    the console, and open no file. listeners: called with each record of metrics.jsonl.
    """

    def __init__(
        self,
        logging: Logging,
        run: RunSizes,
        *,
        header: Optional[dict] = None,
        iteration: int = 0,
        consumed_samples: int = 0,
        save: Optional[str] = None,
        wandb_run: Optional[str] = None,
        active: bool = True,
        timers: Optional[Timers] = None,
        console: Optional[Console] = None,
        files: bool = True,
        listeners: Sequence[Callable[[dict], None]] = (),
    ):
        self.run, self.active, self.log_interval = run, active, logging.log_interval
        self.timers, self.settings, self.listeners = timers, logging, [*listeners]
        self.interval, self.epoch = Interval(), Interval()
        self._started, self._mean = 0, Interval()  # steps of this start, and those in its mean throughput
        self._unlogged: Optional[StepMetrics] = None  # the last step, until a line includes it
        self._mark, self._carried = time.perf_counter(), 0.0
        self._startup: Optional[dict[str, float]] = None  # times before the first step, until that step is done
        self.json, self.prometheus, self.trackers, self.progress = None, None, [], None
        self.wandb_run = wandb_run
        self.console = console or Console(logging.console, bar=logging.progress_bar, active=active)
        if not files:
            self.console.forget()
        if not (active and files):
            self.iteration = iteration
            return
        path = log_path(logging, save)
        if path:
            self.console.keep(path)
            if self.console.short:
                self.log(f" > Megatron-LM's log lines: {path}")
        else:
            self.console.forget()
        header = header or dict(kind="run", iteration=iteration, time=now())
        path = metrics_path(logging, save)
        if logging.metrics_port is not None:
            from megatron.telemetry.history import read_end  # and numpy

            self._serve(header, read_end(path).launches if path else 0, save)
        if path:
            self.json = JsonLines(path)
            self.json.write(header)
            self._point_to(path, save)
        if logging.tensorboard_dir:
            self.trackers.append(TensorBoard(logging.tensorboard_dir))
        if logging.visualdl_dir:
            self.trackers.append(VisualDL(logging.visualdl_dir))
        if logging.wandb_project:
            self.trackers.append(self._weights_and_biases(header, save and local_folder(save)))
        self.iteration = iteration
        if logging.log_progress and save:
            self.progress = ProgressLog(local_folder(save), run.ranks, self._operations(consumed_samples))

    def _serve(self, header: dict, restarts: int, save: Optional[str]) -> None:
        """Serve current values to Prometheus (--metrics-port)."""
        name, saved = local_folder(save).name if save else "", None
        if restarts and save:
            with contextlib.suppress(OSError, Failure):  # the next save sets it
                saved = last_saved(save)
        self.prometheus = Prometheus(self.settings, self.run, header, name=name, restarts=restarts, saved=saved)
        self.listeners.append(self.prometheus.write)
        self.log(f" > metrics for Prometheus: {self.prometheus.url}")

    def _weights_and_biases(self, header: dict, folder: Optional[Path]) -> WeightsAndBiases:
        """Open this training's run at Weights & Biases, and keep its id, also for a launch that is killed."""
        self.wandb_run = trackers.wandb_run(self.wandb_run)
        try:
            if folder:
                trackers.keep_wandb_run(folder, self.wandb_run)
        except OSError as error:
            self.log(f"warning: the id of the run at Weights & Biases cannot be written to {folder}: {error}")
        project, name = self.settings.wandb_project, self.settings.wandb_exp_name
        return WeightsAndBiases(project, name, folder, header, self.wandb_run)

    def _point_to(self, path: Path, save: Optional[str]) -> None:
        """Write the path of the metrics into the run's folder, for tools that only know the folder."""
        try:
            if save:
                point_to(path, local_folder(save))
        except OSError as error:  # the run does not need it
            self.log(f"warning: the path of the metrics cannot be written to {local_folder(save)}: {error}")

    # -- a step ------------------------------------------------------------------------------------------------------

    def record(self, step: StepMetrics) -> None:
        """Record a step that just ended. Its time is counted from the end of the previous one, without pauses.

        The log has a line at every multiple of --log-interval, and at the last step of the run.
        """
        seconds = self._lap()
        complete = step.iteration % self.log_interval == 0 or step.iteration == self.run.train_iters
        self._unlogged = None if complete else step
        times = self.timers.collect() if self.timers and complete else {}
        if not self.active:
            return
        if self._startup is not None:
            self._log_startup(step.iteration, seconds)
        losses = {name: float(value) for name, value in step.losses.items()}
        for sums in (self.interval, self.epoch):
            sums.add(step, losses, seconds)
        rates = self._rates(step.batch_size, seconds)
        self._count_for_mean(step, seconds)
        epoch = self.run.epoch(step.consumed_samples)
        self._write(step_record(step, losses, seconds, rates) | epoch)
        self._track(step_tags(step, losses) | epoch, step.iteration, step.consumed_samples)
        shown = {short_name(name): f"{value:.4f}" for name, value in losses.items()}
        self.console.advance(shown | {"tok/s": short_count(rates["tokens_per_second"])})
        if complete:
            self._log(step, times)

    def log_rest(self) -> None:
        """Log the steps since the last line, if training ends before its last step. All ranks call it together."""
        step, self._unlogged = self._unlogged, None
        if step is None:
            return
        times = self.timers.collect() if self.timers else {}
        if self.active:
            self._log(step, times)

    def record_eval(
        self,
        iteration: int,
        consumed_samples: int,
        losses: dict[str, float],
        *,
        split: str = "validation",
        final: bool = False,
        samples: Optional[range] = None,
        seconds: Optional[float] = None,
        weights_of: Optional[int] = None,
    ) -> None:
        """Record the mean losses of an evaluation over `samples`, places in the order of its split.

        weights_of: the iteration whose weights are evaluated, if they are not the present ones

        The log has "validation loss" for every split, as in Megatron-LM. At the end of training (`final`) it also names
        the set, after the iteration: " on validation set", " on test set".
        """
        if not self.active:
            return
        losses = {name: float(value) for name, value in losses.items()}
        perplexities = {
            name: math.exp(min(20.0, value)) for name, value in losses.items() if name in self.run.perplexities
        }
        self.console.log(
            evaluation_lines(weights_of or iteration, split, final, losses, perplexities),
            short_evaluation(weights_of or iteration, split, final, losses, perplexities, seconds),
        )
        self._write(
            dict(kind="eval", split=split, iteration=iteration, consumed_samples=consumed_samples, time=now())
            | dict(final=final)
            | ({} if weights_of is None else dict(weights_of=weights_of))
            | ({} if samples is None else dict(first_sample=samples.start, samples=len(samples)))
            | losses
            | {f"{name} ppl": value for name, value in perplexities.items()}
            | dict(seconds=seconds)
        )
        tags = {f"{name} {split}": value for name, value in losses.items()}
        tags |= {f"{name} {split} ppl": value for name, value in perplexities.items()}
        self._track(tags, iteration, consumed_samples)

    def record_epoch(self, number: int, iteration: int) -> None:
        """Log the end of an epoch after this iteration, with the mean losses of its steps in this launch."""
        epoch, self.epoch = self.epoch, Interval()
        if not self.active:
            return
        losses = epoch.means
        rate = epoch.samples / max(epoch.seconds, 1e-9)
        parts = [f"{name} = {value:.6E}" for name, value in losses.items()] + [f"Throughput = {rate:.5g} sample/s"]
        self.log(f"[Epoch {number} / Train]: {' | '.join(parts)}")
        self._write(
            dict(kind="epoch", epoch=number, iteration=iteration, time=now(), steps=epoch.steps)
            | dict(samples_per_second=rate)
            | losses
        )

    def _count_for_mean(self, step: StepMetrics, seconds: float) -> None:
        """Add a step to the mean throughput of this start, except the first steps and steps whose samples were left out."""
        self._started += 1
        if self._started > self.settings.throughput_ignore_steps and step.losses:
            self._mean.add(step, {}, seconds)

    def log_mean_throughput(self, iteration: int) -> None:
        """Log the mean rates of this start at the end of training (--log-throughput)."""
        mean, ignored = self._mean, self.settings.throughput_ignore_steps
        if not (self.active and self.settings.log_throughput and self._started):
            return
        if not mean.steps:
            return self.log(
                f"mean throughput: none, for --throughput-ignore-steps {ignored} leaves no step of this start"
            )
        rates = self._rates(mean.samples, mean.seconds, mean.steps)
        but = f" (without the first {ignored} of this start)" if ignored else ""
        self.log(f"mean throughput over {mean.steps} steps{but}: {format_rates(rates)}")
        rates = {name: float(f"{value:.5g}") for name, value in rates.items()}
        self._write(dict(kind="throughput", iteration=iteration, time=now(), steps=mean.steps, ignored=ignored) | rates)

    def record_event(self, timer: str, iteration: int, consumed_samples: int) -> None:
        """Log the time of an event between two steps, from its timer. All ranks call it together."""
        times = self.timers.collect([timer]) if self.timers else {}
        if self.active:
            self._log_times(times, 1, iteration, consumed_samples)

    def record_save(self, iteration: int, consumed_samples: int, in_background: bool) -> None:
        """Append a saved checkpoint to progress.txt (--log-progress)."""
        if self.progress:
            tokens = consumed_samples * self.run.sample_tokens
            try:
                self.progress.saved(iteration, self._operations(consumed_samples), tokens, in_background)
            except OSError as error:
                self.log(f"warning: {self.progress.path} is no longer written: {error}")
                self.progress = None

    def _operations(self, samples: int) -> float:
        return samples * self.run.sample_tokens * self.run.flops_per_token

    def note(self, kind: str, iteration: int, **facts) -> None:
        """Write a record of an event after an iteration, for the report only."""
        self._write(dict(kind=kind, iteration=iteration, time=now()) | facts)

    def record_experts(self, iteration: int, consumed_samples: int, loads: dict[str, list[int]]) -> None:
        """Record the tokens of each expert in a step, by layer. Trackers get each layer's largest and smallest load."""
        self._write(dict(kind="experts", iteration=iteration, time=now(), loads=loads))
        tags = {
            f"{of} expert load/{layer}": load for layer, own in loads.items() for of, load in load_ends(own).items()
        }
        self._track(tags, iteration, consumed_samples)

    def count_event(self, event: dict) -> None:
        """Count an event of events.jsonl for Prometheus."""
        if self.prometheus:
            self.prometheus.count_event(event)

    # -- time --------------------------------------------------------------------------------------------------------

    def start(self, startup: Optional[dict[str, float]] = None) -> None:
        """Start the clock of the first step; loading and compiling before this do not count.

        startup: seconds of the startup by phase, logged with the first step
        """
        if self.active:
            self.console.begin(self.run.train_iters, self.iteration)
        self._mark, self._carried, self._startup = time.perf_counter(), 0.0, startup

    def _log_startup(self, iteration: int, seconds: float) -> None:
        spent, self._startup = {**self._startup, "first step": round(seconds, 3)}, None
        total = round(sum(spent.values()), 3)
        self.log(
            f" > the first step was done {total:.1f} s after the start: "
            + ", ".join(f"{name} {value:.1f}" for name, value in spent.items())
        )
        self._write(dict(kind="start", iteration=iteration, time=now(), seconds=total, parts=spent))

    @contextlib.contextmanager
    def paused(self, doing: str = ""):
        """A context that does not count as time of a step: evaluation, checkpoints. doing: shown in the progress bar."""
        self._carried += time.perf_counter() - self._mark
        if doing:
            self.console.note(doing)
        try:
            yield
        finally:
            self._mark = time.perf_counter()

    def _lap(self) -> float:
        mark, self._mark = self._mark, time.perf_counter()
        seconds, self._carried = self._carried + self._mark - mark, 0.0
        return seconds

    def _rates(self, samples: int, seconds: float, steps: int = 1) -> dict[str, float]:
        per_second, each = samples / max(seconds, 1e-9), self.run.data_ranks
        tokens = per_second * self.run.sample_tokens
        flops = tokens * self.run.flops_per_token / self.run.ranks
        mfu = {"mfu": flops / self.run.peak_flops} if self.run.peak_flops else {}
        if mfu and self.run.plain_peak_flops not in (None, self.run.peak_flops):
            mfu["mfu_bf16_peak"] = flops / self.run.plain_peak_flops
        if 0 < self.run.seen_flops_per_token < self.run.flops_per_token:
            seen = self.run.seen_flops_per_token / self.run.flops_per_token
            mfu |= {f"{name}_causal": seen * value for name, value in {"tflops_per_rank": flops / 1e12, **mfu}.items()}
        return {
            "tokens_per_second": tokens,
            "tflops_per_rank": flops / 1e12,
            "samples_per_second": per_second,
            "steps_per_second": steps / max(seconds, 1e-9),
            "samples_per_second_per_data_rank": per_second / each,
            "tokens_per_second_per_data_rank": tokens / each,
        } | mfu

    def rollback(self, iteration: int) -> None:
        """Go back to this iteration: records of later ones no longer count."""
        self.interval, self.epoch, self._unlogged = Interval(), Interval(), None
        if self.timers:
            self.timers.forget()
        self.console.rewind(iteration)
        self._write(dict(kind="rewind", iteration=iteration, time=now()))

    # -- output ------------------------------------------------------------------------------------------------------

    def log(self, text: str) -> None:
        """Log a line."""
        if self.active:
            self.console.log(text)

    def _log(self, step: StepMetrics, times: dict[str, list[float]]) -> None:
        interval, self.interval = self.interval, Interval()
        rates = self._rates(interval.samples, interval.seconds, interval.steps)
        self.console.log(
            console_line(step, interval, self.run, rates, self.settings.log_throughput),
            short_line(step, interval, self.run, rates, self.console.width),
        )
        tags = {"iteration-time": interval.seconds / interval.steps, "throughput": rates["tflops_per_rank"]}
        self._track(tags, step.iteration, step.consumed_samples)
        self._log_times(times, interval.steps, step.iteration, step.consumed_samples)

    def _log_times(self, times: dict[str, list[float]], steps: int, iteration: int, consumed_samples: int) -> None:
        """Log mean times of a step. times: timer -> seconds of each rank in so many steps"""
        if not times:
            return
        means = {name: [seconds / steps for seconds in ranks] for name, ranks in times.items()}
        self.log(table(means, self.settings.timing_log_option))
        ends = {name: dict(min=round(least, 7), max=round(most, 7)) for name, (least, most) in spans(means).items()}
        if self.settings.timing_log_option == "all":
            ends = {name: both | dict(ranks=[round(one, 7) for one in means[name]]) for name, both in ends.items()}
        self._write(dict(kind="timers", iteration=iteration, time=now(), steps=steps, seconds=ends))
        if self.settings.log_timers_to_tensorboard:
            self._track({f"{name}-time": both["max"] for name, both in ends.items()}, iteration, consumed_samples)

    def _write(self, record: dict) -> None:
        for listener in self.listeners:
            listener(record)
        if self.json:
            try:
                self.json.write(record)
            except OSError as error:  # training continues without metrics when the disk is full
                self.log(f"warning: {self.json.file.name} is no longer written: {error}")
                self.json = None

    def _track(self, tags: dict[str, float], iteration: int, consumed_samples: int) -> None:
        for tracker in list(self.trackers):
            try:
                tracker.scalars(tags, iteration, consumed_samples)
            except OSError as error:
                self.log(f"warning: {type(tracker).__name__} is no longer written: {error}")
                self.trackers.remove(tracker)

    def end(self, iteration: int, code: int, why: str) -> None:
        """Write the last record: the exit code with which a launch ended after this iteration, and the reason."""
        self._write(dict(kind="end", iteration=iteration, time=now(), code=code, why=why))
        if code:
            self.console.keep_only(f"ended after iteration {iteration} with exit code {code}: {why}")

    def close(self) -> None:
        self.console.close()
        for output in [*self.trackers, *filter(None, [self.json, self.prometheus])]:
            output.close()
        self.json, self.prometheus, self.trackers = None, None, []

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def metrics_path(logging: Logging, save: Optional[str]) -> Optional[Path]:
    """Path of the JSON lines: `--metrics-file`, or metrics.jsonl in the `local_folder` of --save, or None."""
    if logging.metrics_file:
        return Path(logging.metrics_file)
    return local_folder(save) / METRICS if save else None


def log_path(logging: Logging, save: Optional[str]) -> Optional[Path]:
    """Path of the log's copy: `--log-file`, or train.log in the `local_folder` of --save, or None."""
    if logging.log_file:
        return Path(logging.log_file)
    return local_folder(save) / "train.log" if save else None
