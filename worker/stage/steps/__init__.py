"""Steps of a stage: the messages that they take and send, replicas and peers that join, repeated ones."""
