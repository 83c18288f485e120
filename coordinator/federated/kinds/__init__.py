"""Kinds of rounds, one a file: what each does in its own way with the state of a job in rounds. Pure. Imports
the files of ``coordinator.federated`` that know one kind's data, and messages."""
