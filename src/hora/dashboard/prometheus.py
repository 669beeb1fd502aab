"""Metrics: the live runs as Prometheus reads them, text format 0.0.4. All have the label `run`."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

from ..monitor.status import RunEvent, RunStatus
from .runs import StoredRuns

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_RUNS = 64

Sample = tuple[Mapping[str, object], float]

FAMILIES = {
    "hora_up": ("gauge", "1 while the run lives."),
    "hora_step": ("gauge", "The run's step."),
    "hora_epoch": ("gauge", "The epoch that is under way."),
    "hora_progress_ratio": ("gauge", "How much of the training is done, 0 to 1."),
    "hora_seconds": ("gauge", "Seconds since the run began."),
    "hora_workers": ("gauge", "Workers by their state."),
    "hora_samples_total": ("counter", "Samples that all workers have computed."),
    "hora_samples_per_second": ("gauge", "Samples of all workers in a second, over the last few."),
    "hora_steps_per_second": ("gauge", "Steps in a second, over the last few."),
    "hora_value": ("gauge", "The newest of what the script logs, by its name."),
    "hora_worker_compute_seconds": ("gauge", "What a worker computes in a step."),
    "hora_worker_wait_seconds": ("gauge", "What a worker waits for slower ones in a step."),
    "hora_worker_communication_seconds": ("gauge", "What communication takes of a worker's step, beyond waiting."),
    "hora_worker_samples_per_second": ("gauge", "A worker's own samples in a second."),
    "hora_worker_slow": ("gauge", "How many times the others' time a straggler computes; 0 for who is none."),
    "hora_sent_bytes_per_second": ("gauge", "Bytes that a worker sends in a second."),
    "hora_bytes_per_step": ("gauge", "Bytes that one worker sends in a step, over the whole run."),
    "hora_hidden_ratio": ("gauge", "Share of communication that computation hid, over the whole run."),
    "hora_rounds_total": ("counter", "Rounds that were closed, where there are any."),
    "hora_server_busy_ratio": ("gauge", "Share of the time in which a server works, 0 to 1."),
    "hora_server_queue": ("gauge", "Gradients that wait at a server for others'."),
    "hora_server_load_bytes": ("gauge", "Bytes of parameters that a server keeps."),
    "hora_server_updates_total": ("counter", "Updates that a server has made."),
    "hora_lag_updates_total": ("counter", "Updates by their lag: how many others came between pull and push."),
    "hora_events_total": ("counter", "What happened, by its kind."),
    "hora_checkpoints_total": ("counter", "Checkpoints that were written."),
    "hora_skipped_total": ("counter", "Steps that were skipped because of a value that is not finite."),
    "hora_lost_reports_total": ("counter", "Reports that came faster than they were heard."),
}


def text(runs: StoredRuns) -> bytes:
    """The live runs, MAX_RUNS of them at most. One that cannot be read now is left out."""
    found: dict[str, list[Sample]] = {name: [] for name in FAMILIES}
    for run in [run for run in runs.all() if run.live][:MAX_RUNS]:
        with contextlib.suppress(Exception):
            reading = run.read()
            if reading is None:
                continue
            for family, labels, value in list(samples(reading.status(), reading.events())):
                found[family].append(({"run": run.name, **labels}, value))
    return "".join(_family(name, found[name]) for name in FAMILIES).encode()


def samples(now: RunStatus, events: Iterable[RunEvent]) -> Iterator[tuple[str, dict[str, object], float]]:
    """Family, labels and value of all that one run tells."""
    one: dict[str, object] = {}
    yield "hora_up", one, 0 if now.state == "ended" else 1
    singles = {
        "hora_step": now.step, "hora_epoch": now.epoch, "hora_progress_ratio": now.progress,
        "hora_seconds": now.seconds, "hora_samples_total": now.samples, "hora_samples_per_second": now.samples_per_s,
        "hora_steps_per_second": now.steps_per_s, "hora_bytes_per_step": now.bytes_per_step,
        "hora_hidden_ratio": now.hidden, "hora_rounds_total": now.rounds, "hora_checkpoints_total": now.checkpoints,
        "hora_skipped_total": now.skipped, "hora_lost_reports_total": now.lost_reports,
    }  # fmt: skip
    for family, value in singles.items():
        if value is not None:
            yield family, one, value
    for state, count in collections.Counter(worker.state for worker in now.workers).items():
        yield "hora_workers", {"state": state}, count
    for name, value in now.values.items():
        yield "hora_value", {"name": name}, value
    for worker in now.workers:
        if worker.state != "alive":
            continue
        labels: dict[str, object] = {"rank": worker.rank}
        yield "hora_worker_compute_seconds", labels, worker.compute_s
        yield "hora_worker_wait_seconds", labels, worker.wait_s
        yield "hora_worker_communication_seconds", labels, worker.comm_s
        yield "hora_worker_samples_per_second", labels, worker.samples_per_s
        yield "hora_worker_slow", labels, worker.slow
        yield "hora_sent_bytes_per_second", labels, worker.sent_bytes_per_s
    for server in now.servers:
        labels = {"server": server.number}
        yield "hora_server_busy_ratio", labels, server.busy
        yield "hora_server_queue", labels, server.queue
        yield "hora_server_load_bytes", labels, server.load_bytes
        yield "hora_server_updates_total", labels, server.updates
    for lag, count in sorted(now.lags.items()):
        yield "hora_lag_updates_total", {"lag": lag}, count
    for kind, count in collections.Counter(event.kind for event in events).items():
        yield "hora_events_total", {"kind": kind}, count


def _family(name: str, found: list[Sample]) -> str:
    kind, what = FAMILIES[name]
    lines = [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
    for labels, value in found:
        shown = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
        lines.append(f"{name}{{{shown}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
