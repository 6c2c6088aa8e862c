"""Speculation: guesses of a sequence's next tokens, which one pass over its keys verifies together.

    drafters.py      where guesses come from
    pace.py          how many guesses are worth their time
    speculator.py    asks the drafters for the scheduler

A guess changes how fast tokens come, never which: the scheduler keeps what the model itself has sampled.
"""
