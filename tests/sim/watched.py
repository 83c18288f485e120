"""A world of one job that keeps who was suspected and quarantined."""

from __future__ import annotations

from atoll.job import JobSpec
from coordinator.messages import instructions as do
from tests.sim.world import World


class Watched(World):
    """``suspected`` and ``quarantined``: workers in order, and why."""

    def run_job(self, spec: JobSpec) -> None:
        self.suspected: list[tuple[str, str]] = []
        self.quarantined: list[tuple[str, str]] = []
        performed = self.coordinator.performed

        def watch(instruction: do.Instruction) -> None:
            performed(instruction)
            if isinstance(instruction, do.Log):
                kept = {"worker.suspected": self.suspected, "worker.quarantined": self.quarantined}
                heard = kept.get(instruction.event)
                if heard is not None:
                    heard.append((instruction.fields["worker"], instruction.fields["reason"]))

        self.coordinator.performed = watch
        self.specs["job-1"] = spec
        self.run()

    def submit(self, job: str, spec: JobSpec, after_s: float) -> None:
        super().submit(job, self.specs[job], after_s)

    @property
    def outcome(self) -> str:
        return self.coordinator.shadow.jobs["job-1"].outcome
