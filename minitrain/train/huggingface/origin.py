"""What a Hugging Face folder says beside sizes and weights: ids that begin and end a text, how to
chat and to generate, types on disk. It is kept beside a converted model, for the way back."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FILE = "huggingface.json"
"""The name under which it is kept in a checkpoint."""

FLOATS: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
"""What safetensors calls the types that weights may have; all but the first become float32."""

_KEPT = (".json", ".jinja", ".txt", ".model")
# The tokenizer keeps its own, and the weights are written anew.
_MADE = ("config.json", "tokenizer.json", "model.safetensors.index.json")


@dataclass(frozen=True)
class Origin:
    """What is kept of the folder that a model came from.

    Attributes:
        config: its config.json; None for a model that was made here.
        kinds: the types of its weights, by their names.
        files: its other files, such as generation_config.json and chat_template.jinja, by name.
    """

    config: dict[str, Any] | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def load(cls, checkpoint: Path) -> Origin:
        """What a checkpoint keeps; nothing if its model was made here."""
        try:
            tree = json.loads((checkpoint / FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        files = {name: base64.b64decode(text) for name, text in tree["files"].items()}
        return cls(tree["config"], tree["kinds"], files)

    def kept(self) -> dict[str, str]:
        """What a checkpoint keeps of it, by file name."""
        return {} if self.config is None else {FILE: self.text()}

    def text(self) -> str:
        """What `load` reads."""
        files = {name: base64.b64encode(x).decode() for name, x in self.files.items()}
        return json.dumps({"config": self.config, "kinds": self.kinds, "files": files}, indent=1)

    def narrowed(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Their arrays in the types that they had, where that loses nothing."""
        return {name: self._narrowed(name, x) for name, x in arrays.items()}

    def _narrowed(self, name: str, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        # A model saved without its head has names without the first part.
        kind = self.kinds.get(name) or self.kinds.get(name.partition(".")[2])
        with np.errstate(over="ignore"):
            small = x.astype(FLOATS[kind]) if kind else x
        return small if np.array_equal(small.astype(x.dtype), x) else x

    def ids(self, name: str) -> tuple[int, ...]:
        """The ids of a key such as eos_token_id: generation_config.json's, else config.json's."""
        try:
            generation = json.loads(self.files.get("generation_config.json", b"{}"))
        except ValueError:
            generation = {}
        found = (generation if name in generation else self.config or {}).get(name)
        ids = found if isinstance(found, list) else [found]
        return tuple(each for each in ids if type(each) is int)


def origin_of(folder: Path, config: dict[str, Any], kinds: Mapping[str, str]) -> Origin:
    """What is to be kept of a folder with this config.json and weights of these types."""
    files = {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in _KEPT and path.name not in _MADE and path.is_file()
    }
    return Origin(config, kinds, files)
