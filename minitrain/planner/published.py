"""Published runs: figures with their sources, and what the planner makes of each.

The tables ship with the package. Column `unverified` names cells that no source prints, `verified`
says whether someone has read the source. Runs that say too little to be computed again (no layout,
no shape) are listed with the reason.

How far the held-out sets are held out: their tables had been read when the model was designed, but
constants were frozen before any of them was computed, and never fitted again. At that first look
the mean errors were megatron2020 5.5 %, mbridge_h100 12.0, mcore_h100 13.7, bigscience_a100 14.8,
mosaic_fsdp 15.8, glm130b 18.4, mtnlg 20.3, sc21_t2 27.8, bigruns 127. After it, what sources say of
a run was added where the look showed it missing: which generation of attention kernels it had
(columns `flash`), what overlaps (`overlap`), sequence parallelism, the passes to float8, ZeRO 3
tensor by tensor where nothing overlaps; and a size that is not published is the fastest that fits.
These choices were made knowing the errors, so sets that they changed (all but megatron2020,
bigscience_a100, glm130b and mtnlg) say less about new runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from minitrain.layout import Layout
from minitrain.planner.architecture import Architecture
from minitrain.planner.clusters import CLUSTERS, Cluster, cluster
from minitrain.planner.layer_time import Training
from minitrain.planner.models import preset, table
from minitrain.planner.step_time import StepTime, step_time
from minitrain.planner.tuning import tuned

FITTED = ("sc21_t1", "zerobubble_t4")  # the only sets that constants were fitted to
GPT2_VOCAB = 50304  # assumed where a table prints none: GPT-2's, padded to 128
SHAPES = {"LLAMA3_8B": "Llama 3 8B", "LLAMA3_70B": "Llama 3 70B", "LLAMA3.1_405B": "Llama 3 405B"}


@dataclass(frozen=True)
class Run:
    """One published run, its cells as text under the table's column names."""

    cells: dict[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    @property
    def name(self) -> str:
        """What its source calls it."""
        return self["name"]

    @property
    def set(self) -> str:
        """The table or sweep that it belongs to."""
        return self["set"]

    def number(self, column: str, default: float | None = None) -> float:
        """A cell as a number; `default` where it is empty."""
        return float(self[column]) if self[column] or default is None else default

    @property
    def seconds(self) -> float | None:
        """Of a step, as published or as it follows from what is; None where nothing tells."""
        if self["seconds"]:
            return self.number("seconds")
        shape = self.shape()
        if not (shape and self["tflops"] and self["batch"] and self["tflops_kind"]):
            return None
        length = int(self["length"])
        flops = (
            shape.model_flops(length)
            if self["tflops_kind"] == "model"
            else shape.hardware_flops(length)
        )
        tokens = self.number("batch") * length
        return flops * tokens / (self.number("tflops") * 1e12 * self.number("gpus"))

    def shape(self) -> Architecture | None:
        """The model, where the table or a preset has its shape."""
        for words, name in SHAPES.items():
            if words in self.name:
                return preset(name).shape
        if self.name.startswith("DeepSeek-V3"):
            return preset("DeepSeek-V3").shape
        if not (self["layers"] and self["width"] and self["heads"]):
            return None
        return self._shape()

    def _shape(self) -> Architecture:
        width, heads, context = (int(self[name]) for name in ("width", "heads", "length"))
        gated = self["gated"] == "1"
        return Architecture(
            vocab=int(self["vocab"] or GPT2_VOCAB),
            context=context,
            layers=int(self["layers"]),
            heads=heads,
            kv_heads=int(self["kv_heads"] or heads),
            width=width,
            hidden=int(self["hidden"] or 4 * width),
            head_width=width // heads,
            tied=not gated,
            gated=gated,
            biased=not gated,
            positions=0 if gated else context,
        )

    def cluster(self) -> Cluster | None:
        """Where it ran, if the planner knows such devices."""
        if self["gpu"] not in CLUSTERS:
            return None
        return cluster(self["gpu"], self["network"])

    def layout(self) -> Layout:
        """How it was cut; a ZeRO stage cuts over the data ranks."""
        dp, zero = int(self["dp"]), int(self["zero"] or 0)
        pp, chunks = int(self["pp"] or 1), int(self["chunks"] or 1)
        schedule = self["schedule"] or ("interleaved" if chunks > 1 else "1f1b")
        if schedule == "dualpipe":  # its bubble is that of its V-shaped half, which we can run
            schedule = "dualpipe-v"
        return Layout(
            dp=1 if zero else dp,
            shard=dp if zero else 1,
            zero=zero if zero and dp > 1 else None,
            pp=pp,
            tp=int(self["tp"] or 1),
            sp=self["sp"] == "1",
            cp=int(self["cp"] or 1),
            ep=int(self["ep"] or 1),
            schedule=schedule if pp > 1 else None,
            chunks=chunks if pp > 1 else 1,
        )

    def open_questions(self) -> dict[str, bool]:
        """Which of the sizes that a user tunes were not published."""
        return {"micro_batch": not self["micro_batch"], "chunks": not self["chunks"]}

    def training(self) -> Training | None:
        """All that its step time depends on; None where the table does not say enough."""
        shape = self.shape()
        if shape is None or not (self["dp"] and self["batch"] and self["tp"]):
            return None
        return Training(
            shape,
            self.layout(),
            int(self["batch"]),
            int(self["micro_batch"] or 1),
            int(self["length"]),
            recompute=self["recompute"] or "none",
            flash=int(self["flash"] or 0),
            overlap="data" in self["overlap"],
            overlap_tensor="tensor" in self["overlap"],
            gradient_bytes=int(self["gradient_bytes"] or 2),
            precision="float8" if self["precision"].startswith("FP8") else "half",
        )


@dataclass(frozen=True)
class Prediction:
    """A published run beside what the planner computes.

    Attributes:
        seconds: of a step, as published.
        time: the planner's step; None where it cannot be computed, and `reason` says why.
    """

    run: Run
    seconds: float | None
    time: StepTime | None
    reason: str

    @property
    def error(self) -> float | None:
        """Relative: above 0 where the planner is too slow."""
        if self.time is None or self.seconds is None:
            return None
        return self.time.seconds / self.seconds - 1


def runs() -> list[Run]:
    """All published steps."""
    return [Run(row) for row in table("runs.csv")]


def durations() -> list[Run]:
    """Published totals: days and GPU-hours of whole trainings."""
    return [Run({"set": "durations", **row}) for row in table("durations.csv")]


def predict(run: Run) -> Prediction:
    """The planner's step for a published run."""
    training, machine, seconds = run.training(), run.cluster(), run.seconds
    if run["out_of_memory"]:
        return Prediction(run, seconds, None, "it ran out of memory")
    if machine is None:
        return Prediction(run, seconds, None, f"no figures for {run['gpu']}")
    if run["precision"] == "unknown":
        return Prediction(run, seconds, None, "its precision is not published")
    if training is None:
        return Prediction(run, seconds, None, "shape, layout or batch is not published")
    time = step_time(tuned(training, machine, **run.open_questions()), machine)
    return Prediction(run, seconds, time, "" if seconds else "no step time is published")


def predictions() -> list[Prediction]:
    """Of all runs."""
    return [predict(run) for run in runs()]


@dataclass(frozen=True)
class SetError:
    """How far the planner is from one set.

    Attributes:
        mean: absolute relative error, mean over the set's runs.
        bias: relative error with its sign, mean.
        computed, total: runs that could be computed, and all.
    """

    name: str
    fitted: bool
    mean: float
    bias: float
    worst: float
    computed: int
    total: int


def errors(found: list[Prediction]) -> Iterator[SetError]:
    """Set by set, the fitted ones first."""
    names = dict.fromkeys(p.run.set for p in found)
    for name in sorted(names, key=lambda name: name not in FITTED):
        mine = [p for p in found if p.run.set == name]
        gaps = [p.error for p in mine if p.error is not None]
        if gaps:
            yield SetError(
                name,
                name in FITTED,
                sum(map(abs, gaps)) / len(gaps),
                sum(gaps) / len(gaps),
                max(gaps, key=abs),
                len(gaps),
                len(mine),
            )
