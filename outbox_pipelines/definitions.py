"""The code location: what Dagster shows and runs. The only place that puts the parts together."""

import dagster as dg

from outbox_pipelines.database.database import Database
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.training.grpc_sink import GrpcSink
from outbox_pipelines.training.pipeline import TrainingPipeline
from outbox_pipelines.training.sink import SinkFactory


def build_definitions(*, sink: SinkFactory | None = None, settings: Settings | None = None) -> dg.Definitions:
    """The package's definitions, to be used alone or merged with a user's own.

    >>> import dagster as dg
    >>> from outbox_pipelines import build_definitions
    >>> defs = dg.Definitions.merge(build_definitions(), dg.Definitions(assets=[]))

    Args:
        sink: makes the destination for training rows; gRPC to ``OUTBOX_ML_TARGET`` when not given.
        settings: read from the environment when not given.

    Raises:
        InvalidSettings: naming each variable, its value and what is allowed.
        TypeError: for a sink instead of a function that makes one.
    """
    if sink is not None and not callable(sink):
        raise TypeError(
            "sink must be a function that makes a sink, since each flush uses one of its own: lambda: MySink()"
        )
    settings = settings or load_settings()
    database = Database(settings)
    training = TrainingPipeline(settings, database, sink or (lambda: GrpcSink(settings)))
    return training.definitions()


defs = build_definitions()
