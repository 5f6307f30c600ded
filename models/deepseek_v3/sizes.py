"""Sizes of DeepSeek-V3 as plain data, and of a model of its architecture.

Sources: DeepSeek-AI 2024, DeepSeek-V3 Technical Report (arXiv 2412.19437), section 4.2; Liu et al. 2025, Muon is
Scalable for LLM Training (arXiv 2502.16982), which is where Moonlight comes from; the released configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from models.activations import Kernels, Saved
from models.decoder_sizes import DecoderSizes, NormType
from models.deepseek_v3.activations import layer_saved
from models.mixture import Balancing, Mixture
from models.size_problems import norm_problems, not_above_zero, not_positive
from models.sizes import SizesError, YarnScaling


@dataclass(frozen=True)
class DeepSeekV3Sizes(DecoderSizes):
    """The sizes of one model. Raises SizesError with every reason why no model can have them.

    Attributes:
        dim: features of the hidden state.
        n_layers: how many layers.
        n_dense_layers: the first so many layers have a feed-forward layer, the others experts.
        n_heads: heads of attention.
        q_lora_rank: features of the latent vector that queries are made of; 0: they are made of the hidden state.
        kv_lora_rank: features of the latent vector that keys and values are made of.
        qk_nope_head_dim: features of a query or key that do not turn with the position.
        qk_rope_head_dim: those that do.
        v_head_dim: features of a value.
        ffn_hidden: features within a feed-forward layer.
        expert_hidden: features within each expert.
        n_experts: experts of a layer, the shared ones not counted.
        n_experts_per_token: how many of them each token goes through.
        n_shared_experts: experts that every token goes through.
        n_expert_groups: groups of neighbouring experts; divides n_experts.
        n_groups_per_token: from how many groups the experts of a token are taken.
        route_scale: the weights of a token's experts add up to this.
        vocab_size: rows of embedding and output.
        max_seq_len: how many positions the published configuration allows.
        norm_eps: added to the mean square in the norms of the hidden state; in those of latent vectors 1e-6 is.
        rope_theta: base of the rotary wavelengths.
        rope_scaling: YaRN, for sequences longer than those of the first training.
        tie_embeddings: whether the output is the embedding.
        norm_type: of the hidden state; those of latent vectors are always RMSNorm.
    """

    dim: int
    n_layers: int
    n_dense_layers: int
    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    ffn_hidden: int
    expert_hidden: int
    n_experts: int
    n_experts_per_token: int
    n_shared_experts: int
    n_expert_groups: int
    n_groups_per_token: int
    route_scale: float
    vocab_size: int
    max_seq_len: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: YarnScaling | None = None
    tie_embeddings: bool = False
    norm_type: NormType = "rmsnorm"

    def __post_init__(self) -> None:
        heads = ("n_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        experts = ("ffn_hidden", "expert_hidden", "n_experts", "n_expert_groups")
        problems = (
            *not_positive(self, ("dim", "n_layers", *heads, *experts, "vocab_size", "max_seq_len")),
            *not_above_zero(self, ("route_scale", "norm_eps", "rope_theta")),
            *norm_problems(self.norm_type),
            *_negative(self),
            *self.mixture.problems(),
            *_group_problems(self),
        )
        if problems:
            raise SizesError(problems)

    @property
    def n_kv_heads(self) -> int:
        """Keys and values have a head for each of the queries'."""
        return self.n_heads

    @property
    def head_dim(self) -> int:
        """Features of a query or key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mixture(self) -> Mixture:
        shared = self.n_shared_experts * self.expert_hidden
        return Mixture(self.dim, self.expert_hidden, self.n_experts, self.n_experts_per_token, shared)

    @property
    def balancing(self) -> Balancing:
        """Section 4.2 of the report."""
        return Balancing(rate=0.001, loss=0.0001)

    def is_dense(self, layer: str) -> bool:
        """Whether the layer of this name has a feed-forward layer and not experts."""
        return int(layer.removeprefix("layers.")) < self.n_dense_layers

    def kind(self, module: str) -> str:
        if not module.startswith("layers."):
            return module
        return "dense layers" if self.is_dense(module) else "layers"

    def layer_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        return {
            **self._attention_shapes(f"{layer}.attention"),
            **(self._ffn_shapes(f"{layer}.feed_forward") if self.is_dense(layer) else {}),
            **({} if self.is_dense(layer) else self.mixture.shapes(f"{layer}.moe")),
            **self.norm_shapes(f"{layer}.attention_norm"),
            **self.norm_shapes(f"{layer}.ffn_norm"),
        }

    def idle_parameters(self, module: str) -> int:
        return self.mixture.idle if module.startswith("layers.") and not self.is_dense(module) else 0

    def layer_flops(self, layer: str, seq_len: int) -> int:
        """Six per weight, and those of attention: 6 · H · (features of a key + of a value) · seq_len."""
        attention = self._attention_shapes("").values()
        weights = sum(shape[0] * shape[1] for shape in attention if len(shape) == 2)
        weights += 3 * self.dim * self.ffn_hidden if self.is_dense(layer) else self.mixture.active
        return 6 * weights + 6 * self.n_heads * (self.head_dim + self.v_head_dim) * seq_len

    def layer_saved(self, layer: str, element: int, kernels: Kernels) -> Saved:
        return layer_saved(self, self.is_dense(layer), element, kernels)

    def _attention_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        q_dim, q_rank = self.n_heads * self.head_dim, self.q_lora_rank
        queries: dict[str, tuple[int, ...]] = {f"{name}.wq.weight": (q_dim, self.dim)}
        if q_rank:
            queries = {
                f"{name}.wq_a.weight": (q_rank, self.dim),
                f"{name}.q_norm.weight": (q_rank,),
                f"{name}.wq_b.weight": (q_dim, q_rank),
            }
        kv_dim = self.n_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return {
            **queries,
            f"{name}.wkv_a.weight": (self.kv_lora_rank + self.qk_rope_head_dim, self.dim),
            f"{name}.kv_norm.weight": (self.kv_lora_rank,),
            f"{name}.wkv_b.weight": (kv_dim, self.kv_lora_rank),
            f"{name}.wo.weight": (self.dim, self.n_heads * self.v_head_dim),
        }

    def _ffn_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        return {
            f"{name}.w1.weight": (self.ffn_hidden, self.dim),
            f"{name}.w2.weight": (self.dim, self.ffn_hidden),
            f"{name}.w3.weight": (self.ffn_hidden, self.dim),
        }


def _negative(sizes: DeepSeekV3Sizes) -> tuple[str, ...]:
    names = ("n_dense_layers", "q_lora_rank", "n_shared_experts")
    return tuple(
        f"{name} must be at least 0, got {getattr(sizes, name)}" for name in names if getattr(sizes, name) < 0
    )


def _group_problems(sizes: DeepSeekV3Sizes) -> tuple[str, ...]:
    groups, of_token = sizes.n_expert_groups, sizes.n_groups_per_token
    if groups < 1 or sizes.n_experts < 1:
        return ()
    if sizes.qk_rope_head_dim % 2 != 0:
        return (f"qk_rope_head_dim {sizes.qk_rope_head_dim} is odd: rotary positions turn pairs",)
    if sizes.n_experts % groups != 0:
        return (f"n_experts {sizes.n_experts} is not divisible by n_expert_groups {groups}",)
    size = sizes.n_experts // groups
    if not 1 <= of_token <= groups:
        return (
            f"n_groups_per_token must be at least 1 and at most n_expert_groups {groups}, got {of_token}",
        )
    if of_token < groups and size < 2:
        return (
            f"n_expert_groups {groups} leaves 1 expert a group: the best groups have the two best experts",
        )
    if sizes.n_experts_per_token > of_token * size:
        return (
            f"n_experts_per_token {sizes.n_experts_per_token} is more than the {of_token * size} experts in "
            f"n_groups_per_token {of_token} groups",
        )
    return ()


_671B = DeepSeekV3Sizes(
    dim=7168,
    n_layers=61,
    n_dense_layers=3,
    n_heads=128,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    ffn_hidden=18432,
    expert_hidden=2048,
    n_experts=256,
    n_experts_per_token=8,
    n_shared_experts=1,
    n_expert_groups=8,
    n_groups_per_token=4,
    route_scale=2.5,
    vocab_size=129_280,
    max_seq_len=163_840,
    rope_scaling=YarnScaling(factor=40.0, original_max_seq_len=4096, mscale_all_dim=1.0),
)

DEEPSEEK_V3 = MappingProxyType(
    {
        # Ours: for a laptop. Eight layers, so that 4 ranks can hold 2 stages each; trained from the start, not scaled.
        "debug": replace(
            _671B,
            dim=256,
            n_layers=8,
            n_dense_layers=1,
            n_heads=8,
            q_lora_rank=96,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            ffn_hidden=512,
            expert_hidden=128,
            n_experts=16,
            n_experts_per_token=4,
            n_expert_groups=4,
            n_groups_per_token=2,
            vocab_size=2048,
            max_seq_len=4096,
            rope_scaling=None,
        ),
        # Moonlight-16B-A3B.
        "16B": replace(
            _671B,
            dim=2048,
            n_layers=27,
            n_dense_layers=1,
            n_heads=16,
            q_lora_rank=0,
            ffn_hidden=11264,
            expert_hidden=1408,
            n_experts=64,
            n_experts_per_token=6,
            n_shared_experts=2,
            n_expert_groups=1,
            n_groups_per_token=1,
            route_scale=2.446,
            vocab_size=163_840,
            max_seq_len=8192,
            norm_eps=1e-5,
            rope_theta=50_000.0,
            rope_scaling=None,
        ),
        "671B": _671B,
    }
)
