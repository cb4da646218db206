"""How well a checkpoint's model predicts a text: nats a token, bits a byte, document by document.

A document is a file, or a line of a .jsonl file. Each is read by itself, in windows of the model's
context without overlap, as the held-out text is while training: every token but the first is
predicted once, from what stands before it in its window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minitrain.comm import run_ranks
from minitrain.comm.group import Group
from minitrain.layout import Layout
from minitrain.machine import fitting_blas_threads
from minitrain.nn.families import Model
from minitrain.parallel import Mesh, parallelize
from minitrain.train.checkpoint.manifest import Manifest, read_manifest
from minitrain.train.checkpoint.weights import load_model
from minitrain.train.config.resolve import from_values
from minitrain.train.data.reading import TextError, read_text
from minitrain.train.data.text import Corpus
from minitrain.train.data.tokenizer import Tokenizer
from minitrain.train.data.windows import Part, evaluated_together, windows
from minitrain.train.metrics import largest_product

NO_STARTS = np.zeros(0, np.int64)
BATCH = 16  # windows that are computed together, where no run says how many


class Document(NamedTuple):
    """A text as ids, and how many bytes it has."""

    name: str
    part: Part
    bytes: int


class Score(NamedTuple):
    """How well a document is predicted.

    Attributes:
        tokens: that were predicted: all but the first.
        nats: the sum of their losses.
        bits: of the whole document, as if its first token cost what the others do on average.
        bytes: of its text.
    """

    document: str
    tokens: int
    nats: float
    bits: float
    bytes: int

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where that is more than a float can hold."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """What comparison across tokenizers needs."""
        return self.bits / self.bytes


def evaluate(path: Path, data: Path | None, *, xp: Any = np) -> list[Score]:
    """The scores of a text's documents under a checkpoint's model; those that have no token to
    predict are left out.

    data: the text; None: what the run of the checkpoint holds out.

    Raises:
        CheckpointError, TextError, TokenizerError: a checkpoint that is not whole; a text that
            cannot be read, or has nothing to predict.
    """
    model, tokenizer = load_model(path)
    manifest = read_manifest(path)
    weights = next(iter(model.parameters().values())).array
    dtype = manifest.config.get("run.dtype") or weights.dtype.name
    batch = evaluated_together(
        manifest.config.get("data.batch") or BATCH, model.config.context, tokenizer.vocab
    )
    product = largest_product(model.config, batch * model.config.context)
    documents = (
        [Document(name, (tokenizer.encode(text), NO_STARTS), len(text))
         for name, text in read_text(data).parts()]
        if data else [_held_out(path, manifest, tokenizer)]
    )  # fmt: skip
    [scores] = run_ranks(
        1, _rank, model, documents, dtype, batch, tokenizer.vocab, xp,
        blas=fitting_blas_threads(product, 1),
    )  # fmt: skip
    if not scores:
        raise TextError(f"{data} has no document of two tokens or more; give a longer text")
    return scores


def _held_out(path: Path, manifest: Manifest, tokenizer: Tokenizer) -> Document:
    """The text that a run holds out, as one document."""
    if not manifest.config:
        raise TextError(f"{path} is of no run, so nothing is held out; give a text with --data")
    config = from_values(manifest.config)
    data, only = config.data, manifest.sources
    corpus = Corpus.load(
        data.path, config.model.context, tokenizer, only, data.documents, data.val_path
    )
    if corpus.held_out_text is None:
        raise TextError(f"{corpus.name} is ids and no text; give a text with --data")
    part = corpus.held_out, corpus.held_out_starts
    return Document("what the run holds out", part, len(corpus.held_out_text))


def total(scores: Iterable[Score]) -> Score:
    """All documents as one, each token and byte counting alike."""
    rows = list(scores)
    return Score(
        "all",
        sum(row.tokens for row in rows),
        sum(row.nats for row in rows),
        sum(row.bits for row in rows),
        sum(row.bytes for row in rows),
    )


def _rank(group: Group, model: Model, documents: list[Document], dtype: str, size: int,
          vocab: int, xp: Any) -> list[Score]:  # fmt: skip
    context = model.config.context
    part = parallelize(model, Mesh(group, Layout()), dtype=dtype, xp=xp)

    def scores() -> Iterator[Score]:
        for document in documents:
            nats, tokens = 0.0, 0
            for batch in windows(document.part, context, size, vocab):
                loss = part.evaluate(batch)
                nats, tokens = nats + loss.value * loss.tokens, tokens + loss.tokens
            if tokens:
                bits = nats / tokens / math.log(2) * len(document.part[0])
                yield Score(document.name, tokens, nats, bits, document.bytes)

    return list(scores())
