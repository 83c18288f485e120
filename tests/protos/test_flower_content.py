"""Records out and in again: the same to the bit, and nothing hostile is believed."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

pytest.importorskip("flwr")

import contextlib

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import BadFrame
from protos import atoll_apps_pb2 as pb
from protos import flower_content as content

INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
KEYS = st.text(max_size=20)
METRICS = st.dictionaries(KEYS, INTS | FLOATS | st.lists(INTS) | st.lists(FLOATS), max_size=6)
SCALARS = (INTS, FLOATS, st.text(max_size=50), st.binary(max_size=5000), st.booleans())
CONFIGS = st.dictionaries(KEYS, st.one_of(*SCALARS, *(st.lists(s, max_size=4) for s in SCALARS)), max_size=6)
ARRAYS = st.dictionaries(KEYS, st.lists(FLOATS, max_size=30).map(lambda x: Array(np.array(x))), max_size=4)


def back(encoded: content.Encoded) -> RecordDict:
    return content.decode(encoded.content, lambda name, size: encoded.parts[name])


@given(METRICS, CONFIGS, ARRAYS)
def test_records_come_back_as_they_went(metrics, configs, arrays) -> None:
    records = RecordDict({"b": MetricRecord(metrics), "a": ConfigRecord(configs), "": ArrayRecord(arrays)})
    found = back(content.encode(records))
    assert list(found) == ["b", "a", ""]
    for name in ("b", "a"):
        assert dict(found[name]) == dict(records[name])
        assert [type(v) for v in found[name].values()] == [type(v) for v in records[name].values()]
    assert list(found[""]) == list(arrays)
    for key, array in found[""].items():
        assert (array.dtype, array.shape, array.stype, array.data) == (
            arrays[key].dtype, arrays[key].shape, arrays[key].stype, arrays[key].data
        )  # fmt: skip


def test_arrays_of_any_serialisation_travel_as_they_are() -> None:
    odd = Array("bfloat16", (2, 3), "somebody.else", b"\x00\xffwhatever")
    found = back(content.encode(RecordDict({"r": ArrayRecord({"x": odd})})))["r"]["x"]
    assert (found.dtype, found.shape, found.stype, found.data) == (odd.dtype, odd.shape, odd.stype, odd.data)


def test_equal_arrays_are_one_part_and_a_replaced_one_is_hashed_anew() -> None:
    array = Array(np.zeros(10))
    encoded = content.encode(RecordDict({"r": ArrayRecord({"x": array, "y": Array(np.zeros(10))})}))
    assert list(encoded.parts) == [hashlib.sha256(array.data).hexdigest()]
    array.data = b"other"
    assert list(content.encode(RecordDict({"r": ArrayRecord({"x": array})})).parts) == [
        hashlib.sha256(b"other").hexdigest()
    ]


def test_small_parts_go_along_as_far_as_there_is_room() -> None:
    parts = {
        f"{n:064}": bytes(size)
        for n, size in enumerate((10, 300_000, 250_000, 250_000, 250_000, 250_000, 250_000))
    }
    found = content.inlined(parts, known=[f"{0:064}"])
    assert [len(p.data) for p in found] == [0, 0, 250_000, 250_000, 250_000, 250_000, 0]
    assert [p.size for p in found] == [len(data) for data in parts.values()]


def test_what_no_message_can_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MAX_CONTENT_BYTES", 10_000)
    with pytest.raises(ValueError, match="64 bits"):
        content.encode(RecordDict({"m": MetricRecord({"n": 2**64})}))
    with pytest.raises(ValueError, match="put numbers into arrays"):
        content.encode(RecordDict({"m": MetricRecord({"n": [float(n) for n in range(2_000)]})}))


def hostile() -> list[pb.AppContent]:
    part = pb.Part(hash="a" * 64, size=1 << 62)
    nested = pb.AppValue(list=pb.AppList(values=[pb.AppValue(list=pb.AppList())]))

    def record(**more: object) -> pb.AppContent:
        return pb.AppContent(records=[pb.AppRecord(name="r", **more)])  # type: ignore[arg-type]

    def entry(value: pb.AppValue, kind: int = pb.APP_RECORD_CONFIGS) -> pb.AppContent:
        return record(kind=kind, entries=[pb.AppEntry(key="k", value=value)])

    return [
        entry(pb.AppValue()),
        entry(nested),
        entry(pb.AppValue(part=part)),
        entry(pb.AppValue(text="x"), pb.APP_RECORD_METRICS),
        entry(pb.AppValue(list=pb.AppList(values=[pb.AppValue(integer=1), pb.AppValue(number=1.0)]))),
        record(kind=pb.APP_RECORD_ARRAYS, arrays=[pb.AppArray(key="k", hash="../../etc/passwd", size=1)]),
        record(
            kind=pb.APP_RECORD_ARRAYS, arrays=[pb.AppArray(key="k", hash="a" * 64, size=1, shape=[1] * 65)]
        ),
        record(kind=pb.APP_RECORD_ARRAYS, arrays=[pb.AppArray(key="k", hash="a" * 64, size=1 << 63)]),
        record(kind=pb.APP_RECORD_ARRAYS, arrays=[pb.AppArray(key="k" * 5000, hash="a" * 64)]),
    ]


@pytest.mark.parametrize("message", hostile())
def test_hostile_content_is_refused(message: pb.AppContent) -> None:
    with pytest.raises(BadFrame):
        content.decode(message.SerializeToString(), lambda name, size: b"")


@given(st.binary(max_size=300))
def test_no_bytes_whatever_do_more_than_be_refused_or_read(data: bytes) -> None:
    with contextlib.suppress(BadFrame):
        content.decode(data, lambda name, size: b"")
