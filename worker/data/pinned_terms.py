"""Terms of a job that is cut into stages around a data set of this machine: what would leave, for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.dataset_spec import DataSpec
from atoll.errors import BadFrame
from protos import bounds, coding
from protos.text_limits import clean
from worker.data.policy import MAX_OWNER_CHARS, Terms

if TYPE_CHECKING:
    from protos import atoll_control_pb2 as pb


class AskedPinned:
    """A stage that reads this machine's data. Raises BadFrame or UsageError for what breaks a bound.

    The graph's hash is the plan's, so it stays when the model is cut elsewhere. That the stage's ops are of
    that graph is the coordinator's word.
    """

    def __init__(self, m: pb.Assign) -> None:
        self._m = m
        self._spec = coding.read(DataSpec, m.data)
        if self._spec.pinned is None:
            raise BadFrame("a stage without data of this machine")
        self.data = self._spec.pinned.data
        self._graph = bounds.blob_hash("graph", m.plan.dag_hash)

    def terms(self, n_samples: int, place: str = "") -> Terms:
        """What a policy judges; the arguments are those of ``Asked.terms``."""
        return Terms(
            bounds.name("job", self._m.job),
            self.data,
            clean(self._m.owner, MAX_OWNER_CHARS),
            self._graph,
            coding.digest_of(self._graph.encode(), self._m.training, self._m.data),
            0,
            0,
            place=place,
        )

    def facts(self, n_samples: int) -> tuple[tuple[str, str], ...]:
        """What would leave, in words: a heading and its text each."""
        training = self._m.training
        return (
            ("data set", f"{self.data}, {n_samples:,} samples here"),
            ("submitted by", clean(self._m.owner, MAX_OWNER_CHARS) or "not stated"),
            ("graph", self._graph),
            (
                "each step",
                f"{training.n_micro} micro-batches of {self._spec.batch} samples: what the first layers make "
                "of each sample goes to other workers of the pool, and gradients of the last ones; samples "
                "and labels stay here",
            ),
            (
                "what that tells",
                "whoever has the weights can read most of a text from such values (SECURITY.md): accept jobs "
                "of people and pools that you trust with the data",
            ),
            ("steps", f"{training.steps:,}, and the loss of each goes to the coordinator"),
            (
                "updates",
                "none; weights and buffers of the layers that are trained here go to the coordinator",
            ),
        )
