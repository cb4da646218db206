"""Which values of a configuration cannot go together. Standard library only, as config is."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minitrain.train.config.sections import ModelSection, RunConfig


def conflicts(config: RunConfig) -> Iterator[str]:
    """Every rule between values that a configuration breaks, with the values and the fix."""
    model, data, optimizer = config.model, config.data, config.optimizer
    if model.width % model.heads:
        below = model.width // model.heads * model.heads
        yield (
            f"model.width = {model.width} is not a multiple of model.heads = {model.heads}; "
            f"use a width such as {below or model.heads}"
        )
    yield from _mixture_conflicts(config)
    if model.family == "llama":
        yield from _llama_conflicts(model)
    elif model.kv_heads is not None:
        yield (
            f"model.kv_heads = {model.kv_heads} is for a llama, but model.family = {model.family}; "
            "leave it out, or take --family llama"
        )
    if optimizer.last_lr > optimizer.lr and optimizer.schedule != "constant":
        yield (
            f"optimizer.min_lr = {optimizer.min_lr} is above optimizer.lr = {optimizer.lr}; "
            f"lower min_lr to {optimizer.lr} or less, or leave it out for a tenth of that"
        )
    if data.micro_batches > data.batch:
        yield (
            f"data.micro_batches = {data.micro_batches} is more than data.batch = {data.batch}, "
            f"so some would be empty; use at most {data.batch}"
        )
    yield from _sync_conflicts(config)


_OF = {
    "async": ("staleness", "pull", "rate", "times", "jitter"),
    "local": ("every", "outer_lr", "outer_momentum"),
}


def _sync_conflicts(config: RunConfig) -> Iterator[str]:
    """Options of a way to train together that is not taken, and what that way can't do."""
    sync = config.sync
    for mode, names in _OF.items():
        changed = [n for n in names if getattr(sync, n) != getattr(type(sync)(), n)]
        if changed and sync.mode != mode:
            yield (
                f"sync.{changed[0]} = {getattr(sync, changed[0])} is about --sync {mode}, but this "
                f"is --sync {sync.mode}; add --sync {mode}, or leave it out"
            )
    if sync.mode != "sync" and config.run.dtype == "float16":
        yield (
            f"run.dtype = float16 has a loss scale, on which ranks of --sync {sync.mode} would not "
            "agree; take --dtype bfloat16 or float32"
        )
    if sync.mode != "sync" and config.run.check_replicas is not None:
        yield (
            f"run.check_replicas = {config.run.check_replicas} compares ranks after each step, but "
            f"those of --sync {sync.mode} go apart; leave one of them out"
        )
    if sync.worker_times is not None and 0 in sync.worker_times:
        yield f"sync.times = {sync.times}: a step takes some time; use numbers of at least 1"
    if sync.times is None and sync.jitter:
        yield f"sync.jitter = {sync.jitter} is of --worker-times; give them, or leave it out"
    for name in ("eval_every", "save_every", "sample_every"):
        cadence = getattr(config.run, name)
        if sync.mode == "local" and cadence is not None and cadence % sync.every:
            near = max(1, cadence // sync.every) * sync.every
            yield (
                f"run.{name} = {cadence} is not a multiple of sync.every = {sync.every}, at which "
                f"ranks have one model; use a multiple, such as {near}"
            )


def _mixture_conflicts(config: RunConfig) -> Iterator[str]:
    mixture, mode = config.mixture, config.sync.mode
    if mixture.experts is None:
        for field in fields(mixture):
            value = getattr(mixture, field.name)
            if value != field.default:
                yield (
                    f"mixture.{field.name} = {value}, but there are no experts; leave it out, or "
                    "add some, such as --experts 8"
                )
        return
    if mixture.top_k > mixture.experts:
        yield (
            f"mixture.top_k = {mixture.top_k} is more than mixture.experts = {mixture.experts}; "
            f"use at most {mixture.experts}"
        )
    if mode != "sync":
        yield (
            f"mixture.experts = {mixture.experts}: gates consider the tokens of all ranks, which "
            f"--sync {mode} lets run apart; leave experts out, or take --sync sync"
        )


# Option -> the option beside it and the value of that with which it means nothing.
_IDLE = {
    "optimizer.beta1": ("optimizer.name", "sgd"),
    "optimizer.beta2": ("optimizer.name", "sgd"),
    "optimizer.epsilon": ("optimizer.name", "sgd"),
    "optimizer.momentum": ("optimizer.name", "adamw"),
    "optimizer.min_lr": ("optimizer.schedule", "constant"),
}


def idle(config: RunConfig, asked: Collection[str]) -> Iterator[str]:
    """Of the options that somebody asks for, by key: those that mean nothing in this run."""
    for key in asked:
        beside, value = _IDLE.get(key, ("", ""))
        if beside and _at(config, beside) == value:
            yield f"{key} means nothing where {beside} = {value}; leave one of the two out"


def _at(config: RunConfig, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _llama_conflicts(model: ModelSection) -> Iterator[str]:
    if model.width % (2 * model.heads):
        yield (
            f"model.width = {model.width} does not give the {model.heads} heads of a llama an even "
            f"number of features; use a multiple of {2 * model.heads}"
        )
    if model.kv_heads is not None and model.heads % model.kv_heads:
        yield (
            f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; use a "
            "number that does"
        )
    if model.dropout:
        yield f"model.dropout = {model.dropout}, but a llama has no dropout; leave it out"
