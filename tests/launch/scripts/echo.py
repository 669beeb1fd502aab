"""Rank 1 ends as an echo at once, rank 2 fails a moment later: the cause is rank 2."""

import os
import sys
import time

from hora.runs.exit_codes import SECONDARY_FAILURE

rank = int(os.environ["HORA_RANK"])
if rank == 1:
    sys.exit(SECONDARY_FAILURE)
if rank == 2 and "alone" not in sys.argv:
    time.sleep(0.4)
    raise ValueError("the real cause")
time.sleep(60)
