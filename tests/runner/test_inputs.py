"""Index arithmetic of a step, against a loop over tokens."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.capabilities.recurrent.memory import StateMemory
from nanovllm.capabilities.recurrent.places import StateStep
from nanovllm.kernels.sampling_tensors import SamplingTensors
from nanovllm.kernels.state_tensors import StateRows
from nanovllm.plan.step_plan import CpuSpan, KVMoves, PromptScores, SamplingRow, SequenceStep, StepPlan, StreamedGroup
from nanovllm.runner.cpu_part import CpuRows
from nanovllm.runner.graph_inputs import GraphBuffers, GraphShape
from nanovllm.runner.inputs import (
    GroupInputs,
    StepInputs,
    build_inputs,
    pad_tables,
    prompt_logprob_inputs,
    sampled_logprob_inputs,
    to_device,
)
from nanovllm.runner.kv_memory import build_batches, last_token_batches

BLOCK_SIZE = 8


def sequence_step(
    num_tokens: int,
    context_len: int,
    *,
    position: int | None = None,
    table: tuple[int, ...] = (),
    num_prompt_tokens: int = 100,
    sampling: SamplingRow | None = None,
    previous_row: int = -1,
    num_guesses: int = 0,
    num_drafts: int = 0,
    state: StateStep | None = None,
) -> SequenceStep:
    ids = np.arange(num_tokens, dtype=np.int64) + 1000 * context_len
    if previous_row >= 0:
        ids[-1 - num_guesses] = -1
    first_guess = num_tokens - num_guesses
    ids[first_guess : first_guess + num_drafts] = -1
    return SequenceStep(
        seq_id=context_len,
        token_ids=ids,
        position=context_len - num_tokens if position is None else position,
        num_prompt_tokens=num_prompt_tokens,
        block_table=table or tuple(range(-(-context_len // BLOCK_SIZE))),
        num_paged_keys=context_len,
        sampling=sampling,
        previous_row=previous_row,
        num_guesses=num_guesses,
        num_drafts=num_drafts,
        payloads=() if state is None else (state,),
    )


def random_state(rng: random.Random) -> StateStep | None:
    """None as in the steps that start-up measures: from zeros, to the slot of nobody."""
    return rng.choice([None, StateStep(rng.randint(-1, 9), rng.randint(1, 9), rng.randint(0, 3), load=5)])


def random_plan(rng: random.Random) -> StepPlan:
    """Some plans have drafts, and then no pending tokens."""
    steps = []
    has_drafts = rng.random() < 0.3
    for _ in range(rng.randint(1, 6)):
        num_tokens = rng.choice([1, 1, rng.randint(2, 30)])
        sampling = rng.choice([None, SamplingRow(0.5, 3, 0.9, 0.1, rng.getrandbits(63))])
        num_guesses = rng.randrange(min(num_tokens, 16)) if sampling and rng.random() < 0.5 else 0
        context_len = num_tokens + rng.randint(0, 40)
        steps.append(
            sequence_step(
                num_tokens,
                context_len,
                position=context_len - num_tokens + BLOCK_SIZE * rng.randint(0, 3),  # blocks that are streamed
                table=tuple(rng.sample(range(50), -(-context_len // BLOCK_SIZE))),
                num_prompt_tokens=rng.randint(1, 60),
                sampling=sampling,
                previous_row=-1 if has_drafts or num_guesses else rng.choice([-1, -1, rng.randint(0, 5)]),
                num_guesses=num_guesses,
                num_drafts=rng.randint(0, num_guesses) if has_drafts else 0,
                state=random_state(rng),
            )
        )
    return StepPlan(tuple(steps), KVMoves())


STATE_COLUMNS = StateRows._fields[1:5]
STATES = StateMemory.__new__(StateMemory)  # `columns` needs no memory


def inputs_of(*steps: SequenceStep) -> StepInputs:
    plan = StepPlan(steps, KVMoves())
    return build_inputs(plan, BLOCK_SIZE, 0, STATES.columns(plan))


def by_name(inputs: Any) -> dict[str, Any]:
    """The arrays of a step's inputs, those of `sampling` as `sampling.temperature` and so on, and the states'."""
    fields: dict[str, Any] = inputs._asdict()
    sampling, columns = fields.pop("sampling")._asdict(), fields.pop("companion_columns")
    assert not fields.pop("groups", ())
    states = dict(zip(STATE_COLUMNS, columns, strict=True))
    fields |= {f"sampling.{name}": values for name, values in sampling.items()}
    return fields | {f"states.{name}": values for name, values in states.items()}


def test_the_sampler_gets_the_fields_of_the_plans_rows() -> None:
    """They are filled by position."""
    assert SamplingTensors._fields == (*SamplingRow._fields, "position")


def test_arrays_of_random_steps_are_those_of_a_loop_over_tokens() -> None:
    rng = random.Random(0)
    for _ in range(200):
        plan = random_plan(rng)
        arrays = by_name(inputs_of(*plan.sequences))
        expected: dict[str, list[float]] = {name: [] for name in arrays}
        expected["cu_seqlens_q"], expected["sampling_cu_seqlens"] = [0], [0]
        token = 0
        drafted: dict[tuple[int, int], int] = {}  # (draft, row) -> token
        for row, step in enumerate(plan.sequences):
            for i, token_id in enumerate(step.token_ids.tolist()):
                key = step.num_paged_keys - step.num_tokens + i
                expected["input_ids"].append(token_id)
                expected["positions"].append(step.position + i)
                expected["rope_lens"].append(max(step.num_prompt_tokens, step.position + i + 1))
                cell = step.block_table[key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE
                expected["slot_mapping"].append(cell)
                token += 1
            expected["cu_seqlens_q"].append(token)
            expected["context_lens"].append(step.num_paged_keys)
            state = step.payload(StateStep) or StateStep(-1, 0)
            expected["states.source_slots"].append(state.source)
            expected["states.target_slots"].append(state.target)
            expected["states.num_replayed"].append(state.num_replayed)
            expected["states.num_guesses"].append(step.num_guesses)
            if step.sampling is not None:
                expected["sampling_seqs"].append(row)
                expected["sampling_cu_seqlens"].append(expected["sampling_cu_seqlens"][-1] + 1 + step.num_guesses)
                for i in range(1 + step.num_guesses):
                    expected["logits_rows"].append(token - step.num_guesses - 1 + i)
                    for name, value in step.sampling._asdict().items():
                        expected[f"sampling.{name}"].append(value)
                    expected["sampling.position"].append(step.position + step.num_tokens - step.num_guesses + i)
            drafted |= {(i, row): token - step.num_guesses + i for i in range(step.num_drafts)}
            expected["pending_rows"] += [-1] * (step.num_tokens - 1) + [step.previous_row]
        for number, draft in enumerate(sorted(drafted)):
            expected["pending_rows"][drafted[draft]] = number
        for name, values in expected.items():
            if name != "block_tables":
                assert arrays[name].tolist() == pytest.approx(values, abs=1e-6), name
        for table, step in zip(arrays["block_tables"].tolist(), plan.sequences, strict=True):
            assert table[: len(step.block_table)] == list(step.block_table)
            assert not any(table[len(step.block_table) :])


def make_buffers(max_num_rows: int, max_num_tokens: int = 1) -> GraphBuffers:
    return GraphBuffers(
        max_num_rows=max_num_rows,
        max_num_tokens=max_num_tokens,
        max_model_len=100,
        block_size=BLOCK_SIZE,
        vocab_size=30,
        padded_vocab_size=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
        column_paddings=StateMemory.paddings,
    )


@pytest.mark.parametrize("max_guesses", [0, 5])
def test_decode_graph_inputs_are_the_arrays_of_the_step_padded(max_guesses: int) -> None:
    """Steps of falling and rising size through the same buffers; ids from the host, and from the step before."""
    rng = random.Random(2)
    buffers = make_buffers(19)
    for _ in range(60):
        counts: list[int] = []  # rows of each sequence
        while not counts or (sum(counts) + 1 + max_guesses <= 19 and rng.random() < 0.8):
            counts.append(1 + rng.randint(0, max_guesses))
        steps = [
            sequence_step(
                num_rows,
                context_len := rng.randint(num_rows, 99),
                table=tuple(rng.sample(range(50), -(-context_len // BLOCK_SIZE))),
                sampling=SamplingRow(rng.random(), rng.randint(0, 50), rng.random(), rng.random(), rng.getrandbits(63)),
                previous_row=rng.choice([-1, rng.randint(0, 18)]) if num_rows == 1 else -1,
                num_guesses=num_rows - 1,
                state=random_state(rng),
            )
            for num_rows in counts
        ]
        inputs = inputs_of(*steps)
        buffers.sampled_ids.copy_(torch.tensor([rng.choice((-1, rng.randint(100_000, 200_000))) for _ in range(19)]))
        num_rows, num_seqs = sum(counts), len(counts)
        size = min(size for size in (4, 8, 16, 19) if size >= num_rows)
        buffers.fill_decode(inputs, size)
        got, want = by_name(buffers.tensors(GraphShape.decode(size))), by_name(inputs)
        for name in got.keys() - {"input_ids", "token_source", "cu_seqlens_q"}:
            num_padding = size - (num_seqs if name == "context_lens" or name.startswith("states.") else num_rows)
            padding = -(name in ("slot_mapping", "states.source_slots"))
            assert got[name].tolist() == [*want[name].tolist(), *[padding] * num_padding], name
        cu_seqlens = got["cu_seqlens_q"].tolist()  # each row of padding is a sequence; the others have no queries
        assert cu_seqlens[: num_seqs + 1] == want["cu_seqlens_q"].tolist()
        assert cu_seqlens[num_seqs:] == [*range(num_rows, size + 1), *[size] * (num_rows - num_seqs)]
        ids = buffers.input_ids(GraphShape.decode(size))[:num_rows].tolist()
        for step, end in zip(steps, cu_seqlens[1:], strict=False):
            expected = step.token_ids.tolist()
            if step.previous_row >= 0:
                expected = [buffers.sampled_ids[step.previous_row]]
            assert ids[end - step.num_tokens : end] == [max(token_id, 0) for token_id in expected]  # -1 has no row
        batch = buffers.decode_batch(size, 1 + max_guesses)
        assert batch.cu_seqlens_q.tolist() == (cu_seqlens if max_guesses else list(range(size + 1)))
        for step, table in zip(steps, batch.block_tables.tolist(), strict=False):
            assert tuple(table[: len(step.block_table)]) == step.block_table


@pytest.mark.parametrize("max_num_rows", [1, 8, 19])
def test_graph_inputs_begin_on_16_bytes(max_num_rows: int) -> None:
    """Else Triton compiles the kernels that read them once more, 0.8 s of a start with an empty cache."""
    buffers = make_buffers(max_num_rows, max_num_tokens=4096)
    for mixed_size in buffers.mixed_sizes:
        shape = GraphShape.mixed(mixed_size)
        tensors = by_name(buffers.tensors(shape))
        chunks = buffers.batch(
            tensors["cu_seqlens_q"], tensors["context_lens"][shape.first_chunk :], 9, shape.first_chunk
        )
        tensors |= {"chunk_lens": chunks.context_lens, "chunk_tables": chunks.block_tables}
        assert {name for name, tensor in tensors.items() if tensor.data_ptr() % 16} == set()
    for size in range(1, max_num_rows + 1):
        tensors = by_name(buffers.tensors(GraphShape.decode(size)))
        tensors |= {"sampled_ids": buffers.sampled_ids, "block_tables": buffers.decode_batch(size, 1).block_tables}
        assert {name for name, tensor in tensors.items() if tensor.data_ptr() % 16} == set()


def test_steps_of_both_kinds_in_turn_find_their_own_tables() -> None:
    """Decode graphs and graphs with chunks share the buffers, and tables that have not changed are not copied."""
    rng = random.Random(3)
    buffers = make_buffers(19, max_num_tokens=300)
    tables = [tuple(rng.sample(range(50), 12)) for _ in range(25)]
    for _ in range(200):
        seq = rng.randrange(len(tables))
        tables[seq] = tuple(rng.sample(range(50), 12))
        chosen = [table[: rng.randint(1, 12)] for table in rng.sample(tables, rng.randint(1, 19))]
        num_rows = rng.choice([len(chosen), max(0, len(chosen) - rng.randint(1, 8))])
        steps = [
            sequence_step(1 if i < num_rows else 5, BLOCK_SIZE * len(table), table=table)
            for i, table in enumerate(chosen)
        ]
        inputs = inputs_of(*steps)
        if num_rows == len(steps):
            size = rng.randint(num_rows, 19)
            buffers.fill_decode(inputs, size)
            found = buffers.decode_batch(size, 1).block_tables[:num_rows]
        else:
            shape = GraphShape.mixed(next(size for size in buffers.mixed_sizes if size.num_rows >= num_rows))
            buffers.fill(inputs, shape, num_rows, np.zeros(9, np.int32))
            given = buffers.tensors(shape)
            rows = buffers.batch(given.cu_seqlens_q, given.context_lens[:num_rows], 1).block_tables
            chunks = buffers.batch(given.cu_seqlens_q, given.context_lens[shape.first_chunk :], 9, shape.first_chunk)
            found = torch.cat([rows, chunks.block_tables[: len(steps) - num_rows]])
            lens = torch.cat([given.context_lens[:num_rows], given.context_lens[shape.first_chunk :]]).tolist()
            assert lens == [step.num_paged_keys for step in steps] + [0] * (8 - len(steps) + num_rows)
        for step, row in zip(steps, found.tolist(), strict=True):
            assert tuple(row[: len(step.block_table)]) == step.block_table


def test_array_types() -> None:
    arrays = inputs_of(*random_plan(random.Random(1)).sequences)
    int32 = {"cu_seqlens_q", "sampling_cu_seqlens", "context_lens", "block_tables"}
    float32 = {"temperature", "top_p", "min_p"}
    for name, values in by_name(arrays).items():
        is_int32 = name in int32 or name.startswith("states.")
        name = name.removeprefix("sampling.")
        assert values.dtype == (np.int32 if is_int32 else np.float32 if name in float32 else np.int64), name


def test_step_that_samples_nothing_has_no_rows() -> None:
    inputs = inputs_of(sequence_step(5, 9))
    assert all(array.shape == (0,) for array in (inputs.logits_rows, *inputs.sampling))


def test_log_probabilities_are_asked_for_by_row() -> None:
    """Both sampled tokens and prompt tokens. Some prompt tokens may have been scored before a preemption."""
    row = SamplingRow()
    steps = (
        sequence_step(3, 9, sampling=row, num_guesses=2),
        sequence_step(4, 9)._replace(scores=PromptScores(1, np.array([7, 8]), 2)),
        sequence_step(2, 9, sampling=row, num_guesses=1)._replace(num_logprobs=3),
        sequence_step(5, 9)._replace(scores=PromptScores(0, np.array([5]), 4)),
        sequence_step(1, 9, sampling=row)._replace(num_logprobs=0),
    )
    plan = StepPlan(steps, KVMoves())
    sampled, prompt = sampled_logprob_inputs(plan), prompt_logprob_inputs(plan)
    assert sampled is not None and sampled.token_ids is None
    assert (sampled.rows.tolist(), sampled.num_top) == ([3, 4, 5], 3)
    assert prompt is not None
    assert (prompt.rows.tolist(), prompt.token_ids.tolist(), prompt.num_top) == ([4, 5, 9], [7, 8, 5], 4)  # type: ignore[union-attr]
    plain = StepPlan(steps[:1], KVMoves())
    assert sampled_logprob_inputs(plain) is None and prompt_logprob_inputs(plain) is None


def test_pad_tables_missing_entries_are_a_valid_block() -> None:
    assert pad_tables([(3, 4), (), (5,)], 3).tolist() == [[3, 4, 0], [0, 0, 0], [5, 0, 0]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_to_device_keeps_types_shapes_values_and_places(device: str) -> None:
    groups = tuple(GroupInputs(np.full(2, i, np.int32), np.full((2, 3), -i, np.int32)) for i in range(3))
    inputs = inputs_of(*random_plan(random.Random(2)).sequences)._replace(groups=groups)
    nested = (np.zeros((0, 3), np.int32), None, (np.arange(7, dtype=np.int32), 5, inputs), np.ones(3, np.float32))
    empty, none, (seven, five, moved), last = to_device(nested, torch.device(device))
    assert (none, five) == (None, 5)
    pairs = [(empty, nested[0]), (seven, np.arange(7, dtype=np.int32)), (last, nested[3])]
    for got, want in zip(moved.groups, groups, strict=True):
        pairs += zip(got, want, strict=True)
    arrays = by_name(inputs._replace(groups=()))
    pairs += [(tensor, arrays.pop(name)) for name, tensor in by_name(moved._replace(groups=())).items()]
    assert not arrays
    for tensor, array in pairs:
        assert tensor.device.type == device
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.cpu().numpy(), array)
        assert tensor.cpu().numpy().dtype == array.dtype
        assert tensor.data_ptr() % tensor.element_size() == 0


def test_nothing_is_moved_if_there_is_nothing() -> None:
    assert to_device(None, torch.device("meta")) is None


def test_batches_of_paged_keys_and_of_streamed_groups() -> None:
    steps = (sequence_step(3, 11, table=(4, 6)), sequence_step(1, 5, table=(2,)))
    groups = (StreamedGroup((7, 8, 9), ((0, 2), (1,))), StreamedGroup((3,), ((), (0,))))
    plan = StepPlan(steps, KVMoves(streamed=groups))
    inputs = build_inputs(plan, BLOCK_SIZE, group_blocks=3)
    assert {array.dtype for group in inputs.groups for array in group} == {np.dtype(np.int32)}
    tensors = to_device(inputs, torch.device("cpu"))
    batches = build_batches(plan, tensors, BLOCK_SIZE)

    paged = batches.paged
    assert paged.causal and (paged.max_query_len, paged.max_context_len) == (3, 11)
    assert paged.context_lens.tolist() == [11, 5] and paged.block_tables.tolist() == [[4, 6], [2, 0]]
    assert paged.host is not None
    assert (paged.host.query_lens, paged.host.context_lens) == ([3, 1], [11, 5])
    assert paged.host.block_tables == [(4, 6), (2,)]

    first, second = batches.groups
    assert not first.causal and (first.max_query_len, first.max_context_len) == (3, 16)
    assert first.context_lens.tolist() == [16, 8] and first.block_tables.tolist() == [[0, 2, 0], [1, 0, 0]]
    assert second.context_lens.tolist() == [0, 8] and second.block_tables.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert first.cu_seqlens_q.tolist() == second.cu_seqlens_q.tolist() == [0, 3, 4]
    assert second.host is not None and second.host.context_lens == [0, 8]


@pytest.mark.parametrize("num_guesses", [(0, 0, 0), (2, 0, 1)])
@pytest.mark.parametrize("samples", [(True, False, True), (False, True, False), (False, False, False)])
def test_batches_of_the_last_tokens_are_those_of_the_sequences_that_sample(
    samples: tuple[bool, ...], num_guesses: tuple[int, ...]
) -> None:
    row = SamplingRow(1.0)
    steps = tuple(
        sequence_step(n, context_len, table=table, sampling=row if does else None, num_guesses=g if does else 0)
        for n, context_len, table, does, g in zip(
            (3, 1, 2), (11, 5, 9), ((4, 6), (2,), (7, 1)), samples, num_guesses, strict=True
        )
    )
    spans = ((CpuSpan(9, 2, 8), CpuSpan(5, 0, 8)), (), (CpuSpan(6, 0, 8),))
    group = StreamedGroup((7, 8, 9), ((0, 2), (), (1,)), num_cut_tokens=6)
    plan = StepPlan(steps, KVMoves(streamed=(group,), cpu_spans=spans))
    inputs = build_inputs(plan, BLOCK_SIZE, group_blocks=3)
    tensors = to_device(inputs, torch.device("cpu"))
    batches = build_batches(plan, tensors, BLOCK_SIZE)
    assert batches.cpu == CpuRows((3, 1, 2), spans)
    paged, (group_batch,), cpu = last_token_batches(plan, batches, tensors)
    query_lens = [1 + g for g, does in zip(num_guesses, samples, strict=True) if does]
    expected_spans = tuple(row for row, does in zip(spans, samples, strict=True) if does)
    assert cpu == CpuRows(tuple(query_lens), expected_spans)
    for batch, context_lens, rows in (
        (paged, (11, 5, 9), [[4, 6], [2, 0], [7, 1]]),
        (group_batch, (10, 0, 8), inputs.groups[0].block_tables.tolist()),
    ):
        expected = [context_len for context_len, does in zip(context_lens, samples, strict=True) if does]
        assert batch.context_lens.tolist() == expected
        assert batch.block_tables.tolist() == [table for table, does in zip(rows, samples, strict=True) if does]
        assert batch.cu_seqlens_q.tolist() == [sum(query_lens[:i]) for i in range(len(expected) + 1)]
        assert (batch.max_query_len, batch.max_context_len) == (max(query_lens, default=0), max(expected, default=0))
        assert batch.host is not None and batch.host.context_lens == expected
        assert batch.host.query_lens == query_lens and len(batch.host.block_tables) == len(expected)
    assert paged.causal and not group_batch.causal
