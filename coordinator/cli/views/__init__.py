"""Views of what runs: ten lines of a job on a terminal, and tables that are lines of facts in a pipe."""
