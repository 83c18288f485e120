"""Files and connections that this process may hold open at once: a session takes one."""

from __future__ import annotations

import contextlib
import sys

if sys.platform != "win32":  # which counts its handles otherwise
    import resource


def raise_limit(wanted: int) -> int:
    """Let this process open ``wanted`` descriptors, or as many as its hard limit allows; return how many it
    may open now."""
    if sys.platform == "win32":
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        with contextlib.suppress(ValueError, OSError):  # some systems cap it below the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
