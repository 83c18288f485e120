"""pip under limits, a program of its own: file's size in bytes, seconds of CPU, then pip's arguments."""

from __future__ import annotations

import resource
import runpy
import sys


def main() -> None:
    """Bound this process and what it starts, and be pip."""
    file_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["pip", *sys.argv[3:]]
    runpy.run_module("pip", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
