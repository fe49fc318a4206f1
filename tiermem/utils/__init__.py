"""The names that users of the reference system import from its `utils`; nothing is defined here.

safe_get_*, safe_set_*, safe_update_*    tiermem.state_access
*z3_leaf_module*, z3_leaf_parameter      tiermem.units.leaf
RepeatingLoader                          tiermem.engine.start
zero_to_fp32.*                           tiermem.checkpoint.zero_to_fp32
"""

from __future__ import annotations

from tiermem.engine.start import RepeatingLoader as RepeatingLoader
from tiermem.state_access import safe_get_full_fp32_param as safe_get_full_fp32_param
from tiermem.state_access import safe_get_full_grad as safe_get_full_grad
from tiermem.state_access import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from tiermem.state_access import safe_get_local_fp32_param as safe_get_local_fp32_param
from tiermem.state_access import safe_get_local_grad as safe_get_local_grad
from tiermem.state_access import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from tiermem.state_access import safe_set_full_fp32_param as safe_set_full_fp32_param
from tiermem.state_access import safe_set_full_grad as safe_set_full_grad
from tiermem.state_access import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from tiermem.state_access import safe_set_local_fp32_param as safe_set_local_fp32_param
from tiermem.state_access import safe_set_local_grad as safe_set_local_grad
from tiermem.state_access import safe_set_local_optimizer_state as safe_set_local_optimizer_state
from tiermem.state_access import (
    safe_update_full_grad_vectorized as safe_update_full_grad_vectorized,
)
from tiermem.state_access import (
    safe_update_local_states_vectorized as safe_update_local_states_vectorized,
)
from tiermem.units.leaf import get_z3_leaf_modules as get_z3_leaf_modules
from tiermem.units.leaf import set_z3_leaf_module as set_z3_leaf_module
from tiermem.units.leaf import set_z3_leaf_modules as set_z3_leaf_modules
from tiermem.units.leaf import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from tiermem.units.leaf import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from tiermem.units.leaf import unset_z3_leaf_modules as unset_z3_leaf_modules
from tiermem.units.leaf import z3_leaf_module as z3_leaf_module
from tiermem.units.leaf import z3_leaf_parameter as z3_leaf_parameter
