"""Is docs/keys.md what the models and tables say today, and does it name every documented key?"""

from __future__ import annotations

from pathlib import Path

from config_keys import DISAGREEMENTS, catalogue, page

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"

# The keys of the reference's documentation, as it spells them.
DOCUMENTED = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer sub_group_size
cpu_offload_param cpu_offload_use_pin_memory cpu_offload prefetch_bucket_size stage3_prefetch_bucket_size
param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold
stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance
stage3_max_reuse_distance gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients
zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients mics_shard_size
mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
device nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write fast_init ratio
super_offload cpuadam_cores_perc zenflow zeropp_loco_param leaf_module stage3_module_granularity_threshold
stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_allgather_single_param
log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds
enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states auto_cast loss_scale
initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads
fp16_master_weights_and_gradients dtype lower_precision_safe_modules grad_accum_dtype param_dtype buffer_dtype
keep_in_fp32_modules
communication_data_type amp train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps type params
lr betas eps weight_decay torch_adam adam_w_mode fp32_optimizer_states zero_allow_untested_optimizer
zero_force_ds_cpu_optimizer gradient_clipping managed_gradient_accumulation gradient_allreduce_op prescale_gradients
gradient_predivide_factor warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio
cos_min_ratio cycle_min_lr cycle_max_lr lr_range_test_min_lr steps_per_print wall_clock_breakdown dump_state seed checkpoint
dataloader_drop_last comms_logger tensorboard wandb csv_monitor flops_profiler activation_checkpointing sparse_attention
"""


def test_page_is_what_the_models_say() -> None:
    made = page()
    assert PAGE.read_text(encoding="utf-8") == made, (
        "run: python docs/config_keys.py > docs/keys.md"
    )


def test_page_names_every_documented_key() -> None:
    made = page()
    assert [key for key in DOCUMENTED.split() if f"`{key}`" not in made] == []


def test_every_key_has_a_row_with_kind_default_and_fate() -> None:
    for section in catalogue():
        for key in section.keys:
            assert key.default
            assert key.kind or section.path == ""
            assert key.asks or key.note or section.path == "scheduler.params"


def test_refused_and_computed_keys_give_a_reason() -> None:
    unexplained = [
        k.path
        for s in catalogue()
        for k in s.keys
        if k.fate in ("refused", "computed") and not k.note
    ]
    assert not unexplained


def test_disagreements_are_about_keys_that_exist() -> None:
    assert set(DISAGREEMENTS) <= {key.path for section in catalogue() for key in section.keys}
