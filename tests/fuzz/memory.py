"""Tensors that end, or begin, at a page which nobody may touch."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PAGE = mmap.PAGESIZE


def fenced(value: Tensor, at_start: bool = False) -> Tensor:
    """A copy of ``value`` whose memory ends at a page without access (``at_start``: begins behind one)."""
    size = value.numel() * value.element_size()
    if not size:
        return value.clone()
    pages = -(-size // PAGE) + 1
    memory = mmap.mmap(-1, pages * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fence = address if at_start else address + (pages - 1) * PAGE
    if _LIBC.mprotect(fence, PAGE, 0):  # PROT_NONE
        raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE if at_start else (pages - 1) * PAGE - size
    flat = torch.frombuffer(memory, dtype=value.dtype, count=value.numel(), offset=offset)
    return flat.reshape(value.shape).copy_(value)
