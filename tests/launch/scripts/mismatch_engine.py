"""`mismatch_engine.py TRANSPORT`: the ranks give the engine's own reduction tensors of different sizes."""

import sys

import torch

import hora

job = hora.init()
for sizes in ((3, 4), (1_000_000, 10), (10, 1_000_000)):
    group = job.group.new_group([0, 1], transport=sys.argv[1])
    try:
        group.all_reduce(torch.ones(sizes[job.rank]), algorithm="engine")
        print("nothing", flush=True)
    except hora.HoraError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
