"""The arithmetic of runs, large ones too: what a rank holds and sends, and how long a step takes.

Plain Python, no arrays. What a rank holds and sends is confirmed by our own runs: tests compare it
with the ledger and the arrays. How long a step takes is held against published runs (published.py).
"""
