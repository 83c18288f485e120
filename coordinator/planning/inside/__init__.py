"""Members of several devices: how their processes divide a stage, and what that costs. Pure."""
