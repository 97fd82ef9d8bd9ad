"""Every private name of Dagster that this part uses, in one place, and the versions it was tested with.

Dagster promises nothing about these names. Each has a contract test in
``tests/launch/test_internals.py``, which is run with the oldest and the newest release named here;
on any other release :func:`check_release` refuses, so that a change shows as one clear
message and not as a run that hangs.
"""

from collections.abc import Mapping
from typing import Any

from dagster import EventLogEntry
from dagster import __version__ as DAGSTER_VERSION  # noqa: N812  # it is a constant
from dagster._cli.api import _execute_run_command_body as execute_run
from dagster._config import Array, BoolSource, Field, IntSource, Noneable, Permissive, StringSource
from dagster._config.config_schema import UserConfigSchema
from dagster._core.code_pointer import CodePointer
from dagster._core.events import ASSET_CHECK_EVENTS, ASSET_EVENTS, EngineEventData
from dagster._core.instance.ref import InstanceRef
from dagster._core.launcher import CheckRunHealthResult, LaunchRunContext, RunLauncher, WorkerStatus
from dagster._core.launcher.default_run_launcher import DefaultRunLauncher
from dagster._core.log_manager import LOG_RECORD_METADATA_ATTR
from dagster._core.origin import JobPythonOrigin, RepositoryPythonOrigin
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.storage.base_storage import DagsterStorage
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.tags import GRPC_INFO_TAG, RUN_METRIC_TAGS
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._grpc.impl import core_execute_run
from dagster._serdes import ConfigurableClass, ConfigurableClassData, deserialize_value, serialize_value
from dagster._utils.hosted_user_process import recon_job_from_origin
from dagster._utils.interrupts import capture_interrupts
from dagster_postgres.event_log import PostgresEventLogStorage
from dagster_postgres.run_storage import PostgresRunStorage
from dagster_postgres.schedule_storage import PostgresScheduleStorage
from dagster_postgres.storage import DagsterPostgresStorage
from dagster_postgres.utils import DagsterPostgresException, pg_config, pg_url_from_config, set_pg_statement_timeout
from packaging.version import InvalidVersion, Version
from sqlalchemy import Engine

from outbox_pipelines.errors import OutboxError

try:
    from dagster_postgres.auth import register_do_connect_hook as give_tokens
    from dagster_postgres.utils import get_token_provider_from_config as token_provider_of
except ImportError:
    # Older releases know passwords only, and their configuration has no auth_provider.

    def give_tokens(engine: Engine, token_provider: Any) -> None:  # type: ignore[misc]
        """There is no token provider that could be given."""
        raise AssertionError(f"{engine.url!r}: no token provider exists in this release: {token_provider}")

    def token_provider_of(config_value: Mapping[str, Any]) -> Any:  # type: ignore[misc]
        """There is none."""


__all__ = [
    "ASSET_CHECK_EVENTS",
    "ASSET_EVENTS",
    "DAGSTER_VERSION",
    "GRPC_INFO_TAG",
    "LOG_RECORD_METADATA_ATTR",
    "RUN_METRIC_TAGS",
    "Array",
    "BoolSource",
    "CheckRunHealthResult",
    "CodePointer",
    "ConfigurableClass",
    "ConfigurableClassData",
    "DagsterPostgresException",
    "DagsterPostgresStorage",
    "DagsterStorage",
    "DefaultRunLauncher",
    "EngineEventData",
    "EventLogEntry",
    "Field",
    "GrpcServerCodeLocationOrigin",
    "InstanceRef",
    "IntSource",
    "JobPythonOrigin",
    "LaunchRunContext",
    "LoadableTargetOrigin",
    "ManagedGrpcPythonEnvCodeLocationOrigin",
    "Noneable",
    "Permissive",
    "PostgresEventLogStorage",
    "PostgresRunStorage",
    "PostgresScheduleStorage",
    "RemoteJobOrigin",
    "RemoteRepositoryOrigin",
    "RepositoryPythonOrigin",
    "RunLauncher",
    "SqlEventLogStorageTable",
    "StringSource",
    "UserConfigSchema",
    "WorkerStatus",
    "capture_interrupts",
    "core_execute_run",
    "deserialize_value",
    "execute_run",
    "give_tokens",
    "pg_config",
    "pg_url_from_config",
    "recon_job_from_origin",
    "serialize_value",
    "set_pg_statement_timeout",
    "token_provider_of",
]

OLDEST_TESTED = "1.13.0"
NEWEST_TESTED = "1.13.27"
"""Releases of Dagster that CI runs the tests of this part with; those between are taken to be as good."""


class UntestedDagster(OutboxError):
    """The installed Dagster is not one that this part was tested with."""


def check_release(version: str = DAGSTER_VERSION, *, allow_untested: bool = False) -> None:
    """Refuse a Dagster outside the tested range.

    Args:
        version: the installed one's.
        allow_untested: let it pass all the same, at the caller's risk.

    Raises:
        UntestedDagster: with the range, and what to write instead.
    """
    try:
        tested = Version(OLDEST_TESTED) <= Version(version) <= Version(NEWEST_TESTED)
    except InvalidVersion:
        # A build of one's own, such as "1!0+dev".
        tested = False
    if not tested and not allow_untested:
        raise UntestedDagster(
            f"Dagster {version} is installed, and warm runs were tested with {OLDEST_TESTED} to {NEWEST_TESTED}. "
            "Either take run_launcher out of dagster.yaml, which gives Dagster's own launcher, or install a tested "
            "release, or set allow_untested_dagster: true in run_launcher's config"
        )
