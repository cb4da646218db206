"""How a loss of right outputs is wrong: what was summed over shards of the vocabulary, and how."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from minitrain.array import Array
from minitrain.autograd.tensor import Tensor
from minitrain.batch import IGNORE
from minitrain.cut import cut_size
from minitrain.oracle.compare import Row
from minitrain.oracle.diagnosis.subject import Diagnosis, Evidence, Subject, is_close


def diagnose_loss(evidence: Evidence, row: Row, subject: Subject) -> Diagnosis | None:
    """Of the loss that a rank has, where the vocabulary is cut: with every wrong sum of its parts.

    The loss of a token of label y is lse − (1−s)·x[y] − s·mean(x) + z·lse², with lse the logarithm
    of the sum of exponentials.
    """
    tp, task = evidence.layout.tp, evidence.task
    if subject.step is None or tp == 1:
        return None
    x, label = _logits(evidence, subject)
    lse = np.log(np.exp(x - x.max(1, keepdims=True)).sum(1)) + x.max(1)
    shard = cut_size(x.shape[1], evidence.layout.coordinates(row.rank)["tp"], tp)
    exponentials = {"": lse, f"the sum of exponentials is made {tp} times": lse + math.log(tp)}
    smoothing = {
        "": x.mean(1),
        f"label smoothing is made {tp} times": tp * x.mean(1),
        "label smoothing divides by a shard of the vocabulary": x.sum(1) / shard,
    }
    for (one, log), (two, mean) in itertools.product(exponentials.items(), smoothing.items()):
        terms = log - (1 - task.smoothing) * label - task.smoothing * mean + task.z_loss * log**2
        words = " and ".join(filter(None, (one, two)))
        if words and is_close(row.got, float(terms.mean())):
            return Diagnosis("vocabulary", f"{words}, and tp is {tp}")
    return None


def _logits(evidence: Evidence, subject: Subject) -> tuple[Array, Array]:
    """Of the tokens that count in a step's batch the logits (N, V), and those of their labels."""
    assert subject.step is not None
    trace, task = evidence.reference[subject.optimizer], evidence.task
    batch = task.batches()[subject.step - 1]
    model: Any = task.declare()
    for name, parameter in model.parameters().items():
        parameter.array = [trace.start, *trace.weights][subject.step - 1][name]
    last = trace.outputs[subject.step - 1][f"blocks.{task.model.layers - 1}"]
    counts = batch.labels != IGNORE
    x = model.finish(Tensor(last), np.arange(task.model.context)).array[counts]
    return x, np.take_along_axis(x, batch.labels[counts][:, None], 1)[:, 0]
