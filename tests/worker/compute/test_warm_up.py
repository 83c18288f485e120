"""What torch imports when it first computes is there before a process is measured at rest."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from worker.hosting.contained.environment import compute_environment

if TYPE_CHECKING:
    import pytest

PROGRAM = """
import json, sys
from worker.machine.op_timing import warm_up
warm_up()
before = set(sys.modules)
import torch
from atoll.job import Precision
from atoll.opdag import Kind, LeafRef, OpNode, Source, TensorMeta
from atoll.messages.to_worker import OpProbe
from worker.machine.op_timing import time_ops
meta = TensorMeta((4, 4), "float32")
node = OpNode("op", Kind.NON_PARAMETRIC, "aten.tanh.default", (LeafRef(Source.INPUT, "x"),), (), (meta,))
assert time_ops([OpProbe("op", node, (), {"x": meta})], precision=Precision.BF16, sustained_s=0.0)
weight = torch.ones(4, 4, requires_grad=True)
torch.autograd.backward([weight @ weight], [weight.detach()])
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_nothing_is_imported_by_the_first_stage_that_was_not_there_at_rest() -> None:
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=compute_environment(1),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(made.stdout) == []


def test_a_process_gets_no_large_pages_unless_its_owner_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed parts of shared ones stay in the control group: its mark would say more than a stage needs."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert "GLIBC_TUNABLES" not in compute_environment()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert compute_environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
