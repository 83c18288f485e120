"""The values of kept elements: 32, 16, 2 or 1 bit each.

    fp32    the value
    fp16    round(v * 2**e) with e such that the largest finite one lands in [2**14, 2**15), one e a
            packet (float16 tensors: e = 0, exact). |error| <= 2**-11 |v| + 2**-40 max|v|
    2bit    sign, and whether |v| exceeds its group's mean s; decoded as s * low or s * high, the
            packet's two means of |v|/s. Eight bits of scale a group
    1bit    sign, decoded as the group's mean of |v|. Eight bits of scale a group

A scale of eight bits is top * 2**(-code/8), top the packet's largest: at most 4.5 % off (2**(1/16)),
down to 2**-31 of the largest, and zero below.
A value that is not finite stays so in 32 and 16 bits and makes its whole group NaN in 2 and 1.
Sources: papers/compression.md 4 (fp16: scale first; two-mean 1 bit), papers/peers.md 7.5 (bits).
"""

from __future__ import annotations

import numpy as np

from atoll.errors import BadFrame
from compressors.bits import Buffer, Bytes, as_bytes, pack, unpack
from compressors.packing import Floats
from compressors.sparse_sizes import BITS, EXPONENT, LEVELS, TOP, value_bytes

_LARGEST = {
    "float32": np.finfo(np.float32).max,
    "bfloat16": np.float32(2.0**128 - 2.0**120),
    "float16": np.float32(65504.0),
}
_ZERO, _NAN = 255, 254
_MAX_CODE = 248  # 2**-31 of the top
_OF_LARGEST = 15 - 128  # the exponent for values from 2**127; rounded up to 2**15 they would be infinite
_BELOW_TOP = np.float32(2.0**15 - 2.0**4)  # the half before 2**15


def encode_values(values: Floats, groups: int, kind: str, *, half: bool = False) -> bytes:
    """``values``: float32 in ``groups`` equal consecutive groups. ``half``: they come from float16."""
    if not len(values):
        return b""
    if kind == "fp32":
        return values.astype("<f4", copy=False).tobytes()
    if kind == "fp16":
        exponent = 0 if half else _exponent(values)
        scaled = _scaled(values, exponent)
        if exponent <= _OF_LARGEST:
            scaled = np.where(np.isfinite(scaled), np.clip(scaled, -_BELOW_TOP, _BELOW_TOP), scaled)
        return EXPONENT.pack(exponent) + scaled.astype("<f2").tobytes()
    return _encode_few_bits(values.reshape(groups, -1), kind)


def decode_values(data: Buffer, count: int, groups: int, kind: str, dtype: str = "float32") -> Floats:
    """``count`` values of a tensor of ``dtype``, as float32. BadFrame unless ``data`` is exactly theirs."""
    if len(data) != value_bytes(count, groups, kind) or (groups and count % groups):
        raise BadFrame(f"{len(data)} bytes for {count} values of {kind} in {groups} groups")
    if not count:
        return np.empty(0, np.float32)
    if kind == "fp32":
        return np.frombuffer(data, "<f4").astype(np.float32)
    if kind == "fp16":
        (exponent,) = EXPONENT.unpack_from(data)
        if not -200 <= exponent <= 200:
            raise BadFrame(f"values scaled by 2**{exponent}")
        return _scaled(np.frombuffer(data, "<f2", offset=EXPONENT.size).astype(np.float32), -exponent)
    decoded = _decode_few_bits(as_bytes(data), count, groups, kind)
    # A rounded level times a rounded scale may pass the largest number; NaN stays.
    return np.clip(decoded, -_LARGEST[dtype], _LARGEST[dtype], out=decoded)


def _exponent(values: Floats) -> int:
    """e with max|v| * 2**e in [2**14, 2**15) over the finite values; 0 where all are zero."""
    top = float(np.max(np.abs(values)))
    if not np.isfinite(top):
        top = float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0))
    return 15 - int(np.frexp(np.float64(top))[1]) if top else 0


def _scaled(values: Floats, exponent: int) -> Floats:
    """values * 2**exponent, exact where the result is a normal number; |exponent| up to 200."""
    if not exponent:
        return values
    with np.errstate(over="ignore", invalid="ignore"):  # only a peer's figures: infinite, signalling NaN
        if abs(exponent) <= 100:
            return values * np.float32(2.0**exponent)
        half = exponent // 2
        return values * np.float32(2.0**half) * np.float32(2.0 ** (exponent - half))


def _scale_codes(scales: Floats) -> tuple[float, Bytes]:
    """The largest finite scale and each scale's code."""
    finite = np.isfinite(scales)
    top = float(np.max(scales, where=finite, initial=0.0))
    codes = np.full(len(scales), _ZERO, np.uint8)
    some = finite & (scales > 0)
    steps = np.rint(8.0 * np.log2(top / scales[some].astype(np.float64)))
    codes[some] = np.where(steps <= _MAX_CODE, steps, _ZERO).astype(np.uint8)
    codes[~finite] = _NAN
    return top, codes


def _scales(top: float, codes: Bytes) -> Floats:
    if not np.isfinite(top) or top < 0.0:
        raise BadFrame(f"a largest scale of {top}")
    if np.any((codes > _MAX_CODE) & (codes < _NAN)):
        raise BadFrame("a scale of no known code")
    scales = (top * np.exp2(-codes.astype(np.float64) / 8)).astype(np.float32)
    scales[codes == _ZERO] = 0.0
    scales[codes == _NAN] = np.nan
    return scales


def _encode_few_bits(values: Floats, kind: str) -> bytes:
    size = np.abs(values)
    # In float64: a mean of float32 could overflow though every value is finite.
    top, codes = _scale_codes(size.mean(axis=1, dtype=np.float64).astype(np.float32))
    marks = np.signbit(values).astype(np.uint8)
    head = TOP.pack(top)
    if kind == "2bit":
        scales = _scales(top, codes)[:, None]
        upper = size > scales
        head = LEVELS.pack(top, *_levels(size, scales, upper))
        marks |= upper.astype(np.uint8) << 1
    return b"".join((head, codes.tobytes(), pack(marks.reshape(-1), BITS[kind]).data))


def _levels(size: Floats, scales: Floats, upper: np.ndarray) -> tuple[float, float]:
    """Mean of |v|/scale below and above it."""
    usable = np.isfinite(scales) & (scales > 0)
    relative = np.divide(size, scales, out=np.ones_like(size), where=usable)
    means = [
        float(np.clip(relative.mean(where=usable & part, dtype=np.float64), 0.0, 60000.0))
        if (usable & part).any()
        else 1.0
        for part in (~upper, upper)
    ]
    return means[0], means[1]


def _decode_few_bits(data: Bytes, count: int, groups: int, kind: str) -> Floats:
    head = LEVELS if kind == "2bit" else TOP
    top, *levels = head.unpack_from(data.data)
    scales = _scales(top, data[head.size : head.size + groups])
    marks = unpack(data[head.size + groups :], count, BITS[kind])
    factors = np.array([1.0, -1.0], np.float32)
    if kind == "2bit":
        if not all(np.isfinite(level) and level >= 0 for level in levels):
            raise BadFrame(f"value levels {levels}")
        low, high = levels
        factors = np.array([low, -low, high, -high], np.float32)
    with np.errstate(over="ignore"):
        decoded: Floats = (factors[marks].reshape(groups, -1) * scales[:, None]).reshape(-1)
    return decoded
