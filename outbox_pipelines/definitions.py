"""The code location: what Dagster shows and runs. The only place that puts the parts together."""

import warnings
from collections.abc import Iterable

import dagster as dg

from outbox_pipelines.database.database import Database
from outbox_pipelines.jobs.kinds import JobKind, Kinds, load_kinds
from outbox_pipelines.jobs.pipeline import JobPipeline
from outbox_pipelines.settings import Settings, load_settings
from outbox_pipelines.training.grpc_sink import GrpcSink
from outbox_pipelines.training.pipeline import TrainingPipeline
from outbox_pipelines.training.sink import SinkFactory
from outbox_pipelines.upkeep.pipeline import UpkeepPipeline
from outbox_pipelines.upkeep.redrive_pipeline import RedrivePipeline
from outbox_pipelines.upkeep.run_history_pipeline import RunHistoryPipeline

# Said again whenever Dagster copies a definition; their loss would cost a label or a link, or a run for each day.
warnings.filterwarnings(
    "ignore", message="Parameter `(owners|backfill_policy)`|.*[cC]ode_?[rR]eference", category=dg.BetaWarning
)


def build_definitions(
    *,
    kinds: Iterable[JobKind] | None = None,
    sink: SinkFactory | None = None,
    settings: Settings | None = None,
) -> dg.Definitions:
    """The package's definitions, to be used alone or merged with a user's own.

    >>> import dagster as dg
    >>> from outbox_pipelines import build_definitions
    >>> defs = dg.Definitions.merge(build_definitions(), dg.Definitions(assets=[]))

    Args:
        kinds: the background jobs that are served; those that ``OUTBOX_KINDS`` names when not given.
        sink: makes the destination for training rows; gRPC to ``OUTBOX_ML_TARGET`` when not given.
        settings: read from the environment when not given.

    Raises:
        InvalidKind: naming the kind, what is wrong and what is allowed.
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
    registry = load_kinds(settings.kinds) if kinds is None else Kinds(kinds)
    jobs = JobPipeline(settings, database, registry)
    upkeep = UpkeepPipeline(settings, database)
    redrive = RedrivePipeline(settings, database, registry)
    parts = [training.definitions(), jobs.definitions(), upkeep.definitions(), redrive.definitions()]
    # Runs that materialize assets are kept: their history would go with them.
    short_lived = [job.name for part in parts for job in part.jobs or () if isinstance(job, dg.JobDefinition)]
    return dg.Definitions.merge(*parts, RunHistoryPipeline(settings, database, short_lived).definitions())


def _shipped() -> dg.Definitions:
    """The definitions with what suits those that are alone in their code location."""
    built = build_definitions()
    return dg.Definitions(
        # An asset's page links to its source. Whoever merges our definitions with theirs links all assets in one way,
        # say to their repository: with paths of ours among them that would make links that lead nowhere.
        assets=dg.with_source_code_references(list(built.assets or ())),
        asset_checks=built.asset_checks,
        jobs=built.jobs,
        sensors=built.sensors,
        schedules=built.schedules,
        # What is launched from an asset's page belongs to no job of ours: it, too, is one process.
        executor=dg.in_process_executor,
    )


defs = _shipped()
