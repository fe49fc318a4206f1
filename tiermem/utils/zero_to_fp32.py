"""The functions that users of the reference system import from its `utils.zero_to_fp32`; nothing is
defined here."""

from __future__ import annotations

from tiermem.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict as convert_zero_checkpoint_to_fp32_state_dict,
)
from tiermem.checkpoint.zero_to_fp32 import (
    convert_zero_checkpoint_to_state_dict as convert_zero_checkpoint_to_state_dict,
)
from tiermem.checkpoint.zero_to_fp32 import (
    get_fp32_state_dict_from_zero_checkpoint as get_fp32_state_dict_from_zero_checkpoint,
)
from tiermem.checkpoint.zero_to_fp32 import (
    load_state_dict_from_zero_checkpoint as load_state_dict_from_zero_checkpoint,
)
