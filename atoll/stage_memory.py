"""Memory that a stage takes beside its model's, on any worker; measured by ``benchmarks.memory``."""

STORING_BYTES = 20 << 20
"""Of a state that is being stored: what is hashed and written at one time, and what waits for the disk."""
PROCESS_BYTES = 32 << 20
"""By which the process itself grows with its first stage: kernels that are compiled, scratch memory of
convolutions, small blocks of the heap. What it imports is there before (``op_timing.warm_up``)."""
HEAP_SHARE = 0.10
"""Of what a stage's model takes, that lies between blocks of the heap, free and not given back."""
BESIDE = (("snapshot", STORING_BYTES), ("process", PROCESS_BYTES))
BESIDE_BYTES = STORING_BYTES + PROCESS_BYTES
