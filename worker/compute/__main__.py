"""The program of a compute process: ``python -m worker.compute PIPE IN SIZE OUT SIZE``, descriptors and
bytes; started by the daemon alone."""

import sys
import time

began_s = time.monotonic()

if __name__ == "__main__":
    from protos.child_pipe import pipe_from
    from worker.compute.ports import Arenas
    from worker.compute.process import serve
    from worker.pipe.arena import Arena

    pipe, incoming, incoming_bytes, outgoing, outgoing_bytes = map(int, sys.argv[1:])
    arenas = Arenas(Arena(incoming, incoming_bytes), Arena(outgoing, outgoing_bytes))
    serve(pipe_from(pipe), arenas, began_s)
