"""One rank of the all-reduces of `hora bench hosts`: python -m hora_benchmarks.bench.hosts_rank HOW COUNTER.

HOW is hora, gloo or mpi; its rank is in the environment, as torchrun sets it, or set by mpirun. It answers requests as
process_pool.py says: for {"algorithm": A, "bytes": N, "calls": K} it all-reduces N bytes of float32 K times, all ranks
beginning each call together, and answers with the seconds of each, those of the processor that one took on average, and
the bytes that left its host in all of them, by the kernel's own COUNTER, a file. With "verify" the sums are checked
instead. Of MPI's ranks the first one speaks for all: mpirun gives it alone a stdin.
"""

from __future__ import annotations

import array
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

LEAD_BYTES = 2 << 20  # untimed, before each turn: idle connections start slowly
POLL_S = 0.01
LINE_BYTES = 256

Answer = dict[str, Any]


class Ranks:
    """`reduce(tensor, algorithm)` all-reduces in place, `meet` waits for the others, `end` leaves the group."""

    rank: int
    size: int

    def reduce(self, tensor: torch.Tensor, algorithm: str) -> None:
        raise NotImplementedError  # defined by each system

    def meet(self) -> None:
        raise NotImplementedError  # defined by each system

    def end(self) -> None: ...

    def requests(self) -> Iterator[Answer]:
        for line in sys.stdin:
            yield json.loads(line)

    def most(self, figures: list[float]) -> list[float]:
        """Of each figure, that of the rank that has most of it, where this one answers for all; else its own."""
        return figures

    @property
    def answers(self) -> bool:
        return True


class Hora(Ranks):
    def __init__(self) -> None:
        import hora

        self._job = hora.init()
        self.rank, self.size = self._job.rank, self._job.size

    def reduce(self, tensor: torch.Tensor, algorithm: str) -> None:
        self._job.group.all_reduce(tensor, algorithm=algorithm)

    def meet(self) -> None:
        self._job.group.barrier()

    def end(self) -> None:
        self._job.close()


class Gloo(Ranks):
    """Through torch.distributed, as its users call it. It has one algorithm for large tensors: the ring."""

    def __init__(self) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self._dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def reduce(self, tensor: torch.Tensor, algorithm: str) -> None:
        self._dist.all_reduce(tensor)

    def meet(self) -> None:
        self._dist.barrier()

    def end(self) -> None:
        self._dist.destroy_process_group()


class Mpi(Ranks):
    """Through mpi4py; which algorithm, mpirun was told. Ranks that wait for a request sleep: MPI itself would spin."""

    def __init__(self) -> None:
        from mpi4py import MPI

        from hora_benchmarks.bench import peers

        call = peers.mpi()
        assert call is not None
        self._call, self._mpi, self._comm = call, MPI, MPI.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def reduce(self, tensor: torch.Tensor, algorithm: str) -> None:
        self._call(tensor)

    def meet(self) -> None:
        self._comm.Barrier()

    def requests(self) -> Iterator[Answer]:
        """The first rank reads them and passes them on; an empty one is the end."""
        while True:
            words = sys.stdin.readline().encode() if self.rank == 0 else b""
            line = bytearray(words.strip().ljust(LINE_BYTES))
            under_way = self._comm.Ibcast([line, self._mpi.BYTE], root=0)
            while not under_way.Test():
                time.sleep(POLL_S)
            if not line.strip():
                return
            yield json.loads(line)

    def most(self, figures: list[float]) -> list[float]:
        most = array.array("d", figures)
        self._comm.Allreduce(self._mpi.IN_PLACE, [most, self._mpi.DOUBLE], self._mpi.MAX)
        return list(most)

    @property
    def answers(self) -> bool:
        return self.rank == 0


KINDS: dict[str, Callable[[], Ranks]] = {"hora": Hora, "gloo": Gloo, "mpi": Mpi}


def measure(ranks: Ranks, request: Answer, counter: str) -> Answer:
    algorithm, tensor = request["algorithm"], torch.zeros(request["bytes"] // 4)
    if request.get("verify"):
        verify(ranks, tensor, algorithm)
        return {"each": [], "cpu_s": 0.0, "wire_bytes": 0}
    tensor.fill_(0)  # every page is there
    ranks.reduce(tensor[: LEAD_BYTES // 4], algorithm)
    each: list[float] = []
    ranks.meet()
    before, begun_s = _count(counter), time.process_time()
    for _ in range(request["calls"]):
        ranks.meet()
        begin = time.perf_counter()
        ranks.reduce(tensor, algorithm)
        each.append(time.perf_counter() - begin)
    ranks.meet()  # until then sent bytes may still be in this host's kernel
    cpu_s = (time.process_time() - begun_s) / request["calls"]
    *slowest, busiest_s, most = ranks.most([*each, cpu_s, _count(counter) - before])
    return {"each": slowest, "cpu_s": busiest_s, "wire_bytes": most}


def verify(ranks: Ranks, tensor: torch.Tensor, algorithm: str) -> None:
    """Wrong sums end the benchmark."""
    tensor.fill_(ranks.rank + 1)
    ranks.reduce(tensor, algorithm)
    expected = ranks.size * (ranks.size + 1) / 2
    if not bool((tensor == expected).all()):
        raise SystemExit(f"{algorithm} gave a wrong sum: {tensor[:4].tolist()}…, expected {expected:g}")


def _count(counter: str) -> int:
    return int(pathlib.Path(counter).read_text())


def main(how: str, counter: str) -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may be printed between the answers
    ranks = KINDS[how]()
    told: Answer = {"ready": True}
    if ranks.answers:
        print(json.dumps(told), file=answers, flush=True)
    for request in ranks.requests():
        told = measure(ranks, request, counter)
        if ranks.answers:
            print(json.dumps(told), file=answers, flush=True)
    ranks.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
