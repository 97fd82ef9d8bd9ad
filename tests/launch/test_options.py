"""The launcher's settings: what they mean, and what is refused with which words."""

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from outbox_pipelines.launch.internals import InstanceRef
from outbox_pipelines.launch.launcher import WarmRunLauncher
from outbox_pipelines.launch.options import MODE_TAG, SCHEMA, InvalidOptions, Mode, Options, read_options


def _launcher(tmp_path: Path, **config: Any) -> WarmRunLauncher:
    named = {"module": "outbox_pipelines.launch", "class": "WarmRunLauncher", "config": config}
    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump({"run_launcher": named}))
    launcher = InstanceRef.from_dir(str(tmp_path)).run_launcher
    assert isinstance(launcher, WarmRunLauncher)
    return launcher


def test_every_setting_has_a_field_and_a_description() -> None:
    assert isinstance(SCHEMA, dict)
    assert set(SCHEMA) == set(Options.__dataclass_fields__)
    for name, field in SCHEMA.items():
        assert field.description, name
        assert not field.is_required, name


def test_dagster_yaml_without_config_means_the_defaults(tmp_path: Path) -> None:
    options = _launcher(tmp_path).options
    assert options == Options(max_starting=options.max_starting)
    assert options.max_starting >= 1


def test_settings_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARM_FOLDER", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("WARM_WORKERS", "7")
    options = _launcher(tmp_path, folder={"env": "WARM_FOLDER"}, max_workers={"env": "WARM_WORKERS"}).options
    assert options.folder_of("/anywhere") == tmp_path / "elsewhere"
    assert options.max_workers == 7


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"mode": "spoon"}, "mode is 'spoon': it must be one of fork, reuse, stock"),
        ({"mode": "stock"}, "take run_launcher out of dagster.yaml"),
        ({"job_modes": {"nightly": "slow"}}, "job_modes for nightly is 'slow'"),
        ({"max_workers": 0}, "max_workers is 0: it must be from 1 to 10000"),
        ({"max_starting": 0}, "max_starting is 0: it must be from 1 to"),
        ({"runs_per_process": 0}, "runs_per_process is 0"),
        ({"max_memory_mb": -1}, "max_memory_mb is -1"),
        ({"kill_grace_seconds": -1}, "kill_grace_seconds is -1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_its_name_and_what_is_allowed(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidOptions, match=words):
        read_options(config)


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dg.DagsterInvalidConfigError, match="max_wokers"):
        _launcher(tmp_path, max_wokers=3)


def test_a_runs_tag_wins_over_its_jobs_setting_and_that_over_the_default() -> None:
    options = read_options({"job_modes": {"quick": "reuse", "strange": "stock"}})
    assert options.mode_of("other", {}) is Mode.FORK
    assert options.mode_of("quick", {}) is Mode.REUSE
    assert options.mode_of("strange", {}) is Mode.STOCK
    assert options.mode_of("quick", {MODE_TAG: "fork"}) is Mode.FORK
    with pytest.raises(InvalidOptions, match=r"tag warm-runs/mode is 'fast'"):
        options.mode_of("quick", {MODE_TAG: "fast"})
