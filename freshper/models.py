"""A policy pi_theta: a transformers model with its tokenizer, chat template and image processor.

Paper: appendix D (Qwen2.5 for text, Qwen2.5-VL for images). Any chat model with a ChatML-like template works, from a
hub id or a folder; freshper/tiny.py builds small ones of the same classes. Two things are easy to get wrong:

- Token in, token out. A conversation grows by appending ids. Only the environment's new text is tokenized, wrapped in a
  "bridge": what closes the assistant turn, the user turn, and the next assistant header.
- Images. Each takes h w / merge^2 placeholder tokens. Their embeddings are replaced by the output of the vision tower,
  and their positions follow m-rope (rows and columns instead of a running count).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from envs.base import Observation
from freshper.episode import AnyImage, Batch, image_key
from freshper.errors import time_limit

TOLERANCE = {
    "float32": 1e-3,
    "bfloat16": 0.5,
}  # of equal logits or log-probs that are computed in two ways
_TEXT, _REPLY = (
    "\ue000",
    "\ue001",
)  # replace a user text and a reply when the chat template is split


@dataclass(eq=False)
class Policy:
    """Model, tokenizer and image processor. Raises ValueError if a chat template is missing or does not fit."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    image_processor: Any = None  # transformers', if the model reads images
    freeze_vision: bool = (
        False  # the vision tower is fixed during RL, and features of images are reused
    )
    mixed: bool = False  # autocast to bfloat16, with float32 weights
    _features: dict[bytes, Tensor] = field(default_factory=dict)
    _templates: dict[tuple[int, bool], tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; choose a chat (instruct) model")
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        closing = self.tokenizer.encode(self._template(0, first=False)[0], add_special_tokens=False)
        if special.isdisjoint(closing):
            raise ValueError(
                "its chat template closes a reply with no special token, so no reply could end"
            )
        self.eos_id: int = next(
            i for i in closing if i in special
        )  # the template's, not always the tokenizer's
        # never sampled: other special tokens (a sampled image placeholder has no image), and the model's own list
        self.suppressed_ids = sorted(
            special.union(self.model.generation_config.suppress_tokens or ()) - {self.eos_id}
        )
        self.image_token_id: int = self.model.config.image_token_id if self.image_processor else -1
        if self.freeze_vision and self.image_processor:
            self.model.model.visual.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def bridge(self, observation: Observation, closed: bool) -> list[int]:
        """Return the tokens between two replies. `closed`: the reply before ended with a sampled eos."""
        tokens = self.user_turn(observation, first=False)
        return tokens[tokens.index(self.eos_id) + 1 :] if closed else tokens

    def _template(self, n_images: int, first: bool) -> tuple[str, str]:
        """Return what the chat template puts before and after the user's text."""
        key = (n_images, first)
        if key not in self._templates:
            content = (
                [{"type": "image"}] * n_images + [{"type": "text", "text": _TEXT}]
                if n_images
                else _TEXT
            )
            earlier = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _REPLY}]
            turns = [*([] if first else earlier), {"role": "user", "content": content}]
            with time_limit(10.0, "its chat template"):
                text = self.tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True
                )
            if text.count(_TEXT) != 1 or text.count(_REPLY) != (not first):
                raise ValueError(
                    "its chat template does not show a user's text exactly once per turn"
                )
            prefix, suffix = text.split(_TEXT)
            self._templates[key] = (prefix if first else prefix.split(_REPLY)[1], suffix)
        return self._templates[key]

    def user_turn(self, observation: Observation, first: bool = True) -> list[int]:
        """Return the tokens of a user turn and the assistant header, from the start of the conversation if it is the
        first. The single placeholder of each image is repeated rows x columns times."""
        before, after = self._template(len(observation.images), first)
        ids = self.tokenizer.backend_tokenizer.encode(
            before + observation.text + after, add_special_tokens=False
        ).ids
        sizes = iter([height * width for height, width in map(self.grid, observation.images)])
        return [
            i
            for token in ids
            for i in [token] * (next(sizes) if token == self.image_token_id else 1)
        ]

    def grid(self, image: AnyImage) -> tuple[int, int]:
        """Return rows and columns of placeholder tokens of an image (uint8 [H, W, 3])."""
        cell = self.image_processor.patch_size * self.image_processor.merge_size
        low, high = (
            self.image_processor.size["shortest_edge"],
            self.image_processor.size["longest_edge"],
        )
        height, width = smart_resize(*image.shape[:2], factor=cell, min_pixels=low, max_pixels=high)
        return height // cell, width // cell

    def positions(self, tokens: np.ndarray, images: list[AnyImage], start: int = 0) -> np.ndarray:
        """Return position ids (m-rope) from `start`, int64 [3, T]: time, row, column, equal for text. An image of h x w
        takes max(h, w): row r is at start + r, column c at start + c. Raises ValueError if images do not fit."""
        advance = np.ones(
            len(tokens), dtype=np.int64
        )  # from each token's position to the next one's
        if not images:
            return np.tile(start + advance.cumsum() - 1, (3, 1))
        is_image, grids = tokens == self.image_token_id, [self.grid(image) for image in images]
        advance[is_image] = np.concatenate([[0] * (h * w - 1) + [max(h, w)] for h, w in grids])
        out = np.tile(start + advance.cumsum() - advance, (3, 1))
        out[:, is_image] += np.concatenate(
            [np.indices((1, h, w)).reshape(3, -1) for h, w in grids], axis=1
        )
        return out

    def image_features(self, images: list[AnyImage]) -> Tensor:
        """Return vision-tower features, [placeholders of all images, hidden]. Identical images are encoded once."""
        keys = [image_key(image) for image in images]
        unseen = {
            k: image for k, image in zip(keys, images, strict=True) if k not in self._features
        }
        if unseen:
            shown = [Image.fromarray(np.asarray(image)) for image in unseen.values()]
            inputs = self.image_processor(images=shown, return_tensors="pt")
            pixels, grid = (
                inputs["pixel_values"].to(self.device),
                inputs["image_grid_thw"].to(self.device),
            )
            out = self.model.model.get_image_features(pixels, grid, return_dict=True)
            self._features.update(zip(unseen, out.pooler_output, strict=True))
        features = torch.cat([self._features[k] for k in keys])
        if not self.freeze_vision or len(self._features) > 20_000:  # 80 MB with the tiny model
            self._features.clear()
        return features

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        images: list[AnyImage],
        mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Return the last hidden states [B, T, hidden] of tokens [B, T] at positions [3, B, T]. `mask`: None for
        causal over right-padded rows, or bool [B, 1, T, cached + T], True if a token attends to another."""
        tokens, positions = tokens.to(self.device), positions.to(self.device)
        with self.precision():
            embeddings = self.model.get_input_embeddings()(tokens)
            if images:
                features = self.image_features(images).to(embeddings.dtype)
                embeddings = embeddings.masked_scatter(
                    (tokens == self.image_token_id)[..., None], features
                )
            decoder = self.model.model.language_model if self.image_processor else self.model.model
            places = {
                "position_ids": positions if self.image_processor else positions[0],
                "attention_mask": mask,
            }
            out = decoder(
                inputs_embeds=embeddings,
                past_key_values=cache,
                use_cache=cache is not None,
                **places,
            )
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits, float32 [n, V], from hidden states [n, hidden]. Ids that are never sampled get
        -inf, in the trainer too: no reward would reach them there, and probability would drift to them."""
        config = (
            self.model.config.get_text_config()
        )  # some families scale or cap (Cohere, Granite, Gemma 2)
        scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        with self.precision():
            logits = self.model.lm_head(hidden).float() * scale
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        logits[:, self.suppressed_ids] = -torch.inf
        return logits

    def precision(self) -> torch.autocast:
        """Return the context of a forward pass. Weights that it casts are kept until the outermost one ends."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed)

    def batch_hidden(self, batch: Batch) -> Tensor:
        """Return the last hidden states of a right-padded batch, [B, T, hidden]."""
        positions = np.zeros((3, *batch.tokens.shape), dtype=np.int64)
        for row, (n, images) in enumerate(zip(batch.lengths, batch.images, strict=True)):
            positions[:, row, :n] = self.positions(batch.tokens[row, :n].numpy(), images)
        return self.hidden(batch.tokens, torch.from_numpy(positions), sum(batch.images, []))

    def save(self, folder: str, weights: dict[str, torch.Tensor] | None = None) -> None:
        """Write model (its own weights, or these), tokenizer and image processor in the Hugging Face format."""
        self.model.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)
        if self.image_processor:
            self.image_processor.save_pretrained(folder)


def load_policy(name: str, device: str, dtype: torch.dtype, freeze_vision: bool = False) -> Policy:
    """Load a policy from a hub id or a folder. Pickled weights are not read. Raises OSError if there is no model there,
    ValueError if weights are missing (transformers would make random ones) or have no place, or if it reads images in
    another way than Qwen2-VL and Qwen2.5-VL."""
    options = {
        "dtype": dtype,
        "attn_implementation": "sdpa",
        "output_loading_info": True,
        "use_safetensors": True,
    }
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    vision = hasattr(config, "vision_config")
    if vision and config.model_type not in ("qwen2_vl", "qwen2_5_vl"):
        raise ValueError(
            f"it is a {config.model_type}; of models that read images, qwen2_vl and qwen2_5_vl are known"
        )
    kind = transformers.AutoModelForImageTextToText if vision else transformers.AutoModelForCausalLM
    model, loaded = kind.from_pretrained(name, trust_remote_code=False, **options)
    for problem, keys in (
        ("lack", loaded["missing_keys"]),
        ("have no place for", loaded["unexpected_keys"]),
    ):
        if keys:
            raise ValueError(f"its weights {problem} {len(keys)}, such as {min(keys)}")
    for (
        parameter
    ) in model.parameters():  # out of the file's mapping, whose alignment can show in a last bit
        parameter.data = parameter.data.clone()
    image_processor = (
        transformers.AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
        if vision
        else None
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    return Policy(model.to(device), tokenizer, image_processor, freeze_vision)
