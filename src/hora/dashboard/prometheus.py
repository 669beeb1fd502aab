"""Metrics of the live runs for Prometheus, text format 0.0.4. Every metric has the label `run`."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ..monitor.status import RunEvent, RunStatus
from .catalogue import RunCatalogue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_RUNS = 64

Families = dict[str, tuple[str, str, str]]
Sample = tuple[Mapping[str, object], float]

# name: (type, help, and where it is one: the field of RunStatus, WorkerStatus or ServerStatus)
RUN = {
    "hora_up": ("gauge", "1 while the run is live.", ""),
    "hora_step": ("gauge", "Step of the run.", "step"),
    "hora_epoch": ("gauge", "Current epoch.", "epoch"),
    "hora_progress_ratio": ("gauge", "Share of the training that is done, 0 to 1.", "progress"),
    "hora_seconds": ("gauge", "Seconds since the run began.", "seconds"),
    "hora_workers": ("gauge", "Workers by state.", ""),
    "hora_samples_total": ("counter", "Samples that all workers have computed.", "samples"),
    "hora_samples_per_second": ("gauge", "Samples per second of all workers, recently.", "samples_per_s"),
    "hora_steps_per_second": ("gauge", "Steps per second, recently.", "steps_per_s"),
    "hora_value": ("gauge", "Newest logged value, by name.", ""),
    "hora_bytes_per_step": ("gauge", "Bytes that one worker sends per step, over the whole run.", "bytes_per_step"),
    "hora_hidden_ratio": ("gauge", "Share of communication hidden by computation, over the whole run.", "hidden"),
    "hora_rounds_total": ("counter", "Closed rounds, for strategies with rounds.", "rounds"),
    "hora_lag_updates_total": ("counter", "Block updates by lag: updates of the block between pull and push.", ""),
    "hora_events_total": ("counter", "Events by kind.", ""),
    "hora_checkpoints_total": ("counter", "Checkpoints written.", "checkpoints"),
    "hora_skipped_total": ("counter", "Steps skipped because of a non-finite gradient.", "skipped"),
    "hora_lost_reports_total": ("counter", "Reports that were invalid or arrived too fast.", "lost_reports"),
}
WORKER = {
    "hora_worker_compute_seconds": ("gauge", "Compute of a worker per step.", "compute_s"),
    "hora_worker_wait_seconds": ("gauge", "Time per step that a worker waits for slower ones.", "wait_s"),
    "hora_worker_communication_seconds": ("gauge", "Exposed communication per step, beyond waiting.", "comm_s"),
    "hora_worker_samples_per_second": ("gauge", "Samples per second of a worker.", "samples_per_s"),
    "hora_worker_slow": ("gauge", "Compute of a straggler relative to the others; 0 for other workers.", "slow"),
    "hora_sent_bytes_per_second": ("gauge", "Bytes per second that a worker sends.", "sent_bytes_per_s"),
}
SERVER = {
    "hora_server_busy_ratio": ("gauge", "Share of the time that a server is busy, 0 to 1.", "busy"),
    "hora_server_queue": ("gauge", "Gradients that wait at a server for those of other workers.", "queue"),
    "hora_server_load_bytes": ("gauge", "Bytes of parameters on a server.", "load_bytes"),
    "hora_server_updates_total": ("counter", "Block updates of a server.", "updates"),
}
FAMILIES = {**RUN, **WORKER, **SERVER}


def text(catalogue: RunCatalogue) -> bytes:
    """At most MAX_RUNS live runs. A run that cannot be read now is left out."""
    found: dict[str, list[Sample]] = {name: [] for name in FAMILIES}
    for run in [run for run in catalogue.all() if run.live][:MAX_RUNS]:
        with contextlib.suppress(Exception):
            if (reader := run.reader()) is not None:
                for family, labels, value in list(samples(reader.status(), reader.events())):
                    found[family].append(({"run": run.name, **labels}, value))
    return "".join(_family(name, found[name]) for name in FAMILIES).encode()


def samples(status: RunStatus, events: Iterable[RunEvent]) -> Iterator[tuple[str, dict[str, object], float]]:
    """Family, labels and value of every metric of one run."""
    yield "hora_up", {}, 0 if status.state == "ended" else 1
    alive = [worker for worker in status.workers if worker.state == "alive"]
    subjects: list[tuple[dict[str, object], msgspec.Struct, Families]] = [({}, status, RUN)]
    subjects += [({"rank": worker.rank}, worker, WORKER) for worker in alive]
    subjects += [({"server": server.number}, server, SERVER) for server in status.servers]
    for labels, subject, families in subjects:
        for family, (_, _, field) in families.items():
            if field and (value := getattr(subject, field)) is not None:
                yield family, labels, value
    for state, count in collections.Counter(worker.state for worker in status.workers).items():
        yield "hora_workers", {"state": state}, count
    for name, value in status.values.items():
        yield "hora_value", {"name": name}, value
    for lag, count in sorted(status.lags.items()):
        yield "hora_lag_updates_total", {"lag": lag}, count
    for kind, count in collections.Counter(event.kind for event in events).items():
        yield "hora_events_total", {"kind": kind}, count


def _family(name: str, found: list[Sample]) -> str:
    kind, description, _ = FAMILIES[name]
    lines = [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
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
