"""Agreements of both ends of a wire: schema, conversions, identities, names."""

import os

PROTOCOL_VERSION = (
    5  # a welcome carries its coordinator's term, and workers refuse a smaller one than they saw
)
"""Raised as docs/decisions/023-versions-of-wire-and-disk.md says."""

# gRPC's event engine reads sockets in threads of its own and wakes ours for each message. Without it the
# thread that waits for messages reads the socket: between workers a quarter less CPU time a message and 15 %
# more bytes/s on loopback, and a commit 4 to 7 % sooner. gRPC looks at this when the first
# channel or server is made. What the owner has set stays.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
