"""Everything that decides a trained drafter's weights, its data apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from kadence.errors import ConfigError
from services.drafter.draft_arch import DraftArch
from services.model.arch import Arch
from services.model.rope_parameters import RopeParameters

KINDS = ("dflash2", "dflash")
CONV_TAPS, CONV_GROUP, TOP_K = 2, 16, 16
LONGER = ("steps", "decay")
"""What may change when a run is taken up again."""


def _entry(default: Any, help: str, least: float = 0, most: float = float("inf")) -> Any:
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True)
class Recipe:
    """Sizes, loss and schedule. Raises ConfigError naming field, value and limit."""

    kind: str = _entry("dflash2", "dflash2, or dflash: neither convolution nor selector")
    taps: tuple[int, ...] = _entry(
        (1, 8, 14, 21, 27), "layers of the target whose outputs are read, from 0; all that features has, or some"
    )
    layers: int = _entry(3, "of the drafter", 1, 64)
    rank: int = _entry(64, "of the selector; 0 is none", 0, 4096)
    convolution: bool = _entry(True, "whether layers have convolutions")
    block: int = _entry(8, "slots of a block, the anchor's included", 2, 16)
    mask_token: int = _entry(3, "id that stands in the slots to be filled")
    vocabulary: int = _entry(8192, "most frequent ids that are drafted", 16)
    soft: float = _entry(0.5, "weight of the target's distribution against its token in the head's loss", 0, 1)
    selector: float = _entry(0.5, "weight of the selector's loss")
    gamma: float = _entry(4.0, "position k weighs exp(-(k - 1) / gamma)", 0.01)
    rate: float = _entry(1e-3, "peak learning rate")
    muon_rate: float = _entry(1e-3, "that of layers' and fc's matrices under Muon; 0 leaves them to AdamW")
    codebook_rate: float = _entry(3e-3, "that of the selector's codebooks")
    warm_up: int = _entry(200, "steps until the peak", 1)
    decay: float = _entry(0.3, "share of the steps, the last ones, over which the rate falls to 0", 0, 1)
    batch: int = _entry(4, "conversations of a step", 1)
    anchors: int = _entry(40, "blocks of each of them", 1)
    steps: int = _entry(10_000, "in all", 1)
    seed: int = _entry(0, "of everything that is drawn", most=2**63 - 1)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; one of {', '.join(KINDS)} is trained")
        for entry in fields(self):
            value, least, most = getattr(self, entry.name), entry.metadata["least"], entry.metadata["most"]
            if isinstance(value, int | float) and not least <= value <= most:
                raise ConfigError(f"{entry.name} is {value}; {least} to {most} is possible")

    def rate_at(self, step: int) -> float:
        """Share of the peak rate in step `step`, counted from 0: up, level, and straight down to 0 at the end."""
        left = (self.steps - step) / max(1.0, self.decay * self.steps)
        return max(0.0, min(1.0, (step + 1) / self.warm_up, left))

    def arch(self, target: Arch) -> DraftArch:
        """The drafter's shape: the target's widths, the recipe's depth. Raises ConfigError if the two do not fit."""
        two = self.kind == "dflash2"
        if list(self.taps) != sorted(set(self.taps)) or not all(0 <= tap < target.num_layers for tap in self.taps):
            raise ConfigError(
                f"taps are {list(self.taps)}; ascending layers of 0 to {target.num_layers - 1} are needed"
            )
        if not 0 <= self.mask_token < target.vocab_size or self.vocabulary > target.vocab_size:
            wrong = f"mask_token is {self.mask_token}, vocabulary {self.vocabulary}"
            raise ConfigError(f"{wrong}; the target has {target.vocab_size} ids")
        return DraftArch(
            kind=self.kind,
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_layers=self.layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            vocab_size=target.vocab_size,
            max_position=target.max_position,
            rms_norm_eps=1e-6,
            rope=RopeParameters(target.rope.theta),  # answers are short: no scaling is learnt
            attention_bias=False,
            block_size=self.block,
            taps=self.taps,
            num_target_layers=target.num_layers,
            target_hidden_size=target.hidden_size,
            mask_token_id=self.mask_token,
            windows=(0,) * self.layers,
            causal=(False,) * self.layers,
            first_slot=1,
            conv_taps=CONV_TAPS if two and self.convolution else 0,
            conv_group=CONV_GROUP if two and self.convolution else 0,
            selector_rank=self.rank if two else 0,
            selector_top_k=TOP_K,
        )

    def differs(self, saved: dict[str, Any]) -> str:
        """The first field in which a saved recipe is another one, told in words; "" if none is."""
        mine = asdict(self) | {"taps": list(self.taps)}
        saved = saved | {"taps": list(saved.get("taps", ()))}
        for name, value in mine.items():
            if name not in LONGER and saved.get(name) != value:
                return f"{name} is {value}, and was {saved.get(name)}"
        return ""
