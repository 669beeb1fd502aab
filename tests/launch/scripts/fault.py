"""`fault.py HOW TRANSPORT [deaf] [lingers]`: rank 1 fails as told while the others wait for it inside a collective."""

import atexit
import os
import signal
import sys
import time

if "lingers" in sys.argv and os.environ["HORA_RANK"] == "1":
    atexit.register(time.sleep, 3)  # first to be registered, last to run: its links are closed by then

import torch

import hora

how, transport = sys.argv[1:3]
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun and torchrun end the others before they can speak
job = hora.init(transport=transport)
algorithm = "engine" if transport == "engine" else "auto"
hora.all_reduce(torch.ones(1000), algorithm=algorithm)
if job.rank == 1:
    time.sleep(0.3)
    print(f"at {time.monotonic()}: rank 1 {how}\n", end="", flush=True)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise ValueError("boom")
    sys.exit(0 if how == "leaves" else 5)
if how == "raises":
    hora.all_reduce(torch.ones(1000), algorithm=algorithm)
try:
    hora.all_reduce(torch.ones(1000), algorithm=algorithm, name="the last")
except hora.PeerLost as lost:
    print(f"at {time.monotonic()}: rank {job.rank} lost {list(lost.ranks)}: {lost}\n", end="", flush=True)
    if how == "exits":
        raise  # rank 1 was the first to fail, though it may take longer to end
