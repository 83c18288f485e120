"""Files of a federated round: broadcasts, exact or as deltas, and updates in the round's codec.

    model, off        the arrays, dense
    model, lossless   each tensor through the ``lossless`` codec
    delta             zigzag(bits(new) - bits(base)), bits as whole numbers, through ``lossless``: small
                      where a weight changed little. Exact, unlike new - base in floats. Of float32 it
                      leaves 0.65 where weights move by 1 % of their spread, 0.57 at 0.1 % (xor: 0.68, 0.58;
                      ``lossless`` by itself 0.83)
    sums              int64 arrays of a host's clients together, each through ``integers``
    masked            the words of a secure round's vector: uniform, so no codec makes them shorter
    update            tensors named as lossy through the round's codec, with error feedback or without;
                      all others, and what a codec would not shrink, exactly

Both ends derive each tensor's codec from its name, its meta and the ``Coding`` of the round, so a file
cannot choose a decoder. Only stateless codecs: what a client keeps is its residual (``error_feedback``),
which must be committed once the update was taken, never before. An unbiased codec gets none: its
variance would make the residual grow, save ``random_k``, which is then scaled down instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from atoll.errors import BadFrame, UsageError
from atoll.opdag import TensorMeta
from compressors import make_compressor
from compressors.base import Compressor, Packet, check_packet, meta_of
from compressors.catalogue import Use, codec, takes
from compressors.container import (
    NO_DIGEST,
    Metas,
    Stored,
    bytes_of,
    check_names,
    is_coded,
    read_coded,
    read_dense,
    write_coded,
    write_dense,
)
from compressors.error_feedback import ErrorFeedback, Residual
from compressors.integers import pack_integers, unpack_integers
from compressors.random_k import RandomK, draw_positions
from compressors.sparse_sizes import random_k_of
from compressors.topk import TopK

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    Array = NDArray[Any]
    Arrays = Mapping[str, Array]

NONE, LOSSLESS = "none", "lossless"
_MASKED = ("masked/sums", "masked/scalars")
_BITS: dict[int, type[np.signedinteger[Any]]] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
Remember = Callable[[str], "Tensor | None"]
Keep = Callable[[str, "Tensor | None"], None]


@dataclass(frozen=True)
class Coding:
    """Coding of a round's updates: ``codec`` for the names in ``lossy``, exact for the rest.

    UsageError for a codec that is unknown, keeps a state of its own or is not made for deltas.
    """

    codec: str = NONE
    ratio: float = 1.0
    lossy: frozenset[str] = frozenset()
    feedback: bool = False  # clients keep what was left out

    def __post_init__(self) -> None:
        facts = codec(self.codec)
        own_state = facts.stateful and self.codec != ErrorFeedback.name
        if own_state or facts.shared_state or Use.DELTA not in facts.valid_for:
            raise UsageError(
                f"codec {self.codec} cannot carry a round's update: it keeps a state between tensors or is "
                "not made for changes of a model; take topk, int8_block or another of docs/compression.md"
            )

    @property
    def exact(self) -> bool:
        """Return whether every update arrives bit for bit."""
        return codec(self.codec).exact or not self.lossy

    @property
    def keeps_residual(self) -> bool:
        """Return whether clients carry a residual from round to round."""
        if self.exact:
            return False
        named = self.codec == ErrorFeedback.name
        return named or (self.feedback and (not codec(self.codec).unbiased or self.codec == RandomK.name))

    def left_out(self, metas: Metas) -> dict[str, TensorMeta]:
        """The tensors whose residual a client keeps."""
        if not self.keeps_residual:
            return {}
        return {name: meta for name, meta in metas.items() if self.of(name, meta) is self._lossy}

    def of(self, name: str, meta: TensorMeta) -> Compressor:
        """The codec of one tensor, the same on both ends."""
        if self.codec != NONE:
            if name in self.lossy and takes(codec(self.codec), meta):
                return self._lossy
            if takes(codec(LOSSLESS), meta):
                return self._lossless
        return self._none

    @cached_property
    def _lossy(self) -> Compressor:
        if self.codec in (TopK.name, ErrorFeedback.name):
            # Where a model changes most differs between its rows: one group, unlike on a link.
            return TopK(self.ratio, rows=False)
        if self.codec == RandomK.name:
            return RandomK(self.ratio, unbiased=not self.feedback)
        return make_compressor(self.codec, self.ratio)

    @cached_property
    def _lossless(self) -> Compressor:
        return make_compressor(LOSSLESS)

    @cached_property
    def _none(self) -> Compressor:
        return make_compressor(NONE)


EXACT = Coding()


# ---------------------------------------------------------------- updates


def write_update(
    path: Path,
    arrays: Arrays,
    coding: Coding,
    seed: int = 0,
    remember: Remember = lambda name: None,
    keep: Keep = lambda name, error: None,
) -> Stored:
    """The file of an update. ``remember(name)`` is what earlier updates left out of a lossy tensor
    (float32, flat, None for zero); ``keep`` is given what this one leaves out, tensor by tensor."""
    if coding.codec == NONE:
        return write_dense(path, arrays)

    def packets() -> Iterator[tuple[str, Packet]]:
        for name in sorted(arrays):
            tensor = _tensor(arrays[name])
            yield name, _encoded(name, tensor, coding, packet_seed(seed, name), remember, keep)

    return write_coded(path, packets())


def read_update(path: Path, expected: Metas, coding: Coding) -> dict[str, Array]:
    """The arrays of an update; memory of their own or views of the file. BadFrame for anything that
    ``write_update`` with this coding would not write for ``expected``."""
    if is_coded(path) == (coding.codec == NONE):
        raise BadFrame(
            f"an update {'' if coding.codec == NONE else 'not '}in codecs; {coding.codec} was asked"
        )
    if coding.codec == NONE:
        return read_dense(path, expected)
    packets = read_coded(path, expected).packets
    return {name: _decoded(packets[name], coding.of(name, meta), meta) for name, meta in expected.items()}


def packet_seed(seed: int, name: str) -> int:
    """Return the seed of one tensor's packet, in [0, 2^63)."""
    key = seed.to_bytes(16, "little", signed=True) + name.encode()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1


def _encoded(name: str, tensor: Tensor, coding: Coding, seed: int, remember: Remember, keep: Keep) -> Packet:
    chosen = coding.of(name, meta_of(tensor))
    if not coding.keeps_residual or chosen is not coding._lossy:
        return chosen.compress(tensor, seed=seed)[0]
    before = Residual(remember(name), None)
    packet, after = ErrorFeedback(codec=chosen).compress(tensor, before, seed=seed)
    keep(name, after.error)
    return replace(packet, codec=chosen.name)


# ---------------------------------------------------------------- models


def write_model(path: Path, arrays: Arrays, *, lossless: bool = False) -> Stored:
    """A broadcast, whole."""
    if not lossless:
        return write_dense(path, arrays)
    return write_update(path, arrays, Coding(LOSSLESS))


def read_model(path: Path, expected: Metas) -> dict[str, Array]:
    """A broadcast of ``write_model``, in either form. BadFrame when it is not ``expected``."""
    return read_update(path, expected, Coding(LOSSLESS if is_coded(path) else NONE))


def write_delta(path: Path, arrays: Arrays, base: Arrays, base_hash: str) -> Stored:
    """Write the delta that turns ``base``, the broadcast known as ``base_hash``, into ``arrays``."""
    check_names(base, {name: _array_meta(array) for name, array in arrays.items()})
    digest = sha256()

    def packets() -> Iterator[tuple[str, Packet]]:
        for name in sorted(arrays):
            digest.update(bytes_of(arrays[name]))
            tensor = _tensor(_change(arrays[name], base[name]))
            yield name, Coding(LOSSLESS).of(name, meta_of(tensor)).compress(tensor)[0]

    return write_coded(path, packets(), base=bytes.fromhex(base_hash), digest=digest.digest)


def read_delta(path: Path, expected: Metas, base: Arrays, base_hash: str) -> dict[str, Array]:
    """The broadcast that a delta leads to from ``base``. BadFrame when the file is of another base, or
    when what comes out is not, bit for bit, what the sender had."""
    coded = read_coded(path, expected)
    if coded.base != bytes.fromhex(base_hash):
        raise BadFrame(f"a delta against {coded.base.hex()[:12]}; this side holds {base_hash[:12]}")
    exact, digest, found = Coding(LOSSLESS), sha256(), {}
    for name in sorted(expected):
        change = _decoded(coded.packets[name], exact.of(name, expected[name]), expected[name])
        found[name] = _changed(base[name], change)
        digest.update(bytes_of(found[name]))
    if digest.digest() != coded.digest or coded.digest == NO_DIGEST:
        raise BadFrame("a delta leads to another model than its sender's; the full one is needed")
    return found


def _change(new: Array, base: Array) -> Array:
    """zigzag(new - base) of a float's bits, in the dtype of ``new``; anything else is sent as it is."""
    if new.dtype.kind != "f":
        return new
    signed = _BITS[new.dtype.itemsize]
    change = _flat(new).view(signed) - _flat(base).view(signed)  # wraps around, as its inverse does
    coded: Array = (change << 1) ^ (change >> (8 * new.dtype.itemsize - 1))
    return coded.view(new.dtype).reshape(new.shape)


def _changed(base: Array, change: Array) -> Array:
    """The inverse of ``_change``."""
    if base.dtype.kind != "f":
        return change
    signed = _BITS[base.dtype.itemsize]
    coded = _flat(change).view(signed)
    one = signed(1)
    half = (coded >> one) & signed(np.iinfo(signed).max)
    bits: Array = _flat(base).view(signed) + (half ^ -(coded & one))
    return bits.view(base.dtype).reshape(base.shape)


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)


# ---------------------------------------------------------------- sums


def write_sums(path: Path, arrays: Arrays) -> Stored:
    """The file of sums in whole numbers."""
    return write_coded(path, ((name, pack_integers(arrays[name])) for name in sorted(arrays)))


def read_sums(path: Path, expected: Metas) -> dict[str, Array]:
    """The arrays of ``write_sums``. BadFrame for anything that it would not write for ``expected``."""
    packets = read_coded(path, expected).packets
    return {name: unpack_integers(packets[name], meta) for name, meta in expected.items()}


# ---------------------------------------------------------------- masked words


def write_masked(path: Path, words: Sequence[Array]) -> Stored:
    """The file of a masked vector: numbers without sign, of 32 or 64 bits, and scalars of 64."""
    signed = {name: array.view(f"i{array.itemsize}") for name, array in zip(_MASKED, words, strict=True)}
    return write_dense(path, signed)


def read_masked(path: Path, sizes: tuple[int, int], dtype: np.dtype[Any]) -> list[Array]:
    """The words of ``write_masked``; views of the file. BadFrame for anything else."""
    kinds = (f"int{8 * dtype.itemsize}", "int64")
    expected = {
        name: TensorMeta((size,), kind) for name, size, kind in zip(_MASKED, sizes, kinds, strict=True)
    }
    arrays = read_dense(path, expected)
    return [arrays[name].view(f"u{arrays[name].itemsize}") for name in _MASKED]


def drawn_supports(metas: Metas, coding: Coding, seed: int) -> dict[str, Array]:
    """Positions that travel of the tensors that ``random_k`` codes under one seed, by their names."""
    if coding.codec != RandomK.name:
        return {}
    return {
        name: draw_positions(meta.elements, random_k_of(meta, coding.ratio), packet_seed(seed, name))
        for name, meta in metas.items()
        if coding.of(name, meta) is coding._lossy
    }


# ---------------------------------------------------------------- tensors


def _decoded(packet: Packet, chosen: Compressor, meta: TensorMeta) -> Array:
    check_packet(packet, chosen.name, meta, chosen.max_payload_bytes(meta))
    try:
        array: Array = chosen.decompress(packet).contiguous().numpy()
    except (ValueError, RuntimeError) as error:  # a decoder's own words for what no encoder makes
        raise BadFrame(f"a packet of {chosen.name} is damaged: {str(error)[:200]}") from None
    return array


def _tensor(array: Array) -> Tensor:
    """In memory of torch's own, aligned: a packet records how its tensor lay, and the same arrays shall
    give the same file."""
    return torch.from_numpy(np.array(array, order="C")).clone()


def _array_meta(array: Array) -> TensorMeta:
    return TensorMeta(tuple(array.shape), str(array.dtype))
