"""A policy pi_theta: a transformers model with its tokenizer, chat template and image processor.

Paper: appendix D (Qwen2.5 for text, Qwen2.5-VL for pictures). Any chat model with a ChatML-like template works,
from a hub id or a folder; freshper/tiny.py builds small ones of the same classes.

Two things here are easy to get wrong, and every caller would have to repeat them:
- *Token in, token out.* A conversation grows by appending ids. Only the environment's new text is tokenized,
  wrapped in a "bridge": what closes the assistant turn, the user turn, and the next assistant header.
- *Pictures.* Each stands for h w / merge^2 placeholder tokens; their embeddings are replaced by the output of
  the vision tower, and their positions follow m-rope (rows and columns instead of a running count).
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
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from envs.base import Observation
from freshper.episode import Batch, picture_key

_TEXT, _REPLY = "\ue000", "\ue001"  # stand-ins for a user text and a reply when the chat template is taken apart
_FEATURE_CACHE = 20_000  # pictures; 80 MB for the tiny model


@dataclass(eq=False)
class Policy:
    """`freeze_vision` keeps the vision tower fixed during RL, so that the features of a picture can be reused."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    image_processor: Any = None  # transformers', where there are pictures
    freeze_vision: bool = False
    _features: dict[bytes, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; choose a chat (instruct) model")
        if self.freeze_vision and self.image_processor:
            self.model.model.visual.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def eos_id(self) -> int:
        return self.tokenizer.eos_token_id

    @cached_property
    def suppressed_ids(self) -> list[int]:
        """Ids that are never sampled: every special token but eos (a sampled image placeholder has no picture), and
        what the model's generation config says (`suppress_tokens`)."""
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return sorted(special.union(self.model.generation_config.suppress_tokens or ()) - {self.eos_id})

    @cached_property
    def image_token_id(self) -> int:
        return self.model.config.image_token_id if self.image_processor else -1

    # -- conversations ---------------------------------------------------------------------------------------

    def first_prompt(self, observation: Observation) -> list[int]:
        """Tokens from the start of the conversation to the first assistant header."""
        prefix, suffix = self._template(len(observation.images), first=True)
        return self._encode(prefix + observation.text + suffix, observation.images)

    def bridge(self, observation: Observation, closed: bool) -> list[int]:
        """Tokens between two replies. `closed` says whether the reply before ended with a sampled eos."""
        prefix, suffix = self._template(len(observation.images), first=False)
        if closed:  # the template closes the assistant turn with the eos that was sampled already
            prefix = prefix.removeprefix(self.tokenizer.eos_token)
        return self._encode(prefix + observation.text + suffix, observation.images)

    @cached_property
    def closing_tokens(self) -> int:
        """How many tokens the template writes after a user's text, up to and with the next assistant header."""
        return len(self.tokenizer.encode(self._template(0, first=False)[1], add_special_tokens=False))

    def reply_text(self, reply: list[int]) -> str:
        """The reply as the environment reads it, without a final eos."""
        return self.tokenizer.decode(reply[:-1] if reply and reply[-1] == self.eos_id else reply)

    def _template(self, n_images: int, first: bool) -> tuple[str, str]:
        """What the chat template puts before and after the user's text."""
        key = (n_images, first)
        if key not in self._templates:
            content = [{"type": "image"}] * n_images + [{"type": "text", "text": _TEXT}] if n_images else _TEXT
            user = {"role": "user", "content": content}
            turns = (
                [user] if first else [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}, user]
            )
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            prefix, suffix = text.split(_TEXT)
            self._templates[key] = (prefix if first else prefix.split(_REPLY)[1], suffix)
        return self._templates[key]

    @cached_property
    def _templates(self) -> dict[tuple[int, bool], tuple[str, str]]:
        return {}

    def _encode(self, text: str, images: tuple[np.ndarray, ...]) -> list[int]:
        ids = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids  # half the time of encode()
        if not images:
            return ids
        grids = iter(self.grid(image) for image in images)
        expanded = []
        for i in ids:
            expanded += [i] * int(np.prod(next(grids))) if i == self.image_token_id else [i]
        return expanded

    # -- pictures --------------------------------------------------------------------------------------------

    def grid(self, image: np.ndarray) -> tuple[int, int]:
        """Rows and columns of placeholder tokens of a picture (uint8 [H, W, 3])."""
        p = self.image_processor
        cell = p.patch_size * p.merge_size
        low, high = p.size["shortest_edge"], p.size["longest_edge"]
        height, width = smart_resize(*image.shape[:2], factor=cell, min_pixels=low, max_pixels=high)
        return height // cell, width // cell

    def image_features(self, images: list[np.ndarray]) -> torch.Tensor:
        """What the vision tower makes of pictures, [placeholders of all of them, hidden]. Equal ones are seen once."""
        keys = [picture_key(image) for image in images]
        unseen = {k: image for k, image in zip(keys, images, strict=True) if k not in self._features}
        found = {}
        if unseen:
            pictures = [Image.fromarray(image) for image in unseen.values()]
            inputs = self.image_processor(images=pictures, return_tensors="pt").to(self.device)
            out = self.model.model.get_image_features(
                inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True
            )
            found = dict(zip(unseen, out.pooler_output, strict=True))
        features = torch.cat([self._features[k] if k in self._features else found[k] for k in keys])
        if self.freeze_vision:
            if len(self._features) + len(found) > _FEATURE_CACHE:
                self._features.clear()
            self._features.update((k, v.detach().clone()) for k, v in found.items())
        return features

    def positions(self, tokens: np.ndarray, images: list[np.ndarray], start: int = 0) -> np.ndarray:
        """Position ids from `start`, int64 [3, T] (time, row, column; all equal for text).

        A picture of h x w placeholders takes max(h, w) positions: row r of it stands at start + r, column c
        at start + c. The text after it goes on from there.
        """
        out = np.empty((3, len(tokens)), dtype=np.int64)
        placeholders = np.flatnonzero(tokens == self.image_token_id)
        at = taken = 0
        for h, w in (self.grid(image) for image in images):
            first = placeholders[taken]
            out[:, at:first] = start + np.arange(first - at)
            start += first - at
            out[:, first : first + h * w] = start + np.stack([np.zeros(h * w), *np.divmod(np.arange(h * w), w)])
            start, at, taken = start + max(h, w), first + h * w, taken + h * w
        if taken != len(placeholders):
            raise ValueError(f"{len(placeholders)} image placeholders for pictures that need {taken}")
        out[:, at:] = start + np.arange(len(tokens) - at)
        return out

    # -- the network -----------------------------------------------------------------------------------------

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        images: list[np.ndarray],
        attention_mask: torch.Tensor | None = None,
        cache: object | None = None,
    ) -> torch.Tensor:
        """Last hidden states [B, T, hidden] of tokens [B, T] at positions [3, B, T].

        `attention_mask`: None for causal over right-padded rows, or what is added to the scores, 0 or -inf, of the
        model's dtype, [B, 1, T, cached + T].
        """
        model, extra = self.model.model, {}
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
        """Next-token logits, float32 [n, V] from hidden states [n, hidden]; -inf for ids that are never sampled.

        Engine and trainer both start from these. Were such ids left in the trainer's softmax, nothing would ever
        punish them, and probability would drift there unseen.
        """
        logits = self.model.lm_head(hidden).float()
        logits[:, self.suppressed_ids] = -torch.inf
        return logits

    def save(self, folder: str) -> None:
        """Write model, tokenizer and image processor in the Hugging Face format, for `load_policy`."""
        for part in (self.model, self.tokenizer, self.image_processor):
            if part is not None:
                part.save_pretrained(folder)

    def batch_hidden(self, batch: Batch) -> torch.Tensor:
        """Last hidden states of a right-padded batch, [B, T, hidden]."""
        positions = np.zeros((3, *batch.tokens.shape), dtype=np.int64)
        for row, (n, images) in enumerate(zip(batch.lengths, batch.images, strict=True)):
            positions[:, row, :n] = self.positions(batch.tokens[row, :n].numpy(), images)
        images = [image for row in batch.images for image in row]
        return self.hidden(batch.tokens.to(self.device), torch.from_numpy(positions).to(self.device), images)


def load_policy(name: str, device: str, dtype: torch.dtype, freeze_vision: bool = False) -> Policy:
    """A policy from a hub id or a folder written by `save_pretrained`. Raises OSError where there is none, ValueError
    where weights are missing (transformers would make random ones). Pickled weights are not read."""
    options = {"dtype": dtype, "attn_implementation": "sdpa", "output_loading_info": True, "use_safetensors": True}
    if hasattr(AutoConfig.from_pretrained(name), "vision_config"):
        model, loaded = AutoModelForImageTextToText.from_pretrained(name, **options)
        image_processor = AutoImageProcessor.from_pretrained(name)
    else:
        model, loaded = AutoModelForCausalLM.from_pretrained(name, **options)
        image_processor = None
    if loaded["missing_keys"]:
        raise ValueError(f"its weights lack {len(loaded['missing_keys'])}, such as {min(loaded['missing_keys'])}")
    return Policy(model.to(device), AutoTokenizer.from_pretrained(name), image_processor, freeze_vision)
