"""Contracts for parts of one's own."""
