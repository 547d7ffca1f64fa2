"""Blocks of models as data: what one rank computes and says, forward and backward."""
