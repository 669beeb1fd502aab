"""WorkerMeans: all workers judge the same means; a worker that gives no value is not waited for without end."""

from __future__ import annotations

import math
import threading
import time

import ranks
from hora.collectives import Group
from hora.job.worker_means import WorkerMeans


def means(group: Group, together: bool = True) -> WorkerMeans:
    made = WorkerMeans(group.control, group.rank, group.size, "test", together)
    group.control.subscribe(made.on_event)
    group.barrier()  # all listen
    return made


def test_all_workers_see_the_same_means_in_the_same_order() -> None:
    def script(group: Group) -> list[float]:
        mine = means(group)
        found: list[float] = []
        for k in range(20):
            time.sleep(0.002 * ((group.rank + k) % 3))
            found += mine.add(10.0 * k + group.rank)
        assert mine.num_workers == 3
        return found

    first, *others = ranks.run(3, script)
    assert first == [10.0 * k + 1 for k in range(20)]
    assert all(each == first for each in others)


def test_a_worker_that_ends_is_not_counted_any_more() -> None:
    ended = threading.Event()

    def script(group: Group) -> list[float]:
        mine = means(group)
        found = mine.add(float(group.rank))
        if group.rank == 2:
            group.control.leave()
            ended.set()
            return found
        ended.wait(10)
        while 2 not in mine._ended:
            time.sleep(0.01)
        found += mine.add(5.0 + group.rank)
        assert mine.num_workers == 2
        return found

    assert ranks.run(3, script)[:2] == [[1.0, 5.5]] * 2


def test_one_worker_alone_gets_its_own_values() -> None:
    """The others never call: `stopping(loss)` under `if job.rank == 0`."""

    def script(group: Group) -> list[float]:
        mine = means(group)
        return [mean for k in range(3) for mean in mine.add(float(k))] if group.rank == 0 else []

    assert ranks.run(2, script)[0] == [0.0, 1.0, 2.0]


def test_workers_that_do_not_step_together_get_the_mean_of_the_newest() -> None:
    def script(group: Group) -> float:
        mine = means(group, together=False)
        mine.add(float(group.rank))
        while len(mine._values) < 2:
            time.sleep(0.01)
        return mine.add(float(group.rank))[-1]

    assert all(math.isclose(found, 0.5) for found in ranks.run(2, script))
