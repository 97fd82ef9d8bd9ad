"""However a run's process ends, the run gets the end that it is due."""

import dagster as dg
import pytest

from tests.launch.conftest import Runs


def test_a_run_succeeds_in_a_process_forked_for_it(runs: Runs) -> None:
    run_id = runs.launch("say")
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS, runs.messages(run_id)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("fail", "this op raises"),
        ("sys_exit", "SystemExit: 3"),
        ("os_exit", "ended with exit code 0 in the middle of the run"),
        ("crash", "was killed by SIGSEGV"),
    ],
)
def test_a_run_whose_code_ends_its_process_is_failed_and_says_how(runs: Runs, job: str, words: str) -> None:
    run_id = runs.launch(job)
    assert runs.end_of(run_id) is dg.DagsterRunStatus.FAILURE
    assert words in runs.messages(run_id)


def test_what_a_run_prints_is_in_the_launchers_log_and_its_events_are_in_the_event_log_alone(runs: Runs) -> None:
    run_id = runs.launch("talk")
    assert runs.end_of(run_id) is dg.DagsterRunStatus.SUCCESS
    assert "logged by the op" in runs.messages(run_id)
    log = runs.home.log.read_text()
    assert "printed by the op" in log
    assert "logged by a library" in log
    assert "logged by the op" not in log
    assert run_id not in log
