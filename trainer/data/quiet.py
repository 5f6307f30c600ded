"""Keep the datasets library from drawing progress bars over ours."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """No progress bars of the datasets library inside; outside they are as they were."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()
