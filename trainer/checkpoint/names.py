"""Full names of parameters: the same in every layout, whatever wraps the modules."""

# What activation checkpointing and torch.compile insert into the names of the modules that they wrap.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def full_name(name: str) -> str:
    """The name that a parameter has in the bare model, e.g. `layers.3.attention.wq.weight`."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
