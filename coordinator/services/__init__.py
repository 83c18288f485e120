"""Services: gRPC in and out of the coordinator, one service a file."""
