import os
import sys

rank = os.environ["HORA_RANK"]
print(f"hello {rank} {sys.argv[1:]}")
print(f"care {rank}", file=sys.stderr)
