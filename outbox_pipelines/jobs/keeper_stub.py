"""Stands in for a lease keeper until it is needed: waits, then becomes it.

Started by file, with nothing but the standard library: importing the keeper's parts costs a
third of a second, and most jobs are over before their first heartbeat is due. When the worker
closes the pipe the stub ends; when the worker dies it becomes the keeper at once, which gives
back what the worker held.

Arguments: seconds to wait, then the keeper's command line, whose last is the worker's process id.
"""

import os
import select
import signal
import sys
import time

DYING_SECONDS = 5.0
"""A dying process closes its pipes a moment before it is gone."""

if __name__ == "__main__":
    seconds, command, worker = float(sys.argv[1]), sys.argv[2:], int(sys.argv[-1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang_up = select.poll()
    # What the worker wrote stays in the pipe, for the keeper to read.
    hang_up.register(0, 0)
    hung_up = bool(hang_up.poll(seconds * 1000))
    ends_at = time.monotonic() + DYING_SECONDS
    while hung_up and os.getppid() == worker and time.monotonic() < ends_at:
        time.sleep(0.01)
    if not hung_up or os.getppid() != worker:
        os.execv(command[0], command)
