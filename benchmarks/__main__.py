"""``python -m benchmarks [flush] [memory] [sensor] ...``: all of them when none is named."""

import sys

from benchmarks import flush, health, jobs, runs, sensor

BENCHMARKS = {
    "flush": flush.compare,
    "memory": flush.memory,
    "sensor": sensor.evaluation,
    "enqueue": sensor.enqueueing,
    "jobs": jobs.compare,
    "latency": jobs.latency,
    "enqueue_jobs": jobs.enqueueing,
    "claim": jobs.claiming,
    "purge": jobs.purging,
    "health": health.answering,
    "runs": runs.compare,
}


def main(names: list[str]) -> int:
    """Run those named, or all."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {unknown[0]!r}: there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        BENCHMARKS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
