"""Run everything that the product needs on one machine, and stop all of it again."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import yaml
from sqlalchemy import make_url

from outbox_pipelines.database.database import Database, ensure_database
from outbox_pipelines.database.migrate import migrate
from outbox_pipelines.database.url import dagster_storage_url, render
from outbox_pipelines.errors import OutboxError
from outbox_pipelines.launch.folder import Folder
from outbox_pipelines.settings import Settings, as_environment, load_settings
from outbox_pipelines.training.grpc_sink import GrpcSink
from outbox_pipelines.wording import counted

STORAGE_VARIABLE = "OUTBOX_DAGSTER_STORAGE_URL"
"""What dagster_home/dagster.yaml reads: Dagster's database with its driver written out."""

LAUNCHER_VARIABLE = "OUTBOX_LAUNCHER_FOLDER"
"""What dagster_home/dagster.yaml reads: the private folder of the stack's launcher."""

_READY_SECONDS = 120.0
_STOP_SECONDS = (15.0, 5.0)
"""How long a process may take to end, and then to end after it was asked again."""

_POLL_SECONDS = 0.1
_HOST = "127.0.0.1"

Say = Callable[[str], None]
"""Tells a person what is going on, one line at a time."""


class ComponentFailed(OutboxError):
    """A process of the stack ended or did not become ready; the text ends with its last lines."""


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    ui_url: str
    settings: Settings
    """The settings that its processes run with: addresses filled in."""

    database: Database
    environment: Mapping[str, str]
    """What another process needs to join: addresses, and DAGSTER_HOME."""

    components: Sequence["Component"]

    def check(self) -> None:
        """Raise when a process has ended by itself."""
        for component in self.components:
            component.check()


class Component:
    """A process of the stack, in a session of its own: a terminal's Ctrl-C reaches only us.

    Args:
        name: for people, and of its log.
        arguments: to Python.
        environment: besides ours.
        log: what it prints is kept here.
        say: told each line that it prints.
        restarts: start it again when it ends by itself after it was ready, instead of failing.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        say: Say,
        *,
        restarts: bool = False,
    ) -> None:
        self.name = name
        self.log = log
        self._arguments = arguments
        self._environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
        self._say = say
        self._restarts = restarts
        self._ready = False
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *self._arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), name=f"log-{self.name}", daemon=True)
        self._reader.start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        # What is printed is read whatever happens: a full pipe would stop the process that prints.
        with self.log.open("a") as file:
            for line in process.stdout:
                with suppress(OSError):
                    # The disk is full.
                    file.write(line)
                    file.flush()
                self._say(f"{self.name:>10} | {line.rstrip()}")

    def check(self) -> None:
        """Raise :class:`ComponentFailed` when the process has ended, or start it again."""
        code = self._process.poll()
        if code is None:
            return
        if self._ready and self._restarts:
            self._say(f"{self.name:>10} | ended with code {code}: starting it again")
            self._start()
            return
        self._reader.join(timeout=1)
        raise ComponentFailed(f"{self.name} ended with code {code}; {self._last_lines()}")

    def has_said(self, text: str) -> bool:
        """Whether it printed this."""
        return text in self.log.read_text(errors="replace")

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready`` says so."""
        ends_at = time.monotonic() + _READY_SECONDS
        while not ready():
            self.check()
            if time.monotonic() > ends_at:
                raise ComponentFailed(f"{self.name} was not ready after {_READY_SECONDS:.0f} s; {self._last_lines()}")
            time.sleep(_POLL_SECONDS)
        self._ready = True

    def stop(self) -> None:
        """Ask the process to end, wait, and kill what is left of its session.

        A second interrupt while waiting shortens the wait; nothing is left behind.
        """
        try:
            for seconds in _STOP_SECONDS:
                if self._process.poll() is None:
                    self._process.send_signal(signal.SIGINT)
                    with suppress(subprocess.TimeoutExpired):
                        self._process.wait(seconds)
        finally:
            self._kill_session()
            self._process.wait()
            self._reader.join(timeout=1)

    def _kill_session(self) -> None:
        # Run workers and code servers are in the session of the process that started them.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_lines(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-15:] if self.log.exists() else []
        return f"its log is {self.log}:\n" + "\n".join(lines)


@contextmanager
def running_stack(
    settings: Settings, *, say: Say, log: Say, port: int | None = None, reference_service: bool = False
) -> Iterator[Stack]:
    """Start database, migrations, ML service, webserver and daemon; stop them at the end.

    Args:
        settings: as the user gave them. Without ``OUTBOX_DATABASE_URL`` the embedded server
            is started, and then without ``OUTBOX_ML_TARGET`` the reference ML service.
        say: told what is being waited for.
        log: told every line that the processes print.
        port: the webserver's; 3000 or the next free one when not given.
        reference_service: start the reference ML service whatever is set.

    Raises:
        OutboxError: saying which part failed, with its last lines.
    """
    if not reference_service and settings.database_url is not None and "ml_target" not in settings.model_fields_set:
        raise OutboxError(
            "OUTBOX_DATABASE_URL names a database and OUTBOX_ML_TARGET no ML service: set it, so that the rows go "
            "where they belong (the reference service is run with `outbox ml-service`)"
        )
    with ExitStack() as stack, _signals_as_interrupt():
        home = settings.home.absolute()
        home.mkdir(parents=True, exist_ok=True)
        database = stack.enter_context(Database(settings, application_name="outbox dev"))
        began = time.monotonic()
        say("database: " + _describe_database(settings, home))
        url = database.url
        changed = migrate(database.engine)
        say(f"database: ready after {time.monotonic() - began:.1f} s, {counted(changed, 'schema')} migrated")
        dagster_home = _dagster_home(home)
        environment = {
            **as_environment(settings),
            "OUTBOX_DATABASE_URL": url,
            "OUTBOX_HOME": str(home),
            "DAGSTER_HOME": str(dagster_home),
            STORAGE_VARIABLE: _storage_url(settings, url),
            LAUNCHER_VARIABLE: str(home / "launcher"),
        }
        components: list[Component] = []

        def start(name: str, arguments: Sequence[str], *, restarts: bool = False) -> Component:
            component = Component(name, arguments, environment, home / "logs" / f"{name}.log", log, restarts=restarts)
            stack.callback(component.stop)
            components.append(component)
            return component

        if reference_service or "ml_target" not in settings.model_fields_set:
            environment["OUTBOX_ML_TARGET"] = _start_ml_service(start, home, say)
        target = environment.get("OUTBOX_ML_TARGET", settings.ml_target)
        effective = settings.model_copy(update={"ml_target": target})
        web_port = _port(port, 3000, "webserver", say)
        say("dagster: starting launcher, code server, webserver and daemon (importing Dagster takes some seconds) …")
        began = time.monotonic()
        if _names_warm_launcher(dagster_home):
            stack.callback(_end_runs, Path(environment[LAUNCHER_VARIABLE]))
            launcher = start("launcher", ["-m", "outbox_pipelines.launch"], restarts=True)
            launcher.wait_until(lambda: launcher.has_said("launcher: ready"))
        dagster = start(
            "dagster",
            ["-W", "ignore", "-m", "dagster", "dev", "-w", str(_workspace(home)), "-h", _HOST, "-p", str(web_port)],
        )
        ui_url = f"http://{_HOST}:{web_port}"
        dagster.wait_until(lambda: _answers(f"{ui_url}/server_info"))
        # Another program may have taken the port meanwhile, and answered.
        dagster.check()
        say(f"dagster: ready after {time.monotonic() - began:.1f} s, the UI is at {ui_url}")
        try:
            yield Stack(ui_url, effective, database, environment, components)
        finally:
            say("stopping …")


def _start_ml_service(start: Callable[[str, Sequence[str]], Component], home: Path, say: Say) -> str:
    if importlib.util.find_spec("river") is None:
        raise OutboxError(
            "no ML service is named and the reference service is not installed: set OUTBOX_ML_TARGET, "
            "or run: pip install 'outbox-pipelines[ml-service]'"
        )
    port = _port(None, 50051, "ml-service", say)
    target = f"{_HOST}:{port}"
    say(f"ml-service: starting on {target} …")
    arguments = ["-m", "outbox_pipelines.cli", "ml-service", "--port", str(port)]
    service = start("ml-service", [*arguments, "--state-dir", str(home / "ml-state")])

    def serving() -> bool:
        sink = GrpcSink(load_settings(ml_target=target, ml_token=None))
        try:
            return sink.probe().reachable
        finally:
            sink.close()

    service.wait_until(serving)
    say("ml-service: ready")
    return target


def _describe_database(settings: Settings, home: Path) -> str:
    if settings.database_url is None:
        return f"starting the embedded PostgreSQL under {home / 'postgres'} …"
    return "connecting to OUTBOX_DATABASE_URL …"


def _storage_url(settings: Settings, url: str) -> str:
    """Dagster's own database, beside the outboxes unless the user named one."""
    if settings.dagster_database_url is not None:
        return render(dagster_storage_url(settings.dagster_database_url.get_secret_value()))
    beside = make_url(url)
    name = f"{beside.database}_dagster"
    try:
        ensure_database(settings, url, name)
    except OutboxError:
        raise
    except Exception as error:  # most often the right to create databases is missing; any cause has the same remedy
        raise OutboxError(
            f"Dagster's database {name!r} could not be created ({type(error).__name__}): create it, "
            "or set OUTBOX_DAGSTER_DATABASE_URL to a database for Dagster's own tables"
        ) from error
    return render(dagster_storage_url(beside.set(database=name)))


def _dagster_home(home: Path) -> Path:
    """The folder with dagster.yaml: the user's, the checkout's, or one made from the package's copy."""
    named = os.environ.get("DAGSTER_HOME")
    if named:
        return Path(named).absolute()
    checkout = Path("dagster_home").absolute()
    if (checkout / "dagster.yaml").exists():
        return checkout
    made = home / "dagster_home"
    made.mkdir(parents=True, exist_ok=True)
    packaged = Path(__file__).parents[1] / "launch" / "dagster.yaml"
    if not packaged.exists():
        packaged = Path(__file__).parents[2] / "dagster_home" / "dagster.yaml"
    (made / "dagster.yaml").write_text(packaged.read_text())
    return made


def _names_warm_launcher(dagster_home: Path) -> bool:
    """Whether the instance's settings name the warm launcher; without it Dagster's own starts the runs."""
    try:
        settings = yaml.safe_load((dagster_home / "dagster.yaml").read_text()) or {}
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise OutboxError(f"{dagster_home / 'dagster.yaml'} cannot be read: {error}") from error
    named = settings.get("run_launcher") or {}
    return bool(named.get("class") == "WarmRunLauncher")


def _end_runs(folder: Path) -> None:
    """End the workers that a launcher left which was killed: they are in no session of the stack's."""
    if folder.exists():
        for holder in Folder(folder).runs():
            if holder.pid and Folder(folder).is_held(holder.run_id):
                with suppress(ProcessLookupError):
                    os.kill(holder.pid, signal.SIGKILL)


def _workspace(home: Path) -> Path:
    given = Path("workspace.yaml").absolute()
    if given.exists():
        return given
    made = home / "workspace.yaml"
    made.write_text(
        "load_from:\n  - python_module:\n      module_name: outbox_pipelines.definitions\n"
        "      location_name: outbox_pipelines\n"
    )
    return made


def _port(wanted: int | None, usual: int, name: str, say: Say) -> int:
    """The wanted port, or the usual one, or a free one, saying which."""
    if wanted is not None:
        if not _is_free(wanted):
            raise OutboxError(f"{name}: port {wanted} is taken; leave --port out to use a free one")
        return wanted
    if _is_free(usual):
        return usual
    port = free_port()
    say(f"{name}: port {usual} is taken, using {port}")
    return port


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
        return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the stack like Ctrl-C does: everything is stopped.

    SIGINT is among them because a shell starts background jobs with it ignored, which the
    stack's processes would inherit; one that has a handler is set back to its default there.
    """

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
