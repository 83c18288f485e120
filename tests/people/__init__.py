"""What people bring: kinds of models and job files, each beside the plain PyTorch loop.

These tests mirror no source file: a case is a kind of what an owner writes, after public bug reports.
``loop`` takes a job through all that a submission does and compares; the others are tables of cases.
"""
