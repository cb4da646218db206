"""What `minitrain train` is asked to do, made out of its options and of what lies on the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .introduction import idle_stages
from .memory import memory_for
from .options import ConfigSources
from .ranks import Ranks

if TYPE_CHECKING:
    from minitrain.train.checkpoint.manifest import Manifest
    from minitrain.train.config.sections import RunConfig
    from minitrain.train.data.text import Corpus
    from minitrain.train.folder import RunFolder
    from minitrain.train.run import Run
    from minitrain.train.trace_file import TraceFile
    from minitrain.train.warm_start import WarmStart


def prepare(given: ConfigSources, ranks: Ranks, run_dir: str | None, resume: str | None,
            origin: str | None, trace: TraceFile | None) -> Run:  # fmt: skip
    """Everything that can be refused, before anything is written or sent."""
    from minitrain.array import keep_memory
    from minitrain.nn.config import from_values as sizes_from
    from minitrain.parallel.table import check_layout
    from minitrain.train.asynchronous import check_sync
    from minitrain.train.checkpoint.manifest import read_manifest, step_of
    from minitrain.train.checkpoint.weights import load_tokenizer
    from minitrain.train.config.resolve import asked, from_values
    from minitrain.train.config.resolve import notes as config_notes
    from minitrain.train.data.text import Corpus
    from minitrain.train.pipeline import notes as schedule_notes
    from minitrain.train.pipeline import resettled, settled
    from minitrain.train.run import Run
    from minitrain.train.warm_start import sizes_with

    keep_memory()
    xp = ranks.array_module()
    _check_readable_by_all(ranks, given.file)
    before = _origin(origin, resume is not None)
    config, at, start, notes = _start(given, run_dir, resume)
    if before:
        config = before.fitted(config, asked(given.sets, given.flags))
    manifest = read_manifest(start) if start else None
    ranks = _laid_out(ranks, at.config if start else given.file, manifest)
    _check_readable_by_all(ranks, config.data.path, config.data.val_path, config.data.tokenizer)
    # A run that goes on has its tokenizer in the checkpoint, trained or not.
    tokenizer: Any = before.tokenizer if before else config.data.tokenizer
    tokenizer = load_tokenizer(start) if start else tokenizer
    only = manifest.sources if manifest else None
    with memory_for("the text", "give --data less of it, or ids in a .bin file, which is mapped"):
        data, context = config.data, config.model.context
        corpus = Corpus.load(data.path, context, tokenizer, only, data.documents, data.val_path)
    known = sizes_from(manifest.model) if manifest else before and sizes_with(before.sizes, config)
    run = Run(config, ranks.layout, corpus, at, start, known=known)
    check_layout(
        ranks.layout,
        run.sizes,
        batch=config.data.batch,
        micro_batches=config.data.micro_batches,
        stages=config.run.stage_sizes,
        frozen=config.optimizer.frozen_patterns,
    )
    check_sync(config.sync, ranks.layout, own_server=ranks.server)
    if manifest:
        stored = from_values(manifest.config)
        config = resettled(config, ranks.layout, stored, manifest.layout)
    else:
        config = settled(config, ranks.layout)
    blas = None
    if start:
        blas, more = _as_before(start, corpus, ranks)
        notes += more
    if before:
        notes.append(f"weights and tokenizer from {before.path}")
    notes += [*config_notes(config), *corpus.notes, *idle_stages(ranks.layout, config),
              *schedule_notes(config, ranks.layout)]  # fmt: skip
    if trace is not None:
        _check_trace(trace, config, step_of(start) if start else 0)
    return replace(run, config=config, notes=tuple(notes), xp=xp, blas=blas, trace=trace,
                   weights=before and before.weights, kept=_kept(before, start))  # fmt: skip


def _laid_out(ranks: Ranks, file: Path | str | None, manifest: Manifest | None) -> Ranks:
    """With the layout that a run's configuration or else its checkpoint says, where the options say
    none."""
    from minitrain.layout import Layout
    from minitrain.train.config.sources import layout_in

    layout = (layout_in(Path(file)) if file else None) or (manifest and manifest.layout)
    return ranks.going_on(Layout.parse(layout)) if layout else ranks


def _as_before(start: Path, corpus: Corpus, ranks: Ranks) -> tuple[int | None, list[str]]:
    """BLAS threads of a run that goes on, and what is not as it was."""
    from minitrain.machine import cores
    from minitrain.train.resume import blas_before, check_same

    notes = check_same(start, corpus, ranks.layout)
    here = cores() // (1 if ranks.backend == "mpi" else ranks.layout.size)
    blas, more = blas_before(start, ranks.layout, max(1, here))
    return blas, notes + more


def _check_trace(trace: TraceFile, config: RunConfig, done: int) -> None:
    """Refuse to record steps that the run lacks, or that ranks do not do together."""
    if config.sync.mode != "sync":
        raise click.UsageError(
            f"--trace is of steps that ranks do together, but this is --sync {config.sync.mode}; "
            "leave one of them out"
        )
    trace.check(config.run.steps - done)


def _check_readable_by_all(ranks: Ranks, *paths: str | None) -> None:
    """Refuse what only one process can read where each MPI rank reads it: the others would hang."""
    from minitrain.train.data.reading import TextError, once_only

    if ranks.backend != "mpi":
        return
    for path in paths:
        if path is not None and (kind := once_only(path)):
            raise TextError(
                f"{path} is {kind}, which can be read once only, but each MPI rank reads it; keep "
                "its content in a file and give that, or leave out --backend mpi"
            )


def _check_read_again(path: str | None) -> None:
    """Refuse a configuration that can be read once only, where what it says is asked for twice."""
    from minitrain.train.data.reading import once_only

    if path is not None and (kind := once_only(path)):
        raise click.UsageError(
            f"--resume auto reads --config twice, and {path} is {kind}, which can be read once "
            "only; keep its content in a file and give that"
        )


def _kept(before: WarmStart | None, start: Path | None) -> dict[str, str]:
    """What is known of a Hugging Face folder that the model once came from."""
    from minitrain.train.huggingface.origin import Origin

    if before:
        return before.origin.kept()
    return Origin.load(start).kept() if start else {}


def _origin(path: str | None, resume: bool) -> WarmStart | None:
    """The model to begin with, where one is named."""
    if path is None:
        return None
    if resume:
        raise click.UsageError(
            "--from begins a new run and --resume goes on with one; leave one of them out"
        )
    from minitrain.train.warm_start import read

    with memory_for("the model", "free some, as it is held as a whole"):
        return read(Path(path))


def _start(
    given: ConfigSources, run_dir: str | None, resume: str | None
) -> tuple[RunConfig, RunFolder, Path | None, list[str]]:
    """The configuration of a run and its folder; of one that goes on also the checkpoint to start
    from, and what differs from before."""
    from minitrain.train import folder
    from minitrain.train.config.resolve import preset_called
    from minitrain.train.resume import absolute, resumed, resumed_if_there

    at = folder.RunFolder(Path(run_dir)) if run_dir else None
    if resume == "auto":
        _check_read_again(given.file)
        at = at or folder.newest_if_any()
        config = absolute(given.resolve())
        found = resumed_if_there(at, config, given.said()) if at else None
        if found and at:
            return found[0], at, found[1], found[2]
        if at and at.config.exists():
            return config, replace(at, unfinished=True), None, []
    elif resume:
        if given.preset or given.file:
            raise click.UsageError(
                "--resume takes the run's own configuration: no --preset, --config"
            )
        at = at or folder.newest()
        config, start, notes = resumed(at, given.sets, given.flags)
        return config, at, start, notes
    config = absolute(given.resolve())
    at = at or folder.next_free(preset_called(given.preset))
    at.check_free()
    return config, at, None, []
