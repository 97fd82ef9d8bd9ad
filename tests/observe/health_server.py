"""``outbox health-server`` as a process of its own."""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.outboxes import wait_until


class HealthServer:
    """Runs while the block does; looks at the database every second."""

    def __init__(self, log: Path, database_url: str, **environment: str) -> None:
        self._log = log
        self._environment = {
            **os.environ,
            "OUTBOX_DATABASE_URL": database_url,
            "OUTBOX_HEALTH_REFRESH_SECONDS": "1",
            **environment,
        }

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "outbox_pipelines.cli", "health-server", "--port", "0"],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until(lambda: "/metrics" in self.printed or self.process.poll() is not None, seconds=60)
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", self.printed)
        assert found, self.printed
        self.url = f"http://127.0.0.1:{found[1]}"
        # The first look.
        wait_until(lambda: "not been looked at yet" not in str(self.get("/health/ready")))
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(20)

    @property
    def printed(self) -> str:
        """All that it has said."""
        return self._log.read_text()

    def text(self, path: str, accept: str = "*/*") -> tuple[int, str, str]:
        """Status, content type and body."""
        request = urllib.request.Request(self.url + path, headers={"Accept": accept})
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read().decode()

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON."""
        status, content_type, body = self.text(path)
        assert content_type == "application/json"
        return status, json.loads(body)

    def metrics(self) -> dict[str, Metric]:
        """The families, by name."""
        status, _, body = self.text("/metrics")
        assert status == 200, body
        return {family.name: family for family in text_string_to_metric_families(body)}

    def sample(self, name: str, **labels: str) -> float | None:
        """One sample's value; none when there is none."""
        for family in self.metrics().values():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return None
