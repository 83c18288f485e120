"""Sign and power of two, which of the nearest two at random so that the mean stays."""

from __future__ import annotations

import numpy as np
import torch

from atoll.errors import BadFrame
from compressors.contrib.quantised.stochastic import Dice
from compressors.fixed_rate import FixedRate
from compressors.packing import Bytes, read_floats, write_floats
from compressors.rates import CHUNK, natural_bytes

_MANTISSA_BITS = 23
_INFINITE = 255 << _MANTISSA_BITS
_SIGN = 0x80
_CODES = 127  # exponents below the first, code 0, stand for zero; the code 127 for NaN
_MAX_FIRST = 254 - (_CODES - 1)
_TOP = {torch.float16: 127 + 15, torch.bfloat16: 254, torch.float32: 254}  # exponents of finite powers


class Natural(FixedRate):
    """``x' = sign(x) * 2**e`` with ``2**e <= |x| < 2**(e + 1)`` or twice that, with probability
    ``|x| / 2**e - 1``: a random number added to the mantissa carries into the exponent.

    One byte: sign and 7 bits of exponent, which reach 2**-125 of the largest value in 65,536
    neighbours; below is zero. Unbiased to 2**-16, relative variance at most 1/8, and |x - x'| is
    below |x|; where the upper power is beyond the dtype, the lower is taken. Infinities and NaN
    decode as NaN. Bytes: 1 an element, 1 a chunk of 65,536.
    Source: papers/compression.md section 4, natural compression ("8 with 7-bit clipped exponent").
    """

    name = "natural"

    def length(self, elements: int) -> int:
        return natural_bytes(elements)

    def encode(self, tensor: torch.Tensor, payload: Bytes, seed: int) -> None:
        elements = tensor.numel()
        codes, firsts = payload[:elements], payload[elements:]
        dice, top = Dice(seed), _TOP[tensor.dtype]
        work, more = (np.empty(min(CHUNK, elements), np.uint32) for _ in range(2))
        for index, (part, chunk) in enumerate(read_floats(tensor)):
            bits, noise, some = work[: chunk.size], more[: chunk.size], codes[part]
            np.bitwise_and(chunk.view(np.uint32), np.uint32(0x7FFFFFFF), out=bits)
            largest = int(bits.max())
            unknown = None
            if largest >= _INFINITE:
                unknown = bits >= _INFINITE
                largest = int(bits.max(where=~unknown, initial=0))
            limit = min((largest >> _MANTISSA_BITS) + 1, top)
            firsts[index] = first = max(limit - (_CODES - 1), 0)
            np.copyto(noise, dice.roll(chunk.size))
            np.left_shift(noise, np.uint32(7), out=noise)
            np.add(bits, noise, out=bits)
            np.right_shift(bits, np.uint32(_MANTISSA_BITS), out=bits)
            np.copyto(some, bits, casting="unsafe")
            np.clip(some, np.uint8(first), np.uint8(limit), out=some)
            np.subtract(some, np.uint8(first), out=some)
            if unknown is not None:
                some[unknown] = _CODES
            np.bitwise_or(some, np.less(chunk, 0.0).view(np.uint8) << np.uint8(7), out=some)

    def decode(self, payload: Bytes, target: torch.Tensor) -> None:
        elements = target.numel()
        codes, firsts = payload[:elements], payload[elements:]
        if firsts.max() > _MAX_FIRST:
            raise BadFrame(f"natural: a first exponent of {firsts.max()}; at most {_MAX_FIRST}")
        for first, (part, values) in zip(firsts, write_floats(target), strict=True):
            exponents = codes[part] & np.uint8(_SIGN - 1)
            unknown = exponents == _CODES
            if first:
                np.multiply(exponents + first, exponents != 0, out=exponents)
            signs = (codes[part] & np.uint8(_SIGN)).astype(np.uint16) << np.uint16(1)
            bits = values.view(np.uint32)
            np.copyto(bits, signs | exponents)
            np.left_shift(bits, np.uint32(_MANTISSA_BITS), out=bits)
            if unknown.any():
                values[unknown] = np.nan
