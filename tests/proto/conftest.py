"""What the tests of messages share."""

from hypothesis import strategies as st

# NaN is no other NaN's equal, and no message has one: who could give one refuses or drops it.
st.register_type_strategy(float, st.floats(allow_nan=False))
