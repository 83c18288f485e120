"""The script for SLURM, on a cluster of Debian's SLURM that is this machine alone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.patience import eventually

ROOT = Path(__file__).resolve().parents[2]
DAEMONS = ("slurmctld", "slurmd")
CONF = """
ClusterName=atoll
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    """Ports that follow each other, free now."""
    while True:
        held = [socket.socket() for _ in range(count)]
        try:
            held[0].bind(("127.0.0.1", 0))
            first = held[0].getsockname()[1]
            for number, one in enumerate(held[1:], 1):
                one.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        finally:
            for one in held:
                one.close()
        return [first + number for number in range(count)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    paths = [shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in DAEMONS]
    if None in paths or os.geteuid():
        pytest.skip("no SLURM here, or not root: apt-get install slurm-wlm")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    conf = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    conf.write_text(CONF.format(host=host, folder=folder, ports=free_ports(2)))
    monkeypatch.setenv("SLURM_CONF", str(conf))
    for path in paths:
        subprocess.run([str(path), "-f", str(conf)], check=True)
    try:
        eventually(lambda: "idle" in subprocess.run(["sinfo"], capture_output=True, text=True).stdout)
        yield folder
    finally:
        for name in reversed(DAEMONS):
            pid = folder / f"{name}.pid"
            if pid.exists():
                os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "options", "site"),
    [(2, "--device cpu", ""), (1, "--devices cpu+cpu", ""), (2, "--device cpu", "1")],
    ids=["workers", "site", "hosts"],
)
def test_one_sbatch_trains_on_two_processes_writes_the_weights_and_leaves_none(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: int, options: str, site: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("ATOLL_ADVERTISE", "127.0.0.1")
    monkeypatch.setenv("ATOLL_PORT", str(free_ports(4)[0]))
    monkeypatch.setenv("ATOLL_SUBMIT_OPTIONS", "--steps 6")
    monkeypatch.setenv("ATOLL_WORKER_OPTIONS", options)
    monkeypatch.setenv("ATOLL_SITE", site)
    script = str(ROOT / "deploy" / "slurm" / "atoll.sbatch")
    wanted = ["sbatch", "--wait", "--ntasks", str(tasks), "--ntasks-per-node", str(tasks), script]
    done = subprocess.run(
        [*wanted, str(ROOT / "examples" / "mlp_digits.py"), "out.safetensors"], capture_output=True, text=True
    )
    log = "\n".join(path.read_text() for path in tmp_path.glob("atoll-*.log"))
    assert done.returncode == 0, done.stderr + log
    workers = 1 if site else tasks
    assert f"on {workers} workers" in log
    joined = [path.read_text() for path in tmp_path.glob("atoll-*/worker-*.log")]
    assert len(joined) == tasks
    assert sum(f"processes={2 // workers}" in text for text in joined) == workers
    assert "finished, step 6/6" in log
    assert len(load_file(tmp_path / "out.safetensors")) == 6
    assert list((tmp_path / "scratch").glob("atoll-[0-9]*")) == []
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(tmp_path / "scratch") not in listed
