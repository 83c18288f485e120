"""The command line of the installed unit, run as an ordinary user as systemd would run it."""

from __future__ import annotations

import json
import os
import pwd
import shlex
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.federated_fleet import COORDINATOR, ROOT, FederatedFleet
from tests.patience import HUNG_S, eventually
from worker.cli.install import NO_RESTART

USER = "nobody"


def become() -> list[str]:
    """The command that runs another as the user; `env` is the first that has no right of root's."""
    found = pwd.getpwnam(USER)
    return ["setpriv", "--reuid", USER, "--regid", str(found.pw_gid), "--clear-groups", "env", "-i"]


def unable() -> str:
    """Why another user cannot run this interpreter, "" where one can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "needs root, to become another user"
    command = [*become(), sys.executable, "-c", ""]
    done = subprocess.run(command, capture_output=True, check=False)
    return f"{USER} cannot run {sys.executable}" if done.returncode else ""


pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(unable()), reason=unable())]


class Account:
    """An ordinary user with a home folder, and what runs for it."""

    def __init__(self, folder: Path) -> None:
        found = pwd.getpwnam(USER)
        self.home = folder / "home"
        self.home.mkdir()
        os.chown(self.home, found.pw_uid, found.pw_gid)
        self.state = self.home / "a state, 100% mine"
        self._log = (folder / "log").open("ab")
        self._path = folder / "log"
        self._prefix = [
            *become(),
            f"HOME={self.home}", "PATH=/usr/bin:/bin", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1",
        ]  # fmt: skip

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._prefix, *command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd=self.home,
        )

    def says(self, *arguments: str) -> dict[str, str]:
        """What an `atoll-worker` command prints."""
        command = [*self._prefix, sys.executable, "-m", "worker.cli", *arguments, "--json"]
        done = subprocess.run(
            [*command, "--state-dir", str(self.state)], capture_output=True, check=True, cwd=self.home
        )
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def log(self) -> str:
        return self._path.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        self._log.close()


def killed(process: subprocess.Popen[bytes]) -> None:
    """kill -9 to a process and all that it has started."""
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for one in below:
        if one.is_running():
            one.kill()
    process.wait(HUNG_S)


@contextmanager
def served(account: Account, unit: str) -> Iterator[None]:
    """Do with the unit's command line what systemd does: start it, and start it anew when it failed."""
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    command = shlex.split(line.removeprefix("ExecStart=").replace("%%", "%").replace("$$", "$"))
    stopping, running = threading.Event(), [account.start(*command)]

    def restart() -> None:
        while not stopping.is_set():
            code = running[-1].wait()
            if stopping.wait(0.5) or code == 0 or code in NO_RESTART:
                return
            running.append(account.start(*command))

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        running[-1].terminate()
        running[-1].wait(HUNG_S)
        thread.join(HUNG_S)


def test_after_everything_was_killed_the_worker_is_back_in_the_pool_by_itself() -> None:
    with FederatedFleet([]) as fleet, tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: S103 - the other user's home is in it
        account = Account(Path(folder))

        def in_pool() -> bool:
            return list(fleet.states("pool")) == ["mine"]

        address, state = f"127.0.0.1:{fleet.entry_port}", ["--state-dir", str(account.state)]
        joined = account.start(
            sys.executable, "-m", "worker.cli", "join", address, "--token", fleet.token, "--name", "mine",
            "--listen", "127.0.0.1:0", "--device", "cpu", "--threads", "1", *state,
        )  # fmt: skip
        try:
            eventually(lambda: in_pool() or joined.poll() is not None)
            assert in_pool(), account.log()
            unit = account.says("install", "--dry-run")["text"]
        finally:
            killed(joined)
        fleet.kill(COORDINATOR)
        with served(account, unit):
            fleet.serve()
            eventually(in_pool)
        account.close()
