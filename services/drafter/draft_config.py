"""A drafter's config.json: every spelling seen in published files brought to one; what cannot be run is refused."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from kadence.errors import CheckpointError
from services.model.arch import read_json
from services.model.rope_parameters import RopeParameters, positive, read_rope

# Where a key may stand: at the top, in an object of the drafter's family, or (speculators) in that of the layers.
_SECTIONS = ("dflash_config", "dspark_config", "transformer_layer_config")
_KINDS = ("full_attention", "sliding_attention")

# Architectures -> the slot that predicts the token after the anchor. Nothing else in a file may tell it.
FIRST_SLOTS = {
    "DFlashDraftModel": 1,
    "DFlashSpeculator": 1,
    "DFlash2DraftModel": 1,
    "Qwen3DFlash2Model": 1,
    "Qwen3DSparkModel": 0,
    "DSparkDraftModel": 0,
}
DFLASH2 = ("DFlash2DraftModel", "Qwen3DFlash2Model")
DSPARK = ("Qwen3DSparkModel", "DSparkDraftModel")

# Keys that change what is computed -> the values under which they do not.
_OFF: dict[str, tuple[Any, ...]] = {
    # speculators copies the target's name into that of layers which are all the same; tensors tell if they are not
    "model_type": ("qwen3", "llama", "speculator_model"),
    "hidden_act": ("silu",),
    "quantization_config": (),
    "attention_sink_bias": (False, 0),
    "add_swa_attention_sink_bias": (False,),
    "add_full_attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "shift_label": (False,),
    "mlp_bias": (False,),
    "markov_rank": (0,),
    "dspark_markov_rank": (0,),
    "enable_confidence_head": (False,),
}


class DraftConfig:
    """Looks keys up under all their names; values that contradict each other are refused."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        sections = {name: values.get(name) for name in _SECTIONS}
        odd = next((name for name, value in sections.items() if not isinstance(value, dict | None)), None)
        if odd is not None:
            raise self.error(odd, values[odd], "an object")
        # Sections first: messages then name the place that a reader looks at first.
        self._places: dict[str, Mapping[str, Any]] = {f"{k}.": v for k, v in sections.items() if v is not None}
        self._places[""] = values
        self.architecture = self._architecture()
        self._refuse()

    @classmethod
    def read(cls, path: Path) -> DraftConfig:
        """The config in file `path`. Raises CheckpointError naming file, key and value."""
        return cls(path, read_json(path))

    def error(self, key: str, value: Any, supported: str) -> CheckpointError:
        """The error for one value of this file."""
        return CheckpointError(f"{self.path}: {key} is {value!r}, supported is {supported}")

    def get(self, *spellings: str, default: Any = None) -> Any:
        """The value under any of these keys; null counts as absent. Raises CheckpointError if two are not the same."""
        found = self._found(*spellings)
        for place, value in found[1:]:
            if value != found[0][1] or isinstance(value, bool) != isinstance(found[0][1], bool):
                raise CheckpointError(f"{self.path}: {found[0][0]} is {found[0][1]!r}, but {place} is {value!r}")
        return found[0][1] if found else default

    def size(self, *spellings: str, default: int | None = None) -> int:
        """A positive integer. Raises CheckpointError naming the key's usual spelling."""
        value = self.get(*spellings, default=default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(self._name(*spellings), value, "a positive integer")
        return value

    def flag(self, *spellings: str) -> bool | None:
        """A boolean, None where the file says nothing."""
        value = self.get(*spellings)
        if not isinstance(value, bool | None):
            raise self.error(self._name(*spellings), value, "true or false")
        return value

    def number(self, *spellings: str, default: float) -> float:
        """A positive number."""
        return positive(self.get(*spellings, default=default), self._name(*spellings), self.path)

    def taps(self, layers: int) -> tuple[int, ...]:
        """Layer-output ids, increasing, without the last of the target's `layers` (0: not known)."""
        names = ("target_layer_ids", "dspark_target_layer_ids")
        shifted = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
        ids, later = self.get(*names), self.get(*shifted)
        for name, value in ((self._name(*names), ids), (self._name(*shifted), later)):
            if value is not None and not _increasing(value):
                raise self.error(name, value, "a list of increasing layer ids")
        counted = None if later is None else [i - 1 for i in later]  # these count the embeddings as 0
        if ids is None and counted is None:
            raise self.error(names[0], None, "a list of increasing layer ids")
        if ids is not None and counted is not None and ids != counted:
            raise CheckpointError(
                f"{self.path}: {self._name(*names)} is {ids!r}, but {self._name(*shifted)} is {later!r}, "
                f"which is {counted!r} counted as layer outputs"
            )
        taps = counted if ids is None else ids
        assert taps is not None
        if taps[0] < 0 or (layers and taps[-1] > layers - 2):
            limit = f"layer outputs 0 to {layers - 2}" if layers else "layer outputs from 0 on"
            raise self.error(self._name(*(names if ids is not None else shifted)), taps, limit)
        return tuple(taps)

    def mask_token(self, vocab_size: int) -> int | None:
        """The id that fills the slots after the anchor's; None if the file names none."""
        names = ("mask_token_id", "dspark_noise_token_id")
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise self.error(self._name(*names), value, f"a token id from 0 to {vocab_size - 1}")
        return value

    def layer_kinds(self, layers: int) -> list[str]:
        """Per layer "full_attention" or "sliding_attention"."""
        kinds = self.get("layer_types")
        if kinds is None:  # as transformers reads files without
            first = self.get("max_window_layers", default=28) if self.flag("use_sliding_window") else layers
            if not isinstance(first, int):
                raise self.error("max_window_layers", first, "an integer")
            kinds = [_KINDS[i >= first] for i in range(layers)]
        if not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds) or len(kinds) != layers:
            raise self.error("layer_types", kinds, f"{layers} times {' or '.join(_KINDS)}")
        if self.flag("use_swa") and _KINDS[1] not in kinds:
            raise self.error(self._name("use_swa"), True, "layer_types with sliding_attention")
        return kinds

    def windows(self, kinds: list[str]) -> tuple[int, ...]:
        """Per layer the keys a query sees to its left, itself counted; 0 for full attention."""
        if _KINDS[1] not in kinds:
            return (0,) * len(kinds)
        names = ("use_sliding_window", "use_swa")
        if not self.flag(*names):  # transformers drops the window then
            raise self.error(self._name(*names), self.get(*names), "true for sliding_attention layers")
        window = self.size("sliding_window", "swa_window_size")
        return tuple(window if kind == _KINDS[1] else 0 for kind in kinds)

    def causal(self, kinds: list[str]) -> tuple[bool, ...]:
        """Per layer whether a slot sees no later slot (draft-model contracts, section 3.4)."""
        everywhere, sliding = self.flag("is_causal", "causal"), self.flag("sliding_window_non_causal")
        if everywhere is not None:
            return (everywhere,) * len(kinds)
        return tuple(kind == _KINDS[1] and not sliding for kind in kinds)

    def pair(self, one: str, other: str) -> tuple[int, int]:
        """Two sizes of which a file has both or neither: (0, 0)."""
        if self.get(one) is None and self.get(other) is None:
            return 0, 0
        return self.size(one), self.size(other)

    def first_slot(self) -> int:
        """The slot that predicts the token after the anchor."""
        said = self.flag("sample_from_anchor")
        return FIRST_SLOTS[self.architecture] if said is None else int(not said)

    def rope(self, kinds: list[str]) -> RopeParameters:
        """The rotary embedding; one per kind of layer only if those in use are equal."""
        place = self._places.get("transformer_layer_config.", self._places[""])
        rope, scaling = place.get("rope_parameters"), place.get("rope_scaling") or {}
        if isinstance(rope, dict) and isinstance(scaling, dict):  # anything else read_rope refuses
            if any(kind in rope for kind in _KINDS):
                first, *others = [rope.get(kind) for kind in sorted(set(kinds))]
                if not isinstance(first, dict) or any(one != first for one in others):
                    raise self.error("rope_parameters", rope, "the same object for all layers")
                rope = first
                place = {**place, "rope_parameters": rope}
            old = {"rope_theta": place.get("rope_theta"), **scaling}
            for key in ("rope_theta", "rope_type", "factor"):
                one, other = old.get(key), rope.get(key)
                if one is not None and other is not None and one != other:
                    raise CheckpointError(f"{self.path}: {key} is {one!r}, but in rope_parameters it is {other!r}")
        return read_rope(place, self.path)

    def _found(self, *spellings: str) -> list[tuple[str, Any]]:
        places = self._places.items()
        return [(f"{p}{k}", v[k]) for k in spellings for p, v in places if v.get(k) is not None]

    def _name(self, *spellings: str) -> str:
        """The key that the file uses, else the first spelling."""
        found = self._found(*spellings)
        return found[0][0] if found else spellings[0]

    def _architecture(self) -> str:
        names = self._places[""].get("architectures")
        name = names[0] if isinstance(names, list) and len(names) == 1 else None
        if not isinstance(name, str) or name not in FIRST_SLOTS:
            raise self.error("architectures", names, f"one of {', '.join(FIRST_SLOTS)}")
        return name

    def _refuse(self) -> None:
        """Raises CheckpointError for what would be computed wrongly."""
        projector = "dspark" if self.architecture in DSPARK else "dflash"
        off = {**_OFF, "projector_type": (projector,), "draft_vocab_size": (self.get("vocab_size"),)}
        for key, harmless in off.items():
            for place, value in self._found(key):
                if value not in harmless:
                    wanted = " or ".join(repr(one) for one in harmless)
                    raise self.error(place, value, wanted or "none")


def _increasing(ids: Any) -> bool:
    """A list of integers, each larger than the one before."""
    if not isinstance(ids, list) or not ids or any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
        return False
    return all(a < b for a, b in pairwise(ids))
