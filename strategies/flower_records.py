"""Flower's records and the arrays of our strategies; the words that travel beside them.

Only Flower's public record types are used, and only their public fields: an ``Array`` is dtype, shape,
stype and the bytes of ``numpy.save``. What a peer sent is read as a view of the bytes that arrived,
after its header was held against their length, so that no header can make this side allocate.
Needs the extra ``atoll[flower]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord

from atoll.errors import BadUpdate, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from strategies.layout import Array as NumpyArray
    from strategies.layout import Arrays

EXTRA = "atoll.extra"
"""Record of a request, and prefix of keys in a reply: arrays beside the weights."""
STATE = "atoll.state"
"""Record of a node's Context: what its client half keeps from round to round."""
STRATEGY, OPTIONS, ROUND = "atoll-strategy", "atoll-options", "atoll-round"
TRAINED, AVERAGED = "atoll-trained", "atoll-averaged"
"""Keys of a request's config: which strategy, its options as JSON, its round, the tensors' roles."""
STEPS = "atoll-steps"
OWN = "atoll-"
"""Prefix of our own metrics in a reply."""

NUMPY = "numpy.ndarray"
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
MAX_HEADER_BYTES = 4096
MAX_OPTIONS_BYTES = 4096
STATISTICS = ("running_mean", "running_var")


def to_record(arrays: Arrays) -> ArrayRecord:
    """The arrays as Flower sends them, in order."""
    return ArrayRecord({name: to_array(array) for name, array in arrays.items()})


def to_array(array: NumpyArray) -> Array:
    """Convert one array; its dimensions stay, zero included."""
    return Array(np.asarray(array, order="C"))


def from_record(record: ArrayRecord) -> dict[str, NumpyArray]:
    """Every array as a read-only view. BadUpdate for one that is no plain numpy array."""
    return {name: from_array(name, array) for name, array in record.items()}


def from_array(name: str, array: Array) -> NumpyArray:
    """A read-only view of the array's bytes; BadUpdate where header and length do not agree."""
    if array.stype != NUMPY:
        raise BadUpdate(f"{name[:128]!r} is serialised as {array.stype[:64]!r}; expected {NUMPY!r}")
    stream = BytesIO(array.data[:MAX_HEADER_BYTES])
    try:
        read = _HEADERS[np.lib.format.read_magic(stream)]
        shape, fortran, dtype = read(stream, max_header_size=MAX_HEADER_BYTES)
    except (ValueError, KeyError) as error:
        raise BadUpdate(f"{name[:128]!r} has no readable header: {str(error)[:80]}") from None
    start = stream.tell()
    wanted = dtype.itemsize
    for size in shape:
        wanted *= size
    if dtype.hasobject or wanted != len(array.data) - start or any(size < 0 for size in shape):
        raise BadUpdate(f"{name[:128]!r} declares {dtype} {shape}; {len(array.data) - start} bytes came")
    flat = np.frombuffer(array.data, dtype, offset=start) if wanted else np.empty(0, dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


def roles_of(names: Iterable[str], dtypes: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(trained, averaged) by default: every floating tensor is trained, but for BatchNorm's
    running statistics, which no gradient reaches."""
    floating = [name for name in names if np.issubdtype(dtypes[name], np.floating)]
    averaged = [name for name in floating if name.split(".")[-1] in STATISTICS]
    return [name for name in floating if name not in averaged], averaged


def options_text(options: Mapping[str, Any]) -> str:
    """A strategy's options as they travel and are compared."""
    return json.dumps(dict(options), sort_keys=True)


def options_of(text: Any) -> dict[str, Any]:
    """Parse the options in a request. UsageError unless they are a JSON object of bounded length."""
    if not isinstance(text, str) or len(text) > MAX_OPTIONS_BYTES:
        raise UsageError(f"{OPTIONS} is not a text of at most {MAX_OPTIONS_BYTES} letters")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{OPTIONS} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{OPTIONS} is not a JSON object")
    return found


def whole_number(record: MetricRecord | ConfigRecord, key: str) -> int:
    """A count in a record; floats without a fraction are one. BadUpdate for anything else."""
    value = record.get(key)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise BadUpdate(f"{key} = {value!r}; a whole number")
    return value


def names_in(config: ConfigRecord, key: str) -> list[str]:
    """A list of names in a request's config. BadUpdate for anything else."""
    value = config.get(key)
    if not isinstance(value, list):
        raise BadUpdate(f"{key} is {type(value).__name__}; a list of names")
    names = [name for name in value if isinstance(name, str)]
    if len(names) != len(value):
        raise BadUpdate(f"{key} holds {len(value) - len(names)} that are no names")
    return names
