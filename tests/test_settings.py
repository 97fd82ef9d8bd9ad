"""Settings: what they promise of a wrong value is to say which, what it is and what is allowed."""

import re
from pathlib import Path

import pytest
from annotated_types import Ge, Le

from outbox_pipelines.settings import InvalidSettings, Pooler, Settings, TrainMode, as_environment, load_settings

BOUNDS = [
    (name, getattr(bound, "ge", getattr(bound, "le", None)), isinstance(bound, Ge))
    for name, field in Settings.model_fields.items()
    for bound in field.metadata
    if isinstance(bound, Ge | Le)
]


def refusal(**overrides: object) -> str:
    """What load_settings says of values that it must refuse."""
    with pytest.raises(InvalidSettings) as raised:
        load_settings(**overrides)
    return str(raised.value)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("OUTBOX_BATCH_SIZE", "ten", "valid integer"),
        ("OUTBOX_BATCH_SIZE", "2.5", "valid integer"),
        ("OUTBOX_BATCH_SIZE", "0", "greater than or equal to 1"),
        ("OUTBOX_POOL_SIZE", "1", "greater than or equal to 2"),
        ("OUTBOX_POOL_SIZE", "65", "less than or equal to 64"),
        ("OUTBOX_LEASE_SECONDS", "soon", "valid number"),
        ("OUTBOX_LEASE_SECONDS", "nan", "86400"),
        ("OUTBOX_LEASE_SECONDS", "inf", "86400"),
        ("OUTBOX_TRAIN_MODE", "both", "'remote' or 'local'"),
        ("OUTBOX_DATABASE_POOLER", "session", "'none' or 'transaction'"),
        ("OUTBOX_ML_TLS", "perhaps", "valid boolean"),
        ("OUTBOX_OWNER", "nobody in particular", "team"),
    ],
)
def test_a_value_that_cannot_be_used_is_told_with_its_variable_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(variable, value)
    told = refusal()
    assert f"{variable}={value!r}: " in told
    assert allowed in told


@pytest.mark.parametrize(("name", "bound", "lower"), BOUNDS)
def test_every_bound_is_kept_and_told(monkeypatch: pytest.MonkeyPatch, name: str, bound: float, lower: bool) -> None:
    value = repr(bound - 1 if lower else bound + 1)
    monkeypatch.setenv(f"OUTBOX_{name.upper()}", value)
    told = refusal()
    assert f"OUTBOX_{name.upper()}={value!r}: " in told
    allowed = re.search(rf"{'greater' if lower else 'less'} than or equal to ([\d.]+)", told)
    assert allowed is not None
    assert float(allowed[1]) == bound


def test_every_number_has_bounds() -> None:
    numbers = {name for name, field in Settings.model_fields.items() if field.annotation in {int, float}}
    assert {name for name, _, lower in BOUNDS if lower} == numbers
    assert {name for name, _, lower in BOUNDS if not lower} == numbers


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("vip: 60", "OUTBOX_JOB_WAIT_TARGETS: this is not JSON"),
        ('["vip"]', "OUTBOX_JOB_WAIT_TARGETS=['vip']: Input should be a valid dictionary"),
        ('{"vip": "soon"}', "OUTBOX_JOB_WAIT_TARGETS='soon': Input should be a valid number"),
        ('{"vip": 0}', "OUTBOX_JOB_WAIT_TARGETS=0: Input should be greater than or equal to 1"),
    ],
)
def test_targets_that_cannot_be_used_are_told(monkeypatch: pytest.MonkeyPatch, value: str, told: str) -> None:
    monkeypatch.setenv("OUTBOX_JOB_WAIT_TARGETS", value)
    assert told in refusal()


def test_targets_reach_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    given = load_settings(job_wait_targets={"vip-*": 60.0})
    monkeypatch.setenv("OUTBOX_JOB_WAIT_TARGETS", as_environment(given)["OUTBOX_JOB_WAIT_TARGETS"])
    assert load_settings().job_wait_targets == {"vip-*": 60.0}


@pytest.mark.parametrize("name", ["database_url", "dagster_database_url", "ml_token"])
def test_a_secrets_value_is_hidden(name: str) -> None:
    told = refusal(**{name: ["hunter2"]})
    assert f"OUTBOX_{name.upper()}=(hidden): Input should be a valid string" in told
    assert "hunter2" not in told


@pytest.mark.parametrize("token", ["hunter2\n", "hunter 2", "hunter2é", "hunter2\x7f"])
def test_a_token_that_cannot_travel_is_refused_without_being_shown(token: str) -> None:
    told = refusal(ml_token=token)
    assert "OUTBOX_ML_TOKEN=(hidden): a token is printable ASCII" in told
    assert "hunter" not in told


def test_secrets_are_not_shown_with_the_settings() -> None:
    settings = load_settings(database_url="postgresql://u:hunter2@h/d", ml_token="hunter2")
    assert "hunter2" not in f"{settings!r} {settings} {settings.model_dump()}"


def test_all_faults_are_told_at_once() -> None:
    told = refusal(batch_size=0, train_mode="both", ml_token=["hunter2"])
    for variable in ("OUTBOX_BATCH_SIZE", "OUTBOX_TRAIN_MODE", "OUTBOX_ML_TOKEN"):
        assert variable in told


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"batch_size": 11, "max_rows_per_turn": 10}, ["batch_size", "max_rows_per_turn", "11", "10"]),
        ({"backoff_first_seconds": 20, "backoff_max_seconds": 10}, ["backoff_first_seconds", "backoff_max_seconds"]),
        ({"ml_certificate_file": __file__}, ["ml_certificate_file", "ml_private_key_file"]),
        ({"ml_private_key_file": __file__}, ["ml_certificate_file", "ml_private_key_file"]),
        ({"ml_ca_file": "/not/there.pem"}, ["ml_ca_file", "/not/there.pem: there is no such file"]),
        (
            {"ml_certificate_file": "/not/there.pem", "ml_private_key_file": __file__},
            ["ml_certificate_file", "/not/there.pem: there is no such file"],
        ),
    ],
)
def test_values_that_do_not_fit_together_are_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, object], named: list[str]
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"OUTBOX_{name.upper()}", str(value))
    told = refusal().lower()
    for part in named:
        assert part in told


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert f"{tmp_path}: there is no such file" in refusal(ml_ca_file=tmp_path)


def test_the_edges_of_what_fits_together_are_accepted() -> None:
    settings = load_settings(
        batch_size=10, max_rows_per_turn=10, backoff_first_seconds=10, backoff_max_seconds=10, ml_ca_file=__file__
    )
    assert settings.uses_tls


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"ml_tls": True}, True),
        ({"ml_ca_file": __file__}, True),
        ({"ml_certificate_file": __file__, "ml_private_key_file": __file__}, True),
    ],
)
def test_a_certificate_implies_tls(values: dict[str, object], expected: bool) -> None:
    assert load_settings(**values).uses_tls is expected


def test_the_environment_is_read_an_empty_variable_means_the_default_and_overrides_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTBOX_BATCH_SIZE", "7")
    monkeypatch.setenv("OUTBOX_POOL_SIZE", "")
    monkeypatch.setenv("OUTBOX_DATABASE_URL", "")
    monkeypatch.setenv("OUTBOX_TRAIN_MODE", "local")
    monkeypatch.setenv("OUTBOX_DATABASE_POOLER", "transaction")
    settings = load_settings()
    assert (settings.batch_size, settings.pool_size, settings.database_url) == (7, 4, None)
    assert (settings.train_mode, settings.database_pooler) == (TrainMode.LOCAL, Pooler.TRANSACTION)
    assert load_settings(batch_size=8).batch_size == 8


def test_the_defaults_are_those_of_the_design() -> None:
    settings = load_settings()
    assert (settings.poll_seconds, settings.batch_size, settings.max_rows_per_turn) == (10, 10, 100)
    assert (settings.lease_seconds, settings.budget_seconds) == (120, 8)
    assert (settings.backoff_first_seconds, settings.backoff_max_seconds) == (10, 300)
