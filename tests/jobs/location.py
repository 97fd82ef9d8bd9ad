"""A code location with job kinds, evaluated and executed as the daemon would."""

import dagster as dg

from outbox_pipelines import JobKind, build_definitions
from outbox_pipelines.settings import Settings


class Location:
    """A code location with some kinds, evaluated and executed against one instance as the daemon would."""

    def __init__(self, settings: Settings, instance: dg.DagsterInstance, *kinds: JobKind) -> None:
        self.definitions = build_definitions(kinds=kinds, settings=settings)
        self.instance = instance

    def tick(self, sensor: str) -> dg.SensorResult:
        """Evaluate a sensor once."""
        context = dg.build_sensor_context(instance=self.instance, definitions=self.definitions)
        result = self.definitions.get_sensor_def(sensor)(context)
        assert isinstance(result, dg.SensorResult)
        return result

    def poll(self, kind: str) -> list[dg.RunRequest]:
        """What the kind's sensor asks for."""
        return list(self.tick(f"{kind}_sensor").run_requests or [])

    def execute(self, kind: str, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        """Execute a requested run, with the tags that the daemon gives it."""
        tags = {**request.tags, **({"dagster/run_key": request.run_key} if request.run_key else {})}
        return self.definitions.get_job_def(kind).execute_in_process(
            instance=self.instance, run_config=request.run_config, tags=tags, raise_on_error=False
        )

    def serve(self, kind: str) -> list[dg.ExecuteInProcessResult]:
        """Poll and execute once."""
        return [self.execute(kind, request) for request in self.poll(kind)]
