import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallelisms.pipeline.actions import Action, ActionSyntaxError, Kind


@st.composite
def actions(draw):
    kind = draw(st.sampled_from(list(Kind)))
    microbatch = draw(st.integers(0, 10**6)) if kind.has_microbatch else None
    chunk = draw(st.none() | st.integers(0, 99)) if kind.has_microbatch else None
    return Action(draw(st.integers(0, 10**4)), kind, microbatch, chunk)


@given(actions())
def test_the_text_of_an_action_reads_back_as_the_same_action(action):
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action} ") == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "1UNSHARD3", "2SEND_F", "-1F0", "2F0 1B0", "2f0"])
def test_a_text_that_is_no_action_is_refused_with_the_text(text):
    with pytest.raises(ActionSyntaxError, match=repr(text).replace("(", r"\(")):
        Action.parse(text)


@pytest.mark.parametrize(("kind", "microbatch"), [(Kind.FORWARD, None), (Kind.UNSHARD, 3)])
def test_an_action_cannot_be_made_with_a_microbatch_missing_or_in_excess(kind, microbatch):
    with pytest.raises(ValueError, match="microbatch"):
        Action(0, kind, microbatch)
