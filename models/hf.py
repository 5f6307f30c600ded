"""What the `hf` modules of the families have in common: how our weights and sizes are said in Hugging Face's terms.

Plain data, no torch: which of their tensors each of ours comes from and what is done to it, and the parts of their
`config.json` that several families share. `trainer/weights/` carries it out, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from models.sizes import RopeScaling, YarnScaling

Config = Mapping[str, Any]
"""The contents of a `config.json`."""


class UnsupportedConfig(ValueError):
    """A `config.json` describes a model that Stageline does not have; the message names key and value."""


@dataclass(frozen=True)
class Same:
    """The tensor is as theirs."""


@dataclass(frozen=True)
class RotaryHalves:
    """Within each head of `head_dim` rows, rows are in another order.

    Rotary positions turn pairs of features: here the neighbours 2i and 2i + 1, as in RoFormer and in Meta's files; in
    Hugging Face's files i and i + head_dim / 2. Row 2i of ours is their row i, and 2i + 1 their i + head_dim / 2.
    """

    head_dim: int

    def theirs(self, row: int) -> int:
        """Their row that is our row of this index."""
        head, within = divmod(row, self.head_dim)
        pair, second = divmod(within, 2)
        return head * self.head_dim + second * (self.head_dim // 2) + pair


@dataclass(frozen=True)
class Stacked:
    """One tensor of each expert there; here one for all, with the experts along its first dimension."""


Change = Same | RotaryHalves | Stacked


@dataclass(frozen=True)
class Weight:
    """One tensor of ours.

    Attributes:
        name: its full name here.
        shape: its shape here.
        theirs: the names of the tensors that it consists of; one, but for `Stacked`.
        change: what is done to theirs to make it ours.
        full_precision: whether it stays in fp32 when a model is written in another number format.
    """

    name: str
    shape: tuple[int, ...]
    theirs: tuple[str, ...]
    change: Change = Same()
    full_precision: bool = False

    def their_shape(self) -> tuple[int, ...]:
        """The shape of each of theirs."""
        return self.shape[1:] if isinstance(self.change, Stacked) else self.shape


class HuggingFaceFormat(Protocol):
    """What a family's module `hf` offers."""

    MODEL_TYPES: tuple[str, ...]
    """The values of `model_type` in `config.json` that are this architecture."""

    def sizes_of(self, config: Config) -> Any:
        """The sizes that a `config.json` says. Raises UnsupportedConfig, or SizesError for impossible ones."""
        ...

    def config_of(self, sizes: Any) -> dict[str, Any]:
        """The `config.json` of a model of these sizes, without data type and tokens. Raises UnsupportedConfig."""
        ...

    def weights_of(self, sizes: Any) -> tuple[Weight, ...]:
        """Every tensor of a model of these sizes, in the model's order."""
        ...

    def is_left_out(self, sizes: Any, name: str) -> bool:
        """Whether a tensor of theirs has no counterpart here although the files are of such a model."""
        ...


# Names that most architectures there share.
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
NORM = "model.norm.weight"


ROTARY_BUFFER = ".rotary_emb.inv_freq"
"""How the name of a tensor ends that old files hold: it follows from the configuration."""


def required(config: Config, key: str) -> Any:
    """A value that must be there. Raises UnsupportedConfig."""
    if config.get(key) is None:
        raise UnsupportedConfig(f"{key} is missing")
    return config[key]


def expect(config: Config, expected: Mapping[str, object]) -> None:
    """Raise UnsupportedConfig if a key is there, is not null, and has another value than the expected one."""
    for key, value in expected.items():
        if config.get(key) is not None and config[key] != value:
            raise UnsupportedConfig(f"{key} = {config[key]!r}; Stageline's model has {value!r}")


def rope_of(config: Config, default_theta: float = 10_000.0) -> tuple[float, Config]:
    """The base of the rotary wavelengths, and the table of their scaling with its "rope_type" ("default": none).

    Files of transformers 5 have both in `rope_parameters`, older ones in `rope_theta` and `rope_scaling`, whose type
    the oldest call "type".
    """
    table = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = table.pop("rope_theta", None) or config.get("rope_theta") or default_theta
    table["rope_type"] = table.get("rope_type") or table.get("type") or "default"
    if table.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise UnsupportedConfig("partial_rotary_factor: Stageline's model turns all features of a head")
    return float(theta), table


def llama3_scaling(table: Config) -> RopeScaling | None:
    """The scaling that Llama 3.1 introduced, or none. Raises UnsupportedConfig for another type."""
    match table["rope_type"]:
        case "default":
            return None
        case "llama3":
            return RopeScaling(
                factor=float(required(table, "factor")),
                low_freq_factor=float(required(table, "low_freq_factor")),
                high_freq_factor=float(required(table, "high_freq_factor")),
                original_max_seq_len=int(required(table, "original_max_position_embeddings")),
            )
    raise UnsupportedConfig(f"rope_type = {table['rope_type']!r}; expected 'llama3' or none")


def yarn_scaling(table: Config, max_seq_len: int) -> YarnScaling | None:
    """YaRN, or none; `max_seq_len` is that of the configuration. Raises UnsupportedConfig for another type."""
    match table["rope_type"]:
        case "default":
            return None
        case "yarn":
            expect(table, {"truncate": True})
            scaling = YarnScaling(
                factor=float(required(table, "factor")),
                original_max_seq_len=int(table.get("original_max_position_embeddings") or max_seq_len),
                beta_fast=float(table.get("beta_fast") or 32.0),
                beta_slow=float(table.get("beta_slow") or 1.0),
                mscale=float(table.get("mscale") or 1.0),
                mscale_all_dim=float(table.get("mscale_all_dim") or 0.0),
            )
            expect(table, {"attention_factor": scaling.amplitude})
            return scaling
    raise UnsupportedConfig(f"rope_type = {table['rope_type']!r}; expected 'yarn' or none")


def rope_config(theta: float, scaling: RopeScaling | YarnScaling | None) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, as published files write them; every version of transformers reads these."""
    table: dict[str, Any] | None = None
    match scaling:
        case RopeScaling():
            table = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
            }
        case YarnScaling():
            table = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.original_max_seq_len,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
            }
            if scaling.mscale_all_dim:
                table |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return {"rope_theta": theta, "rope_scaling": table}


@dataclass(frozen=True)
class Names:
    """How our names translate into theirs.

    Attributes:
        outer: of the tensors outside the layers, by our full name.
        in_layer: of those within a layer, without our `layers.N.` and their `model.layers.N.`.
        experts: of those that have one for each expert there; `{expert}` stands for its number.
        head_dims: rows of a head, by our name within a layer, of those whose rows are in another order there.
        full_precision: our names within a layer of what stays in fp32.
    """

    outer: Mapping[str, str]
    in_layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    head_dims: Mapping[str, int] = field(default_factory=dict)
    full_precision: frozenset[str] = frozenset()

    def weight(self, name: str, shape: tuple[int, ...]) -> Weight:
        """The weight of this full name. Raises KeyError if nothing is said of it."""
        if not name.startswith("layers."):
            return Weight(name, shape, (self.outer[name],))
        _, index, inner = name.split(".", 2)
        layer = f"model.layers.{index}"
        if inner in self.experts:
            theirs = tuple(
                f"{layer}.{self.experts[inner].format(expert=number)}" for number in range(shape[0])
            )
            return Weight(name, shape, theirs, Stacked())
        change = RotaryHalves(self.head_dims[inner]) if inner in self.head_dims else Same()
        theirs = (f"{layer}.{self.in_layer[inner]}",)
        return Weight(name, shape, theirs, change, full_precision=inner in self.full_precision)


OUTER_NAMES = MappingProxyType(
    {"tok_embeddings.weight": EMBEDDING, "norm.weight": NORM, "output.weight": OUTPUT}
)
ATTENTION_NAMES = MappingProxyType(
    {
        "attention.wq.weight": "self_attn.q_proj.weight",
        "attention.wk.weight": "self_attn.k_proj.weight",
        "attention.wv.weight": "self_attn.v_proj.weight",
        "attention.wo.weight": "self_attn.o_proj.weight",
    }
)
FEED_FORWARD_NAMES = MappingProxyType(
    {
        "feed_forward.w1.weight": "mlp.gate_proj.weight",
        "feed_forward.w2.weight": "mlp.down_proj.weight",
        "feed_forward.w3.weight": "mlp.up_proj.weight",
    }
)
NORM_NAMES = MappingProxyType(
    {
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    }
)
EXPERT_NAMES = MappingProxyType(
    {
        "moe.experts.w1": "mlp.experts.{expert}.gate_proj.weight",
        "moe.experts.w2": "mlp.experts.{expert}.down_proj.weight",
        "moe.experts.w3": "mlp.experts.{expert}.up_proj.weight",
    }
)


def shapes_of(sizes: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter by full name, in the model's order."""
    names: Sequence[str] = sizes.modules()
    return {name: shape for module in names for name, shape in sizes.parameter_shapes(module).items()}
