"""A log whose disk is full, and one that a peer would fill."""

import io
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import structlog

from hostos.log_stream import MAX_EVENTS, LogBudget, log_stream

PROGRAM = """
import resource, sys
import structlog
from hostos.log_stream import log_stream

structlog.configure(logger_factory=structlog.PrintLoggerFactory(log_stream(sys.stderr)))
log = structlog.get_logger()
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
for number in range(200):
    log.info("lost", number=number, words="x" * 200)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.info("written")
print("lives")
"""


def test_a_full_disk_costs_lines_and_not_the_process(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=log, text=True, check=False
        )
    text = (tmp_path / "log").read_text()
    assert (done.returncode, done.stdout) == (0, "lives\n"), text
    assert text.splitlines()[-1].endswith("written")


def test_a_closed_stream_is_no_error() -> None:
    stream = io.StringIO()
    log = structlog.PrintLogger(log_stream(stream))
    log.info("first")
    assert stream.getvalue() == "first\n"
    stream.close()
    log.info("second")


def test_an_event_that_a_peer_may_cause_as_often_as_it_likes_takes_so_many_lines_and_no_more() -> None:
    now_s, out = 0.0, io.StringIO()
    log = structlog.wrap_logger(
        structlog.PrintLogger(out),
        processors=[LogBudget(100, 1.0, lambda: now_s), structlog.processors.KeyValueRenderer()],
    )
    for number in range(10_000):
        log.info("peer.joined", number=number)
        if number % 1000 == 0:
            log.info("job.state", number=number)
    lines = out.getvalue().splitlines()
    assert sum("peer.joined" in line for line in lines) == 100
    assert sum("job.state" in line for line in lines) == 10, "what one causes costs no other event a line"
    now_s = 1.0
    log.info("peer.joined", number=7)
    assert "lines_left_out_before=9900" in out.getvalue().splitlines()[-1]


def test_names_of_events_that_a_process_invents_share_a_budget() -> None:
    budget = LogBudget(5, 0.0, lambda: 0.0)
    passed = 0
    for number in range(10 * MAX_EVENTS):
        with suppress(structlog.DropEvent):
            budget(None, "info", {"event": f"invented.{number}"})
            passed += 1
    assert passed == MAX_EVENTS + 5
