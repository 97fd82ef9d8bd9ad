"""How a run is executed: in a process of its own, in one that others used before, or by Dagster's own launcher."""

import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.workspace.load_target import WorkspaceLoadTarget

from outbox_pipelines.launch.options import MODE_TAG
from tests.launch.conftest import LOCATION, MakeHome, Runs, file_target, opened, wait_until, wait_until_gone

# One launcher for the tests of this file.
pytestmark = pytest.mark.xdist_group("launcher_modes")

_RUNS_PER_PROCESS = 4
_IDLE_SECONDS = 5


@pytest.fixture(scope="module")
def reusing(make_shared_home: MakeHome, code_server: WorkspaceLoadTarget) -> Iterator[Runs]:
    """A launcher whose processes execute four runs each, of most jobs."""
    home = make_shared_home(
        mode="reuse",
        runs_per_process=_RUNS_PER_PROCESS,
        idle_worker_seconds=_IDLE_SECONDS,
        job_modes={"thread": "fork", "fail": "stock"},
    )
    home.start_launcher()
    with opened(home, code_server) as ready:
        yield ready


@pytest.fixture
def fresh(reusing: Runs) -> Runs:
    """The same, once no process waits for another run."""
    wait_until(lambda: not reusing.home.status()["idle_workers"], "no worker waits")
    return reusing


def execute(runs: Runs, folder: Path, **tags: str) -> list[str]:
    """Execute a small run; returns its process, its folder, and what it found in its environment."""
    run_id = runs.launch("say", op={"folder": str(folder)}, tags=tags)
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, runs.messages(run_id)
    wait_until(lambda: not runs.is_worked_on(run_id), "its process is ready for another")
    pid, where, found = runs.left(run_id, folder)
    # The launcher hears of it a moment later.
    wait_until(lambda: run_id not in {one["run_id"] for one in runs.home.status()["running"]}, "the launcher knows")
    return [pid, where, found]


def test_runs_of_the_same_code_share_a_process_that_is_replaced_after_some(fresh: Runs, tmp_path: Path) -> None:
    pids = [execute(fresh, tmp_path)[0] for _ in range(_RUNS_PER_PROCESS + 1)]
    assert len(set(pids[:-1])) == 1
    assert pids[-1] != pids[0]
    wait_until_gone(int(pids[0]))


def test_a_run_finds_nothing_of_the_one_before_in_its_environment_and_folder(fresh: Runs, tmp_path: Path) -> None:
    first = execute(fresh, tmp_path)
    moved = fresh.launch("move")
    assert fresh.end_of(moved) is dg.DagsterRunStatus.SUCCESS, fresh.messages(moved)
    wait_until(lambda: not fresh.home.status()["running"], "the launcher knows")
    second = execute(fresh, tmp_path)
    assert first == second == [first[0], os.getcwd(), ""]


def test_a_process_that_waits_too_long_for_a_run_ends(fresh: Runs, tmp_path: Path) -> None:
    pid = int(execute(fresh, tmp_path)[0])
    assert fresh.home.status()["idle_workers"] == 1
    wait_until_gone(pid)
    assert fresh.home.status()["idle_workers"] == 0


def test_a_process_is_shared_by_runs_of_one_code_server_alone(fresh: Runs, tmp_path: Path) -> None:
    pid = execute(fresh, tmp_path)[0]
    with opened(fresh.home, file_target(LOCATION)) as reloaded:
        pid = execute(fresh, tmp_path)[0]
        assert execute(reloaded, tmp_path)[0] != pid
        assert execute(fresh, tmp_path)[0] == pid


def test_a_canceled_run_takes_its_process_along(fresh: Runs, tmp_path: Path) -> None:
    pid = execute(fresh, tmp_path)[0]
    run_id = fresh.begin("wait", tmp_path)
    assert fresh.home.pid_of(run_id) == int(pid)
    assert fresh.launcher.terminate(run_id)
    assert fresh.end_of(run_id) is dg.DagsterRunStatus.CANCELED
    assert execute(fresh, tmp_path)[0] != pid
    wait_until_gone(int(pid))


@pytest.mark.parametrize("job", ["crash", "os_exit"])
def test_a_crash_fails_its_own_run_alone(fresh: Runs, tmp_path: Path, job: str) -> None:
    before = fresh.launch("say")
    assert fresh.end_of(before) is dg.DagsterRunStatus.SUCCESS
    other = fresh.begin("gate", tmp_path)
    crashed = fresh.launch(job)
    assert fresh.end_of(crashed) is dg.DagsterRunStatus.FAILURE
    assert fresh.run(before).status is dg.DagsterRunStatus.SUCCESS
    execute(fresh, tmp_path)
    (tmp_path / "open").touch()
    assert fresh.end_of(other) is dg.DagsterRunStatus.SUCCESS


def test_a_failed_run_leaves_a_process_that_the_next_can_use(fresh: Runs, tmp_path: Path) -> None:
    pid = execute(fresh, tmp_path)[0]
    failed = fresh.launch("sys_exit", tags={MODE_TAG: "reuse"})
    assert fresh.end_of(failed) is dg.DagsterRunStatus.FAILURE
    wait_until(lambda: not fresh.home.status()["running"], "the launcher knows")
    assert execute(fresh, tmp_path)[0] == pid


def test_runs_at_the_same_time_have_a_process_each(fresh: Runs, tmp_path: Path) -> None:
    begun = [fresh.begin("gate", tmp_path) for _ in range(3)]
    assert len({fresh.home.pid_of(run_id) for run_id in begun}) == 3
    (tmp_path / "open").touch()
    assert {fresh.end_of(run_id) for run_id in begun} == {dg.DagsterRunStatus.SUCCESS}


def test_a_process_that_is_killed_while_it_waits_costs_no_run(fresh: Runs, tmp_path: Path) -> None:
    pid = int(execute(fresh, tmp_path)[0])
    os.kill(pid, signal.SIGKILL)
    # Whether or not the launcher has noticed.
    execute(fresh, tmp_path)


def test_a_tag_has_a_run_executed_in_a_process_of_its_own(fresh: Runs, tmp_path: Path) -> None:
    pid = execute(fresh, tmp_path)[0]
    own = execute(fresh, tmp_path, **{MODE_TAG: "fork"})[0]
    assert own != pid
    wait_until_gone(int(own))
    assert execute(fresh, tmp_path)[0] == pid


def test_a_tag_has_a_run_executed_in_a_process_that_others_use(runs: Runs, tmp_path: Path) -> None:
    pids = {execute(runs, tmp_path, **{MODE_TAG: "reuse"})[0] for _ in range(3)}
    assert len(pids) == 1
    os.kill(int(pids.pop()), signal.SIGKILL)
    wait_until(lambda: not runs.home.status()["idle_workers"], "the launcher is as before")


def test_a_setting_has_a_job_executed_in_processes_of_their_own(fresh: Runs, tmp_path: Path) -> None:
    runs = [fresh.begin("thread", tmp_path) for _ in range(2)]
    assert {fresh.end_of(run_id) for run_id in runs} == {dg.DagsterRunStatus.SUCCESS}
    wait_until(lambda: not fresh.home.status()["running"], "the launcher knows")
    assert fresh.home.status()["idle_workers"] == 0


@pytest.mark.parametrize("job", ["say", "fail"])
def test_a_runs_events_are_the_same_and_in_the_same_order_as_with_dagsters_own_launcher(
    fresh: Runs, tmp_path: Path, job: str
) -> None:
    told = {}
    for mode in ("stock", "fork", "reuse"):
        run_id = fresh.launch(job, tags={MODE_TAG: mode}, op={"folder": str(tmp_path)})
        fresh.end_of(run_id)
        told[mode] = [
            entry.dagster_event.event_type_value
            for entry in fresh.instance.all_logs(run_id)
            # What a launcher and a process say of themselves differs.
            if entry.dagster_event is not None
            and not (entry.dagster_event.message or "").startswith(("Started process", "Process for run"))
        ]
    assert len(told["stock"]) > 6
    assert told["fork"] == told["reuse"] == told["stock"]


def test_a_setting_and_a_tag_give_a_run_to_dagsters_own_launcher(fresh: Runs, tmp_path: Path) -> None:
    before = fresh.home.status()["started"]
    by_setting = fresh.launch("fail")
    by_tag = fresh.launch("wait", op={"folder": str(tmp_path)}, tags={MODE_TAG: "stock"})
    for run_id in (by_setting, by_tag):
        assert ".dagster/grpc_info" in fresh.run(run_id).tags
        assert "Launched by Dagster's own launcher" not in fresh.messages(run_id)
    assert fresh.end_of(by_setting) is dg.DagsterRunStatus.FAILURE
    # It is canceled like every other.
    fresh.left(by_tag, tmp_path)
    assert fresh.is_worked_on(by_tag)
    assert fresh.launcher.terminate(by_tag)
    assert fresh.end_of(by_tag) is dg.DagsterRunStatus.CANCELED
    assert fresh.home.status()["started"] == before


def test_a_tag_that_names_no_mode_gives_the_run_to_dagsters_own_launcher_and_says_so(runs: Runs) -> None:
    run_id = runs.launch("say", tags={MODE_TAG: "quick"})
    assert "tag warm-runs/mode is 'quick': it must be one of fork, reuse, stock" in runs.messages(run_id)
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS


def code(says: str) -> str:
    """A code location whose job leaves a word."""
    return textwrap.dedent(f'''
        from pathlib import Path
        import dagster as dg

        class Told(dg.Config):
            folder: str
            seconds: float = 0

        @dg.op(out=dg.Out(dg.Nothing))
        def speak_op(context: dg.OpExecutionContext, config: Told):
            (Path(config.folder) / context.run_id).write_text("{says}")

        @dg.job(executor_def=dg.in_process_executor)
        def speak():
            speak_op()

        defs = dg.Definitions(jobs=[speak])
    ''')


def spoken(runs: Runs, folder: Path) -> str:
    """Execute the job of such a location; returns its word."""
    run_id = runs.launch("speak", op={"folder": str(folder)})
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, runs.messages(run_id)
    wait_until(lambda: run_id not in {one["run_id"] for one in runs.home.status()["running"]}, "the launcher knows")
    return (folder / run_id).read_text()


def test_a_run_executes_the_code_as_it_is_when_it_begins(runs: Runs, tmp_path: Path) -> None:
    file = tmp_path / "edited.py"
    file.write_text(code("before"))
    with opened(runs.home, file_target(file), "edited") as edited:
        assert spoken(edited, tmp_path) == "before"
        file.write_text(code("afterwards"))
        assert spoken(edited, tmp_path) == "afterwards"


def test_locations_execute_their_own_code_in_shared_processes_and_a_reload_brings_the_new(
    fresh: Runs, tmp_path: Path
) -> None:
    files = {name: tmp_path / name / "code.py" for name in ("one", "two")}
    for name, file in files.items():
        file.parent.mkdir()
        file.write_text(code(name))
    with (
        # The same name of file and job, and of the location: two checkouts of a project.
        opened(fresh.home, file_target(files["one"]), "code") as one,
        opened(fresh.home, file_target(files["two"]), "code") as two,
    ):
        for _ in range(2):
            assert spoken(one, tmp_path) == "one"
            assert spoken(two, tmp_path) == "two"
        files["one"].write_text(code("new"))
        one.workspace.reload_code_location("code")
        assert spoken(one, tmp_path) == "new"
        assert spoken(two, tmp_path) == "two"


def test_a_run_of_many_processes_ends_well_and_can_be_canceled(runs: Runs, tmp_path: Path) -> None:
    """Dagster's default executor starts a process for each step."""
    run_id = runs.launch("many", op={"folder": str(tmp_path)})
    runs.left(run_id, tmp_path)
    (tmp_path / "open").touch()
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, runs.messages(run_id)
    (tmp_path / "open").unlink()

    run_id = runs.launch("many", op={"folder": str(tmp_path)})
    step = int(runs.left(run_id, tmp_path)[0])
    worker = runs.home.pid_of(run_id)
    assert step != worker
    assert runs.launcher.terminate(run_id)
    assert runs.end_of(run_id) is dg.DagsterRunStatus.CANCELED, runs.messages(run_id)
    wait_until_gone(step, worker)
