"""Predict the time of one training iteration of a large hybrid-parallel deep-learning job."""
