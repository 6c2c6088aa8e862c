"""Speculation: draft tokens of a sequence, which one verification step checks together.

    drafters.py      sources of draft tokens
    speculator.py    asks the drafters for the scheduler, for the number of draft tokens that is worth its time

A draft token changes how fast tokens come, never which: the scheduler keeps the tokens that the model has sampled.
"""
