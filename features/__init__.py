"""What a model sees: numbers from ops, collectives and graphs.  Pure functions."""
