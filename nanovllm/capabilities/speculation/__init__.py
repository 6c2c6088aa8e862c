"""Speculation: guesses of a sequence's next tokens, which one pass over its keys verifies together.

    drafters.py      where guesses come from
    speculator.py    asks the drafters for the scheduler, for as many guesses as are worth their time

A guess changes how fast tokens come, never which: the scheduler keeps what the model itself has sampled.
"""
