"""What the pages show is computed when they are built: cards, pictures, commands, faults."""

from __future__ import annotations

from typing import Any


def setup(app: Any) -> dict[str, bool]:
    """Tell sphinx of the directives, and of the check of links at the end."""
    from extension import directives, links

    for name in ("Card", "Drawing", "Faults", "Holding", "Run"):
        app.add_directive(name.lower(), getattr(directives, name))
    app.connect("build-finished", links.check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
