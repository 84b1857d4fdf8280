"""The policy: a Hugging Face language or vision-language model, and what the trainer must know of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import LoraSection
from ..errors import ConfigError, DataError
from ..model_folder import does_not_load
from ..torchvision_ops import ensure_torchvision_imports
from .lora import adapters_off, add_adapters, drop_inputs
from .segments import register_segments

logger = logging.getLogger(__name__)
TEXT, SCORE, TRUNK = "text", "score", "trunk"
"""What a model has on top: logits over its vocabulary; one number a sequence, by the layer of that name; what does not matter."""
_REACHES = ("sliding_window", "attention_chunk_size")
_SHORT = 8
AUTO = "auto"
"""The attention that is found to fit the model."""


@dataclass(frozen=True)
class Head:
    """What is done to the products of the output embedding: scaled (Granite, Cohere), or squeezed below a cap (Gemma 2)."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


@dataclass(frozen=True)
class Policy:
    """A loaded model, in eval mode: dropout would change the ratio.

    packs: sequences may share a row (checked on this very model). own_attention: what its text half used before that.
    mrope: positions are text, time, height and width (Qwen2-VL, Wang 2024). head: how logits come from the trunk's last
    hidden state, so that they can be computed piece by piece; None where that is not known.
    placeholders: ids that stand for pictures or videos; empty for a text model. image_id is None for a text model.
    adapted: LoRA adapters are trained, and nothing else.
    """

    model: Any
    packs: bool
    own_attention: str
    mrope: bool
    head: Head | None
    image_id: int | None
    placeholders: tuple[int, ...]
    adapted: bool = False

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside, the model is the one that LoRA started from. For passes without gradient only. Needs `adapted`."""
        if not self.adapted:
            raise ValueError("the policy has no adapters")
        with adapters_off(self.model):
            yield

    def drop_inputs(self, on: bool) -> None:
        """Switch the adapters' dropout, which is off outside of updates."""
        if self.adapted:
            drop_inputs(self.model, on)

    def use_segments(self) -> None:
        """Keep the sequences of a pack apart."""
        _use_attention(self.model, register_segments())

    @property
    def vision(self) -> bool:
        return self.image_id is not None

    @property
    def trunk(self) -> Any:
        """The model without its output embedding."""
        return self.model.base_model

    @property
    def half_cost(self) -> float:
        """The length at which attention costs as much as the rest, see `attention_cost`: a layer of width H has about 12 H^2
        weights, 24 H^2 operations a token, and causal attention 2 H a token for each token before it.
        """
        return 12.0 * self.model.config.get_text_config().hidden_size

    @property
    def stand_in(self) -> int:
        """The id that is read where the policy sampled a placeholder: the first that is none."""
        return next(i for i in range(len(self.placeholders) + 1) if i not in self.placeholders)


def load_policy(
    path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    lora: LoraSection | None = None,
    freeze_vision: bool = False,
    head: str = TEXT,
    attention: str = AUTO,
) -> Policy:
    """Load a folder or hub id. `head` = TEXT, or SCORE for one number a sequence; `attention` other than AUTO = that of
    transformers, and nothing is packed. Raises DataError when there is no model, ConfigError for a kind that cannot be trained.
    """
    model = load_model(path, dtype, trust_remote_code=trust_remote_code, head=head)
    vision = "vision_config" in model.config.sub_configs
    if freeze_vision and not vision:
        raise ConfigError(f"--model.freeze-vision: {path} is a text model.")
    choose_trained(model, lora, freeze_vision=freeze_vision, head=head)
    model.to(device).eval()
    if gradient_checkpointing:
        _recompute_activations(model)
    if model.base_model is model:
        raise ConfigError(
            f"{path}: models of type {model.config.model_type} have no part that gives hidden states alone."
        )
    return _examined(model, vision, attention)


def choose_trained(model: Any, lora: LoraSection | None, *, freeze_vision: bool, head: str) -> None:
    """Freeze what is not trained, and put adapters where they belong, in place: see `load_policy`."""
    frozen = _vision_parts(model) if freeze_vision else []
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if lora is not None and lora.enabled:
        add_adapters(model, lora, frozen=[*frozen, SCORE] if head == SCORE else frozen)
        if head == SCORE:
            model.score.requires_grad_(True)


def _vision_parts(model: Any) -> list[str]:
    """Names of what turns pixels into embeddings: all of the trunk but its language model."""
    language = model.get_decoder()
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(child)] for child in model.base_model.children() if child is not language]


def _recompute_activations(model: Any) -> None:
    """Layers look at their own `training` to decide, and some of them also to drop: it is on around them, and off inside."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True
            module.register_forward_pre_hook(_enter_layer)
            module.register_forward_hook(_leave_layer, always_call=True)


def _enter_layer(layer: Any, _inputs: Any) -> None:
    layer.training = False


def _leave_layer(layer: Any, _inputs: Any, _output: Any) -> None:
    """Called also when the backward pass breaks the second forward off, once it has what it needs."""
    layer.training = True


def load_model(path: str, dtype: torch.dtype, *, trust_remote_code: bool = False, head: str = TEXT) -> Any:
    """The Hugging Face model of a folder or hub id, with a head for text, or one that scores sequences (a new one where the
    folder has none). Raises DataError when there is none, ConfigError for a kind without such a head.
    """
    ensure_torchvision_imports()
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if head == SCORE:
            if config.num_labels != 1 and any(
                "ForSequenceClassification" in name for name in config.architectures or ()
            ):
                raise ConfigError(f"{path} tells {config.num_labels} classes apart; a reward model gives one number.")
            config.num_labels = 1
            auto: Any = AutoModelForSequenceClassification
            if type(config) not in auto._model_mapping:
                raise ConfigError(f"{path}: models of type {config.model_type} have no form that scores sequences.")
        else:
            auto = AutoModelForImageTextToText if "vision_config" in config.sub_configs else AutoModelForCausalLM
        model, info = auto.from_pretrained(
            path, config=config, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise DataError(str(does_not_load(path, "The model", trust_remote_code, error))) from error
    if head == SCORE and not hasattr(model, SCORE):
        raise ConfigError(
            f"{path}: models of type {config.model_type} do not score a text at its last token, as those that write texts do."
        )
    _check_whole(path, model, info["missing_keys"], head)
    return model


def _check_whole(path: str, model: Any, missing: set[str], head: str) -> None:
    """Raises DataError when weights were made up: a reward model's for the head of a policy, a text model's for its trunk."""
    new = f"{SCORE}." if head == SCORE else ""
    wanted = f"{model.base_model_prefix}." if head == TRUNK else ""
    made_up = [name for name in sorted(missing) if name.startswith(wanted) and not (new and name.startswith(new))]
    if made_up:
        raise DataError(f"{path} is no whole model of this kind: its weights lack {made_up[0]}.")


def _examined(model: Any, vision: bool, attention: str) -> Policy:
    """Find out by trying what this model can do. Raises ConfigError for an attention that it lacks."""
    text = model.config.get_text_config()
    if attention != AUTO:
        try:
            _use_attention(model, attention)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"--model.attention {attention}: {' '.join(str(error).split())}") from error
    own_attention = text._attn_implementation
    mrope = hasattr(model.base_model, "get_rope_index")
    packs = attention == AUTO and _try_packing(model, mrope)
    if not packs:
        _use_attention(model, own_attention)
    config = model.config
    placeholders = [config.image_token_id] if vision else []
    placeholders += [config.video_token_id] if hasattr(config, "video_token_id") else []
    return Policy(
        model=model,
        packs=packs,
        own_attention=own_attention,
        mrope=mrope,
        head=None if hasattr(model, SCORE) else _find_head(model),
        image_id=placeholders[0] if vision else None,
        placeholders=tuple(placeholders),
        adapted=hasattr(model, "peft_config"),
    )


def unpacked(policy: Policy) -> Policy:
    """The same policy with its own attention, one sequence a row."""
    _use_attention(policy.model, policy.own_attention)
    return replace(policy, packs=False)


def _use_attention(model: Any, name: str) -> None:
    """Of the language model; a vision tower keeps its own."""
    text = model.config.get_text_config()
    model.set_attn_implementation(name if text is model.config else {"text_config": name})


@torch.no_grad()
def _try_packing(model: Any, mrope: bool) -> bool:
    """Switch to segment attention, and see whether it keeps packed sequences apart in this model."""
    first, second = lengths = 5, 2 * _SHORT + 4
    with _short_sighted(model):
        alone = trunk_states(model, _probe(model, second), text_positions((second,), mrope), (second,))
        try:
            _use_attention(model, register_segments())
            ids = torch.cat([_probe(model, first), _probe(model, second)])
            packed = trunk_states(model, ids, text_positions(lengths, mrope), lengths)
            why = "" if agree(packed[first:], alone) else "their states come out differently"
        except NotImplementedError as error:
            why = str(error)
    if why:
        kind = model.config.model_type
        logger.warning("%s: sequences cannot share a pack (%s); each is computed by itself", kind, why)
    return not why


@contextmanager
def _short_sighted(model: Any) -> Iterator[None]:
    """Inside, attention that reaches back over a sliding window or within a chunk has one of `_SHORT` tokens, so that a
    short sequence shows what it does to a long one.
    """
    owners = [model.config.get_text_config(), *model.modules()]
    found = [(owner, name, vars(owner).get(name)) for owner in owners for name in _REACHES]
    long = [(owner, name, reach) for owner, name, reach in found if isinstance(reach, int) and reach > _SHORT]
    for owner, name, _ in long:
        setattr(owner, name, _SHORT)
    try:
        yield
    finally:
        for owner, name, reach in long:
            setattr(owner, name, reach)


def agree(states: Tensor, expected: Tensor) -> bool:
    """Whether two ways of computing the same states do: no difference above 1e-5 of the largest state in float32, 5e-2 in
    bfloat16.
    """
    tolerance = 1e-5 if expected.dtype == torch.float32 else 5e-2
    return float((states - expected).abs().max()) <= tolerance * float(expected.abs().max())


@torch.no_grad()
def _find_head(model: Any) -> Head | None:
    """The head that gives this model's logits best, of the plain one and those that its configuration hints at: in the small
    logits of a fresh model a cap hardly shows, and a hint may be of another part.
    """
    ids = _probe(model, 4)
    states = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state
    logits = model(input_ids=ids[None], use_cache=False).logits
    hints = model.config.get_text_config().to_dict()
    heads = [Head(cap=hints["final_logit_softcapping"])] if hints.get("final_logit_softcapping") else []
    heads += [Head(scale=1.0 / hints["logits_scaling"])] if hints.get("logits_scaling") else []
    heads += [Head(scale=hints["logit_scale"])] if hints.get("logit_scale") else []
    heads += [Head()]
    matrix = model.get_output_embeddings()
    products = matrix(states)
    best = min(heads, key=lambda head: float((head(products) - logits).abs().max()))
    return best if torch.allclose(best(products), logits, rtol=1e-3, atol=1e-3) else None


def _probe(model: Any, length: int) -> Tensor:
    """The first ids of the vocabulary: int64[length]."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.arange(length, device=model.device) * 7 % min(vocabulary, 100)


def text_positions(lengths: tuple[int, ...], mrope: bool, device: torch.device | str = "cpu") -> Tensor:
    """Positions that start again at 0 with each sequence: [1, T], or [4, 1, T] (text, time, height, width) for M-RoPE."""
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    return positions.expand(4, 1, -1) if mrope else positions


def trunk_states(model: Any, ids: Tensor, positions: Tensor, segments: tuple[int, ...], **pixels: Tensor) -> Tensor:
    """Last hidden states [T, H] of packed ids [T]. No cache and no mask: either would undo the packing silently."""
    output = model.base_model(
        input_ids=ids[None],
        position_ids=positions.to(ids.device),
        attention_mask=None,
        use_cache=False,
        segments=segments,
        **pixels,
    )
    states: Tensor = output.last_hidden_state[0]
    return states
