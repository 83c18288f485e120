"""Demo: a job trained by workers that a demo starts, shown and checked."""
