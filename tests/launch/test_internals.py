"""The contract with Dagster's private names: what is used of each, as it is used."""

import ast
import inspect
import os
import signal
from pathlib import Path

import dagster as dg
import pytest
from packaging.version import Version

from outbox_pipelines.launch import internals
from outbox_pipelines.launch.internals import UntestedDagster, check_release

LAUNCH = Path(inspect.getfile(internals)).parent


def test_every_private_name_of_dagster_is_imported_in_one_module() -> None:
    for path in LAUNCH.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                private = module.startswith(("dagster._", "dagster_postgres", "dagster_shared"))
                assert not private or path.name == "internals.py", f"{path.name} imports {module}"


def test_a_release_outside_the_tested_range_is_refused_with_the_remedy() -> None:
    for tested in (internals.OLDEST_TESTED, "1.13.7", internals.NEWEST_TESTED):
        check_release(tested)
    for other in ("1.12.22", "1.13.0rc1", "1.14.0", "2!1.13.5", "of my own"):
        with pytest.raises(UntestedDagster, match=r"take run_launcher out of dagster.yaml.*allow_untested_dagster"):
            check_release(other)
        check_release(other, allow_untested=True)


def test_the_installed_release_is_a_tested_one() -> None:
    assert Version(internals.OLDEST_TESTED) <= Version(dg.__version__) <= Version(internals.NEWEST_TESTED)


def test_executing_a_run_tells_each_event_and_swallows_the_failure_of_the_run() -> None:
    parameters = list(inspect.signature(internals.execute_run).parameters)
    assert parameters == ["run_id", "instance", "write_stream_fn", "set_exit_code_on_failure"]
    parameters = list(inspect.signature(internals.core_execute_run).parameters)
    assert parameters[:4] == ["recon_job", "dagster_run", "instance", "inject_env_vars"]
    assert inspect.isgeneratorfunction(internals.core_execute_run)
    assert list(inspect.signature(internals.recon_job_from_origin).parameters) == ["origin"]
    assert internals.EngineEventData.in_process(7).metadata["pid"].text == "7"
    assert set(map(type, internals.RUN_METRIC_TAGS)) == {str}
    assert dg.DagsterInstance.should_start_background_run_thread.fget is not None  # type: ignore[attr-defined]


def test_an_instance_travels_as_a_text(tmp_path: Path) -> None:
    (tmp_path / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    ref = internals.InstanceRef.from_dir(str(tmp_path))
    text = internals.serialize_value(ref)
    assert isinstance(text, str)
    assert internals.deserialize_value(text, internals.InstanceRef) == ref
    assert ref.local_artifact_storage.base_dir == str(tmp_path)
    assert isinstance(ref.run_launcher, internals.DefaultRunLauncher)
    with dg.DagsterInstance.from_ref(ref) as instance:
        assert instance.root_directory == str(tmp_path)
        assert instance.get_ref() == ref


def test_interrupts_are_captured_inside_the_block_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    with internals.capture_interrupts():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_dagsters_own_launcher_marks_its_runs_with_the_tag_that_tells_them_from_warm_ones() -> None:
    source = inspect.getsource(internals.DefaultRunLauncher)
    assert "GRPC_INFO_TAG" in source
    assert internals.GRPC_INFO_TAG == ".dagster/grpc_info"
    for method in ("launch_run", "terminate", "join", "register_instance"):
        assert callable(getattr(internals.DefaultRunLauncher, method))


def test_a_launcher_answers_to_these_and_no_other_abstract_names() -> None:
    assert internals.RunLauncher.__abstractmethods__ == {"launch_run", "terminate"}
    assert set(internals.LaunchRunContext._fields) >= {"dagster_run", "workspace"}
    assert {"RUNNING", "FAILED"} <= set(internals.WorkerStatus.__members__)
    assert list(internals.CheckRunHealthResult._fields)[:2] == ["status", "msg"]


def test_the_storages_reach_the_database_through_one_attribute() -> None:
    for storage in (
        internals.PostgresRunStorage,
        internals.PostgresEventLogStorage,
        internals.PostgresScheduleStorage,
    ):
        parameters = inspect.signature(storage).parameters
        assert {"postgres_url", "should_autocreate_tables"} <= set(parameters)
        assert "self._engine" in inspect.getsource(storage)
        assert list(inspect.signature(storage.optimize_for_webserver).parameters)[1:] == [
            "statement_timeout",
            "pool_recycle",
            "max_overflow",
        ]
    abstract = internals.DagsterStorage.__abstractmethods__
    assert abstract == {"event_log_storage", "run_storage", "schedule_storage"}


def test_the_storages_configuration_is_dagster_postgres_own() -> None:
    config = internals.pg_config()
    assert isinstance(config, dict)
    assert {"postgres_url", "postgres_db", "should_autocreate_tables"} <= set(config)
    assert internals.pg_url_from_config({"postgres_url": "postgresql://u@h/d"}) == "postgresql://u@h/d"
    assert internals.token_provider_of({"postgres_url": "postgresql://u@h/d"}) is None
    assert callable(internals.give_tokens)
    assert list(inspect.signature(internals.set_pg_statement_timeout).parameters) == ["conn", "millis"]


def test_a_code_server_elsewhere_is_told_by_its_origin() -> None:
    origin = internals.GrpcServerCodeLocationOrigin(host="code.example", port=4000, location_name="there")
    assert (origin.host, origin.location_name) == ("code.example", "there")


def test_a_run_says_where_its_code_is_and_where_it_was_asked_for(tmp_path: Path) -> None:
    pointer = internals.CodePointer.from_python_file(str(tmp_path / "code.py"), "defs", None)
    repository = internals.RepositoryPythonOrigin(executable_path="/python", code_pointer=pointer)
    code = internals.JobPythonOrigin("job", repository)
    assert (code.job_name, code.repository_origin.executable_path) == ("job", "/python")
    assert code.repository_origin.container_image is None
    target = internals.LoadableTargetOrigin(executable_path="/python", python_file="code.py", attribute="defs")
    managed = internals.ManagedGrpcPythonEnvCodeLocationOrigin(target, location_name="there")
    origin = internals.RemoteJobOrigin(internals.RemoteRepositoryOrigin(managed, "__repository__"), "job")
    assert origin.repository_origin.code_location_origin.location_name == "there"
