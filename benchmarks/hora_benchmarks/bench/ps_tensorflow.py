"""TensorFlow's ParameterServerStrategy: one ps task, W worker tasks. Run by TensorFlow's Python, without Hora.

    python ps_tensorflow.py WORKERS PARAMS

For each line {"seconds": S} on stdin it measures for about S seconds and prints one JSON line; it ends when stdin does.
A step reads the variable from the ps (pull), makes a gradient of it and a fresh random number, and has the ps apply it
(push). Each gradient differs in every element from every other, so that no transfer can be saved by sameness; the bytes
that crossed the loopback device are counted as well.
"""

from __future__ import annotations

import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import TextIO

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import tensorflow as tf  # type: ignore[import-untyped]

LEARNING_RATE = 1e-6
WARM_UP_STEPS = 20
HERE = "127.0.0.1"


def end_with_stdin() -> None:
    """Ends a task together with the process that started it, when its stdin ends."""
    sys.stdin.buffer.read()
    os._exit(0)


def serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    threading.Thread(target=end_with_stdin, daemon=True).start()
    tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc").join()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((HERE, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def counters(pid: int) -> dict[str, float]:
    """Counted by Linux: CPU seconds of the ps, and gigabytes over the loopback device."""
    stat, sent = pathlib.Path(f"/proc/{pid}/stat"), pathlib.Path("/sys/class/net/lo/statistics/tx_bytes")
    found = {}
    if stat.exists():
        fields = stat.read_text().rpartition(")")[2].split()
        found["server_cpu"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    if sent.exists():
        found["wire_gb_per_s"] = int(sent.read_text()) / 1e9
    return found


def main() -> None:
    if sys.argv[1] == "serve":
        serve(json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    workers, params = int(sys.argv[1]), int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TensorFlow must not print between the answers
    addresses = [f"{HERE}:{port}" for port in free_ports(workers + 1)]
    cluster = {"ps": addresses[:1], "worker": addresses[1:]}
    tasks = [
        subprocess.Popen(
            [sys.executable, __file__, "serve", json.dumps(cluster), job, str(index)],
            stdin=subprocess.PIPE,
        )
        for job, those in cluster.items()
        for index in range(len(those))
    ]
    try:
        measure(cluster, params, tasks[0].pid, answers)
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    answers.flush()
    os._exit(0)  # the coordinator's threads would wait for the tasks just ended


def measure(cluster: dict[str, list[str]], params: int, ps_pid: int, answers: TextIO) -> None:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        variable = tf.Variable(tf.random.uniform([params]))

    @tf.function
    def step() -> tf.Tensor:
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            pulled = variable.read_value()
        gradient = pulled - tf.random.uniform([])
        with tf.device(variable.device):
            pushed = tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=LEARNING_RATE, delta=gradient)
        with tf.control_dependencies([pushed]):
            return tf.timestamp() - began

    def run(steps: int) -> tuple[list[float], float]:
        """Each step's latency, and the seconds of all together."""
        began = time.perf_counter()
        latencies = [coordinator.schedule(step) for _ in range(steps)]
        coordinator.join()
        seconds = time.perf_counter() - began
        return coordinator.fetch(latencies), seconds

    run(WARM_UP_STEPS)
    rate = WARM_UP_STEPS / run(WARM_UP_STEPS)[1]
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        steps = max(2, round(rate * json.loads(line)["seconds"]))
        before = counters(ps_pid)
        latencies, seconds = run(steps)
        rate = steps / seconds
        answer = {"updates_per_s": rate, "latency_s": statistics.median(map(float, latencies))}
        answer |= {key: (value - before[key]) / seconds for key, value in counters(ps_pid).items()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
