from __future__ import annotations

import signal
import threading
from pathlib import Path

import grpc
import pytest

from .client import Client
from .rows import answers, batches, directly_trained, rows
from .service_process import DIE_AT_RENAME, ServiceProcess


def test_a_service_killed_again_and_again_while_training_learns_each_row_once(state_dir: Path) -> None:
    sent = rows(600)
    todo = batches(sent)
    done = 0  # batches answered OK so far, over all lives
    for life in range(4):
        with ServiceProcess(state_dir) as service, Client(service.port) as client:
            # What was answered OK is there; of the batch in flight, all of it or nothing.
            assert client.predict().examples_seen in (10 * done, 10 * (done + 1))
            killing = threading.Event()

            def kill(service: ServiceProcess = service, killing: threading.Event = killing) -> None:
                killing.wait()
                service.send(signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            again = max(0, done - 2)  # at least once: some batches come a second time
            try:
                for at in range(again, len(todo)):
                    assert list(client.train(todo[at]).accepted) == [example.id for example in todo[at]]
                    done = max(done, at + 1)
                    if life < 3 and at >= 12 * (life + 1):
                        killing.set()  # and train on, until it strikes
            except grpc.RpcError:
                assert life < 3
            finally:
                killing.set()
                killer.join()
            assert service.ended()[0] == -signal.SIGKILL
    assert done == len(todo)
    with ServiceProcess(state_dir) as service, Client(service.port) as client:
        predicted = client.predict()
    assert predicted.examples_seen == 600
    assert list(predicted.probabilities) == answers(directly_trained(sent))


@pytest.mark.parametrize("before", [True, False], ids=["before the rename", "after the rename"])
def test_a_service_that_dies_while_saving_keeps_whole_batches(state_dir: Path, before: bool) -> None:
    sent = rows(100)
    todo = batches(sent)
    sabotage = DIE_AT_RENAME.format(nth=4, before=before)
    with ServiceProcess(state_dir, sabotage) as service, Client(service.port) as client:
        for batch in todo[:3]:
            client.train(batch)
        with pytest.raises(grpc.RpcError):
            client.train(todo[3])
        assert service.ended()[0] == -signal.SIGKILL
    with ServiceProcess(state_dir) as service, Client(service.port) as client:
        assert client.predict().examples_seen == (30 if before else 40)
        for batch in todo[3:]:
            assert list(client.train(batch).accepted) == [example.id for example in batch]
        predicted = client.predict()
    assert predicted.examples_seen == 100
    assert list(predicted.probabilities) == answers(directly_trained(sent))
