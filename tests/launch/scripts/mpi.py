"""Under mpirun, with HORA_STRATEGY=engine:backend=mpi: what the MPI engine promises, message by message.

Each line is one write, since the ranks share their output.
"""

import torch

import hora

job = hora.init()
mine, other = job.rank, 1 - job.rank
group = job.group.new_group([0, 1], transport="engine")
assert group.transport.backend.name == "mpi"

for dtype in (torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
    for op, wanted in {"sum": 5, "max": 3, "min": 2, "prod": 6}.items():
        reduced = hora.all_reduce(torch.full((3, 5), mine + 2, dtype=dtype), op)
        assert reduced.eq(wanted).all(), (dtype, op, reduced)
assert hora.all_reduce(torch.full((4,), mine + 2.0), "mean").eq(2.5).all()
assert hora.all_reduce(torch.full((4,), mine + 2), "xor").eq(1).all()
assert hora.all_reduce(torch.arange(6.0).view(2, 3).t()).eq(2 * torch.arange(6.0).view(2, 3).t()).all()
try:
    hora.all_reduce(torch.empty(0))
    print("nothing: reduced\n", end="", flush=True)
except BufferError as problem:
    print(f"nothing: {problem}\n", end="", flush=True)

for numel in (0, 1, 300_000):
    letter = torch.full((numel,), float(mine))
    if mine == 0:
        assert group.recv(torch.empty(numel), 1).eq(1).all()
        group.send(letter, 1)
    else:
        sending = group.send(letter, 0, wait=False)
        assert group.recv(torch.empty(numel), 0).eq(0).all()
        sending.wait()
for algorithm in ("ring", "tree", "halving", "star"):
    assert group.all_reduce(torch.full((1001,), mine + 1.0), algorithm=algorithm).eq(3).all(), algorithm
assert [part.tolist() for part in group.all_gather(torch.full((mine,), mine))] == [[], [1]]

try:
    hora.all_reduce(torch.ones(2, dtype=torch.float16))
except ValueError as refused:
    print(f"refused: {refused}\n", end="", flush=True)
try:
    group.all_reduce(torch.ones(3 + mine), algorithm="ring")
except hora.Mismatch as mismatch:
    print(f"mismatch by ring: {mismatch}\n", end="", flush=True)
print(f"done: rank {mine}\n", end="", flush=True)
