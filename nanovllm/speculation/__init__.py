"""Speculation: guesses of a sequence's next tokens, which one pass over its keys verifies together.

    drafters.py      where guesses come from
    pace.py          how many guesses are worth their time
    speculator.py    what the scheduler asks, and which sampled tokens are the sequence's own

A guess changes how fast tokens come, never which: the scheduler keeps what the model itself has sampled.
"""
