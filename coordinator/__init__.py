"""Decides: captures, plans, schedules, keeps the journal."""
