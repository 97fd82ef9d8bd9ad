"""How long `outbox health-server` takes to answer, and to look."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request

from benchmarks.setting import Results, engine, fill, server, tenants

PATHS = ("/health/live", "/health/ready", "/health/messaging", "/metrics")
ASKED = 200


def answering() -> None:
    """1,000 tenants with 500 rows each, 100,000 jobs that wait and 500,000 attempts: over a million rows."""
    results = Results("health", ("path", "tenants", "rows", "median, ms", "worst, ms", "wanted at most, ms"))
    with server() as url, engine(url) as opened:
        everyone = tenants(opened, 1_000, "health")
        fill(opened, everyone, 500)
        with opened.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO outbox.messages (kind) SELECT 'kind-' || mod(n, 5) FROM generate_series(1, 100000) AS n"
            )
            connection.exec_driver_sql(
                "INSERT INTO outbox.job_attempts (message_id, kind, claim, attempt, run_id, outcome, started_at) "
                "SELECT n, 'kind-' || mod(n, 5), 1, 1, 'run', 'succeeded', clock_timestamp() "
                "FROM generate_series(1, 500000) AS n"
            )
        environment = {**os.environ, "OUTBOX_DATABASE_URL": url}
        command = [sys.executable, "-u", "-m", "outbox_pipelines.cli", "health-server", "--port", "0"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            found = re.search(r"http://[\d.:]+", process.stdout.readline())
            assert found
            # The first ones also roll up what is new to them.
            _wait_for_looks(found[0], 3)
            for path in PATHS:
                times = [_timed(found[0] + path) * 1000 for _ in range(ASKED)]
                results.add(path, 1_000, 1_100_000, round(statistics.median(times), 1), round(max(times), 1), 200)
            looked = re.search(r"^outbox_reading_seconds (\S+)", _asked(found[0] + "/metrics"), re.MULTILINE)
            assert looked
            results.add("a look, behind them", 1_000, 1_100_000, round(float(looked[1]) * 1000, 1), "", "")
        finally:
            process.terminate()
            process.wait()
    results.publish()


def _wait_for_looks(url: str, count: int) -> None:
    seen: set[str] = set()
    while len(seen) < count:
        time.sleep(0.5)
        seen |= {str(json.loads(_asked(url + "/health/messaging")).get("taken_at"))} - {"None"}


def _timed(url: str) -> float:
    began = time.perf_counter()
    _asked(url)
    return time.perf_counter() - began


def _asked(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        # What is wrong is told with 503, and takes as long.
        return error.read().decode()
