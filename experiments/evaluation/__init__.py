"""Predictions beside measurements: runs, kernels, collectives and collections; baselines."""
