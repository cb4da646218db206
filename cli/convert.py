"""minitrain convert."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from .arguments import check_here, given_path
from .memory import memory_for
from .output import tell


@click.command()
@click.argument("source", type=given_path)
@click.argument("target", type=given_path)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value instead of a line.")
def convert(source: str, target: str, as_json: bool) -> int:
    """Convert weights between Hugging Face's layout and minitrain's, whichever SOURCE is not.

    SOURCE is a folder with a config.json and safetensors of a GPT-2 or a Llama, and TARGET the run
    folder to make, which `minitrain generate TARGET` takes; or SOURCE is a run or a checkpoint, and
    TARGET the folder to make in Hugging Face's layout. What only that layout has, such as the ids
    that end a text and a chat template, is kept and goes back as it was.
    """
    check_here()
    from minitrain.nn.config import to_values
    from minitrain.train.checkpoint.weights import load_model, save_model
    from minitrain.train.huggingface import pretrained
    from minitrain.train.huggingface.origin import Origin
    from minitrain.train.sample import find

    old, new = Path(source), Path(target)
    with memory_for("the model", "free some, as it is held as a whole"):
        if os.path.exists(old / "config.json"):
            model, tokenizer = pretrained.read(old)
            with pretrained.whole(new) as part:
                kept = pretrained.read_origin(old).kept()
                save_model(model, tokenizer, part / "checkpoints", kept)
        else:
            path = find(old)
            model, tokenizer = load_model(path)
            pretrained.write(new, model, tokenizer, Origin.load(path))
    arrays = [p.array for p in model.parameters().values()]
    found = {
        "target": target,
        "family": to_values(model.config)["family"],
        "parameters": sum(x.size for x in arrays),
        "dtype": arrays[0].dtype.name,
        "tokenizer": tokenizer.spec,
    }
    if as_json:
        tell(json.dumps(found))
    else:
        words = "{target}: {family} of {parameters:,} {dtype} parameters, tokenizer {tokenizer}"
        tell(words.format_map(found))
    return 0
