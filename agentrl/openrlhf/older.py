"""Names that options had before OpenRLHF 0.11, where each was one word with underscores."""

from __future__ import annotations

from collections.abc import Collection

RENAMED = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "agent_func_path": "train.agent_func_path",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "generate_max_len": "rollout.max_new_tokens",
    "prompt_max_len": "data.max_len",
    "colocate_all_models": "train.colocate_all",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "async_train": "train.async_enable",
    "partial_rollout": "train.partial_rollout_enable",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "temperature": "rollout.temperature",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "full_determinism": "train.full_determinism_enable",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "max_norm": "actor.max_norm",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "freezing_actor_steps": "critic.freezing_steps",
    "save_value_network": "critic.save_value_network",
    "entropy_loss_coef": "actor.entropy_coef",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "freeze_visual_encoder": "actor.freeze_visual_encoder",
    "advantage_estimator": "algo.advantage.estimator",
    "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_correction_type": "algo.advantage.is_correction_type",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_estimator": "algo.kl.estimator",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "use_kl_loss": "algo.kl.use_loss",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "ref_reward_offload": "ref.offload",
    "bf16": "ds.param_dtype",
    "flash_attn": "ds.attn_implementation",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "target_modules": "ds.lora.target_modules",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "best_metric_key": "ckpt.best_metric_key",
    "use_wandb": "logger.wandb.key",
    "use_tensorboard": "logger.tensorboard_dir",
}
RENAMED_SUPERVISED = {
    "pretrain": "model.model_name_or_path",
    "ref_pretrain": "ref.model_name_or_path",
    "pretrain_mode": "model.pretrain_mode_enable",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "model.gradient_checkpointing_reentrant",
    "loss": "model.loss_type",
    "margin_loss": "model.margin_loss_enable",
    "compute_fp32_loss": "model.compute_fp32_loss_enable",
    "ipo": "model.ipo_enable",
    "dataset": "data.dataset",
    "learning_rate": "adam.lr",
    "l2": "adam.weight_decay",
    "micro_train_batch_size": "train.micro_batch_size",
    "normalize_reward": "reward.normalize_enable",
    "max_len": "data.max_len",
}
"""Of train_sft, train_rm, train_dpo and serve_rm, where they differ from the above or add to it."""


def newer(name: str, known: Collection[str]) -> str | None:
    """The present name of an older option. One that only took on a section (zero_stage, vllm_num_engines, wandb_org) is
    recognised by that.
    """
    renamed = [now for table in (RENAMED, RENAMED_SUPERVISED) if (now := table.get(name)) in known]
    if renamed or "." in name:
        return renamed[0] if renamed else None
    same = [option for option in known if "." in option and _ends_so(option, name)]
    return same[0] if len(same) == 1 else None


def _ends_so(option: str, name: str) -> bool:
    """Whether a name is all sections of an option, or its last ones, joined by underscores."""
    parts = option.split(".")
    return name in {"_".join(parts[start:]) for start in range(len(parts))}
