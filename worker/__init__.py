"""Computes: runs stages, moves tensors, obeys its guest's limits."""

import os

# gRPC's event engine reads sockets in threads of its own and wakes ours for each message. Without it the
# thread that waits for messages reads the socket: a quarter less CPU time a message, and 15 % more bytes/s on
# loopback. gRPC looks at this once, when it is first used. What the owner has set stays.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
