"""The code location of these tests: jobs that end in every way in which a run can end."""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dagster as dg

NOTHING = dg.Out(dg.Nothing)


class Told(dg.Config):
    """What a test tells an op."""

    folder: str = ""
    """Where the op leaves what the test looks for."""

    seconds: float = 0


def _leave(config: Told, name: str, text: str = "") -> None:
    if config.folder:
        path = Path(config.folder) / name
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)


@dg.op(out=NOTHING)
def say_op(context: dg.OpExecutionContext, config: Told) -> None:
    """Says who and where it is."""
    context.log.info("hello")
    _leave(config, context.run_id, f"{os.getpid()}\n{os.getcwd()}\n{os.environ.get('LEFT', '')}")
    os.environ["LEFT"] = "by a run before"


@dg.op(out=NOTHING)
def move_op() -> None:
    """Leaves the process elsewhere, and with less in its environment."""
    os.chdir("/")
    del os.environ["PATH"]


@dg.op(out=NOTHING)
def talk_op(context: dg.OpExecutionContext) -> None:
    """Prints, and logs in two ways."""
    print("printed by the op")  # noqa: T201
    logging.getLogger("a_library").warning("logged by a library")
    context.log.info("logged by the op")


@dg.op(out=NOTHING)
def wait_op(context: dg.OpExecutionContext, config: Told) -> None:
    """Goes on until it is interrupted, or for some seconds."""
    _leave(config, context.run_id, str(os.getpid()))
    time.sleep(config.seconds or 600)


@dg.op(out=NOTHING)
def gate_op(context: dg.OpExecutionContext, config: Told) -> None:
    """Goes on until the test lets it through."""
    _leave(config, context.run_id, str(os.getpid()))
    while not (Path(config.folder) / "open").exists():
        time.sleep(0.05)


@dg.op(out=NOTHING)
def many_op(context: dg.OpExecutionContext, config: Told) -> None:
    """Does as ``gate_op``, in a job with a process for each step."""
    _leave(config, context.run_id, str(os.getpid()))
    while not (Path(config.folder) / "open").exists():
        time.sleep(0.05)


@dg.op(out=NOTHING)
def stubborn_op(context: dg.OpExecutionContext, config: Told) -> None:
    """Cannot be interrupted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _leave(config, context.run_id, str(os.getpid()))
    time.sleep(600)


@dg.op(out=NOTHING)
def fail_op() -> None:
    """Raises."""
    raise RuntimeError("this op raises")


@dg.op(out=NOTHING)
def sys_exit_op() -> None:
    """Ends the interpreter."""
    sys.exit(3)


@dg.op(out=NOTHING)
def os_exit_op() -> None:
    """Ends the process and says that all is well."""
    os._exit(0)


@dg.op(out=NOTHING)
def crash_op() -> None:
    """Reads where nothing is."""
    ctypes.string_at(0)


@dg.op(out=NOTHING)
def child_op(context: dg.OpExecutionContext, config: Told) -> None:
    """Leaves a forked and an executed child behind, perhaps after some seconds."""
    forked = os.fork()
    if not forked:
        time.sleep(600)
        os._exit(0)
    executed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    _leave(config, context.run_id, f"{forked}\n{executed.pid}")
    time.sleep(config.seconds)


@dg.op(out=NOTHING)
def thread_op(context: dg.OpExecutionContext, config: Told) -> None:
    """Leaves a thread behind that never ends."""
    threading.Thread(target=threading.Event().wait).start()
    _leave(config, context.run_id)


@dg.op(out=NOTHING)
def loud_op() -> None:
    """Prints 100 MB."""
    line = "x" * 1023
    for _ in range(100 * 1024):
        print(line)  # noqa: T201


@dg.op(out=NOTHING)
def greedy_op() -> None:
    """Wants a gigabyte."""
    bytearray(1024**3)


def _job(op: dg.OpDefinition) -> dg.JobDefinition:
    name = op.name.removesuffix("_op")

    @dg.job(name=name, executor_def=dg.in_process_executor)
    def made() -> None:
        op()

    return made


@dg.job(executor_def=dg.multiprocess_executor)
def many() -> None:
    """A process for each step, as Dagster has it by default."""
    many_op()


defs = dg.Definitions(
    jobs=[
        many,
        *(
            _job(op)
            for op in (
                say_op,
                talk_op,
                move_op,
                wait_op,
                gate_op,
                stubborn_op,
                fail_op,
                sys_exit_op,
                os_exit_op,
                crash_op,
                child_op,
                thread_op,
                loud_op,
                greedy_op,
            )
        ),
    ]
)
