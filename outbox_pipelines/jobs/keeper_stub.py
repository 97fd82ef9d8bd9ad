"""Stands in for a lease keeper until it is needed: waits, then becomes it.

Started by file, with nothing but the standard library: importing the keeper's parts costs a
third of a second, and most jobs are over before their first heartbeat is due. Ends at once when
the worker closes the pipe or dies.

Arguments: seconds to wait, then the keeper's command line, whose last is the worker's process id.
"""

import os
import select
import signal
import sys

if __name__ == "__main__":
    seconds, command, worker = float(sys.argv[1]), sys.argv[2:], int(sys.argv[-1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang_up = select.poll()
    # What the worker wrote stays in the pipe, for the keeper to read.
    hang_up.register(0, 0)
    if not hang_up.poll(seconds * 1000) and os.getppid() == worker:
        os.execv(command[0], command)
