"""Job kinds of the stack that the tests run: their payload names the files that they wait for and write."""

import os
from pathlib import Path

from outbox_pipelines import Backoff, JobContext, JobKind


def wait_for_a_file(job: JobContext) -> None:
    """Note which process works on it, tell of progress, and end when the file is there."""
    Path(job.payload["pid"]).write_text(str(os.getpid()))
    job.progress("halfway", 0.5)
    while not Path(job.payload["until"]).exists():
        if job.wait(0.05):
            return
    job.progress("ending")


def fail(job: JobContext) -> None:
    """Never succeed."""
    raise ValueError(f"attempt {job.attempt} at the impossible")


KINDS = [
    JobKind("waiting_job", wait_for_a_file, consumers=2),
    JobKind("failing_job", fail, attempts=2, backoff=Backoff(first=0, maximum=0)),
]
