"""Waits; deaf to SIGINT and SIGTERM if asked to be."""

import signal
import sys
import time

if "deaf" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
