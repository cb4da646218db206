"""The console script."""

from __future__ import annotations

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="minitrain")
def main() -> None:
    """Train transformers under every parallel strategy, and prove each equal to one device."""
