# SPDX-License-Identifier: Apache-2.0
"""Current values of a run for Prometheus, over HTTP (--metrics-port).

    exporter = Prometheus(Logging(metrics_port=9400), RunSizes(...), header)
    exporter.write(record)               # each record of metrics.jsonl
    # curl http://127.0.0.1:9400/metrics

A record only changes a few numbers in memory. A thread of prometheus-client answers the requests.
"""

import errno
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Optional

from megatron.errors import SettingsError
from megatron.settings import rank_env
from megatron.settings.schema import Logging
from megatron.telemetry.events import KINDS
from megatron.telemetry.run_folder import Saved
from megatron.telemetry.run_record import LOSS, own_sums
from megatron.telemetry.step_metrics import RunSizes, load_ends
from megatron.telemetry.trackers import missing_package

PREFIX = "megatron_"
GAUGES = {  # name without prefix -> help
    "iteration": "Last finished training iteration",
    "train_iterations": "Iterations of the whole run",
    "consumed_samples": "Samples the run was trained on",
    "consumed_tokens": "Tokens the run was trained on",
    "loss": "Training loss of the last step, by name",
    "evaluation": "Values of the last evaluation, by split and name",
    "learning_rate": "Learning rate of the last step",
    "grad_norm": "Norm of the gradient before clipping",
    "params_norm": "Norm of the parameters (--log-params-norm)",
    "max_attention_logit": "Largest attention logit of the last step (--log-max-attention-logit)",
    "expert_load": "Largest and smallest load of a layer's experts in the last logged step, in means over them",
    "loss_scale": "Loss scale",
    "batch_size": "Samples of the last step",
    "step_seconds": "Time of the last step",
    "step_age_seconds": "Time since the last step ended",
    "tokens_per_second": "Tokens per second of all ranks in the last step",
    "tflops_per_rank": "Model TFLOP/s of a rank in the last step",
    "mfu": "Model FLOPs utilization, from 0 to 1; with --fp8-format of the peaks of both formats",
    "mfu_bf16_peak": "With --fp8-format, model FLOPs over the peak of --precision alone",
    "tflops_per_rank_causal": "Model TFLOP/s of a rank in the last step, with only the seen pairs of causal attention",
    "mfu_causal": "Model FLOPs utilization with only the seen pairs of causal attention, from 0 to 1",
    "memory_peak_bytes": "Peak memory of rank 0: tensors on a GPU, the process on a CPU",
    "restarts": "Earlier launches of this run",
    "checkpoint_iteration": "Iteration of the last checkpoint",
    "checkpoint_age_seconds": "Time since the last checkpoint was written",
    "run_info": "Host, device, commit and number of ranks of the run; the value is 1",
}
COUNTERS = {
    "steps": "Steps of this launch",
    "skipped_steps": "Steps without an update, because gradients overflowed",
    "nonfinite_steps": "Steps whose loss was not finite",
    "events": "Events of events.jsonl, by kind and level",
}
OF_A_STEP = ("iteration", "consumed_samples", "batch_size", "learning_rate", "grad_norm", "params_norm", "loss_scale")
# Keys of a step's record that are gauges of this name.
OF_A_STEP += (
    "max_attention_logit",
    "tokens_per_second",
    "tflops_per_rank",
    "mfu",
    "mfu_bf16_peak",
    "tflops_per_rank_causal",
    "mfu_causal",
)
NORMS = ("params_norm", "num_zeros", "max_attention_logit")
NO_VALUES = {"kind", "split", "iteration", "consumed_samples", "time", "final", "first_sample", "samples", "seconds"}


class Prometheus:
    """Serves the current values of a run. Takes the records of metrics.jsonl.

    name: name of the run, a label of all values. restarts: number of earlier launches. saved: the last checkpoint of these.
    """

    def __init__(
        self,
        logging: Logging,
        run: RunSizes,
        header: dict,
        *,
        name: str = "",
        restarts: int = 0,
        saved: Optional[Saved] = None,
    ):
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise missing_package("--metrics-port", "prometheus-client", error) from None
        self.run, self._name, self._saved, self._stepped = run, name, saved, None
        # (name, other labels) -> value. Each kind of event begins with 0, so that its first one is an increase.
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for kind, about in KINDS.items():
            self._set("events", 0, event=kind, level=about.level)
        for name in ("steps", "skipped_steps", "nonfinite_steps"):
            self._set(name, 0)
        self._lock = threading.Lock()
        self._set("restarts", restarts)
        self._set("train_iterations", run.train_iters)
        info = {key: str(header.get(key) or "") for key in ("host", "device", "commit")} | {"ranks": str(run.ranks)}
        self._set("run_info", 1, **info)
        if header.get("iteration") is not None:
            self._set("iteration", header["iteration"])
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(logging.metrics_port, addr=logging.metrics_host, registry=registry)
        except OSError as error:
            raise _cannot_listen(logging, error) from None
        host = logging.metrics_host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._server.server_port}/metrics"

    def write(self, record: dict[str, Any]) -> None:
        """Update the values from a record. Unknown kinds change nothing."""
        with self._lock:
            take = getattr(self, f"_take_{record['kind']}", None)
            if take:
                take(record)

    def count_event(self, event: dict[str, Any]) -> None:
        """Count an event. The event of a complete checkpoint also sets the time of the last one."""
        with self._lock:
            self._add("events", 1, event=event["event"], level=event["level"])
            if event["event"] == "save" and event["iteration"] is not None:
                self._saved = Saved(event["iteration"], event["time"])

    def collect(self) -> Iterator:
        """All values, as prometheus-client asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            values, saved, stepped, now = dict(self._values), self._saved, self._stepped, time.time()
        if saved:
            values["checkpoint_iteration", ()] = saved.iteration
            values["checkpoint_age_seconds", ()] = max(0.0, now - saved.time)
        if stepped:
            values["step_age_seconds", ()] = max(0.0, now - stepped)
        for metric, words in (GAUGES | COUNTERS).items():
            samples = [(labels, value) for (name, labels), value in values.items() if name == metric]
            if samples:
                kind = GaugeMetricFamily if metric in GAUGES else CounterMetricFamily
                family = kind(PREFIX + metric, words, labels=["run", *(name for name, _ in samples[0][0])])
                for labels, value in samples:
                    family.add_metric([self._name, *(word for _, word in labels)], value)
                yield family

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _set(self, metric: str, value: float, **labels: str) -> None:
        self._values[metric, tuple(labels.items())] = float(value)

    def _add(self, metric: str, number: float, **labels: str) -> None:
        key = metric, tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + number

    def _take_step(self, record: dict) -> None:
        for name in OF_A_STEP:
            if record.get(name) is not None:
                self._set(name, record[name])
        names = [name for name in (LOSS, *own_sums(record)) if name not in NORMS]
        losses = [name for name in names if isinstance(record.get(name), (int, float))]
        for name in losses:
            self._set("loss", record[name], name=name)
        self._set("step_seconds", record["seconds"])
        self._set("consumed_tokens", record["consumed_samples"] * self.run.sample_tokens)
        self._stepped = time.time()
        self._add("steps", 1)
        self._add("skipped_steps", bool(record.get("skipped")))
        self._add("nonfinite_steps", any(not math.isfinite(record[name]) for name in losses))

    def _take_eval(self, record: dict) -> None:
        for name, value in record.items():
            if name not in NO_VALUES and isinstance(value, (int, float)):
                self._set("evaluation", value, split=str(record["split"]), name=name)

    def _take_experts(self, record: dict) -> None:
        for layer, loads in record["loads"].items():
            for of, load in load_ends(loads).items():
                self._set("expert_load", load, layer=layer, of=of)

    def _take_memory(self, record: dict) -> None:
        if record.get("bytes") is not None:
            self._set("memory_peak_bytes", record["bytes"])

    def _take_rewind(self, record: dict) -> None:
        self._set("iteration", record["iteration"])


def refused_port(logging: Logging) -> Optional[SettingsError]:
    """The error if rank 0 cannot listen on --metrics-port; else None. Checked before ranks join, for all to raise it."""
    if logging.metrics_port is None or rank_env.ranks().rank:
        return None
    try:
        with socket.create_server((logging.metrics_host, logging.metrics_port), family=_family(logging.metrics_host)):
            return None
    except OSError as error:
        refusal = _cannot_listen(logging, error)
        refusal.about = refusal.what  # the other ranks of this machine need not repeat it
        return refusal


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _cannot_listen(logging: Logging, error: OSError) -> SettingsError:
    port, host = logging.metrics_port, logging.metrics_host
    if error.errno == errno.EADDRINUSE:
        return SettingsError(
            f"--metrics-port {port}: another process listens on this port of {host}",
            do=f"give another port, or 0 for a free one; ss -ltnp 'sport = :{port}' shows the process",
        )
    do = "--metrics-host 127.0.0.1 for this machine alone, 0.0.0.0 for all its networks"
    if error.errno == errno.EACCES:
        do = "ports below 1024 are those of the system: give a larger one"
    return SettingsError(f"--metrics-port {port}: cannot listen on {host}", error.strerror or str(error), do)
