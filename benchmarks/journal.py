"""How soon a coordinator is there again after a long life: its journal of many steps, folded.

    python -m benchmarks.journal --steps 1000000 --json

Writes a journal of two past jobs and one with so many committed steps, in batches, with a checkpoint every
thousand steps. Then times what a start does: every record read and folded, as without a snapshot, and the
newest snapshot with the records after it, in seconds of CPU time. Both must be the same state.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from atoll.dataset_spec import DataSpec
from atoll.job import JobSpec, TrainingSpec
from atoll.microbatch import ScheduleName
from atoll.plan import Plan, StageSpec, one_replica
from benchmarks.harness import execute, machine, parser
from coordinator.messages.facts import (
    CheckpointStored,
    Fact,
    JobEnded,
    JobSubmitted,
    PlanAdopted,
    StepCommitted,
    to_record,
)
from coordinator.services.recovery import SNAPSHOT_EVERY, recover
from coordinator.storage.journal import Journal

KEEP = 2
BATCH = 1000
TENSORS = 200
CHECKPOINT_EVERY = 1000


def written(journal: Journal, steps: int, random: Random) -> None:
    """Fill a journal; ``steps`` of them are those of the last job, which has not ended."""

    def blob() -> str:
        return random.randbytes(32).hex()

    names = [f"layers.{at}.weight" for at in range(TENSORS)]
    stages = (StageSpec(0, 1, 0, 0, "w0", 1), StageSpec(1, 2, 0, 0, "w1", 1))
    for job, many in (("job-1", 1000), ("job-2", 1000), ("job-3", steps)):
        spec = JobSpec(
            "job",
            TrainingSpec(many + 1, 2),
            blob(),
            "",
            {name: blob() for name in names},
            DataSpec((), 8, 1),
            None,
        )
        plan = Plan(job, 1, spec.dag_hash, "", "even", ScheduleName.GPIPE, 2, one_replica(2, stages))
        facts: list[Fact] = [JobSubmitted(job, "", spec, 0, {}, 0.0), PlanAdopted(job, plan)]
        for step in range(many):
            facts.append(StepCommitted(job, 1, step, random.random(), float(step)))
            if (step + 1) % CHECKPOINT_EVERY == 0:
                facts.append(CheckpointStored(job, step + 1, {name: blob() for name in names}))
        if job != "job-3":
            facts.append(JobEnded(job, "finished", "done"))
        for at in range(0, len(facts), BATCH):
            journal.append([to_record(fact, float(at)) for fact in facts[at : at + BATCH]])


def measured(steps: int, seed: int) -> dict[str, Any]:
    """Return the figures of one journal."""
    with tempfile.TemporaryDirectory(prefix="atoll-journal-") as folder:
        path = Path(folder) / "journal.sqlite"
        with closing(Journal(path)) as journal:
            journal.claim(0.0)
            written(journal, steps, Random(seed))
            before = path.stat().st_size
            begun_s = time.process_time()
            whole = recover(journal, KEEP)
            replayed_s = time.process_time() - begun_s
            whole.ledger.take_superseded()
            begun_s = time.process_time()
            text = whole.encoded()
            journal.fold(whole.number, text, 0.0)
            folded_s = time.process_time() - begun_s
            rest = min(steps, SNAPSHOT_EVERY - 1)  # the most that a running coordinator leaves unfolded
            more: list[Fact] = [StepCommitted("job-3", 1, steps + at, 1.0, 0.0) for at in range(rest)]
            for at in range(0, rest, BATCH):
                journal.append([to_record(fact, 0.0) for fact in more[at : at + BATCH]])
        with closing(Journal(path)) as journal:
            begun_s = time.process_time()
            started = recover(journal, KEEP)
            started_s = time.process_time() - begun_s
            for fact in more:
                whole.ledger.apply(fact)
            return {
                "steps": steps,
                "records": whole.records,
                "journal_bytes": before,
                "replayed_s": round(replayed_s, 3),
                "us_a_record": round(1e6 * replayed_s / whole.records, 2),
                "snapshot_bytes": len(text),
                "folded_s": round(folded_s, 3),
                "records_after_snapshot": started.records,
                "started_s": round(started_s, 3),
                "same_state": started.ledger == whole.ledger and started.register == whole.register,
            }


def main() -> int:
    """Print the figures; 1 when the snapshot's state is another."""
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=1_000_000)
    given = options.parse_args()
    figures = measured(given.steps, given.seed)
    print(
        f"{figures['records']} records, {figures['journal_bytes'] / 2**20:.0f} MiB: all of them in "
        f"{figures['replayed_s']} s; from a snapshot and {figures['records_after_snapshot']} records in "
        f"{figures['started_s']} s; a snapshot, {figures['snapshot_bytes']} bytes, in {figures['folded_s']} s"
    )
    if given.json:
        print(json.dumps({**figures, "seed": given.seed, "machine": machine()}))
    return 0 if figures["same_state"] else 1


if __name__ == "__main__":
    execute(main)
