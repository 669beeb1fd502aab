"""Each rank says where it is and what it was given, then all add up one number."""

import json
import os
import socket
import sys

import torch

import hora

job = hora.init()
told = {
    "rank": job.rank,
    "size": job.size,
    "local_rank": int(os.environ["HORA_LOCAL_RANK"]),
    "local_size": int(os.environ["HORA_LOCAL_SIZE"]),
    "host": os.environ["HORA_HOST"],
    "bind": os.environ.get("HORA_BIND", ""),
    "machine": socket.gethostname(),
    "arguments": sys.argv[1:],
    "cwd": os.getcwd(),
    "env": {name: value for name, value in os.environ.items() if name.startswith(("MY_", "GIVEN_", "OTHER_"))},
}
print(json.dumps(told), flush=True)
print(f"rank {job.rank} on stderr", file=sys.stderr, flush=True)
total = torch.full((3,), float(job.rank + 1))
hora.all_reduce(total)
print(f"sum {total.tolist()}", flush=True)
