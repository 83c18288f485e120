"""Stage: computes one stage of a job."""
