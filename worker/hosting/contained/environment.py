"""Environment variables that a process of ours is given; everything else of ours is left out."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from protos.child_process import with_packages

# No credentials of clouds, agents or proxies pass, whatever their names.
_SHOWN = ("LANG", "LD_LIBRARY_PATH", "PATH", "TZ", "VIRTUAL_ENV")
_SHOWN_TOO = ("CUDA_", "LC_", "NVIDIA_")
# Of computing: results and speed depend on them.
_COMPUTE = ("CUBLAS_WORKSPACE_CONFIG", "GLIBC_TUNABLES", "LD_PRELOAD")
_COMPUTE_TOO = ("ATEN_", "HIP_", "HSA_", "KMP_", "MALLOC_", "MKL_", "OMP_", "OPENBLAS_",
                "PYTORCH_", "ROCR_", "TORCH_")  # fmt: skip


def shown_environment(threads: int, names: Sequence[str] = (), starts: Sequence[str] = ()) -> dict[str, str]:
    """Return what any process of ours is given, the variables ``names`` and those that begin with one of
    ``starts`` too. Our packages are found; ``threads``: of OpenMP and MKL, 0 leaves that to the library."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in (*_SHOWN, *names) or name.startswith((*_SHOWN_TOO, *starts))
    }
    kept = with_packages(kept)
    if threads:
        kept["OMP_NUM_THREADS"] = kept["MKL_NUM_THREADS"] = str(threads)
    # Prints come at once; no folder that it may write to gets files that it did not mean to write.
    return {**kept, "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def compute_environment(threads: int = 0, *, network: bool = False) -> dict[str, str]:
    """Return what a compute process is given; ``network``: one that reaches others of its site, NCCL's
    variables too. Its home and temporary folder are the sandbox's own, where there is one; its packages are
    those of this installation, whatever PYTHONPATH holds."""
    starts = (*_COMPUTE_TOO, "NCCL_") if network else _COMPUTE_TOO
    found = shown_environment(threads, (*_COMPUTE, "HOME", "TMPDIR", "USER"), starts)
    if elsewhere := foreign_torch():
        found["PYTHONPATH"] += os.pathsep + elsewhere
    return found


def foreign_torch() -> str | None:
    """Return the folder that torch would be imported from where that is none of this Python's own, such as
    a user's; torch is not imported."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return None
    folder = Path(found.origin).parent.parent
    own = any(folder.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))
    return None if own else str(folder)
