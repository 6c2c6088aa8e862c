"""Speculation: guesses of a sequence's next tokens, which one pass over its keys verifies together.

    drafters.py         where guesses come from
    prompt_lookup.py    the text so far as a drafter's source
    pace.py             how many guesses are worth their time
    speculator.py       what the scheduler asks
    verification.py     which sampled tokens are the sequence's own

A guess changes how fast tokens come, never which: the scheduler keeps what the model itself has sampled.
"""
