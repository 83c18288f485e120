"""The program of a follower: ``python -m worker.mesh PIPE``; started by its leader alone."""

import sys

if __name__ == "__main__":
    from protos.child_pipe import pipe_from
    from worker.mesh.follower import serve

    serve(pipe_from(int(sys.argv[1])))
