"""A member of several devices: a compute process for each, of which the first leads and the others follow.

The leader has the pipe to the daemon and the session; it tells its followers each call of the stage, and all
make it together, their tensors joined by torch.distributed. They share a sandbox, and meet in a file of the
leader's folder. May import ``worker.context`` and what stands below it.
"""
