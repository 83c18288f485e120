"""In-process: whole plans and federations in one process, for the oracle and simulation."""
