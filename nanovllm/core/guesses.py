"""What guesses yield: the arithmetic that plans and the pace of speculation share."""


def expected_tokens(acceptance: float, num_guesses: int) -> float:
    """Tokens that a pass with k guesses yields on average, if each is right with probability a when those before it
    are: 1 + a + ... + a^k (Leviathan, Kalman, Matias: Fast inference from transformers via speculative decoding, 2023).
    """
    return float(sum(acceptance**i for i in range(num_guesses + 1)))
