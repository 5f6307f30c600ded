"""What the sizes of decoder-only transformers have in common. No torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

from models.activations import Kernels, Saved, embedding_saved, last_norm_saved, output_saved
from models.mixture import Balancing

NormType = Literal["rmsnorm", "layernorm", "np_layernorm"]


class DecoderSizes(ABC):
    """An embedding, layers, a norm and an output: `models.sizes.Sizes` of all of it but the layers.

    A family's sizes are a frozen dataclass that derives from this, has the fields named here, and says what its
    layers are.
    """

    dim: int
    n_layers: int
    vocab_size: int
    max_seq_len: int
    norm_eps: float
    norm_type: NormType
    tie_embeddings: bool

    @property
    def balancing(self) -> Balancing:
        """How the family's experts are kept equally busy, as published."""
        return Balancing()

    @abstractmethod
    def layer_shapes(self, layer: str) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of the layer of this name, by its full name."""

    @abstractmethod
    def layer_flops(self, layer: str, seq_len: int) -> int:
        """Floating-point operations of its forward and backward for one token of a sequence of `seq_len`."""

    @abstractmethod
    def layer_saved(self, layer: str, element: int, kernels: Kernels) -> Saved:
        """What it keeps for its backward."""

    def modules(self) -> tuple[str, ...]:
        """All modules in the order in which the forward pass meets them."""
        layers = tuple(f"layers.{index}" for index in range(self.n_layers))
        return ("tok_embeddings", *layers, "norm", "output")

    def kind(self, module: str) -> str:
        """Modules of the same kind are alike in everything but their name: all layers are, unless a family says more."""
        return module.partition(".")[0]

    def parameter_shapes(self, module: str) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter of a module, by its full name. Raises KeyError if there is no such module.

        A matrix is (features out, features in). The output has no parameter of its own if it is tied to the
        embedding.
        """
        if module not in self.modules():
            raise KeyError(f"no module {module!r} in a model of {self.n_layers} layers")
        if module == "tok_embeddings":
            return {"tok_embeddings.weight": (self.vocab_size, self.dim)}
        if module == "norm":
            return self.norm_shapes("norm")
        if module == "output":
            return {} if self.tie_embeddings else {"output.weight": (self.vocab_size, self.dim)}
        return self.layer_shapes(module)

    def parameter_count(self, module: str | None = None) -> int:
        """Parameters of one module, or of the whole model."""
        modules = self.modules() if module is None else (module,)
        return sum(math.prod(shape) for name in modules for shape in self.parameter_shapes(name).values())

    def active_parameter_count(self, module: str | None = None) -> int:
        """Parameters that one token goes through: all but those of experts that it is not sent to."""
        modules = self.modules() if module is None else (module,)
        return sum(self.parameter_count(name) - self.idle_parameters(name) for name in modules)

    def idle_parameters(self, module: str) -> int:
        """Parameters of a module that a token does not go through."""
        return 0

    def flops_per_token(self, seq_len: int, module: str | None = None) -> int:
        """Floating-point operations of forward and backward for one token, of one module or of the whole model.

        Six per weight of a matrix product that the token goes through, and those of attention, causal masking not
        deducted: the model FLOPs of Chowdhery et al. 2022, PaLM (arXiv 2204.02311), appendix B.
        """
        modules = self.modules() if module is None else (module,)
        return sum(self._module_flops(name, seq_len) for name in modules)

    def saved(self, module: str, element: int, kernels: Kernels) -> Saved:
        """What a module keeps for its backward; `element` is the bytes of a number in the compute format."""
        match module:
            case "tok_embeddings":
                return embedding_saved()
            case "norm":
                return last_norm_saved(self.dim, self.norm_type, element, kernels)
            case "output":
                return output_saved(self.dim, self.vocab_size, element)
        return self.layer_saved(module, element, kernels)

    def norm_shapes(self, norm: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters of the norm of this full name, over the hidden state."""
        return {} if self.norm_type == "np_layernorm" else {f"{norm}.weight": (self.dim,)}

    def _module_flops(self, module: str, seq_len: int) -> int:
        if module in ("tok_embeddings", "norm"):
            return 0  # a look-up, and a few operations per feature
        if module == "output":
            return 6 * self.vocab_size * self.dim
        return self.layer_flops(module, seq_len)
