"""This machine as a member of secure rounds: keys, one vector, its answers. Imports strategies alone."""
