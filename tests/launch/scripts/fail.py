"""The rank given first fails in the way given second; the others wait, deaf to SIGTERM if given third."""

import os
import signal
import sys
import time

rank, how = sys.argv[1:3]
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["HORA_RANK"] == rank:
    time.sleep(0.3)
    if how == "raise":
        raise ValueError("boom")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    sys.exit(int(how))
print("waiting", flush=True)
time.sleep(60)
