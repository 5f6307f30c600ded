"""Random damage to valid lists: the verifier refuses exactly what an independent machine finds wrong."""

from hypothesis import given, settings
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action, ActionLists
from parallelisms.pipeline.communicate import add_communication
from parallelisms.pipeline.errors import VerificationError
from parallelisms.pipeline.verify import verify
from tests.pipeline.brute_force import Wrong, run_on_symbols
from tests.pipeline.settings import ValidLists, valid_lists


def damaged(lists: ActionLists, data: st.DataObject, made: ValidLists) -> ActionLists:
    rows = [list(actions) for actions in lists]
    row = rows[data.draw(st.integers(0, len(rows) - 1), "rank")]
    place = data.draw(st.integers(0, len(row) - 1), "place")
    damage = data.draw(st.sampled_from(("swap", "move", "drop", "duplicate", "exchange", "alter")), "damage")
    if damage == "swap":
        other = min(place + 1, len(row) - 1)
        row[place], row[other] = row[other], row[place]
    elif damage == "exchange":
        other = data.draw(st.integers(0, len(row) - 1), "other")
        row[place], row[other] = row[other], row[place]
    elif damage == "move":
        row.insert(data.draw(st.integers(0, len(row) - 1), "to"), row.pop(place))
    elif damage == "drop":
        del row[place]
    elif damage == "duplicate":
        row.insert(data.draw(st.integers(0, len(row)), "at"), row[place])
    else:
        action = row[place]
        stage = data.draw(st.integers(0, made.placement.stages), "stage")
        microbatch = data.draw(st.integers(0, made.microbatches), "microbatch")
        row[place] = Action(stage, action.kind, microbatch if action.kind.has_microbatch else None)
    return tuple(tuple(row) for row in rows)


@given(made=valid_lists(), sharded=st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_order_that_can_be_carried_out_is_proven(made: ValidLists, sharded: bool):
    lists = add_communication(made.lists, made.placement, sharded)
    held = run_on_symbols(lists, made.placement, made.microbatches, sharded)
    assert verify(lists, made.placement, made.microbatches, sharded=sharded).peak_activations == tuple(held)


@given(made=valid_lists(), sharded=st.booleans(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_lists_are_refused_or_still_right(made: ValidLists, sharded: bool, data: st.DataObject):
    lists = add_communication(made.lists, made.placement, sharded)
    for _ in range(data.draw(st.integers(1, 3), "damages")):
        if all(lists):
            lists = damaged(lists, data, made)
    assert accepted(lists, made, sharded) == right(lists, made, sharded)


def right(lists: ActionLists, made: ValidLists, sharded: bool) -> bool:
    try:
        run_on_symbols(lists, made.placement, made.microbatches, sharded)
    except Wrong:
        return False
    return True


def accepted(lists: ActionLists, made: ValidLists, sharded: bool) -> bool:
    try:
        verify(lists, made.placement, made.microbatches, sharded=sharded)
    except VerificationError:
        return False
    return True
