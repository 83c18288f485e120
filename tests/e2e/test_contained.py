"""A worker outlives the process that computes, whatever that does, in a sandbox and without one.

A job named after an attack is attacked once, in its third step: it is planned anew and ends in the bits of
a job that nobody disturbed, on the same daemons. What a sandbox alone can stop succeeds without one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest

from atoll.job import Optimizer, TrainingSpec
from benchmarks.oracle import Case, Run, built_in, difference, run_local
from tests.e2e.contained import (
    WAYS,
    HostileFleet,
    assert_no_torch,
    attacked,
    hostile_fleet,
    submitted,
)

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = TrainingSpec(steps=4, n_micro=2, seed=3, optimizer=Optimizer(lr=3e-3))
OP = r"op 'aten\.\w+\.\w+' \(\w+\) "
PIPE = "broke the rules of its pipe: "
ENDS = {
    "grows": r"its memory bound: \d+ MiB more than at rest",
    "forks": "more than 256 processes|its memory bound",
    "rubbish": PIPE + "a damaged message",
    "endless": PIPE + "a message of 4294967295 bytes",
    "unknown": PIPE + "a message to the coordinator of kind introduction",
    "foreign": PIPE + "StageFailed.lost_peer",
    "leaves": PIPE + "a message to the coordinator of kind leaving",
    "floods": PIPE + "it says more than any job has to say",
    "twice": PIPE + "it was ready before",
    "beyond": PIPE + "bytes 4611686018427387904 to .* of an arena",
    "outside": PIPE + "a message of job 'outside-1' with 'somebody', none of which is here",
    "wants": PIPE + "a message of 9223372036854775808 bytes wanted",
    "shuts": "it closed its pipe|exit code 0",  # an honest part of it may end it first
    "steals": PIPE + "a file to store at '.*key.pem', which is not the compute process's own",
}
"""How a process's end is explained, by attack."""
SILENT = {
    "spins": rf"{OP}has run for \d+ s; what is honest ends within \d+ s",
    "sleeps": "has run for|it has not answered for",
    "deaf": "it has not answered for",
}
"""The same, of those that answer nobody."""
TRIED = {
    "connects": {"contained": "connection: Connection refused", "bare": "connection: done"},
    "leaks": dict.fromkeys(WAYS, "cannot read .*linked: Too many levels of symbolic links"),
    "fetches": dict.fromkeys(WAYS, "failed: "),
}
"""The outcome of what ends no process."""


@cache
def case() -> Case:
    return built_in("branches", TRAINING, 0.1)


@cache
def undisturbed() -> Run:
    return run_local(case(), (0,))


@pytest.fixture(scope="module", params=["contained", pytest.param("bare", marks=pytest.mark.slow)])
def fleet(request: pytest.FixtureRequest) -> Iterator[HostileFleet]:
    with hostile_fleet(request.param) as started:
        yield started


def way_of(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["fleet"])


def survived(fleet: HostileFleet, attack: str) -> str:
    """Why the attacked job was interrupted; it ended as if nothing had been, on the daemons of before."""
    fleet.pooled()
    daemons = fleet.daemons()
    found = attacked(fleet, attack, case())
    assert found.run is not None, found
    assert difference(found.run, undisturbed(), 1) == 0.0
    assert fleet.daemons() == daemons
    return found.reasons


def test_a_crash_names_the_op_and_the_job_ends_in_the_same_bits(fleet: HostileFleet) -> None:
    assert re.search(rf"failed: {OP}ended the compute process \(SIGSEGV", survived(fleet, "segfault"))
    assert "Traceback" not in fleet.log("worker0")


@pytest.mark.slow  # of the sandbox alone: tests/worker/hosting/contained
def test_files_outside_are_not_there(fleet: HostileFleet, request: pytest.FixtureRequest) -> None:
    """A secret file, and this worker's own key."""
    missing = "No such file or directory"
    outcome = {"contained": missing, "bare": "done"}[way_of(request)]
    assert f"failed: secret: {outcome}; key.pem: {outcome};" in survived(fleet, "opens")


def test_the_daemons_of_a_pipeline_map_no_torch(fleet: HostileFleet) -> None:
    job = submitted(fleet, "honest", case())
    for update in fleet.client.watch(job):
        if update.step:  # while it trains, and after
            assert_no_torch(fleet.daemons())
    assert update.state == "finished"


def test_joining_says_which_protections_are_on(fleet: HostileFleet, request: pytest.FixtureRequest) -> None:
    sandbox = {"contained": "bubblewrap", "bare": r"no sandbox \(switched off by --sandbox off\)"}
    line = next(line for line in fleet.whole_log("worker0").splitlines() if "worker.joined" in line)
    assert re.search(f"protections='own process, {sandbox[way_of(request)]}, memory by ", line)


def assert_ends(fleet: HostileFleet, attack: str, reason: str) -> None:
    """Its daemon ends the process with the reason. The owner reads it too, unless the coordinator was the
    first to see that nothing comes of it: the job does not wait then."""
    begun = len(fleet.whole_log("worker0"))
    reasons = survived(fleet, attack)
    assert re.search(f"was quarantined: |ended .*\\(.*({reason})", reasons), reasons
    fleet.logged("worker0", f"compute.ended .*({reason})", begun)


@pytest.mark.slow
@pytest.mark.parametrize("attack", list(ENDS))
def test_an_attack_ends_its_process_with_the_reason(fleet: HostileFleet, attack: str) -> None:
    assert_ends(fleet, attack, ENDS[attack])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attack", list(SILENT))
def test_a_process_that_answers_nobody_is_ended_and_its_job_goes_on_before(way: str, attack: str) -> None:
    """Their worker is quarantined, each time for longer: a fleet for each."""
    with hostile_fleet(way) as fleet:
        assert_ends(fleet, attack, SILENT[attack])
        assert "failed" not in survived(fleet, "honest")


@pytest.mark.slow
@pytest.mark.parametrize("attack", list(TRIED))
def test_an_attempt_has_the_outcome_that_is_promised(
    fleet: HostileFleet, attack: str, request: pytest.FixtureRequest
) -> None:
    reasons = survived(fleet, attack)
    assert re.search(TRIED[attack][way_of(request)], reasons), reasons


@pytest.mark.slow
def test_memory_of_the_daemon_cannot_be_read(fleet: HostileFleet, request: pytest.FixtureRequest) -> None:
    """Without a sandbox that is for the system to decide."""
    reasons = survived(fleet, "peeks")
    assert "failed: memory of the daemon: " in reasons
    if way_of(request) == "contained":
        assert "failed: memory of the daemon: No such file or directory" in reasons


@pytest.mark.slow
def test_a_job_that_always_kills_one_workers_process_goes_on_without_that_worker(fleet: HostileFleet) -> None:
    """That a worker refuses a job that has cost it three processes is shown by ``test_host``."""
    reasons = survived(fleet, "segfault always")
    assert re.search(rf"worker0.*{OP}ended the compute process \(SIGSEGV", reasons), reasons
    assert "failed" not in survived(fleet, "honest")
