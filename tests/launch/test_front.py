"""Whatever comes in at the launcher's socket, and however often, others are served and each run is executed once."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.launcher import LaunchRunContext
from dagster._core.workspace.load_target import WorkspaceLoadTarget

from outbox_pipelines.launch.protocol import LONGEST_LINE, LauncherSilent, ask
from tests.launch.conftest import MakeHome, Runs, opened, wait_until

_REQUEST = {"ask": "launch", "mode": "fork", "key": "", "cwd": "/", "instance_ref": ""}


def connect(runs: Runs) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(str(runs.home.folder.socket_path))
    return connection


def say(runs: Runs, text: bytes) -> bytes:
    """What the launcher answers; empty when it hangs up without a word."""
    with connect(runs) as connection:
        try:
            connection.sendall(text)
            return connection.makefile("rb").readline()
        except (BrokenPipeError, ConnectionResetError):
            return b""


def assert_serves(runs: Runs) -> None:
    run_id = runs.launch("say")
    assert "instead of a warm one" not in runs.messages(run_id)
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS


def test_a_run_that_is_launched_many_times_at_once_is_executed_once(runs: Runs) -> None:
    run = runs.create("say")
    runs.launch_created(run)
    context = LaunchRunContext(runs.run(run.run_id), runs.workspace.create_request_context())
    callers = [threading.Thread(target=runs.launcher.launch_run, args=(context,)) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert runs.end_of(run.run_id) is dg.DagsterRunStatus.SUCCESS
    wait_until(lambda: not runs.home.status()["running"] + runs.home.status()["waiting"], "nothing is left to do")
    assert runs.times(run.run_id, dg.DagsterEventType.RUN_START) == 1
    assert runs.run(run.run_id).status is dg.DagsterRunStatus.SUCCESS
    assert f"run {run.run_id}:" not in runs.home.log.read_text(), "it was taken for a run of another launcher's"


def test_a_run_that_is_over_is_not_executed_again(runs: Runs, tmp_path: Path) -> None:
    finished = runs.launch("say")
    canceled = runs.begin("wait", tmp_path)
    runs.end_of(finished)
    runs.launcher.terminate(canceled)
    runs.end_of(canceled)
    for run_id in (finished, canceled):
        before = runs.run(run_id).status
        wait_until(lambda run_id=run_id: not runs.is_worked_on(run_id), "its worker is gone")
        started = runs.home.status()["started"]
        runs.launcher.launch_run(LaunchRunContext(runs.run(run_id), runs.workspace.create_request_context()))
        wait_until(lambda started=started: runs.home.status()["started"] > started, "a worker has it")
        wait_until(lambda: not runs.home.status()["running"], "the worker is done")
        assert runs.run(run_id).status is before
        assert runs.times(run_id, dg.DagsterEventType.RUN_START) == 1


def test_a_run_that_is_deleted_before_it_begins_is_forgotten(runs: Runs) -> None:
    run = runs.create("say")
    context = LaunchRunContext(run, runs.workspace.create_request_context())
    runs.instance.delete_run(run.run_id)
    runs.launcher.launch_run(context)
    wait_until(lambda: not runs.home.status()["running"] + runs.home.status()["waiting"], "it is forgotten")
    assert runs.instance.get_run_by_id(run.run_id) is None
    assert_serves(runs)


def test_a_run_that_is_deleted_while_it_goes_on_leaves_no_worker(runs: Runs, tmp_path: Path) -> None:
    run_id = runs.begin("gate", tmp_path)
    runs.instance.delete_run(run_id)
    (tmp_path / "open").touch()
    wait_until(lambda: run_id not in {one["run_id"] for one in runs.home.status()["running"]}, "it is forgotten")
    assert_serves(runs)


@pytest.mark.parametrize(
    "text",
    [
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\xff\xfe\n",
        b"[]\n",
        b"null\n",
        b"{}\n",
        b'{"ask": []}\n',
        b'{"ask": "launch"}\n',
        b'{"ask": "launch", "run_id": "../../escaped", "python": null}\n',
        b'{"ask": "terminate"}\n',
        b"[" * 100_000 + b"\n",
        b'{"ask": "status"}\n{"ask": "status"}\n',
    ],
    ids=lambda text: repr(text[:30]),
)
def test_nonsense_is_refused_and_others_are_served(runs: Runs, text: bytes) -> None:
    answer = say(runs, text)
    assert "refused" in json.loads(answer)
    assert runs.home.status()["pid"]


@pytest.mark.parametrize(
    "wrong", [{"run_id": "../escaped"}, {"run_id": ""}, {"run_id": 7}, {"instance_ref": None}, {"mode": None}]
)
def test_a_run_that_lacks_something_is_refused(runs: Runs, wrong: dict[str, Any]) -> None:
    """As a launcher of another version may find it."""
    python = runs.home.status()["python"]
    request = {**_REQUEST, "python": python, "run_id": "00000000-0000-0000-0000-000000000000", **wrong}
    assert "another version" in json.loads(say(runs, json.dumps(request).encode() + b"\n"))["refused"]
    assert runs.home.status()["waiting"] == []
    assert_serves(runs)


def test_files_of_another_version_do_not_keep_a_launcher_from_starting(
    make_home: MakeHome, code_server: WorkspaceLoadTarget
) -> None:
    home = make_home()
    waiting = home.folder.path / "waiting"
    for name, text in [
        ("00000000000000000001-old.json", '{"run_id": "old"}'),
        ("00000000000000000002-cut.json", '{"run_id": '),
        ("00000000000000000003-list.json", "[]"),
        ("notes", "{}"),
        (".half", "{"),
    ]:
        (waiting / name).write_text(text)
    (home.folder.path / "running" / "old").write_text("not a number")
    home.start_launcher()
    with opened(home, code_server) as runs:
        assert_serves(runs)
        wait_until(lambda: not list(home.folder.runs()), "nobody works on the old run")
    assert "this is no run that can be started" in home.log.read_text()
    assert not (waiting / ".half").exists()


def test_a_request_of_any_usual_size_is_heard(runs: Runs) -> None:
    question = {"ask": "terminate", "run_id": "nobody's", "more": "x" * 1_000_000}
    assert ask(runs.home.folder.socket_path, question) == {"found": "nowhere"}
    with connect(runs) as connection:
        for part in (b'{"ask": "sta', b"tus", b'"}', b"\n"):
            connection.sendall(part)
            time.sleep(0.05)
        assert json.loads(connection.makefile("rb").readline())["pid"]


def test_a_request_without_an_end_is_hung_up_on(runs: Runs) -> None:
    began = time.monotonic()
    assert say(runs, b"x" * (LONGEST_LINE + 100_000)) == b""
    assert time.monotonic() - began < 8, "it was dropped for its silence"
    assert_serves(runs)


def test_callers_that_say_nothing_hinder_nobody_and_are_dropped(runs: Runs) -> None:
    silent = [connect(runs) for _ in range(50)]
    half = connect(runs)
    half.sendall(b'{"ask": "sta')
    assert_serves(runs)
    for connection in [*silent, half]:
        # It hangs up after ten seconds.
        assert connection.recv(1) == b""
        connection.close()


def test_callers_that_do_not_wait_for_their_answer_hinder_nobody(runs: Runs) -> None:
    for _ in range(100):
        with connect(runs) as connection:
            connection.sendall(b'{"ask": "status"}\n')
    assert_serves(runs)


def test_many_runs_at_once_are_all_executed(runs: Runs) -> None:
    ids = [runs.launch("say") for _ in range(25)]
    assert {runs.end_of(run_id) for run_id in ids} == {dg.DagsterRunStatus.SUCCESS}


def test_runs_are_executed_in_the_order_of_their_launch(make_home: MakeHome, code_server: WorkspaceLoadTarget) -> None:
    home = make_home(max_workers=1)
    home.start_launcher()
    with opened(home, code_server) as runs:
        ids = [runs.launch("say") for _ in range(10)]
        assert {runs.end_of(run_id) for run_id in ids} == {dg.DagsterRunStatus.SUCCESS}
        began = [runs.instance.get_run_record_by_id(run_id) for run_id in ids]
    times = [record.start_time for record in began if record is not None and record.start_time is not None]
    assert len(times) == len(ids)
    assert times == sorted(times)


def test_who_asks_where_nobody_listens_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(LauncherSilent, match="No such file or directory"):
        ask(tmp_path / "launcher.sock", {"ask": "status"})
