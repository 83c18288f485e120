"""A plan as a picture: the fleet as a graph with the plan on it, and one step second by second."""
