"""Verification: which of the tokens that a step has sampled are the sequences' own."""

from nanovllm.core.step_plan import StepPlan


def verified_tokens(plan: StepPlan, token_ids: list[int]) -> list[list[int]]:
    """For each row of the plan, the sampled tokens up to the first that differs from the guess at its position.

    A sampled token after a wrong guess follows a text that the sequence does not have. `token_ids`: the step's result,
    which are the sampled tokens and then the drafted ones (see StepPlan).
    """
    if not plan.has_guesses:
        sampled_ids = iter(token_ids)
        return [[next(sampled_ids)] if step.sampling is not None else [] for step in plan.sequences]
    guesses = _guesses(plan, token_ids[plan.num_sampled :])
    tokens = []
    first = 0
    for row, step in enumerate(plan.sequences):
        sampled = token_ids[first : first + step.num_sampled]
        first += step.num_sampled
        num_right = 0
        while num_right < step.num_guesses and guesses[row][num_right] == sampled[num_right]:
            num_right += 1
        tokens.append(sampled[: num_right + 1])
    return tokens


def _guesses(plan: StepPlan, drafted: list[int]) -> list[list[int]]:
    """Each row's guesses, with the drafted tokens in their places."""
    guesses = [step.guesses for step in plan.sequences]
    drafts = iter(drafted)
    for i, rows in enumerate(plan.draft_rows()):
        for row in rows:
            draft = next(drafts)
            if i < len(guesses[row]) and guesses[row][i] < 0:
                guesses[row][i] = draft
    return guesses
