"""What other systems call the keys and values of a scenario.

Tables only. Nothing here is accepted in a file: it is what messages suggest.
"""

from __future__ import annotations

KEYS: dict[str, str] = {
    # placement
    "colocate": "placement.mode: colocated",
    "colocate_all": "placement.mode: colocated",
    "colocated": "placement.mode: colocated",
    "disaggregate": "placement.mode: disaggregated",
    "disaggregated": "placement.mode: disaggregated",
    "partial_gpu_mode": "placement.mode: hybrid",
    "actor_num_nodes": "placement.actor_num_gpus (nodes x GPUs per node)",
    "num_train_gpus": "placement.actor_num_gpus",
    "num_infer_gpus": "placement.rollout_num_gpus",
    "num_gpus_per_node": "cluster.gpus_per_node",
    "num_nodes": "cluster.nodes",
    "offload": "placement.switch.offload",
    "offload_train": "placement.switch.offload",
    "offload_rollout": "placement.switch.offload",
    # staleness
    "max_weight_staleness": "experience.staleness.bound",
    "max_off_policy_steps": "experience.staleness.bound",
    "max_staleness_steps": "experience.staleness.bound",
    "max_staleness_versions": "experience.staleness.bound",
    "max_trajectory_age_steps": "experience.staleness.bound",
    "async_generation_ratio": "experience.staleness.bound",
    "staleness_threshold": "experience.staleness.bound (a whole number of versions)",
    "unused_samples_handler": "experience.staleness.action",
    "async_unused_samples_handler": "experience.staleness.action",
    # transition
    "in_flight_weight_updates": "weights.transition.pause_generation_mode: in_place",
    "partial_rollout": "weights.transition.pause_generation_mode: retract",
    "kv_policy": "weights.transition.kv",
    "use_cache_salt": "weights.transition.kv: salt_by_version",
    "clear_kv_cache_on_weight_sync": "weights.transition.kv: flush",
    # weight path
    "model_update_buffer_size_mb": "weights.update_weight_buffer_size (bytes)",
    "trigger_parameter_sync_step": "weights.update_weights_interval",
    "update_weight_interval": "weights.update_weights_interval",
    # rollout
    "insertion": "experience.buffer.type",
    "max_buffered_rollouts": "experience.buffer.max_buffered_groups",
    "over_sampling_batch_size": (
        "rollout.admission.over_sampling_ratio, a multiple of rollout_batch_size; "
        "in a fully asynchronous run experience.buffer.async_data_buffer_capacity_factor"
    ),
    "async_max_concurrent_samples": "rollout.admission.async_max_concurrent_groups (samples / n_samples_per_prompt)",
    "rollout_submission_granularity": "rollout.admission.submission_granularity",
    "eta": "rollout.admission.max_head_offpolicyness",
    "router_policy": "rollout.routing.type",
    "router": "rollout.routing",
    "policy": "rollout.routing.type",
    "rollout_max_response_len": "workload.max_response_length",
    "max_new_tokens": "workload.max_response_length",
    "max_inflight": "rollout.concurrency.max_inflight",
    # algorithm and training
    "group_size": "algorithm.n_samples_per_prompt",
    "num_generations": "algorithm.n_samples_per_prompt",
    "num_generations_per_prompt": "algorithm.n_samples_per_prompt",
    "num_prompts_per_step": "algorithm.rollout_batch_size",
    "batch_size": "algorithm.rollout_batch_size",
    "train_batch_size": "algorithm.rollout_batch_size",
    "tensor_model_parallel_size": "training.tensor_parallel",
    "tensor_parallel_size": "training.tensor_parallel; of an engine placement.rollout_num_gpus_per_engine",
    "tp_size": "placement.rollout_num_gpus_per_engine; of the trainer training.tensor_parallel",
    "tp": "training.tensor_parallel; of an engine placement.rollout_num_gpus_per_engine",
    "pipeline_model_parallel_size": "training.pipeline_parallel",
    "pp": "training.pipeline_parallel",
    "context_parallel_size": "training.context_parallel",
    "cp": "training.context_parallel",
    "expert_model_parallel_size": "training.expert_parallel",
    "ep": "training.expert_parallel",
    "num_steps": "run.num_rollout",
    "max_steps": "run.num_rollout",
    "dynamic_sampling": "experience.selection.filter_zero_variance",
    "quantization": "rollout.engine.weight_precision",
}
"""Key of another system -> ours (dotted, with the value where it implies one)."""

VALUES: dict[str, str] = {
    "mask_tokens": "mask",
    "disk_full": "disk",
    "nccl": "broadcast",
    "ipc": "cuda_ipc",
    "rdma": "p2p",
    "delta": "disk_delta",
    "colocate": "colocated",
    "shared": "colocated",
    "disagg": "disaggregated",
    "separate": "disaggregated",
    "async": "fully_async",
    "one_step_off": "one_step_ahead",
    "one_step_off_policy": "one_step_ahead",
    "bounded_async": "bounded",
    "recompute": "retract",
    "pause": "retract",
    "continue": "in_place",
    "salt": "salt_by_version",
    "clear": "flush",
    "windowed": "windowed_fifo",
    "sticky": "session_affinity",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "grpo": "group",
    "ppo": "critic",
    "opd": "distillation",
}
"""Value of another system -> ours; suggested only where it is one of the allowed values."""
