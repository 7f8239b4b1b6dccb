"""A policy pi_theta: a transformers model with its tokenizer, chat template and image processor.

Paper: appendix D (Qwen2.5 for text, Qwen2.5-VL for images). Any chat model with a ChatML-like template works, from a
hub id or a folder; freshper/tiny.py builds small ones of the same classes. Two things are easy to get wrong:

- Token in, token out. A conversation grows by appending ids. Only the environment's new text is tokenized, wrapped in a
  "bridge": what closes the assistant turn, the user turn, and the next assistant header.
- Images. Each takes h w / merge^2 placeholder tokens. Their embeddings are replaced by the output of the vision tower,
  and their positions follow m-rope (rows and columns instead of a running count).
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from envs.base import Observation
from freshper.episode import Batch, image_key
from freshper.images import expand, grid, m_rope_positions

_TEXT, _REPLY = "\ue000", "\ue001"  # replace a user text and a reply when the chat template is split
_FEATURE_CACHE = 20_000  # images; 80 MB for the tiny model


@dataclass(eq=False)
class Policy:
    """`freeze_vision` keeps the vision tower fixed during RL, so that the features of an image can be reused. `mixed`
    computes in bfloat16 with float32 weights (autocast)."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    image_processor: Any = None  # transformers', if the model reads images
    freeze_vision: bool = False
    mixed: bool = False
    _features: dict[bytes, torch.Tensor] = field(default_factory=dict)
    _templates: dict[tuple[int, bool], tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; choose a chat (instruct) model")
        self.special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        closing = self._encode(self._template(0, first=False)[0], ())
        found = [i for i in closing if i in self.special]
        if not found:
            raise ValueError("its chat template closes a reply with no special token, so no reply could end")
        self.eos_id: int = found[0]  # the template's, not always the tokenizer's
        self.image_token_id: int = self.model.config.image_token_id if self.image_processor else -1
        if self.freeze_vision and self.image_processor:
            self.model.model.visual.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def suppressed_ids(self) -> list[int]:
        """Ids that are never sampled: every special token but eos (a sampled image placeholder has no image), and
        `suppress_tokens` of the model's generation config."""
        return sorted(self.special.union(self.model.generation_config.suppress_tokens or ()) - {self.eos_id})

    # -- conversations -----------------------------------------------------------------------------------------

    def first_prompt(self, observation: Observation) -> list[int]:
        """Return the tokens from the start of the conversation to the first assistant header."""
        prefix, suffix = self._template(len(observation.images), first=True)
        return self._encode(prefix + observation.text + suffix, observation.images)

    def bridge(self, observation: Observation, closed: bool) -> list[int]:
        """Return the tokens between two replies. `closed`: the reply before ended with a sampled eos."""
        prefix, suffix = self._template(len(observation.images), first=False)
        tokens = self._encode(prefix + observation.text + suffix, observation.images)
        return tokens[tokens.index(self.eos_id) + 1 :] if closed else tokens

    @cached_property
    def closing_tokens(self) -> int:
        """Number of tokens that the template writes after a user's text, with the next assistant header."""
        return len(self.tokenizer.encode(self._template(0, first=False)[1], add_special_tokens=False))

    def reply_text(self, reply: list[int]) -> str:
        """Return the reply as the environment reads it, without a final eos."""
        return self.tokenizer.decode(reply[:-1] if reply and reply[-1] == self.eos_id else reply)

    def _template(self, n_images: int, first: bool) -> tuple[str, str]:
        """Return what the chat template puts before and after the user's text."""
        key = (n_images, first)
        if key not in self._templates:
            content = [{"type": "image"}] * n_images + [{"type": "text", "text": _TEXT}] if n_images else _TEXT
            user = {"role": "user", "content": content}
            earlier = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
            turns = [user] if first else [*earlier, user]
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            if text.count(_TEXT) != 1 or text.count(_REPLY) != (not first):
                raise ValueError("its chat template does not show a user's text exactly once per turn")
            prefix, suffix = text.split(_TEXT)
            self._templates[key] = (prefix if first else prefix.split(_REPLY)[1], suffix)
        return self._templates[key]

    def _encode(self, text: str, images: tuple[np.ndarray, ...]) -> list[int]:
        ids = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids  # half the time of encode()
        return expand(ids, self.image_token_id, [self.grid(image) for image in images]) if images else ids

    # -- images ------------------------------------------------------------------------------------------------

    def grid(self, image: np.ndarray) -> tuple[int, int]:
        """Return rows and columns of placeholder tokens of an image (uint8 [H, W, 3])."""
        return grid(image, self.image_processor)

    def positions(self, tokens: np.ndarray, images: list[np.ndarray], start: int = 0) -> np.ndarray:
        """Return position ids from `start`, int64 [3, T] (time, row, column; all equal for text)."""
        return m_rope_positions(tokens == self.image_token_id, [self.grid(image) for image in images], start)

    def image_features(self, images: list[np.ndarray]) -> torch.Tensor:
        """Return vision-tower features, [placeholders of all images, hidden]. Identical images are encoded once."""
        keys = [image_key(image) for image in images]
        unseen = {k: image for k, image in zip(keys, images, strict=True) if k not in self._features}
        found = {}
        if unseen:
            inputs = self.image_processor(images=[Image.fromarray(x) for x in unseen.values()], return_tensors="pt")
            pixels, grid = inputs["pixel_values"].to(self.device), inputs["image_grid_thw"].to(self.device)
            out = self.model.model.get_image_features(pixels, grid, return_dict=True)
            found = dict(zip(unseen, out.pooler_output, strict=True))
        features = torch.cat([self._features[k] if k in self._features else found[k] for k in keys])
        if self.freeze_vision:
            if len(self._features) + len(found) > _FEATURE_CACHE:
                self._features.clear()
            self._features.update((k, v.detach().clone()) for k, v in found.items())
        return features

    # -- the network -------------------------------------------------------------------------------------------

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        images: list[np.ndarray],
        attention_mask: torch.Tensor | None = None,
        cache: object | None = None,
    ) -> torch.Tensor:
        """Return the last hidden states [B, T, hidden] of tokens [B, T] at positions [3, B, T].

        `attention_mask`: None for causal over right-padded rows, or what is added to the scores, 0 or -inf, of the
        model's dtype, [B, 1, T, cached + T].
        """
        model, extra = self.model.model, {}
        with self._precision():
            embeddings = self.model.get_input_embeddings()(tokens)
            if images:
                features = self.image_features(images).to(embeddings.dtype)
                embeddings = embeddings.masked_scatter((tokens == self.image_token_id)[..., None], features)
            if self.image_processor:
                model = model.language_model
            else:
                positions = positions[0]
            if cache is not None:
                extra = {"past_key_values": cache, "use_cache": True}
            out = model(inputs_embeds=embeddings, position_ids=positions, attention_mask=attention_mask, **extra)
        return out.last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits, float32 [n, V], from hidden states [n, hidden]. Ids that are never sampled get
        -inf, in the trainer too: no reward would reach them there, and probability would drift to them."""
        config = self.model.config.get_text_config()  # some families scale or cap (Cohere, Granite, Gemma 2)
        scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        with self._precision():
            logits = self.model.lm_head(hidden).float() * scale
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        logits[:, self.suppressed_ids] = -torch.inf
        return logits

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed)

    def batch_hidden(self, batch: Batch) -> torch.Tensor:
        """Return the last hidden states of a right-padded batch, [B, T, hidden]."""
        positions = np.zeros((3, *batch.tokens.shape), dtype=np.int64)
        for row, (n, images) in enumerate(zip(batch.lengths, batch.images, strict=True)):
            positions[:, row, :n] = self.positions(batch.tokens[row, :n].numpy(), images)
        images = [image for row in batch.images for image in row]
        return self.hidden(batch.tokens.to(self.device), torch.from_numpy(positions).to(self.device), images)

    def save(self, folder: str) -> None:
        """Write model, tokenizer and image processor in the Hugging Face format, for `load_policy`."""
        for part in (self.model, self.tokenizer, self.image_processor):
            if part is not None:
                part.save_pretrained(folder)


def load_policy(name: str, device: str, dtype: torch.dtype, freeze_vision: bool = False) -> Policy:
    """Load a policy from a hub id or a folder written by `save_pretrained`. Pickled weights are not read.

    Raises OSError if there is none, ValueError if weights are missing (transformers would make random ones).
    """
    options = {"dtype": dtype, "attn_implementation": "sdpa", "output_loading_info": True, "use_safetensors": True}
    if hasattr(AutoConfig.from_pretrained(name), "vision_config"):
        model, loaded = AutoModelForImageTextToText.from_pretrained(name, **options)
        image_processor = AutoImageProcessor.from_pretrained(name)
    else:
        model, loaded = AutoModelForCausalLM.from_pretrained(name, **options)
        image_processor = None
    if loaded["missing_keys"]:
        raise ValueError(f"its weights lack {len(loaded['missing_keys'])}, such as {min(loaded['missing_keys'])}")
    for parameter in model.parameters():  # out of the file's mapping, whose alignment can show in a last bit
        parameter.data = parameter.data.clone()
    return Policy(model.to(device), AutoTokenizer.from_pretrained(name), image_processor, freeze_vision)
