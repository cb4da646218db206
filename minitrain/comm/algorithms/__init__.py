"""What collectives are made of: each algorithm a short function with its cost and its source."""
