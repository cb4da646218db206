"""placeholder until generate lands"""

from pathlib import Path


def sample_text(path: Path, tokens: int) -> str:
    """Temporary."""
    return f"(sample of {tokens} from {path})"
