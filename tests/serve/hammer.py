"""A writer that publishes without a pause into the snapshot behind a descriptor; every element of step s is s.

Run as `python hammer.py FD [KILL]`: with KILL it dies in the middle of publishing that step.
"""

import os
import signal
import sys

import torch

from hora.serve.snapshot_buffer import ParameterVersion, SnapshotBuffer

SHAPES = [(64, 32), (1000,), (3, 4, 5, 6)]


def tensors() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    parameters = [torch.zeros(shape) for shape in SHAPES]
    parameters[2] = parameters[2].to(memory_format=torch.channels_last)
    return parameters, {"mean": torch.zeros(77), "count": torch.zeros((), dtype=torch.int64)}


def entries() -> list[list[object]]:
    return [["made", "for", "tests"]]


class Deadly(torch.Tensor):
    """A buffer whose reading is the end of the process."""

    def detach(self) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


if __name__ == "__main__":
    torch.set_num_threads(1)
    parameters, buffers = tensors()
    snapshot = SnapshotBuffer.open(int(sys.argv[1]), parameters, buffers, entries())
    fatal = int(sys.argv[2]) if len(sys.argv) > 2 else -1
    step = 0
    while True:
        step += 1
        for tensor in (*parameters, *buffers.values()):
            tensor.fill_(step)
        if step == fatal:
            buffers["count"] = buffers["count"].as_subclass(Deadly)
        snapshot.publish(parameters, buffers, ParameterVersion(step, round=step // 10, local_step=step % 10))
