"""Published configs: the keys and values of DeepSpeed configs that fine-tuning projects publish, by
repository and file."""

from __future__ import annotations

from typing import Any

_AUTO = dict.fromkeys(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ),
    "auto",
)
_SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
_FP16 = {"enabled": "auto", "initial_scale_power": 16, **_SCALE}
_BF16 = {"enabled": "auto"}
_CPU = {"device": "cpu", "pin_memory": True}
_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
_RATES = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
_MONITOR = {"enabled": True, "tag": "DeepSpeedMonitor", "csv_monitor": {"enabled": False}}
_QUIET = {"wall_clock_breakdown": False}
_BUCKETS = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    "auto",
)
_LIVE = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_ZERO3 = {
    "stage": 3,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    **_BUCKETS,
    **_LIVE,
    "overlap_comm": True,
}
_OFFLOAD = {"offload_optimizer": _CPU, "offload_param": _CPU}
_ZERO2 = {
    "stage": 2,
    "allgather_partitions": True,
    "reduce_scatter": True,
    "contiguous_gradients": True,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "hiyouga/LLaMA-Factory examples/deepspeed/ds_z3_offload_config.json": {
        **_AUTO,
        "zero_allow_untested_optimizer": True,
        "fp16": _FP16,
        "bf16": _BF16,
        "zero_optimization": {**_ZERO3, **_OFFLOAD, "overlap_comm": False, _GATHER: True},
        "comms_config": {"verbose": False},
        "monitor_config": _MONITOR,
    },
    "hiyouga/LLaMA-Factory examples/deepspeed/ds_z2_config.json": {
        **_AUTO,
        "zero_allow_untested_optimizer": True,
        "fp16": _FP16,
        "bf16": _BF16,
        "zero_optimization": {
            **_ZERO2,
            "allgather_bucket_size": 5e8,
            "overlap_comm": False,
            "reduce_bucket_size": 5e8,
            "round_robin_gradients": True,
        },
        "comms_config": {"verbose": False},
        "monitor_config": _MONITOR,
    },
    "axolotl-ai-cloud/axolotl deepspeed_configs/zero3_bf16_cpuoffload_all.json": {
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            **_OFFLOAD,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 0,
            **_BUCKETS,
            "max_live_parameters": 0,
            "max_reuse_distance": 0,
            "gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
        **_AUTO,
        **_QUIET,
    },
    "axolotl-ai-cloud/axolotl deepspeed_configs/zero1_torch_compile.json": {
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "bf16": _BF16,
        "fp16": {"enabled": "auto", "auto_cast": False, "initial_scale_power": 32, **_SCALE},
        "compile": {"disable": False, "backend": "inductor"},
        **_AUTO,
        **_QUIET,
    },
    "haotian-liu/LLaVA scripts/zero3_offload.json": {
        "fp16": _FP16,
        "bf16": {"enabled": True},
        "optimizer": _ADAMW,
        "scheduler": {"type": "WarmupLR", "params": _RATES},
        "zero_optimization": {**_ZERO3, **_OFFLOAD, "gather_16bit_weights_on_model_save": True},
        **_AUTO,
        "steps_per_print": 1e5,
        **_QUIET,
    },
    "tatsu-lab/stanford_alpaca configs/default_offload_opt_param.json": {
        "bf16": _BF16,
        "optimizer": _ADAMW,
        "scheduler": {"type": "WarmupDecayLR", "params": {**_RATES, "total_num_steps": "auto"}},
        "zero_optimization": {**_ZERO3, **_OFFLOAD, _GATHER: False},
        **_AUTO,
        "steps_per_print": 5,
        **_QUIET,
    },
    "modelscope/ms-swift swift/llm/ds_config/zero3_offload.json": {
        "fp16": _FP16,
        "bf16": _BF16,
        "optimizer": _ADAMW,
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": dict.fromkeys(("total_num_steps", "warmup_num_steps"), "auto"),
        },
        "zero_optimization": {
            **_ZERO3,
            **_OFFLOAD,
            "offload_optimizer": {**_CPU, "device": "none"},
            _GATHER: True,
        },
        **_AUTO,
        "steps_per_print": 2000,
        **_QUIET,
    },
    "OptimalScale/LMFlow configs/ds_config_zero2.json": {
        "fp16": _FP16,
        "bf16": _BF16,
        "optimizer": _ADAMW,
        "zero_optimization": {
            **_ZERO2,
            "offload_optimizer": _CPU,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_bucket_size": 2e8,
        },
        **_AUTO,
        "steps_per_print": 2000,
        **_QUIET,
    },
    "lm-sys/FastChat playground/deepspeed_config_s3.json": {
        "fp16": _FP16,
        "zero_optimization": {
            "stage": 3,
            **_OFFLOAD,
            "overlap_comm": True,
            "contiguous_gradients": True,
            **_LIVE,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e6,
            "sub_group_size": 1e12,
            _GATHER: True,
        },
        **{key: value for key, value in _AUTO.items() if key != "gradient_clipping"},
    },
    "OpenGVLab/InternVL internvl_chat/zero_stage3_config.json": {
        "zero_optimization": {
            **_ZERO3,
            "reduce_bucket_size": 1e9,
            "stage3_prefetch_bucket_size": 1e9,
            "stage3_param_persistence_threshold": 1e7,
            _GATHER: True,
        },
        "fp16": {"enabled": "auto", "auto_cast": True, "initial_scale_power": 32, **_SCALE},
        "bf16": _BF16,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": "auto"},
        },
        **_AUTO,
        "steps_per_print": 2000,
        "wall_clock_breakdown": True,
    },
}
