"""A model as lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) wants it; needs the package `lm_eval`.

What a task asks for is tokenized, cut and post-processed as lm-eval's own backend for Hugging Face models does, so
that the results are those of the exported model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from trainer.errors import StagelineError
from trainer.generation import Continuation
from trainer.inference import InferenceModel
from trainer.perplexity import windows
from trainer.sampling import Sampling
from trainer.scoring import Passage, Score, score

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

_NEW_TOKENS = 256  # of an answer, where the task does not say
_ANSWERS_AT_ONCE = 16


class StagelineLM(TemplateLM):
    """Answers lm-eval's three kinds of requests."""

    def __init__(self, loaded: InferenceModel, window: int, batch_size: int | None = None) -> None:
        """
        Args:
            loaded: the model and its tokenizer.
            window: tokens of the longest sequences that it is given; what is longer is cut at its begin.
            batch_size: sequences at a time; None: as many as memory for logits allows, or a fixed number of answers.
        """
        super().__init__()
        self._loaded = loaded
        self._window = window
        self._batch_size = batch_size

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        eos = self._loaded.tokenizer.eos_id
        return self._loaded.before_text if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text of which there is no context."""
        return self._loaded.before_text

    @property
    def tokenizer_name(self) -> str:
        """Part of the name under which lm-eval keeps prepared requests."""
        return type(self._loaded.tokenizer).__name__

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, begun as those in training were unless told otherwise."""
        if add_special_tokens is False:
            return self._loaded.tokenizer.encode(string, bos=False, eos=False)
        return self._loaded.encode(string)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Of each continuation (third) given its context (second): log-likelihood, and whether it is greedy."""
        passages = [self._passage(context, continuation) for _, context, continuation in requests]
        scores = self._score(passages, "Running loglikelihood requests", disable_tqdm)
        answers = [(each.log_likelihood, each.greedy) for each in scores]
        for (texts, *_tokens), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows that do not overlap."""
        passages: list[Passage] = []
        counts = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            found = (
                list(windows([self.prefix_token_id, *tokens], self._window, self._window)) if tokens else []
            )
            passages += found
            counts.append(len(found))
        scores = iter(self._score(passages, "Running loglikelihood_rolling requests", disable_tqdm))
        answers = [sum(next(scores).log_likelihood for _ in range(count)) for count in counts]
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """A text for each context, up to the first of its stop sequences. Requests are (context, how)."""
        answers = [""] * len(requests)
        bar = tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm)
        for batch in self._batches_of_like_answers(requests):
            contexts = [requests[index].args[0] for index in batch]
            for index, answer in zip(batch, self._answer(contexts, _how(requests[batch[0]])), strict=True):
                answers[index] = answer
                self.cache_hook.add_partial("generate_until", requests[index].args, answer)
            bar.update(len(batch))
        bar.close()
        return answers

    def _passage(self, context: Sequence[int], continuation: Sequence[int]) -> Passage:
        tokens = [*context, *continuation][-(self._window + 1) :]
        return Passage(tokens, min(len(continuation), len(tokens) - 1))

    def _score(self, passages: Sequence[Passage], what: str, quiet: bool) -> list[Score]:
        with tqdm(total=len(passages), desc=what, disable=quiet) as bar:
            return score(self._loaded.model, passages, self._batch_size, bar.update)

    def _batches_of_like_answers(self, requests: Sequence[Instance]) -> list[list[int]]:
        """Indices of requests that are answered together: in the same way, and of similar length."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(_how(request)), []).append(index)
        size = self._batch_size or _ANSWERS_AT_ONCE
        batches = []
        for group in groups.values():
            ordered = sorted(group, key=lambda index: -len(requests[index].args[0]))
            batches += [ordered[start : start + size] for start in range(0, len(ordered), size)]
        return batches

    def _answer(self, contexts: Sequence[str], how: dict[str, Any]) -> list[str]:
        wanted = normalize_gen_kwargs(how, _NEW_TOKENS)
        most = int(wanted["max_gen_toks"])
        room = self._window - most
        if room < 1:
            raise StagelineError(
                f"a task asks for answers of {most} tokens, and the model's window is {self._window}: "
                "a larger --window, or another task"
            )
        prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
        sampling = Sampling(
            float(wanted["temperature"]) if wanted["do_sample"] else 0.0,
            wanted.get("top_k"),
            wanted.get("top_p"),
        )
        texts = Continuation(
            self._loaded.model, prompts, most, sampling, range(len(prompts)), self._loaded.stop
        )
        stop = [term for term in handle_stop_sequences(wanted.get("until"), eos=None) if term]
        answers: list[list[int]] = [[] for _ in prompts]
        decode = self._loaded.tokenizer.decode
        # A token is a byte at least, so this many of the last ones hold whatever has just been completed.
        enough = max((len(term.encode()) for term in stop), default=0) + 8
        while not texts.done:
            for index, token in enumerate(texts.step()):
                if token is None:
                    continue
                answers[index].append(token)
                end = decode(answers[index][-enough:]) if stop else ""
                if any(term in end for term in stop):
                    texts.end(index)
        return [postprocess_generated_text(decode(answer), stop, None) for answer in answers]


def _how(request: Instance) -> dict[str, Any]:
    """How an answer is to be written: stop sequences, length, sampling."""
    how: dict[str, Any] = request.args[1]
    return how
