"""Claims: for each key that is honoured, a value that differs from its default, what it changes in the policy, and the test
that sees what it changes in a run. test_every_key.py checks them against the catalogue: a new key without a claim fails there.

Keys that are refused or computed need no claim: their note is the promise, and test_every_key.py and test_refused_keys.py
flip each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tiermem import Precision, Tier
from tiermem.policy import IoSettings, LeafRules, NvmePath


class Claim(NamedTuple):
    """What a key does, and who has seen it."""

    value: Any
    """Another value than the default."""
    seen_by: str
    """The test that flips the key and sees a run's bytes, events, steps or lines change: path::name."""
    policy: Mapping[str, Any] = {}
    """Fields of the policy that change, with what they become; no other may."""
    beside: Mapping[str, Any] = {}
    """What the rest of the config has to say for the key to matter."""


RUN = "tests/engine/test_keys_on_a_run.py::"
ENGINE = "tests/engine/test_engine.py::"
PRECISION = "tests/engine/test_engine_precision.py::"
SWITCHES = "tests/config/test_precision_switches.py::"
OPTIMIZER = "tests/config/test_config_optimizer.py::"

GRADS = "tests/ranks/test_grads_on_ranks.py::"
GATHERS = "tests/ranks/test_gathers.py::"
LEAVES = "tests/zero/test_leaf_modules.py::"

ZERO = "zero_optimization."
PARAM = ZERO + "offload_param."
OPTIM = ZERO + "offload_optimizer."

STAGE_2 = {"zero_optimization": {"stage": 2}}
STAGE_3 = {"zero_optimization": {"stage": 3}}
NVME_PARAM = {
    "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}}
}
NVME_OPTIM = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/a"}}
}
CPU_OPTIM = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
STRICT = {"tiermem": {"strict": True}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True}}
ADAM = {"optimizer": {"type": "Adam"}}


def with_io(**fields: Any) -> dict[str, Any]:
    return {"io": IoSettings(**fields)}


CLAIMS: dict[str, Claim] = {
    # the top
    "train_batch_size": Claim(6, RUN + "test_any_two_batch_sizes_give_micro_batches_and_steps"),
    "train_micro_batch_size_per_gpu": Claim(3, RUN + "test_any_two_batch_sizes_give_micro_batches_and_steps"),
    "gradient_accumulation_steps": Claim(2, RUN + "test_any_two_batch_sizes_give_micro_batches_and_steps"),
    "gradient_clipping": Claim(0.0, RUN + "test_gradient_clipping_bounds_the_step"),
    "communication_data_type": Claim(
        "fp32", "tests/ranks/test_reduced_dtypes.py::test_gradients_add_up_in_what_is_asked", {"reduce_dtype": "fp32"}
    ),
    "fp32_allreduce": Claim(
        True, "tests/ranks/test_reduced_dtypes.py::test_gradients_add_up_in_what_is_asked", {"reduce_dtype": "fp32"}
    ),
    "steps_per_print": Claim(2, RUN + "test_steps_per_print_spaces_the_lines_of_progress"),
    "wall_clock_breakdown": Claim(True, RUN + "test_wall_clock_breakdown_adds_the_phases_to_a_line_of_progress"),
    "dump_state": Claim(True, RUN + "test_dump_state_logs_every_key_at_the_start"),
    "seed": Claim(
        7, RUN + "test_seed_decides_the_order_of_training_data", {"precision": Precision(seed=7)}
    ),
    "dataloader_drop_last": Claim(True, RUN + "test_dataloader_drop_last_leaves_out_the_batch_that_is_not_full"),
    "gradient_allreduce_op": Claim("sum", GRADS + "test_ranks_train_as_the_twin_whatever_the_way", {"reduce_op": "sum"}),
    "prescale_gradients": Claim(
        True, GRADS + "test_ranks_train_as_the_twin_whatever_the_way", {"predivide_factor": "ranks"}
    ),
    "gradient_predivide_factor": Claim(
        4.0, GRADS + "test_ranks_train_as_the_twin_whatever_the_way", {"predivide_factor": 4.0}
    ),
    "managed_gradient_accumulation": Claim(
        False, "tests/engine/test_accumulation.py::test_not_managed_every_step_is_the_boundary"
    ),
    # zero_optimization
    ZERO + "allgather_bucket_size": Claim(
        1000, GRADS + "test_allgather_bucket_size_bounds_what_comes_in_one_call",
        {"allgather_bucket_numel": 1000}, STAGE_2,
    ),
    ZERO + "ignore_unused_parameters": Claim(
        False, GRADS + "test_unused_parameters_end_training_on_all_ranks_with_their_names",
        {"ignore_unused": False}, STAGE_3,
    ),
    ZERO + "stage": Claim(
        2, RUN + "test_states_on_nvme_rest_in_files_in_every_stage_that_shards_them", {"stage": 2}
    ),
    ZERO + "reduce_bucket_size": Claim(
        1000, GRADS + "test_no_bucket_is_larger_than_asked_and_the_payload_is_the_same",
        {"reduce_bucket_numel": 1000}, STAGE_3,
    ),
    ZERO + "stage3_gather_16bit_weights_on_model_save": Claim(
        True, "tests/engine/test_engine_weights.py::test_partitioned_weights_are_not_saved_unless_asked", {}, STAGE_3
    ),
    ZERO + "stage3_prefetch_bucket_size": Claim(
        0, GATHERS + "test_prefetch_bucket_size_says_how_much_is_gathered_ahead", {"prefetch_numel": 0}, STAGE_3
    ),
    ZERO + "stage3_max_live_parameters": Claim(
        13_000, GATHERS + "test_max_live_parameters_keeps_two_blocks_from_being_live",
        {"max_live_numel": 13_000}, STAGE_3,
    ),
    ZERO + "stage3_max_reuse_distance": Claim(
        0, GATHERS + "test_max_reuse_distance_of_zero_gives_every_unit_up_at_once", {"max_reuse_numel": 0}, STAGE_3
    ),
    ZERO + "stage3_param_persistence_threshold": Claim(
        0, GATHERS + "test_persistence_thresholds_say_what_is_never_gathered", {"persistence_numel": 0}, STAGE_3
    ),
    ZERO + "stage3_model_persistence_threshold": Claim(
        300, GATHERS + "test_persistence_thresholds_say_what_is_never_gathered", {"model_persistence_numel": 300}, STAGE_3
    ),
    ZERO + "stage3_allgather_sequential": Claim(
        True, GATHERS + "test_single_parameters_are_gathered_one_by_one", {"gather_way": "single"}
    ),
    ZERO + "stage3_module_granularity_threshold": Claim(
        2000, LEAVES + "test_the_config_names_leaves", {"leaves": LeafRules(granularity_numel=2000)}, STAGE_3
    ),
    ZERO + "leaf_module.classes": Claim(
        "SparseBlock", LEAVES + "test_the_config_names_leaves", {"leaves": LeafRules(classes=("SparseBlock",))}, STAGE_3
    ),
    ZERO + "leaf_module.names": Claim(
        ["layers.0"], LEAVES + "test_the_config_names_leaves", {"leaves": LeafRules(names=("layers.0",))}, STAGE_3
    ),
    ZERO + "leaf_module.name_suffixes": Claim(
        [".0"], LEAVES + "test_the_config_names_leaves", {"leaves": LeafRules(name_suffixes=(".0",))}, STAGE_3
    ),
    ZERO + "override_module_apply": Claim(
        False, "tests/zero/test_init_arguments.py::test_apply_of_an_engine_gathers_unless_told_not_to", {}, STAGE_3
    ),
    ZERO + "mics_shard_size": Claim(
        2, "tests/ranks/test_mesh_on_ranks.py::test_states_are_divided_among_as_many_ranks_as_asked",
        {"shard_group_size": 2}, STAGE_3,
    ),
    ZERO + "mics_hierarchical_params_gather": Claim(
        True, "tests/ranks/test_mesh_on_ranks.py::test_two_stage_gathers_cross_nodes_with_one_part_each",
        {"two_stage_gather": True}, {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    ),
    ZERO + "zero_hpz_partition_size": Claim(
        2, "tests/ranks/test_mesh_on_ranks.py::test_with_a_second_copy_no_gather_of_backward_leaves_the_node",
        {"secondary_group_size": 2}, STAGE_3,
    ),
    ZERO + "zero_quantized_weights": Claim(
        True, "tests/ranks/test_mesh_on_ranks.py::test_quantised_gathers_send_a_byte_per_element_and_a_scale_per_block",
        {"quantised_gather": True}, STAGE_3,
    ),
    ZERO + "zero_quantized_nontrainable_weights": Claim(
        True, "tests/zero/test_quantised_frozen.py::test_a_fetch_reads_the_bits_of_blocks",
        {"quantised_frozen": True}, STAGE_3,
    ),
    ZERO + "zero_quantized_gradients": Claim(
        True, "tests/ranks/test_mesh_on_ranks.py::test_quantised_reductions_send_within_the_node_and_then_across",
        {"quantised_reduction": True}, STAGE_3,
    ),
    ZERO + "load_from_fp32_weights": Claim(
        False, RUN + "test_masters_are_loaded_or_made_from_the_weights_as_load_from_fp32_weights_says",
        {"loads_masters": False}, STAGE_3,
    ),
    ZERO + "sub_group_size": Claim(
        1024, RUN + "test_sub_group_size_cuts_the_step_into_tiles", {"tile_numel": 1024}, STAGE_3
    ),
    # offload_param
    PARAM + "device": Claim("cpu", ENGINE + "test_engine_trains_as_a_plain_loop", {"params": Tier.HOST}, STAGE_3),
    PARAM + "nvme_path": Claim(
        "/b", "tests/zero/test_paths_of_ranks.py::test_states_within_the_caps_are_dealt_over_both_paths",
        {"paths": (NvmePath("/b"),)}, NVME_PARAM,
    ),
    PARAM + "pin_memory": Claim(
        False, "tests/gpu/test_pinning.py::test_what_crosses_the_link_is_pinned_and_nothing_else",
        {"pin_memory": False}, NVME_PARAM,
    ),
    PARAM + "buffer_count": Claim(
        4, RUN + "test_parameter_buffers_on_nvme_are_as_many_as_buffer_count", {"unit_buffers": 4}, NVME_PARAM
    ),
    PARAM + "buffer_size": Claim(
        1000, RUN + "test_a_unit_larger_than_buffer_size_is_refused", {"unit_numel": 1000}, NVME_PARAM | STRICT
    ),
    PARAM + "max_in_cpu": Claim(
        1000, RUN + "test_max_in_cpu_keeps_parameters_off_the_disk", {"host_param_numel": 1000}, NVME_PARAM
    ),
    # offload_optimizer
    OPTIM + "device": Claim(
        "cpu", RUN + "test_states_on_nvme_rest_in_files_in_every_stage_that_shards_them", {"optim": Tier.HOST}, STAGE_3
    ),
    OPTIM + "nvme_path": Claim(
        "/b", "tests/zero/test_paths_of_ranks.py::test_states_within_the_caps_are_dealt_over_both_paths",
        {"paths": (NvmePath("/b"),)}, NVME_OPTIM,
    ),
    OPTIM + "pin_memory": Claim(
        False, "tests/gpu/test_pinning.py::test_what_crosses_the_link_is_pinned_and_nothing_else",
        {"pin_memory": False}, NVME_OPTIM,
    ),
    OPTIM + "buffer_count": Claim(
        8, RUN + "test_four_optimizer_buffers_hold_one_tile", {"tile_buffers": 2}, NVME_OPTIM
    ),
    OPTIM + "pipeline_read": Claim(
        False, "tests/optim/test_reads_before_step.py::test_nothing_is_read_early_when_the_policy_does_not_want_it",
        {"pipeline_read": False}, NVME_OPTIM,
    ),
    OPTIM + "pipeline_write": Claim(
        False, RUN + "test_a_pipeline_that_is_off_takes_fewer_buffers_and_ends_each_tile_first",
        {"pipeline_write": False}, NVME_OPTIM,
    ),
    OPTIM + "ratio": Claim(
        0.5, "tests/accelerator/test_device_step.py::test_the_ratio_is_the_part_of_the_states_that_rests_elsewhere",
        {"optim_ratio": 0.5}, NVME_OPTIM,
    ),
    # bf16
    "bf16.enabled": Claim(True, ENGINE + "test_engine_trains_as_a_plain_loop"),
    "bf16.check_grad_overflow": Claim(
        False, PRECISION + "test_without_the_check_a_step_is_applied_whatever_it_holds", {"on_nonfinite": "apply"}, BF16
    ),
    "bf16.bf16_master_weights_and_grads": Claim(
        True, PRECISION + "test_fp32_moments_beside_a_bf16_master_stay_fp32",
        {"precision": Precision(master="bf16", grads="bf16", rounding="nearest")}, BF16 | CPU_OPTIM,
    ),
    "bf16.bf16_optimizer_states": Claim(
        True, PRECISION + "test_bf16_states_warn_once_with_the_arithmetic",
        {"precision": Precision(master="bf16", moments="bf16", grads="bf16", rounding="nearest")},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **CPU_OPTIM},
    ),
    # fp16
    "fp16.enabled": Claim(True, ENGINE + "test_fp16_with_a_dynamic_scale_skips_and_recovers"),
    "fp16.auto_cast": Claim(True, RUN + "test_auto_cast_gives_the_model_fp16_inputs", {}, FP16),
    "fp16.loss_scale": Claim(128.0, ENGINE + "test_a_static_scale_changes_no_loss", {}, FP16),
    "fp16.initial_scale_power": Claim(24, ENGINE + "test_fp16_with_a_dynamic_scale_skips_and_recovers", {}, FP16),
    "fp16.loss_scale_window": Claim(3, ENGINE + "test_fp16_with_a_dynamic_scale_skips_and_recovers", {}, FP16),
    "fp16.hysteresis": Claim(1, PRECISION + "test_a_loss_scale_waits_for_its_hysteresis", {}, FP16),
    "fp16.consecutive_hysteresis": Claim(
        True, "tests/optim/test_scaling.py::test_consecutive_hysteresis_forgives_again_after_a_good_step", {}, FP16
    ),
    "fp16.min_loss_scale": Claim(4, "tests/optim/test_scaling.py::test_scale_never_falls_below_its_minimum", {}, FP16),
    "fp16.fp16_master_weights_and_grads": Claim(
        True, PRECISION + "test_states_are_kept_in_what_the_switches_say",
        {"precision": Precision(master="fp16", grads="fp16", rounding="nearest")}, FP16 | CPU_OPTIM,
    ),
    # data_types
    "data_types.grad_accum_dtype": Claim(
        "fp32", "tests/optim/test_precision_states.py::test_micro_batches_add_up_in_the_dtype_asked_for",
        {"precision": Precision(grads="fp32")}, BF16,
    ),
    "data_types.param_dtype": Claim("bf16", SWITCHES + "test_param_dtype_is_what_the_sections_say", {}, BF16),
    "data_types.buffer_dtype": Claim("bf16", RUN + "test_buffer_dtype_casts_floating_point_buffers_alone"),
    "data_types.keep_in_fp32_modules": Claim(["bias"], RUN + "test_listed_buffers_are_fp32", {}, BF16),
    # torch_autocast
    "torch_autocast.enabled": Claim(True, PRECISION + "test_forward_runs_under_autocast"),
    "torch_autocast.dtype": Claim("fp16", PRECISION + "test_autocast_to_fp16_scales_the_loss", {}, AUTOCAST),
    "torch_autocast.lower_precision_safe_modules": Claim(
        ["torch.nn.Linear"], "tests/ranks/test_reduced_dtypes.py::test_gradients_add_up_in_what_is_asked", {}, AUTOCAST
    ),
    # aio
    "aio.block_size": Claim(
        65536, "tests/swap/test_queue_options.py::test_options_change_no_byte", with_io(block_bytes=65536), STRICT
    ),
    "aio.queue_depth": Claim(
        3, "tests/swap/test_queue_options.py::test_blocks_beyond_the_depth_go_on_while_python_holds_the_gil",
        with_io(depth=3), STRICT,
    ),
    "aio.intra_op_parallelism": Claim(
        2, RUN + "test_engine_says_who_moves_the_blocks", with_io(depth=IoSettings().depth, threads=2)
    ),
    "aio.thread_count": Claim(
        2, RUN + "test_engine_says_who_moves_the_blocks",
        with_io(depth=IoSettings().depth, threads=2),
    ),
    "aio.num_threads": Claim(
        2, RUN + "test_engine_says_who_moves_the_blocks", with_io(depth=IoSettings().depth, threads=2)
    ),
    "aio.single_submit": Claim(
        True, "tests/swap/test_queue_options.py::test_options_change_no_byte", with_io(single_submit=True)
    ),
    "aio.overlap_events": Claim(
        False, "tests/swap/test_queue_options.py::test_options_change_no_byte", with_io(overlap_events=False)
    ),
    "aio.use_gds": Claim(False, "tests/config/test_config_aio.py::test_gds_names_the_first_thing_that_is_missing"),
    # optimizer
    "optimizer.type": Claim("Lion", PRECISION + "test_every_optimizer_trains_as_on_ordinary_parameters", {"num_moments": 1}),
    "optimizer.params.fp32_optimizer_states": Claim(
        False, PRECISION + "test_states_are_kept_in_what_the_switches_say",
        {"precision": Precision(master="bf16", moments="bf16", grads="bf16", rounding="nearest")},
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, **CPU_OPTIM, **ADAM},
    ),
    **{
        f"optimizer.params.{name}": Claim(
            value, RUN + "test_a_setting_of_an_optimizer_changes_the_weights", policy, {"optimizer": section}
        )
        for name, value, policy, section in (
            ("lr", 0.5, {}, {"type": "Adam"}),
            ("weight_decay", 0.5, {}, {"type": "Adam"}),
            ("betas", [0.5, 0.9], {}, {"type": "Adam"}),
            ("eps", 0.1, {}, {"type": "Adam"}),
            ("amsgrad", True, {"num_moments": 3}, {"type": "Adam"}),
            ("maximize", True, {}, {"type": "Adam"}),
            ("adam_w_mode", False, {}, {"type": "Adam"}),
            ("momentum", 0.9, {"num_moments": 1}, {"type": "SGD"}),
            ("dampening", 0.1, {}, {"type": "SGD", "params": {"momentum": 0.9}}),
            ("nesterov", True, {}, {"type": "SGD", "params": {"momentum": 0.9}}),
            ("lr_decay", 0.1, {}, {"type": "Adagrad"}),
            ("initial_accumulator_value", 0.1, {}, {"type": "Adagrad"}),
            ("ns_steps", 3, {}, {"type": "Muon"}),
            ("muon_lr", 0.1, {}, {"type": "Muon"}),
            ("adam_lr", 0.1, {}, {"type": "Muon"}),
        )
    },
    "optimizer.params.torch_adam": Claim(
        True, OPTIMIZER + "test_what_is_not_set_is_deepspeeds_default", {}, ADAM
    ),
    # scheduler
    "scheduler.type": Claim("OneCycle", RUN + "test_a_scheduler_by_name_changes_the_rate_of_each_step"),
    "scheduler.params": Claim(
        {"warmup_num_steps": 5}, RUN + "test_a_scheduler_by_name_changes_the_rate_of_each_step", {},
        {"scheduler": {"type": "WarmupLR"}},
    ),
    # checkpoint
    "checkpoint.tag_validation": Claim(
        "Fail", "tests/checkpoint/test_save_on_ranks.py::test_an_engine_validates_tags_as_its_config_says"
    ),
    # tiermem
    "tiermem.host_bytes": Claim("1GiB", RUN + "test_host_bytes_is_what_the_arena_takes_at_most", {"host_bytes": 1 << 30}),
    "tiermem.disk_bytes": Claim("1GiB", RUN + "test_disk_bytes_is_what_the_files_take_at_most", {"disk_bytes": 1 << 30}),
    "tiermem.paths": Claim(
        ["/a"], "tests/zero/test_paths_of_ranks.py::test_states_within_the_caps_are_dealt_over_both_paths", {}, NVME_OPTIM
    ),
    "tiermem.paths.path": Claim(
        "/a", "tests/zero/test_paths_of_ranks.py::test_states_within_the_caps_are_dealt_over_both_paths"
    ),
    "tiermem.paths.max_bytes": Claim(
        1, "tests/zero/test_paths_of_ranks.py::test_caps_below_the_plan_are_refused_before_any_weight_moves"
    ),
    "tiermem.paths.weight": Claim(2.0, "tests/swap/test_path_weights.py::test_one_path_and_given_weights_are_not_measured"),
    "tiermem.resident_bytes": Claim("1MiB", RUN + "test_resident_bytes_keeps_states_off_the_disk", {"resident_bytes": 1 << 20}),
    "activation_checkpointing.cpu_checkpointing": Claim(
        True,
        "tests/accelerator/test_activations.py::test_cpu_checkpointing_sends_inputs_of_checkpointed_blocks_to_host",
        {"activations": Tier.HOST},
    ),
    "tiermem.activations": Claim(
        "cpu", "tests/zero/test_activations.py::test_a_model_trains_to_the_same_bits", {"activations": Tier.HOST}
    ),
    "tiermem.activation_bytes": Claim(
        1 << 20,
        "tests/accelerator/test_activations.py::test_a_room_that_is_too_small_keeps_inputs_on_the_device",
        {"activation_bytes": 1 << 20},
        {"tiermem": {"activations": "cpu"}},
    ),
    "tiermem.device_bytes": Claim(
        1 << 30,
        "tests/accelerator/test_device_budget.py::test_units_that_stay_change_no_bit",
        {"device_bytes": 1 << 30},
    ),
    "tiermem.kv_bytes": Claim(
        1 << 20,
        "tests/accelerator/test_generation.py::test_units_give_way_to_the_cache_of_a_generation",
        {"kv_bytes": 1 << 20},
    ),
    "tiermem.fills_device": Claim(
        True,
        "tests/accelerator/test_fill.py::test_units_are_fetched_once_a_step_where_memory_has_room",
        {"fills_device": True},
    ),
    "tiermem.rehomes_states": Claim(
        True,
        "tests/accelerator/test_second_plan.py::test_states_take_the_room_that_the_first_step_leaves",
        {"rehomes_states": True},
    ),
    "tiermem.grads": Claim("cpu", RUN + "test_grads_says_where_gradients_rest", {"grads": Tier.HOST}, STAGE_3),
    "tiermem.accumulation": Claim(
        "layers", "tests/engine/test_layerwise.py::test_weights_are_read_twice_and_gradients_written_once",
        {"accumulation": "layers"}, STAGE_3,
    ),
    "tiermem.overlap": Claim(
        "none", RUN + "test_overlap_says_whether_a_step_goes_on_under_the_next_forward", {"overlap": "none"}, STAGE_3
    ),
    "tiermem.step_in_backward": Claim(
        True, ENGINE + "test_step_in_backward_trains_as_stepping_after_it",
        {"step_in_backward": True, "on_nonfinite": "raise"}, {"gradient_clipping": 0.0},
    ),
    "tiermem.on_nonfinite": Claim(
        "raise", ENGINE + "test_non_finite_gradients_are_skipped_or_raise_as_asked", {"on_nonfinite": "raise"}
    ),
    "tiermem.precision": Claim(
        "compact", PRECISION + "test_stochastic_bf16_states_do_not_warn", {"precision": Precision.preset("compact")}, BF16
    ),
    **{
        f"tiermem.precision.{part}": Claim(
            value, "tests/optim/test_precision_states.py::test_a_step_moves_the_bytes_of_its_precision",
            {"precision": Precision(**({} if part == "preset" else {part: value}))} if part != "preset"
            else {"precision": Precision.preset(value)}, BF16,
        )
        for part, value in (
            ("preset", "bf16"), ("master", "split"), ("moments", "bf16"), ("grads", "fp32"), ("rounding", "nearest"),
            ("seed", 3),
        )
    },
    "tiermem.compute_dtype": Claim(
        "fp32",
        "tests/zero/test_compute_dtype.py::test_every_tier_equals_a_twin_that_casts",
        {"compute_dtype": "fp32"},
        STAGE_3,
    ),
    "tiermem.streamed_ratio": Claim(
        0.5, "tests/accelerator/test_device_step.py::test_bits_are_equal_whatever_the_ratio", {"streamed_ratio": 0.5},
        NVME_OPTIM,
    ),
    "tiermem.frozen_quant_type": Claim(
        "nf4", "tests/zero/test_quantised_frozen.py::test_a_config_sets_it", {"frozen_quant_type": "nf4"}, STAGE_3
    ),
    "tiermem.master_from": Claim(
        "init", "tests/zero/test_init.py::test_masters_start_from_the_fp32_initial_values_when_asked", {"master_from": "init"}
    ),
    "tiermem.durability": Claim(
        "step", "tests/checkpoint/test_engine_saves.py::test_durability_step_makes_every_step_durable", {"durability": "step"},
        NVME_OPTIM,
    ),
    "tiermem.keep": Claim(2, "tests/checkpoint/test_engine_saves.py::test_keep_is_the_number_of_tags_that_stay", {"keep": 2}),
    "tiermem.copies": Claim(
        True, "tests/checkpoint/test_whole.py::test_a_key_makes_every_save_a_complete_copy", {"copies": True}
    ),
    "tiermem.verify": Claim(
        "resume", "tests/checkpoint/test_engine_saves.py::test_verify_says_which_reads_are_compared", {"verify": "resume"}
    ),
    "tiermem.sizes_are_least": Claim(
        False, RUN + "test_small_numbers_are_least_where_memory_allows_more", {"sizes_are_least": False}
    ),
    "tiermem.strict": Claim(
        True, "tests/config/test_refused_keys.py::test_what_does_nothing_is_dropped_with_one_warning_unless_strict",
        {"sizes_are_least": False},
    ),
    "tiermem.engine": Claim("threads", RUN + "test_engine_says_who_moves_the_blocks", with_io(engine="threads")),
    "tiermem.join_timeout_s": Claim(
        5.0, "tests/zero/test_joining.py::test_a_rank_that_never_comes_is_named_by_all", {"join_timeout_s": 5.0}
    ),
    "tiermem.timeout_s": Claim(
        5.0, "tests/ranks/test_lost_ranks.py::test_a_rank_that_hangs_is_waited_for_no_longer_than_the_policy_says",
        {"timeout_s": 5.0},
    ),
}  # fmt: skip
