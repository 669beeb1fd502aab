"""/metrics, read by Prometheus' own parser."""

from __future__ import annotations

import math
import pathlib

import pytest
from fake_runs import FakeRun
from pages import shown

from hora.dashboard import prometheus
from hora.dashboard.catalogue import RunCatalogue
from hora.monitor.status import RunStatus

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")


def parsed(text: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in parser.text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_a_live_run_tells_its_numbers(tmp_path: pathlib.Path) -> None:
    story = FakeRun(tmp_path, "one", strategy="ps:mode=async", size=3, servers=2, slow=1)
    for _ in range(50):
        story.go(4)
    with shown(tmp_path) as page:
        status, said, headers = page.ask("/metrics")
    story.end()
    assert status == 200 and headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = parsed(said)
    run = ("run", "one")
    assert found["hora_up"] == {(run,): 1} and found["hora_step"] == {(run,): 200}
    assert found["hora_samples_total"] == {(run,): 200 * 64 * 3}
    assert found["hora_value"][(("name", "loss"), run)] > 0
    assert (
        found["hora_worker_slow"][(("rank", "1"), run)] > 1.5 and found["hora_worker_slow"][(("rank", "0"), run)] == 0
    )
    for part in ("compute", "wait", "communication"):
        assert len(found[f"hora_worker_{part}_seconds"]) == 3
    assert len(found["hora_server_busy_ratio"]) == len(found["hora_server_queue"]) == 2
    assert sum(found["hora_lag_updates_total"].values()) == 200 * 3 * 2
    assert found["hora_events_total"][(("kind", "joined"), run)] == 3
    assert found["hora_checkpoints_total"] == {(run,): 1} and found["hora_sent_bytes_per_second"]


def test_ended_runs_are_left_out(tmp_path: pathlib.Path) -> None:
    FakeRun(tmp_path, "one").end()
    assert parsed(prometheus.text(RunCatalogue(str(tmp_path)))) == {}


@pytest.mark.parametrize(
    "name", ['a"b', "a\\b", "a\nb", '"} 1\nhora_up{run="x', "π <img src=x onerror=alert(1)>", "\\"]
)
def test_names_are_escaped(tmp_path: pathlib.Path, name: str) -> None:
    story = FakeRun(tmp_path, "one", size=1)
    story.run_state.on_event(name, "somebody", "something", 0.0)
    story.go(4, values={name: 2.5})
    found = parsed(prometheus.text(RunCatalogue(str(tmp_path))))
    story.end()
    kept = story.run_state.status(0.0).values
    assert [dict(labels)["name"] for labels in found["hora_value"]] == [*kept] and len(kept) == 1
    assert found["hora_up"].keys() == {(("run", "one"),)}


def test_any_text_survives_the_escaping() -> None:
    now = RunStatus(run="r", values={'a"\\\n{}=,': 1.0, "nan": math.nan, "inf": math.inf, "-inf": -math.inf})
    told = [(labels["name"], value) for family, labels, value in prometheus.samples(now, []) if family == "hora_value"]
    text = prometheus._family("hora_value", [({"name": name}, value) for name, value in told]).encode()
    found = {dict(labels)["name"]: value for labels, value in parsed(text)["hora_value"].items()}
    assert found['a"\\\n{}=,'] == 1.0 and math.isnan(found["nan"])
    assert (found["inf"], found["-inf"]) == (math.inf, -math.inf)
