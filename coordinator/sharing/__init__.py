"""Sharing: many jobs of several owners on one fleet, who gets which workers and when. Pure, above atoll."""
