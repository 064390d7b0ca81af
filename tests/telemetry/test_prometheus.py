# SPDX-License-Identifier: Apache-2.0
"""--metrics-port, read as Prometheus does: over HTTP, with the parser of prometheus-client."""

import json
import math
import re
import socket
import urllib.request
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.errors import SettingsError
from megatron.settings.schema import Logging
from megatron.telemetry import prometheus
from megatron.telemetry.events import EventLog
from megatron.telemetry.history import read_history
from megatron.telemetry.metrics import Metrics
from megatron.telemetry.step_metrics import RunSizes, StepMetrics
from megatron.training.hooks import Hook

parser = pytest.importorskip("prometheus_client.parser")
DASHBOARD = Path(__file__).resolve().parent.parent.parent / "docs" / "grafana.json"
ADDRESS = "127.0.0.2"  # another one than the default, which every Linux has


def scrape(url: str) -> dict:
    """{(name, labels other than run): value} of all samples."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        families = list(parser.text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {
        (
            sample.name,
            *(f"{name}={word}" for name, word in sorted(sample.labels.items()) if name != "run"),
        ): sample.value
        for sample in samples
    }


def step(iteration: int, loss: float = 2.0, **more) -> StepMetrics:
    given = dict(losses={"lm loss": loss}, learning_rate=1e-4, grad_norm=1.5)
    return StepMetrics(iteration, 8 * iteration, 8, **{**given, **more})


class Scraper(Hook):
    """A hook that reads the metrics after each step, where the log says that they are."""

    found = []

    def __init__(self, config):
        self.log = Path(config.checkpoint.save) / "train.log"

    def after_step(self, run, facts):
        Scraper.found.append(scrape(re.search(r"metrics for Prometheus: (\S+)", self.log.read_text())[1]))


def test_a_run_serves_its_current_values(tmp_path):
    command = f"""--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4 --mock-data --vocab-size 50
        --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --train-iters 4 --log-interval 2 --eval-interval 2
        --eval-iters 1 --device cpu --save {tmp_path} --save-interval 3 --metrics-port 0 --metrics-host {ADDRESS}
        --hooks {__name__}:Scraper --peak-tflops 1"""
    Scraper.found.clear()
    pretrain_gpt.main(command.split())
    assert f"http://{ADDRESS}:" in (tmp_path / "train.log").read_text()
    history, found = read_history(tmp_path / "metrics.jsonl"), Scraper.found
    assert len(found) == len(history.steps) == 4
    for values, record in zip(found, history.steps, strict=True):
        assert values["megatron_iteration",] == values["megatron_steps_total",] == record["iteration"]
        assert values["megatron_loss", "name=lm loss"] == record["lm loss"]
        for name in ("learning_rate", "grad_norm", "tokens_per_second", "mfu", "consumed_samples", "batch_size"):
            assert values[f"megatron_{name}",] == record[name], name
        assert values["megatron_step_seconds",] == record["seconds"] > 0
        assert values["megatron_consumed_tokens",] == 4 * record["consumed_samples"]
        assert values["megatron_train_iterations",] == 4 and values["megatron_restarts",] == 0
    assert found[1]["megatron_memory_peak_bytes",] == history.memory[0]["bytes"]
    [evaluation] = [e for e in history.evals if e["iteration"] == 2]
    assert found[2]["megatron_evaluation", "name=lm loss", "split=validation"] == evaluation["lm loss"]
    assert [values.get(("megatron_checkpoint_iteration",)) for values in found] == [None, None, None, 3]
    assert [values["megatron_events_total", "event=save", "level=info"] for values in found] == [0, 0, 0, 1]


def test_a_resumed_run_knows_its_restarts_and_the_age_of_its_checkpoint(tmp_path, monkeypatch):
    checkpoint = tmp_path / "iter_0000007"
    checkpoint.mkdir()
    (checkpoint / "index.json").write_text("{}")
    written = (checkpoint / "index.json").stat().st_mtime
    for launch in range(3):
        with Metrics(Logging(metrics_port=0), RunSizes(9, 16), save=str(tmp_path), iteration=7) as metrics:
            monkeypatch.setattr(prometheus.time, "time", lambda: written + 90)
            values = scrape(metrics.prometheus.url)
            assert values["megatron_restarts",] == launch
        assert values.get(("megatron_checkpoint_age_seconds",)) == (90 if launch else None)  # not one of another run
    assert values["megatron_checkpoint_iteration",] == 7


def test_losses_that_are_not_finite_and_steps_without_an_update(tmp_path):
    with Metrics(Logging(metrics_port=0), RunSizes(9, 16)) as metrics:
        events = EventLog(listeners=[metrics.count_event])
        for one in (step(1), step(2, math.nan, skipped=True), step(3, math.inf, skipped=True), step(4, skipped=True)):
            metrics.record(one)
        events.record("spike", "loss 5 is far above", iteration=4)
        metrics.rollback(2)
        values = scrape(metrics.prometheus.url)
    counts = {name: values[f"megatron_{name}_total",] for name in ("steps", "skipped_steps", "nonfinite_steps")}
    assert counts == dict(steps=4, skipped_steps=3, nonfinite_steps=2)
    assert values["megatron_iteration",] == 2
    assert values["megatron_events_total", "event=spike", "level=warning"] == 1


def test_the_most_unequal_loads_of_experts(tmp_path):
    with Metrics(Logging(metrics_port=0), RunSizes(9, 16)) as metrics:
        for loads in ([9, 0, 0], [6, 2, 4]):
            metrics.record_experts(2, 16, {"blocks.1": loads})
        values = scrape(metrics.prometheus.url)
    found = {key[1:]: value for key, value in values.items() if key[0] == "megatron_expert_load"}
    assert found == {("layer=blocks.1", "of=largest"): 1.5, ("layer=blocks.1", "of=smallest"): 0.5}


def test_a_reader_that_hangs_holds_nothing_up():
    with Metrics(Logging(metrics_port=0), RunSizes(9, 16)) as metrics:
        host, port = re.search(r"//(.*):(\d+)/", metrics.prometheus.url).groups()
        with socket.create_connection((host, int(port))) as silent:
            silent.sendall(b"GET /metrics HTTP/1.1\r\n")  # and no more
            metrics.record(step(1))
            assert scrape(metrics.prometheus.url)["megatron_iteration",] == 1
            metrics.close()
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), timeout=5)


@pytest.mark.parametrize("start", [lambda logging: Metrics(logging, RunSizes(9, 16)), prometheus.refused_port])
def test_a_taken_port_is_named(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        try:
            error = start(Logging(metrics_port=port))
        except SettingsError as raised:
            error = raised
    assert error.what == f"--metrics-port {port}: another process listens on this port of 127.0.0.1"
    assert f"sport = :{port}" in error.do and error.code == 3


def test_an_address_of_another_machine_is_named():
    error = prometheus.refused_port(Logging(metrics_port=0, metrics_host="192.0.2.1"))
    assert error.what == "--metrics-port 0: cannot listen on 192.0.2.1" and "--metrics-host 127.0.0.1" in error.do


def test_other_ranks_open_no_port(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert prometheus.refused_port(Logging(metrics_port=0, metrics_host="192.0.2.1")) is None
    assert Metrics(Logging(metrics_port=0), RunSizes(9, 16), active=False).prometheus is None


def test_the_grafana_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    known = {prometheus.PREFIX + name for name in prometheus.GAUGES}
    known |= {f"{prometheus.PREFIX}{name}_total" for name in prometheus.COUNTERS}
    asked = {name for query in queries for name in re.findall(r"megatron_\w+", query)}
    assert asked - known == set() and len(asked) > 15
    assert all(query.count(a) == query.count(b) for query in queries for a, b in ("()", "{}", "[]"))
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and all(panel["targets"] for panel in dashboard["panels"])
    places = [
        (x, y)
        for panel in dashboard["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(places) == len(set(places)) and max(x for x, _ in places) < 24  # panels do not cover each other
