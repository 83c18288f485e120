"""Pipeline: jobs cut into stages. Pure."""
