"""Capture of a user's training script: it runs on this machine as one rank of a fake world, and becomes a graph."""
