"""Speculation: guessing the next tokens, so that one step can check several at once."""
