"""The machine's part of rounds whose sites send one sum: who gathers whose updates, and what came. Pure.
Imports messages and strategies alone."""
