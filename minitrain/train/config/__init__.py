"""The configuration of a run: its options, where their values come from, which go together."""
