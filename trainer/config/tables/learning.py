"""Tables about what is learned, from which text, and how."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from trainer.config.tables.base import (
    Allowed,
    BatchesOrAll,
    BelowOne,
    Betas,
    DegreeOrRest,
    Name,
    NotNegative,
    Positive,
    Table,
    Text,
    as_tuple,
)


class Model(Table):
    """Which model."""

    name: Text = "llama3"
    """Family of the model. One outside of this repository by where it is: "package.module:FAMILY", or
    "path/module.py:FAMILY" or "path/package:FAMILY"; see docs/adding-a-model.md."""

    flavor: Text = "debug"
    """Size within the family."""

    norm_type: Literal["rmsnorm", "layernorm", "np_layernorm"] = "rmsnorm"
    """Normalisation before attention, feed-forward and output; np_layernorm has no parameters."""

    attention: Literal["auto", "sdpa", "flash", "flex"] = "auto"
    """Kernel of attention. sdpa: torch's choice for the device; documents that are masked cost it a matrix of seq_len ×
    seq_len. flash: flash attention, in bfloat16. flex: flex attention, which leaves out what is masked; accelerators
    only. auto: flex on accelerators where documents are masked, otherwise sdpa."""

    tokenizer_path: Text | None = None
    """A sentencepiece .model, a Hugging Face tokenizer.json, a Llama 3 tokenizer.model in tiktoken's format, or
    "byte". Unset: a small tokenizer is trained on the corpus at first use."""

    override: Annotated[
        Mapping[str, Any], Allowed("sizes of the model family, such as dim, n_layers, n_heads, vocab_size")
    ] = Field(default_factory=dict)
    """Sizes that differ from the flavor's, in a table [model.override]."""


class Optimizer(Table):
    """The optimizer. Norms and biases are never decayed."""

    name: Literal["AdamW", "Adam", "Muon"] = "AdamW"
    """Adam adds the weight decay to the gradient, AdamW takes it off the weights. Muon orthogonalises the updates of
    the matrices of the layers, and is AdamW for everything else."""

    lr: float = Field(default=8e-4, gt=0)
    """Highest learning rate, reached after the warm-up."""

    betas: Betas = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""

    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean square."""

    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay of the matrices."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the running means. They are rounded to nearest: in bfloat16, betas above 0.99 are too slow to
    be seen in its 8 bits."""

    muon_momentum: BelowOne = 0.95
    """Decay rate of Muon's running mean of the gradient."""

    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Size of Muon's updates. "match_rms_adamw": as AdamW's, so that its lr and weight_decay are right for Muon too.
    "original": of operator norm 1, which wants a larger lr, such as 0.02."""

    fused: bool | None = None
    """One kernel for the whole update. Unset: where the device has it."""


class LRScheduler(Table):
    """The learning rate after the warm-up: stable, then decaying. The warm-up is training.warmup_steps."""

    decay_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of training.steps that decays, at their end; before it the rate is stable.
    Unset: it decays from the end of the warm-up."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""

    min_lr_factor: float = Field(default=0.0, ge=0, le=1)
    """Where the decay ends, as a share of optimizer.lr."""


class Training(Table):
    """The training loop and data parallelism."""

    dataset: Text = "python_docs"
    """"python_docs": the text that ships with Python. "text", "jsonl", "parquet" or "arrow": files at dataset_path.
    "chat": conversations in lines of JSON. "store": tokens that `stageline prepare` made; "megatron": an indexed data
    set of Megatron-LM. Else the name of a Hugging Face data set, such as "allenai/c4", which is streamed."""

    dataset_path: Text | None = None
    """File, folder or pattern (such as "corpus/*.jsonl") of a local data set; the folder of a token store."""

    text_column: Text = "text"
    """Column or field that holds the text."""

    batch_size: Positive = 8
    """Sequences of one data-parallel rank in one forward and backward, before they are cut into microbatches."""

    global_batch_size: Positive | None = None
    """Sequences of one optimizer step over all ranks; gradients are accumulated to reach it.
    Unset: batch_size × data-parallel ranks."""

    seq_len: Positive = 2048
    """Tokens of a sequence."""

    steps: Positive = 10000
    """Optimizer steps of the whole run."""

    warmup_steps: NotNegative = 200
    """Steps over which the learning rate rises from 0."""

    max_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm, taken over the whole model."""

    data_parallel_replicate_degree: Positive = 1
    """Copies of the model, each sharded over data_parallel_shard_degree ranks."""

    data_parallel_shard_degree: DegreeOrRest = -1
    """Ranks over which parameters, gradients and optimizer state are sharded (FSDP)."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether sharded parameters are released after each forward and gathered again for its backward. "default":
    without a pipeline they are, until the first backward of several; the stages of a pipeline stay gathered for the
    whole step, since every microbatch would gather them again. "always": least memory. "never": least traffic."""

    tensor_parallel_degree: Positive = 1
    """Ranks over which the matrices of every layer are divided, with the sequence between them."""

    fused_loss: bool = True
    """Compute logits, loss and their gradients for a few tokens at a time, so that the logits of all are never
    there. Not done with disable_loss_parallel."""

    loss_chunk: Positive = 1024
    """Tokens of which the logits are there at a time, with fused_loss."""

    disable_loss_parallel: bool = False
    """Gather the logits of tensor-parallel ranks for the loss, instead of computing it from each one's part of the
    vocabulary."""

    enable_cpu_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in the host's memory."""

    compile: bool = False
    """Compile every layer with torch.compile, on any device, with any layout. Slower to start."""

    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """Which compiler. "aot_eager" traces and plans what is kept for the backward, and makes no code."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Number format in which the model computes. The optimizer's copy of the weights is float32."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Number format in which gradients are summed over data-parallel ranks."""

    gc_freq: Positive = 50
    """Steps from one collection of Python's garbage to the next, at the same step on all ranks."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides the initial parameters and the order of the data, in every layout alike."""

    deterministic: bool = False
    """Use algorithms that give the same bits every time, even where they are slower."""

    nonfinite_policy: Literal["skip", "rollback", "stop"] = "skip"
    """If a loss or gradient is not finite: skip the step on all ranks; go back to the parameters and the optimizer of
    the last checkpoint, and on with the text that follows; or stop the job with exit code 5."""

    max_nonfinite_steps: NotNegative = 10
    """More skipped steps than this in a row, whatever they were skipped for, stop the job with exit code 5."""

    loss_spike_threshold: float | None = Field(default=None, gt=1)
    """A loss of more than this times the median of the last loss_spike_window losses is a spike, such as 1.5.
    Unset: no loss is."""

    loss_spike_window: Positive = 32
    """Steps whose losses say what is usual. Before there are so many, no loss is a spike."""

    loss_spike_policy: Literal["warn", "skip", "rollback", "stop"] = "warn"
    """If the loss spikes: say so; or what nonfinite_policy has."""

    max_rollbacks: NotNegative = 5
    """More rollbacks than this in the whole run stop the job with exit code 5."""

    load_balance_rate: float | None = Field(default=None, ge=0)
    """How much the bias of each expert changes after a step, for models that balance their experts by one.
    Unset: as the family was published (DeepSeek-V3: 0.001)."""

    load_balance_loss: float | None = Field(default=None, ge=0)
    """Factor of the loss of each sequence that balances the experts of a layer. It is not in the logged loss.
    Unset: as the family was published (DeepSeek-V3: 0.0001, Qwen3: 0.001)."""

    debug_moe_force_load_balance: bool = False
    """Send tokens to the experts one after the other, whatever their scores: for measurements of speed, which then do
    not depend on what was learned."""


class ValidationSet(Table):
    """A data set in [[validation.sets]]."""

    name: Name
    dataset: Text = "text"
    dataset_path: Text | None = None
    text_column: Text = "text"
    steps: BatchesOrAll | None = None


class DataSource(Table):
    """A data set in [[data.sources]]."""

    name: Name
    dataset: Text = "text"
    dataset_path: Text | None = None
    text_column: Text = "text"
    weight: float = Field(default=1.0, gt=0)
    epochs: Positive | None = None
    limit_tokens: Positive | None = None
    limit_documents: Positive | None = None


class Validation(Table):
    """Loss on text that is not trained on."""

    enable: bool = False
    """Validate while training."""

    dataset: Text | None = None
    """As training.dataset. Unset: like training."""

    dataset_path: Text | None = None
    """As training.dataset_path."""

    freq: Positive = 100
    """Training steps from one validation to the next. The last step is followed by one too."""

    steps: BatchesOrAll = 10
    """Batches of one validation; -1: the whole set, once, ended by all ranks after the same batch."""

    sets: Annotated[
        tuple[ValidationSet, ...],
        BeforeValidator(as_tuple),
        Allowed("tables [[validation.sets]]: name, dataset, dataset_path, text_column, steps"),
    ] = ()
    """Several sets, in place of dataset and dataset_path: name (letters, digits, - and _), dataset ("text" where it is
    unset), dataset_path, text_column, steps (as above where it is unset). Each has its loss logged as
    validation_loss/<name>; validation_loss is then the mean over the tokens of all."""

    batch_size: Positive | None = None
    """Sequences of one data-parallel rank in one batch. Unset: like training."""

    seq_len: Positive | None = None
    """Tokens of a sequence. Unset: like training."""


class Data(Table):
    """From documents to sequences."""

    shuffle: bool = True
    """Read documents in a random order, another one in each epoch, decided by training.seed. For data that is streamed,
    see shuffle_buffer."""

    shuffle_buffer: Positive = 1
    """Documents of streamed data that are shuffled among themselves: so many consecutive ones at a time are read before
    the first is used. 1: they are used as they come. A resumed run reads those of its place again, and none is lost."""

    sources: Annotated[
        tuple[DataSource, ...],
        BeforeValidator(as_tuple),
        Allowed(
            "tables [[data.sources]]: name, dataset, dataset_path, text_column, weight, epochs, limit_tokens, "
            "limit_documents"
        ),
    ] = ()
    """A mixture, in place of training.dataset: name (letters, digits, - and _), dataset ("text" where it is unset),
    dataset_path, text_column; weight (1 where it is unset): its share of the sequences is its weight over the sum of
    all; epochs: as below, of this source; limit_tokens: it ends after so many; limit_documents: only the first so many
    are read in each epoch. A source that has ended is left out, and the others share the rest by their weights; one
    without epochs and limit_tokens begins again for ever. See docs/data.md."""

    add_bos: bool = True
    """Begin each document with the token for that."""

    add_eos: bool = True
    """End each document with the token for that."""

    mask_documents: bool = False
    """Documents that share a sequence do not see each other: attention ends where a document begins, positions begin
    again at 0 there, and its first token is nobody's label. Otherwise each token sees all before it."""

    packing: Literal["cut", "best_fit"] = "cut"
    """From documents to sequences. "cut": documents one after the other, cut where a sequence is full. "best_fit":
    documents stay whole where they fit into a sequence, which is chosen so that little is left to fill up; no label
    crosses from one document to the next."""

    packing_lookahead: Positive = 64
    """Sequences that best_fit packs at a time: more of them are filled better, and have to be read before the first."""

    workers: NotNegative = 0
    """Processes of each rank that tokenize ahead. 0: a thread of the rank does. The tokens are the same."""

    on_error: Literal["skip", "stop"] = "skip"
    """Documents that are bad (empty, broken UTF-8, a broken line) are reported with file and position. "skip": left
    out, or kept with U+FFFD for the bytes that are broken, and counted in the metrics; "stop": the end of the run."""

    chat_template: Literal["plain", "chatml", "llama3", "tokenizer"] | None = None
    """How the messages of dataset "chat" become text. "plain": one after the other; "tokenizer": as the chat_template
    in the tokenizer_config.json beside the tokenizer says. Unset: that one if there is one, else "chatml"."""

    epochs: Positive | None = None
    """Read the corpus so many times, then end. Unset: repeat until training.steps."""
