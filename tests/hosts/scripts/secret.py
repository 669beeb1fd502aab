"""`secret.py FOLDER`: the first rank writes down the run's token, and all wait until somebody has looked around."""

import os
import pathlib
import sys
import time

import hora

folder = pathlib.Path(sys.argv[1])
token = os.pread(int(os.environ["HORA_TOKEN_FD"]), 32, 0)
job = hora.init()
hora.barrier()
if job.rank == 0:
    (folder / "token.part").write_bytes(token)
    (folder / "token.part").rename(folder / "token")
while not (folder / "looked").exists():
    time.sleep(0.02)
