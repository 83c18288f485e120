"""The machine's part of secure rounds: what members were asked and have answered. Pure. Imports messages and
strategies alone."""
