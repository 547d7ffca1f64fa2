"""Jobs of two real ranks of this machine, and of one of them alone: truth of overlap."""
