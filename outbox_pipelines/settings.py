"""Every knob of the product, with its unit, default and bounds.

Read from environment variables named ``OUTBOX_<FIELD>`` (``batch_size`` is
``OUTBOX_BATCH_SIZE``). The README's table of settings is generated from this
file, so a field's description is what users read.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from outbox_pipelines.errors import OutboxError

GRPC_DEFAULT_MESSAGE_LIMIT = 4 * 1024 * 1024
"""Bytes a gRPC server accepts in one message unless told otherwise."""


class InvalidSettings(OutboxError):
    """One or more ``OUTBOX_*`` variables have values that cannot be used."""


class TrainMode(StrEnum):
    """Where training examples go."""

    REMOTE = "remote"
    """Rows are sent to the ML service."""

    LOCAL = "local"
    """Flushing is off: rows accumulate in their outboxes."""


RUN_START_SECONDS = 180.0
"""How long a Dagster run may take to start; dagster_home/dagster.yaml says the same."""

LOCAL_MODE = "OUTBOX_TRAIN_MODE=local: flushing is off"


class Pooler(StrEnum):
    """What stands between this package and PostgreSQL."""

    NONE = "none"
    """A direct connection (or a pooler in session mode)."""

    TRANSACTION = "transaction"
    """A pooler in transaction mode, such as PgBouncer: nothing may live in the session."""


class Settings(BaseSettings):
    """Settings of the package, validated; see the fields."""

    model_config = SettingsConfigDict(
        env_prefix="OUTBOX_", frozen=True, extra="ignore", env_ignore_empty=True, hide_input_in_errors=True
    )

    # Database
    database_url: SecretStr | None = Field(
        None,
        description="PostgreSQL 14 or newer that holds the outboxes, as a URL. "
        "Unset: an embedded server under `OUTBOX_HOME`.",
    )
    dagster_database_url: SecretStr | None = Field(
        None,
        description="Where `outbox dev` keeps Dagster's own tables. "
        "Unset: a database beside the outboxes, named after it with `_dagster` appended.",
    )
    home: Path = Field(Path(".outbox"), description="Folder for the embedded server, logs and the ML service's state.")
    database_pooler: Pooler = Field(
        Pooler.NONE,
        description="`transaction` when the URL leads to a pooler in transaction mode (PgBouncer).",
    )
    pool_size: int = Field(4, ge=2, le=64, description="Connections that one process keeps at most.")
    connect_timeout: Annotated[int, Field(ge=1, le=300)] = Field(10, description="Seconds to wait for a connection.")
    statement_timeout: float = Field(60, ge=1, le=3600, description="Seconds one SQL statement may take.")
    lock_timeout: float = Field(10, ge=0.1, le=3600, description="Seconds one SQL statement waits for a lock.")

    owner: str = Field(
        "team:outbox",
        pattern=r"^(team:\S+|\S+@\S+)$",
        description="Who answers for the jobs and sensors in Dagster: `team:NAME` or a mail address.",
    )

    # Training outbox
    train_mode: TrainMode = Field(TrainMode.REMOTE, description="`local` turns flushing off: the outboxes accumulate.")
    batch_size: int = Field(10, ge=1, le=10_000, description="Rows in one `TrainBatch` call.")
    max_rows_per_turn: int = Field(
        100,
        ge=1,
        le=100_000,
        description="Rows of one tenant in one turn: how much it may send before others come.",
    )
    budget_seconds: float = Field(
        8, ge=0, le=3600, description="Seconds after which a flush run begins no further round of turns."
    )
    tenants_in_parallel: int = Field(16, ge=1, le=256, description="Tenants that one flush run serves side by side.")
    runs_per_tick: int = Field(
        10,
        ge=1,
        le=200,
        description="Flush runs that one sensor tick emits at most; more tenants share them.",
    )
    poll_seconds: int = Field(10, ge=5, le=3600, description="Seconds between two evaluations of the sensor.")
    lease_seconds: float = Field(120, ge=10, le=86_400, description="Seconds a claim lasts when nobody renews it.")
    backoff_first_seconds: float = Field(
        10, ge=0.1, le=3600, description="Seconds until a failed tenant is tried again; doubles each time."
    )
    backoff_max_seconds: float = Field(300, ge=0.1, le=86_400, description="Seconds that the doubling stops at.")
    max_example_bytes: int = Field(
        2 * 1024 * 1024,
        ge=2,
        le=256 * 1024 * 1024,
        description="Bytes of JSON that `enqueue_training` accepts in one example.",
    )

    # Job outbox
    kinds: str | None = Field(
        None,
        description="Where the job kinds are, `module:attribute`: a list of `JobKind`. Unset: `outbox worker` and the "
        "shipped code location serve none.",
    )
    recovery_seconds: int = Field(
        60, ge=5, le=3600, description="Seconds between two recoveries of lost leases and lost publishes."
    )
    publish_timeout_seconds: float = Field(
        120, ge=5, le=86_400, description="Seconds after which a published job that no run came for is published again."
    )
    max_payload_bytes: int = Field(
        1024 * 1024,
        ge=2,
        le=256 * 1024 * 1024,
        description="Bytes of JSON that `enqueue_job` accepts in one payload.",
    )
    worker_poll_seconds: float = Field(
        1,
        ge=0.05,
        le=3600,
        description="Seconds between two looks of an idle `outbox worker`; a notification is faster.",
    )
    worker_prefetch: int = Field(
        500, ge=0, le=10_000, description="Jobs of a kind that a worker claims ahead of its consumers; 0: none."
    )
    worker_grace_seconds: float = Field(
        30, ge=0, le=86_400, description="Seconds that running jobs are given when a worker is told to stop."
    )
    ui_url: str = Field(
        "http://127.0.0.1:3000",
        pattern=r"^https?://\S+$",
        description="Address of the Dagster UI, for the links that commands print.",
    )

    # Upkeep
    completed_retention_days: float = Field(
        14, ge=1, le=3650, description="Days that completed jobs are kept; a purge a day."
    )
    job_ledger_retention_days: float = Field(90, ge=1, le=36_500, description="Days that the ledger of attempts keeps.")
    training_ledger_retention_days: float = Field(
        365, ge=1, le=36_500, description="Days that the ledger of deliveries keeps."
    )
    dead_letter_retention_days: float = Field(
        90, ge=1, le=36_500, description="Days that training dead letters are kept."
    )
    run_retention_days: float = Field(
        7, ge=0, le=3650, description="Days that Dagster keeps flush and job runs that succeeded."
    )
    failed_run_retention_days: float = Field(
        30, ge=0, le=3650, description="Days that Dagster keeps flush and job runs that failed or were canceled."
    )
    backlog_retention_days: float = Field(30, ge=1, le=3650, description="Days that backlog snapshots are kept.")
    purge_pause_seconds: float = Field(
        0.01, ge=0, le=60, description="Seconds between two transactions of a purge, each of 500 rows at most."
    )
    archive_dir: Path | None = Field(
        None,
        description="Folder for what a purge deletes, as Parquet files; needs the extra `archive`. Unset: not kept.",
    )
    training_wait_target_seconds: float = Field(
        300, ge=1, le=31_536_000, description="Seconds that a training row may wait before a check says so."
    )
    training_wait_targets: dict[str, Annotated[float, Field(ge=1)]] = Field(
        {}, description='The same for groups of tenants, as JSON: `{"vip-*": 60}`; the first pattern that fits counts.'
    )
    job_wait_target_seconds: float = Field(
        300, ge=1, le=31_536_000, description="Seconds that a due job may wait before a check says so."
    )
    job_wait_targets: dict[str, Annotated[float, Field(ge=1)]] = Field(
        {}, description='The same for kinds, as JSON: `{"makeup_exams": 60}`; the first pattern that fits counts.'
    )

    # Health and metrics
    health_refresh_seconds: float = Field(
        10, ge=1, le=3600, description="Seconds between two looks of `outbox health-server` at the database."
    )
    metrics_tenants: int = Field(
        100,
        ge=0,
        le=10_000,
        description="Tenants with series of their own in the metrics; the others are one, `_other`.",
    )

    # ML service
    ml_target: str = Field("127.0.0.1:50051", min_length=1, description="gRPC address of the ML service, `host:port`.")
    ml_deadline_seconds: float = Field(10, ge=0.05, le=600, description="Seconds one `TrainBatch` call may take.")
    ml_keepalive_seconds: float = Field(
        30, ge=5, le=3600, description="Seconds of silence after which the connection is probed."
    )
    ml_max_message_bytes: int = Field(
        GRPC_DEFAULT_MESSAGE_LIMIT,
        ge=1024,
        le=1024 * 1024 * 1024,
        description="Bytes that the ML service accepts in one message.",
    )
    ml_token: SecretStr | None = Field(None, description="Bearer token sent with every call. Needs TLS off-host.")
    ml_tls: bool = Field(False, description="Use TLS with the system's certificate authorities.")
    ml_ca_file: Path | None = Field(None, description="PEM file of the authority to trust; implies TLS.")
    ml_certificate_file: Path | None = Field(None, description="PEM client certificate, for mTLS.")
    ml_private_key_file: Path | None = Field(None, description="PEM private key of that certificate.")

    @field_validator("ml_token")
    @classmethod
    def _can_travel(cls, token: SecretStr | None) -> SecretStr | None:
        value = token.get_secret_value() if token is not None else "-"
        if not value.isascii() or not value.isprintable() or " " in value:
            raise ValueError("a token is printable ASCII without spaces or line ends; check for a final newline")
        return token

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.max_rows_per_turn < self.batch_size:
            raise ValueError(
                f"OUTBOX_MAX_ROWS_PER_TURN={self.max_rows_per_turn} is smaller than "
                f"OUTBOX_BATCH_SIZE={self.batch_size}; a turn holds at least one batch"
            )
        if self.backoff_max_seconds < self.backoff_first_seconds:
            raise ValueError(
                f"OUTBOX_BACKOFF_MAX_SECONDS={self.backoff_max_seconds} is smaller than "
                f"OUTBOX_BACKOFF_FIRST_SECONDS={self.backoff_first_seconds}"
            )
        if (self.ml_certificate_file is None) != (self.ml_private_key_file is None):
            raise ValueError("OUTBOX_ML_CERTIFICATE_FILE and OUTBOX_ML_PRIVATE_KEY_FILE are needed together")
        if self.job_ledger_retention_days < self.completed_retention_days:
            raise ValueError(
                f"OUTBOX_JOB_LEDGER_RETENTION_DAYS={self.job_ledger_retention_days:g} is shorter than "
                f"OUTBOX_COMPLETED_RETENTION_DAYS={self.completed_retention_days:g}; the ledger outlives the jobs"
            )
        for name in ("ml_ca_file", "ml_certificate_file", "ml_private_key_file"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"OUTBOX_{name.upper()}={path}: there is no such file")
        return self

    @property
    def uses_tls(self) -> bool:
        """Whether the ML service is called over TLS."""
        return self.ml_tls or self.ml_ca_file is not None or self.ml_certificate_file is not None


def as_environment(settings: Settings) -> dict[str, str]:
    """The settings that were given, as variables for a process that shall run with the same."""
    values = {}
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        if value is None:
            continue
        if isinstance(value, SecretStr):
            text = value.get_secret_value()
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
        values[f"OUTBOX_{name.upper()}"] = text
    return values


def load_settings(**overrides: object) -> Settings:
    """Read the settings from the environment; ``overrides`` win over it.

    Raises:
        InvalidSettings: naming each variable, what is wrong with it and what is allowed.
    """
    try:
        return Settings(**overrides)  # type: ignore[arg-type]  # checked by pydantic
    except ValidationError as error:
        raise InvalidSettings(_explain(error)) from None
    except SettingsError as error:
        # The variable's name, and not its value.
        field = str(error).partition('"')[2].partition('"')[0]
        raise InvalidSettings(f"invalid settings:\n  OUTBOX_{field.upper()}: this is not JSON") from None


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False, include_context=False):
        message = problem["msg"].removeprefix("Value error, ")
        if not problem["loc"]:
            lines.append(message)
            continue
        field = str(problem["loc"][0])
        info = Settings.model_fields.get(field)
        secret = info is not None and "Secret" in str(info.annotation)
        value = "(hidden)" if secret else repr(problem.get("input"))
        lines.append(f"OUTBOX_{field.upper()}={value}: {message}")
    return "invalid settings:\n  " + "\n  ".join(lines)
