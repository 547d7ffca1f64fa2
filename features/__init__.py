"""Inputs of models: numbers from ops, collectives and graphs. Pure functions."""
