"""Ranks as MPI processes: launching and ending a job, its messages, the memory a node shares."""
