"""The arithmetic of runs, large ones too: what a rank holds and sends. Plain Python, no arrays.

Every formula here is confirmed by a run: a test compares it with what ranks really hold and send.
"""
