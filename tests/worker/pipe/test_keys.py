"""Keys cross the pipe whole; what no transport could carry is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import BadFrame
from protos import atoll_compute_pb2 as pb
from worker.pipe.keys import from_key, to_key
from worker.transport.frames import Direction, MessageKey

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
KEYS = st.builds(MessageKey, st.text(max_size=50), U32, U64, U32, U32, st.sampled_from(Direction))


@given(KEYS)
def test_a_key_comes_back_as_it_was(key: MessageKey) -> None:
    found = from_key(pb.Key.FromString(to_key(key).SerializeToString()))
    assert found == key
    assert isinstance(found.direction, Direction)


@pytest.mark.parametrize("direction", [max(Direction) + 1, 2**32 - 1])
def test_a_direction_of_no_kind_is_refused(direction: int) -> None:
    with pytest.raises(BadFrame, match=f"direction {direction}"):
        from_key(pb.Key(job="j", direction=direction))
