"""One step out of the trace of a run of overlap_rank.py: what the training thread was at, and what was on its way.

    forward   backward   waiting   step             training: backward ends with its last gradient
                 bucket 0  bucket 1 …               in flight: from when a bucket's reduction begins until it is done

A bucket leaves training when it is launched; until one before it has arrived it may have to queue.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from .claim import Row

GRADIENT = "gradient"  # the name of a mark in the trace
WARM_UP_STEPS = 2  # the first backward agrees on the buckets, which then leave after it
TRAINING, BUCKETS = "training", "buckets"

Event = dict[str, Any]


def one_step(path: pathlib.Path) -> dict[str, Any]:
    """The step of median length of rank 0, in seconds from its begin.

    Stages of `training` are [name, begin, end]; `buckets` are [number, launched, begun, arrived], as they left.
    """
    trace = json.loads(path.read_text())
    pid = next(one["pid"] for one in trace["otherData"]["processes"] if (one["role"], one["rank"]) == ("worker", 0))
    events = [event for event in trace["traceEvents"] if event["pid"] == pid and event["ph"] == "X"]
    ends = sorted(_end(event) for event in events if event["name"] == "step")
    steps = sorted((end - begin, begin) for begin, end in itertools.pairwise(ends[WARM_UP_STEPS - 1 :]))
    length, zero = steps[(len(steps) - 1) // 2]
    return _told([event for event in events if zero <= event["ts"] < zero + length], zero, length)


def _told(events: list[Event], zero: float, length: float) -> dict[str, Any]:
    """Of the events of one step."""

    def seconds(*times: float) -> list[float]:
        return [(time - zero) / 1e6 for time in times]

    stages = {event["name"]: event for event in events if event["name"] in ("forward", "backward", "step")}
    computed = max(event["ts"] for event in events if event["name"] == GRADIENT)
    backward = stages["backward"]
    buckets = sorted((event for event in events if event["cat"] == "communication"), key=lambda one: one["ts"])
    return {
        "step_s": length / 1e6,
        TRAINING: [
            ["forward", *seconds(stages["forward"]["ts"], _end(stages["forward"]))],
            ["backward", *seconds(backward["ts"], computed)],
            ["waiting", *seconds(computed, _end(backward))],
            ["step", *seconds(stages["step"]["ts"], _end(stages["step"]))],
        ],
        BUCKETS: [
            [one["args"]["bucket"], *seconds(one["ts"], max(one["ts"], _end(one) - one["args"]["work_us"]), _end(one))]
            for one in buckets
            if "bucket" in one.get("args", {})
        ],
    }


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def rate_text(place: str) -> str:
    """The rate at the end of a place's name, which has it as tc does: 200 Mbit/s for 'links of 200mbit'."""
    rate = place.rpartition(" ")[2]
    return f"{rate[:-4]} {rate[-4:].capitalize()}/s"


def draw_timelines(those: Sequence[Row], axis: Any) -> None:
    """For each run a row of the training thread above one of what is on its way, all on one scale of time."""
    from .figure import COLORS, dress

    colors = {"forward": "tab:cyan", "backward": COLORS["ring"], "waiting": "0.85", "step": "tab:green"}
    places = []
    for number, row in enumerate(those):
        high = 2.6 * (len(those) - 1 - number)
        places += [(high + 1, f"overlap={str(row['overlap']).lower()}: training"), (high, "gradients on their way")]
        for name, begin, end in row[TRAINING]:
            label = "" if number else {"step": "optimizer step", "waiting": "waits for the gradients"}.get(name, name)
            axis.barh(high + 1, 1e3 * (end - begin), left=1e3 * begin, height=0.8, color=colors[name], label=label)
        for index, (_, _, begin, end) in enumerate(row[BUCKETS]):
            label = "" if number or index else "buckets, dark and pale in turn"
            axis.barh(high, 1e3 * (end - begin), left=1e3 * begin, height=0.8, alpha=1 - 0.4 * (index % 2),
                      color=COLORS["ddp"], label=label)  # fmt: skip
        axis.text(1e3 * row["step_s"], high + 1, f"  {1e3 * row['step_s']:.0f} ms", va="center", fontsize=9)
    first = those[0]
    title = (
        f"One step of rank 0 ({first['model']}, {first['workers']} workers) in a traced run on one host,\n"
        f"transport limited to {rate_text(first['place'])}; not one of the timed rounds"
    )
    dress(axis, title, "ms", "", legend=False)
    axis.set_yticks([place for place, _ in places], [name for _, name in places], fontsize=8)
    axis.set_xlim(0, 1.15e3 * max(row["step_s"] for row in those))
    axis.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False)
