"""Small to large: what at most four ranks taught, proven on runs that taught nothing."""
