"""A log whose disk is full."""

import io
import subprocess
import sys
from pathlib import Path

import structlog

from protos.log_stream import log_stream

PROGRAM = """
import resource, sys
import structlog
from protos.log_stream import log_stream

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
