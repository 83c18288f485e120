"""Site: the command of a worker that several hosts are: rank 0 is the daemon, the others compute for it.

May import any wing of the worker.
"""
