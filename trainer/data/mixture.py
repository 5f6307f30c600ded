"""Sequences from several sources in given shares, and what of each has been read.

Every sequence is of one source. Source s, with weight w, takes its k-th sequence at the time (k + u) / w, where
0 <= u < 1 is drawn from (seed, s, k), and the sequences follow in the order of their times: the shares are exact to
about a sequence, the order is random, and follows from how many each source has given. A source that has ended, for
its epochs or its limit are over, is left out, and the others go on in the proportions of their weights. A source
without either begins again for ever.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from trainer.data.encoding import Encode
from trainer.data.packing import Row, best_fit, cut
from trainer.data.stream import Position, TokenStream
from trainer.errors import ConfigurationError

_log = logging.getLogger(__name__)

_COUNTS = ("epoch", "document", "offset", "row", "turn", "sequences", "tokens", "bad_documents")


@dataclass(frozen=True)
class Member:
    """A source of a mixture; its share of the sequences is its weight over the sum of all. It ends before a sequence
    that would give it more than `limit_tokens` tokens."""

    name: str
    stream: TokenStream
    weight: float = 1.0
    limit_tokens: int | None = None


@dataclass(frozen=True)
class Place:
    """How far a source has been read: where its next sequence begins, and how much it has given since the start."""

    position: Position = field(default_factory=Position)
    turn: int = 0  # its sequences, in the mixture as it is now
    sequences: int = 0
    tokens: int = 0  # without those that fill sequences up
    bad_documents: int = 0


Places = tuple[Place, ...]


@dataclass(frozen=True)
class Packing:
    """How documents become sequences of `length` inputs: see `trainer.data.packing`."""

    length: int
    kind: Literal["cut", "best_fit"] = "cut"
    lookahead: int = 64


@dataclass(frozen=True)
class Mixture:
    """The sources of a run, at least one, with names of their own."""

    members: Sequence[Member]
    packing: Packing
    seed: int = 0

    @classmethod
    def of(cls, stream: TokenStream, length: int) -> Mixture:
        """A single stream, cut."""
        return cls((Member("data", stream),), Packing(length))

    @property
    def name(self) -> str:
        """For messages."""
        return " and ".join(member.stream.source.name for member in self.members)

    @property
    def start(self) -> Places:
        """Where each source begins."""
        return (Place(),) * len(self.members)

    def rows(self, places: Places, encode: Encode | None = None) -> Iterator[tuple[Row, Places]]:
        """Sequences from `places` on, each with the places after it; ends when every source has."""
        sources = [
            self._rows_of(member, place, encode) for member, place in zip(self.members, places, strict=True)
        ]
        times = {index: self._time(index, place) for index, place in enumerate(places)}
        while times:
            index = min(times, key=lambda each: (times[each], each))
            row, place = next(sources[index], None), places[index]
            limit = self.members[index].limit_tokens
            if row is None or (limit is not None and place.tokens + row.inputs > limit):
                del times[index]
                continue
            place = Place(
                row.after or self.members[index].stream.end,
                place.turn + 1,
                place.sequences + 1,
                place.tokens + row.inputs,
                place.bad_documents + row.bad,
            )
            places = (*places[:index], place, *places[index + 1 :])
            times[index] = self._time(index, place)
            yield row, places

    def state_dict(self, places: Places) -> dict[str, Any]:
        """The places as JSON can hold them."""
        return {
            "packing": asdict(self.packing),
            "sources": {
                member.name: {
                    **asdict(place.position),
                    **{key: value for key, value in asdict(place).items() if key != "position"},
                    "weight": member.weight,
                    "stream": member.stream.describe(),
                }
                for member, place in zip(self.members, places, strict=True)
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Places:
        """The places in a state, maybe of another mixture: a source that is new begins at its start.

        Warns, naming what, if data, tokenizer, seed or order are not those that a position was taken in: tokens may
        then be repeated or left out. Raises ConfigurationError if `state` is none.
        """
        saved = state.get("sources")
        if not isinstance(saved, Mapping) or not all(map(_is_place, saved.values())):
            raise ConfigurationError(f"the checkpoint's data state is no position in the data: {dict(state)}")
        places = tuple(self._place(member, saved.get(member.name)) for member in self.members)
        gone = sorted(set(saved) - {member.name for member in self.members})
        if gone:
            _log.warning("the checkpoint's data has more sources, which are left out: %s", ", ".join(gone))
        weights = {name: each.get("weight") for name, each in saved.items()}
        if weights != {member.name: member.weight for member in self.members}:
            # From here on the new weights: not until their shares of the whole run are reached.
            places = tuple(replace(place, turn=0) for place in places)
        packed, now = state.get("packing") or {}, asdict(self.packing)
        if any(place.position.row for place in places) and packed != now:
            _log.warning(
                "how sequences are packed changed since the checkpoint: up to %d of each source are repeated",
                packed.get("lookahead", 0),
            )
            places = tuple(replace(place, position=replace(place.position, row=0)) for place in places)
        return places

    def _place(self, member: Member, saved: Mapping[str, Any] | None) -> Place:
        name = member.stream.source.name
        if saved is None:
            _log.warning("%s: is not in the checkpoint's data and begins at its start", name)
            return Place()
        then, now = saved.get("stream") or {}, member.stream.describe()
        changed = [key for key in {**now, **then} if then.get(key) != now.get(key)]
        if changed:
            _log.warning(
                "%s: %s changed since the checkpoint, so its position in the data (epoch %d, document %d) means "
                "other text now; some may be repeated or left out",
                *(name, " and ".join(changed), saved["epoch"], saved["document"]),
            )
        position = Position(saved["epoch"], saved["document"], saved["offset"], saved["row"])
        return Place(position, *(saved[key] for key in _COUNTS[4:]))

    def _rows_of(self, member: Member, place: Place, encode: Encode | None) -> Iterator[Row]:
        start = place.position
        pieces = member.stream.pieces(replace(start, row=0), encode)
        if self.packing.kind == "cut":
            return cut(pieces, self.packing.length)
        return best_fit(pieces, start, self.packing.length, self.packing.lookahead)

    def _time(self, index: int, place: Place) -> float:
        """When the next sequence of a source is due."""
        if len(self.members) == 1:
            return 0.0
        member = self.members[index]
        key = f"{self.seed} {member.name} {place.turn}".encode()
        drawn = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "little") / 2**48
        return (place.turn + drawn) / member.weight


def _is_place(saved: Any) -> bool:
    numbers = [saved.get(key) for key in _COUNTS] if isinstance(saved, Mapping) else [None]
    return all(isinstance(number, int) and number >= 0 for number in numbers)
