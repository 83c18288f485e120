"""A real line falls from 50 to 5 Mbit/s and rises again under a run, which nobody is told."""

from __future__ import annotations

import pytest

from benchmarks.harness import LabFleet, steady
from benchmarks.link_adaptation import SCENARIO, SETTINGS, SLOW_MBIT, Trace, run
from lab.tun import unavailable

pytestmark = [
    pytest.mark.wan,
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=f"namespaces: {unavailable()}"),
]


def sent(trace: Trace, first: int, last: int) -> list[int]:
    """Bytes of all links by step, probes of the first step aside."""
    steps = [step for step in sorted(trace.links) if max(2, first) <= step <= last]
    return [sum(x.sent_bytes for x in trace.links[step].values()) for step in steps]


def most(trace: Trace, step: int) -> int:
    """Bytes of the fuller link in this step, or in the last one heard of before."""
    return max(x.sent_bytes for x in trace.links[max(s for s in trace.links if s <= step)].values())


def test_the_codecs_follow_a_line_down_within_ten_steps_and_up_within_thirty() -> None:
    with LabFleet(SCENARIO) as fleet:
        trace = run(fleet, "examples/gpt.py", "auto", SETTINGS)
    (down, _), (up, _) = trace.changes
    # On a quick machine the fast line's codecs may be such that the slow line carries what they send, too.
    carried = 1e6 * SLOW_MBIT / 8 * steady(trace.step_s[:down])
    if most(trace, down) > carried:
        first = trace.first_change_after(down)
        assert first is not None
        assert first <= 10
    assert most(trace, down + 10) <= carried
    assert max(sent(trace, up + 1, up + 30)) >= 0.7 * min(sent(trace, 2, down))
    reasons = [line["reason"] for line in trace.log]
    assert any("measured" in reason and "chosen for" in reason for reason in reasons)
    shown = [x.reason for links in trace.links.values() for x in links.values()]
    assert any("chosen for" in reason for reason in shown)  # as `atoll watch` has it
    codecs = {x.codec for links in trace.links.values() for x in links.values()}
    assert codecs - {"none"}
