"""Memory that the MPI ranks of a node share, and how messages go through it."""
