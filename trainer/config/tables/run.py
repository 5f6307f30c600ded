"""Tables about the run itself: where its output goes, what it shows, what it keeps."""

from typing import Literal

from pydantic import Field

from trainer.config.tables.base import Duration, Names, NotNegative, Positive, Steps, Table, Text


class Job(Table):
    """The job as a whole."""

    dump_folder: Text | None = None
    """Folder for everything that the run writes. Unset: outputs/<name of the configuration file>."""

    description: str = ""
    """A line about the run, shown when it starts."""

    print_args: bool = False
    """Print the whole effective configuration when the run starts. It is always in config.toml."""

    time_limit: Duration | None = None
    """End in time, the state saved, with exit code 3, before the job has run so long: "2:00:00", "1-12:00:00" or
    seconds. From measured times of steps and saves; all ranks end after the same step."""

    max_restarts: NotNegative = 0
    """How often the launcher starts the job again from its last checkpoint after a rank has failed or hung (exit
    code 4). Under torchrun its --max-restarts does that."""


class Profiling(Table):
    """Measured pipeline timelines, and traces of time and memory by torch's profiler."""

    enable_profiling: bool = False
    """Write traces of the profiler."""

    save_traces_folder: Text = "profile_traces"
    """Folder for the traces, inside the run's folder."""

    profile_freq: Positive = 10
    """Steps from one trace to the next."""

    enable_memory_snapshot: bool = False
    """Write snapshots of the device's memory as often as traces."""

    save_memory_snapshot_folder: Text = "memory_snapshot"
    """Folder for the memory snapshots, inside the run's folder."""

    pipeline_timeline_steps: Steps = ()
    """Steps whose pipeline is measured on the devices' own clocks: when every rank did what, and for what it
    waited. Written to timeline/ as JSON, as a trace for Perfetto, and as a picture beside the plan."""


class Metrics(Table):
    """What is measured and shown. metrics.jsonl is always written."""

    log_freq: Positive = 10
    """Steps from one logged step to the next."""

    enable_tensorboard: bool = False
    """Write the metrics for TensorBoard too."""

    save_tb_folder: Text = "tb"
    """Folder for TensorBoard's files, inside the run's folder."""

    enable_wandb: bool = False
    """Send the metrics to Weights & Biases too. WANDB_MODE=offline keeps them on disk."""

    rank_0_only: bool = True
    """Write to TensorBoard and Weights & Biases on rank 0 only, which knows the loss in every layout."""

    disable_color_printing: bool = False
    """Print without colors and without the live progress line."""


class Checkpoint(Table):
    """Saving, and going on from what was saved."""

    enable_checkpoint: bool = False
    """Save checkpoints, and go on from the latest valid one when the same run is started again."""

    folder: Text = "checkpoint"
    """Folder for the checkpoints, inside the run's folder, or a URL that fsspec knows, such as s3://bucket/my-run."""

    interval: Positive = 500
    """Distance from one checkpoint to the next. The last step is always saved."""

    interval_type: Literal["steps", "seconds"] = "steps"
    """Unit of interval."""

    model_weights_only: bool = False
    """At the last step save the weights alone: smaller, but training cannot go on from them."""

    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights that model_weights_only and last_save_in_hf save."""

    keep_latest_k: NotNegative = 0
    """Keep this many checkpoints and delete older ones. 0 keeps all."""

    load_step: int = Field(default=-1, ge=-1)
    """Step of the checkpoint to go on from. -1: the latest valid one."""

    exclude_from_loading: Names = ()
    """What of a checkpoint is not loaded but starts anew: among optimizer, lr_scheduler, dataloader."""

    initial_load_path: Text | None = None
    """Start from these weights where the run has no checkpoint of its own yet: a Hugging Face folder, a run folder
    (its latest valid checkpoint) or one of its step-N folders; or the URL of a folder of checkpoints or of a step-N;
    or a step folder of torchtitan, of a Llama. Step 0, a fresh optimizer, the data from the start."""

    initial_load_in_hf: bool = False
    """Insist that initial_load_path is a Hugging Face folder; else it is recognised by its config.json."""

    initial_load_model_only: bool = True
    """Take only the weights of initial_load_path. If false, go on from there with optimizer, step and data."""

    last_save_in_hf: bool = False
    """After the last checkpoint write its weights as a Hugging Face folder too: huggingface/step-N."""

    create_seed_checkpoint: bool = False
    """Save the initial parameters as step 0 and end, to start several runs from them."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Whether training waits while a checkpoint is written, or only while it is copied to the host's memory, which is
    kept for the next save; pinned: page-locked, so that with CUDA even the copy is not waited for. What the run ends
    with always is."""

    verify: Literal["full", "sizes"] = "full"
    """What is verified of a checkpoint before it is loaded: every byte against checksums, or the sizes of the files."""


class Comm(Table):
    """Communication between ranks, and how long to wait for it."""

    init_timeout_seconds: Positive = 300
    """Longest wait for all ranks to start and to end their first step."""

    train_timeout_seconds: Positive = 100
    """A rank without progress for so long, after its first step, ends the job with exit code 4."""

    interface: Text | None = None
    """Network interface on which ranks of several hosts talk, e.g. "eth0". Unset: the one by which the other hosts are
    reached, unless GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name one."""

    bind_processes: bool = True
    """Bind each process to its share of the cores that are nearest to its GPU, or of its NUMA domain, on machines that
    have GPUs or several domains."""

    health_check: Literal["auto", "always", "never"] = "auto"
    """Measure, before the first step, the speed of every rank's device, its connection to the next rank and its clock,
    in a few seconds, and name ranks that fall behind. auto: with GPUs or on several hosts."""

    slow_rank_policy: Literal["warn", "stop"] = "warn"
    """What the health check does about a slow rank: say so, or end the job with exit code 4."""

    check_replicas_every: NotNegative = 0
    """Steps from one comparison of parameters and optimizer state among the ranks that should hold the same, to the
    next; if they do not, the job ends with exit code 4 and says which rank has other values, and of what. 0: never."""

    trace_buf_size: NotNegative = 20000
    """Entries of the flight recorder of collectives, which is written when a job fails. 0 turns it off."""
