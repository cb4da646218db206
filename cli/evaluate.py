"""minitrain eval."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .arguments import check_here, given_path
from .groups import GroupedCommand
from .memory import memory_for
from .output import tell
from .rank_options import device_option
from .tables import show

if TYPE_CHECKING:
    from minitrain.train.evaluate import Score

MOST = 40  # documents in the table, the worst predicted ones first


@click.command("eval", cls=GroupedCommand)
@click.argument("checkpoint", type=given_path, required=False)
@click.option(
    "--data", type=given_path, metavar="PATH",
    help="A text file, a folder of them, or a .jsonl of texts. [what the run holds out]",
)  # fmt: skip
@device_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of tables.")
def evaluate(checkpoint: str | None, data: str | None, device: str, as_json: bool) -> int:
    """Tell how well a model predicts a text, document by document.

    CHECKPOINT is a step-NNNNNN folder, or the folder of a run; without it the newest run is taken.
    A document is a file, or a line of a .jsonl file. Nats and perplexity are for each token; bits
    for each byte compare models of different tokenizers.
    """
    check_here()
    from minitrain.machine import array_module
    from minitrain.train.evaluate import evaluate as scores_of
    from minitrain.train.evaluate import total
    from minitrain.train.sample import find

    path = find(Path(checkpoint) if checkpoint else None)
    with memory_for("the model and the text", "give --data less of it, or free some memory"):
        scores = scores_of(path, Path(data) if data else None, xp=array_module(device))
    whole = total(scores)
    if as_json:
        documents = [_values(score) for score in scores]
        found = {"checkpoint": str(path), **_values(whole), "documents": documents}
        del found["document"]
        tell(json.dumps(found))
        return 0
    rows = sorted(scores, key=lambda score: -score.bits_per_byte)
    columns = ("document", "tokens", "nats/token", "perplexity", "bits/byte")
    title = f"{path} on {data or 'what the run holds out'}"
    if len(rows) > 1:
        show(f"{title}, the worst first", columns, list(map(_row, rows[:MOST])))
    if len(rows) > MOST:
        tell(f"and {len(rows) - MOST} more")
    show(title, columns, [_row(whole)])
    return 0


def _values(score: Score) -> dict[str, Any]:
    """As JSON, which has no infinity."""
    perplexity = score.perplexity
    return {
        "document": score.document,
        "tokens": score.tokens,
        "bytes": score.bytes,
        "nats_per_token": score.loss,
        "perplexity": perplexity if math.isfinite(perplexity) else None,
        "bits_per_byte": score.bits_per_byte,
    }


def _row(score: Score) -> tuple[str, ...]:
    numbers = f"{score.loss:.4f}", f"{score.perplexity:.4g}", f"{score.bits_per_byte:.4f}"
    return score.document, f"{score.tokens:,}", *numbers
