"""A site whose processes are on several hosts, here as ranks in threads that reach rank 0 by TCP alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atoll.errors import ConnectionFailed
from atoll.mesh.layout import Inside
from tests.patience import eventually
from tests.worker.mesh.site import Site, assigned_to, plain, settings_of, site, train
from tests.worker.stage.steps.crew import case
from worker.machine.torch_device import find_device
from worker.mesh.followers import followers_elsewhere
from worker.mesh.leader import Leader, Reach
from worker.ranks import gathering
from worker.ranks.gathering import Gathering, Reached
from worker.site import rank as rank_module
from worker.site.rank import Rank, Terms

pytestmark = pytest.mark.usefixtures("one_thread")
SECRET, VERSIONS = b"0123456789abcdef", "atoll, torch"


class Hosts(Site):
    """Rank 0 in this process; the others in threads, each with a contained process below it."""

    def _lead(self, folder: Path) -> Leader:
        self.gathering = Gathering(self.size, SECRET, Reached("127.0.0.1", 0, "lo"), VERSIONS)
        gathers = "127.0.0.1", self.gathering.port
        self.ranks = [
            Rank(Terms(n, self.size, gathers, "lo", "cpu", 1, 2 << 30, 0, "auto", VERSIONS), SECRET)
            for n in range(1, self.size)
        ]
        for rank in self.ranks:
            threading.Thread(target=rank.run, daemon=True).start()
        return self.lead(folder)

    def lead(self, folder: Path, *, may_shrink: bool = False) -> Leader:
        """A life of the process that leads."""
        settings = settings_of(folder, "cpu")
        followers = followers_elsewhere([pipe.detach() for pipe in self.gathering.pipes()])
        folders, died, reach = (self._scratch, self._blobs), self.deaths.append, Reach("lo", may_shrink)
        return Leader(settings, find_device(settings), folders, died, followers, self.status, reach)

    def close(self) -> None:
        super().close()
        for rank in self.ranks:
            rank.leave()
        self.gathering.close()
        eventually(lambda: not computing())


def computing() -> list[psutil.Process]:
    """Processes of ranks, below their guards and sandboxes."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if line[1:4] == ["-P", "-m", "worker.mesh"]:
            found.append(process)
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with site(3, tmp_path_factory.mktemp("hosts"), Hosts) as found:
        assert isinstance(found, Hosts)
        yield found


def test_a_rank_with_another_secret_gives_up_and_says_what_may_be_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_module, "GONE_S", 0.0)
    at = Gathering(2, SECRET, Reached("127.0.0.1", 0, "lo"), VERSIONS)
    terms = Terms(1, 2, ("127.0.0.1", at.port), "lo", "cpu", 1, 2 << 30, 0, "auto", VERSIONS)
    with pytest.raises(ConnectionFailed, match="where its secret is another"):
        Rank(terms, b"another secret 16").run()
    at.close()


def test_processes_on_three_hosts_train_as_one_does_and_read_no_file_of_the_first(three: Hosts) -> None:
    device = three.leader.device
    assert device.processes == 3
    assert device.memory_limit_bytes == 3 << 30  # three times the least
    train(three, plain("llama"), Inside.SHARDS, steps=1)


def test_a_killed_process_ends_its_site_which_starts_anew_and_goes_on_smaller_without_it(
    three: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "AGAIN_S", 60.0)
    (assignment,) = assigned_to(case("gpt2"), Inside.SHARDS)
    three.stage(case("gpt2"), assignment)
    victim, _ = computing()
    os.kill(victim.pid, signal.SIGKILL)
    eventually(lambda: bool(three.deaths))
    assert three.deaths[0].startswith("process ")
    assert three.deaths[0].endswith("of the mesh ended (gone)")
    three.leader.close()  # as the process that leads ends with it: the other rank's process must, too
    three.ranks.pop().leave()  # and this host does not come again
    monkeypatch.setattr(gathering, "AGAIN_S", 5.0)
    three.gathering._wait_s = 5.0
    three.leader = three.lead(tmp_path, may_shrink=True)
    assert three.leader.device.processes == 2
    assert three.leader.device.memory_limit_bytes == 2 << 30
    train(three, "gpt2", Inside.TENSOR, steps=1)
