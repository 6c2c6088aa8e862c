"""WindowStates: the places of the keys of layers with a window, which are like the states of recurrent layers.

A window in the middle of a chunk is copied from the chunk's keys to its snapshot while the layer runs, so no slot is
needed for it. Drafts by the model itself write to the sequence's own slot, where the step overwrites their keys.
Graphs write no keys of padding rows, so sequences own every slot.
"""

from nanovllm.capabilities.recurrent.places import RecurrentStates

_NO_SLOT = -1
_ANY_NUMBER = 2**30


class WindowStates(RecurrentStates):
    first_slot = 0

    def __init__(self, num_slots: int, num_snapshots: int) -> None:
        super().__init__(num_slots, num_snapshots, model_drafts=False)

    @property
    def num_save_slots(self) -> int:
        return _ANY_NUMBER

    def _save_slot(self) -> int:
        return _NO_SLOT
