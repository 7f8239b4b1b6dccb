"""A policy pi_theta: a transformers model with its tokenizer, chat template and image processor.

Paper: appendix D (Qwen2.5 for text, Qwen2.5-VL for images). A chat model of one of FAMILIES works,
from a hub id or a folder. freshper/tiny.py builds small ones of the same classes. Two things are
easy to get wrong:

- Token in, token out. A conversation grows by appending ids. Only the environment's new text is
  tokenized, wrapped in a "bridge": what closes the assistant turn, the user turn, and the next
  assistant header. That text never becomes a special token, whatever it spells.
- Images. Each takes rows x columns placeholder tokens (`grid`). Their embeddings are replaced by
  the output of the vision tower, and their positions follow m-rope (rows and columns instead of a
  count).
"""

import copy
import functools
import math
import re
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import modeling_utils
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from envs.base import THOUGHT, THOUGHT_TAG, Observation, UserError
from freshper.episode import AnyImage, Batch, image_key

# The `model_type` of models that this code computes correctly: with the engine's cache and its
# holes, in a padded batch, saved and loaded again. tests/test_families.py compares each with the
# model's own forward pass. Add a family there first.
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl")
TEXT_FAMILIES = "qwen2 qwen3 llama mistral smollm3 granite phi3 olmo2".split()
FAMILIES = (*TEXT_FAMILIES, *VISION_FAMILIES)
# Types of rope whose angles do not depend on the length of the text
ROPES = "default linear llama3 yarn".split()
# These replace a user's text and a reply when the chat template is split.
TEXT = "\ue000"
REPLY = "\ue001"
# Instead of transformers' table of weights that do not fit, `load_policy` raises one sentence.
modeling_utils.logger.addFilter(lambda record: "LOAD REPORT" not in record.msg)


@dataclass(eq=False)
class Policy:
    """Hold model, tokenizer and image processor. Raises UserError if tokenizer or chat template do
    not fit."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    image_processor: Any = None  # transformers', if the model reads images
    freeze_vision: bool = False  # the vision tower is not trained, and features are reused
    mixed: bool = False  # autocast to bfloat16, with float32 weights
    # Some chat templates show the date. It is that of the run's first start.
    today: date = field(default_factory=date.today)
    features: dict[bytes, Tensor] = field(default_factory=dict)  # by `image_key`
    held_out_features: dict[bytes, Tensor] = field(default_factory=dict)  # of `evaluate`

    def __post_init__(self) -> None:
        # One rendering of each form is enough for all turns.
        self.template = functools.cache(self.split_template)

        # The end of a reply is the template's, which is not always the tokenizer's eos.
        added = self.tokenizer.added_tokens_decoder
        special = {i: token.content for i, token in added.items() if token.special}
        closing, *_ = self.template(0, first=False)
        ends = [i for i in self.encode(closing) if i in special]
        if not ends:
            raise UserError(
                "its chat template closes a reply with no special token, so no reply could end"
            )
        self.eos_id = ends[0]

        # Never sampled: rows of the output layer without a token, other special tokens (a sampled
        # placeholder has no image), and the model's own list.
        rows = {*range(self.model.get_output_embeddings().out_features)}
        tokens = {*self.tokenizer.get_vocab().values()}
        if not tokens <= rows:
            raise UserError("its tokenizer belongs to another model, which has more tokens")
        listed = self.model.generation_config.suppress_tokens or ()
        sampled = tokens.difference(special, listed) | {self.eos_id}
        self.suppressed_ids = sorted(rows - sampled)

        self.special_tokens = [*special.values()]
        for token in self.special_tokens:
            if re.search(f"{THOUGHT}|answer|<search>", token.lower()):
                raise UserError(f"it needs {token}, a special token, which is never sampled")

        self.image_token_id = getattr(self.model.config, "image_token_id", -1)
        if self.image_processor:
            self.model.model.visual.requires_grad_(not self.freeze_vision)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def split_template(self, n_images: int, first: bool) -> tuple[str, str, bool]:
        """Return what the chat template puts before and after a user's text, and whether it opens
        a thought there. `first`: at the start of a conversation, else after a reply. Raises
        UserError if it does not show the text."""
        content: Any = TEXT
        if n_images:
            content = [{"type": "image"}] * n_images + [{"type": "text", "text": TEXT}]
        turns = [{"role": "user", "content": content}]
        if not first:
            reply = {"role": "assistant", "content": REPLY}
            turns = [{"role": "user", "content": "?"}, reply, *turns]

        text = self.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, strftime_now=self.today.strftime
        )
        if text.count(TEXT) != 1 or text.count(REPLY) != len(turns) // 2:
            raise UserError("its chat template does not show a user's text exactly once per turn")

        before, after = text.split(TEXT)
        header, *tags = re.split(THOUGHT_TAG, after)  # of each tag "" or "/", and what follows it
        if re.search(f"(?i){THOUGHT}", header):
            raise UserError("its chat template marks a thought in a form other than <think>")
        return before.split(REPLY)[-1], after, tags[-2:-1] == [""]

    def user_turn(self, observation: Observation, first: bool = True) -> list[int]:
        """Return the tokens of a user turn and the assistant header, from the start of the
        conversation if it is the first."""
        before, after, _ = self.template(len(observation.images), first)
        text = observation.text
        if any(token in text for token in self.special_tokens):
            tokens = self.encode(before) + self.encode(text, plain=True) + self.encode(after)
        else:
            tokens = self.encode(before + text + after)

        # The template has one placeholder per image, and the model needs rows x columns of them.
        end = 0
        for image in observation.images:
            start = tokens.index(self.image_token_id, end)
            size = math.prod(self.grid(image))
            end = start + size
            tokens[start : start + 1] = [self.image_token_id] * size
        return tokens

    def encode(self, text: str, plain: bool = False) -> list[int]:
        """Return the tokens of a text. `plain`: a special token that it spells is text, too."""
        encodable = text.encode(errors="replace").decode()  # "?" for lone surrogates
        return self.tokenizer.encode(
            encodable, add_special_tokens=False, split_special_tokens=plain
        )

    def read(self, reply: list[int], first: bool) -> str:
        """Return the text of a reply, with the thought that the chat template has opened for it,
        and with "…" at the end if the limit cut it."""
        text = self.tokenizer.decode(reply, skip_special_tokens=True)
        return "<think>" * self.template(0, first)[2] + text + "…" * (reply[-1] != self.eos_id)

    def bridge(self, observation: Observation, closed: bool) -> list[int]:
        """Return the tokens between two replies. `closed`: the first one ended with a sampled
        eos."""
        tokens = self.user_turn(observation, first=False)
        return tokens[tokens.index(self.eos_id) + 1 :] if closed else tokens

    def grid(self, image: AnyImage) -> tuple[int, int]:
        """Return rows and columns of placeholder tokens of an image (uint8 [H, W, 3])."""
        processor = self.image_processor
        pixels = processor.patch_size * processor.merge_size  # of a placeholder, in each direction
        limits = processor.size  # pixels of an image
        height, width = smart_resize(
            *image.shape[:2], pixels, limits["shortest_edge"], limits["longest_edge"]
        )
        return height // pixels, width // pixels

    def positions(self, tokens: list[int], images: list[AnyImage], start: int = 0) -> Tensor:
        """Return position ids (m-rope) from `start`, int64 [3, T]: time, row and column, which are
        equal for text. Of an image of h x w at position p, row r is at p + r, column c at p + c,
        and the next token at p + max(h, w). Raises UserError if there are more images than tokens
        for them."""
        positions = start + np.tile(np.arange(len(tokens)), (3, 1))  # [3, T]: of text
        end = 0
        for image in images:
            rows, columns = self.grid(image)
            begin = tokens.index(self.image_token_id, end)
            end = begin + rows * columns
            cells = np.indices((1, rows, columns)).reshape(3, -1)  # [3, h w]
            positions[:, begin:end] = positions[0, begin] + cells
            positions[:, end:] += max(rows, columns) - rows * columns
        return torch.from_numpy(positions)

    def image_features(self, images: list[AnyImage]) -> Tensor:
        """Return vision-tower features, [placeholders of all images, hidden]. Identical images are
        encoded once."""
        device = self.device
        keys = [image_key(image) for image in images]
        unseen = {k: x for k, x in zip(keys, images) if k not in self.features}

        if unseen:
            pictures = [Image.fromarray(np.asarray(image)) for image in unseen.values()]
            inputs = self.image_processor(pictures, return_tensors="pt").to(device)
            encoded = self.model.get_image_features(**inputs)
            # Per image: [rows * columns, hidden].
            self.features.update(zip(unseen, encoded.pooler_output))

        # Those of a checkpoint are on the CPU.
        features = torch.cat([self.features[key].to(device) for key in keys])
        # With the tiny model, features of so many images take 80 MB.
        if not self.freeze_vision or len(self.features) > 20_000:
            self.features.clear()
        return features

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        images: list[AnyImage],
        mask: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """Return the last hidden states [B, T, hidden] of tokens [B, T] at positions [3, B, T].
        `mask`: None for causal over right-padded rows, or bool [B, 1, T, cached + T], True if a
        token attends to another."""
        tokens = tokens.to(self.device)
        decoder = self.model.get_decoder()
        if not self.image_processor:
            positions = positions[0]  # [B, T]

        with self.precision():
            embeddings = self.model.get_input_embeddings()(tokens)  # [B, T, hidden]
            if images:
                features = self.image_features(images).to(embeddings.dtype)
                is_image = tokens == self.image_token_id  # [B, T]
                embeddings = embeddings.masked_scatter(is_image[..., None], features)
            output = decoder(
                inputs_embeds=embeddings,
                position_ids=positions.to(self.device),
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return output.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits, float32 [n, V], from hidden states [n, hidden]. Ids that are
        never sampled get -inf, in the trainer too: no reward would reach them there, and
        probability would drift to them."""
        scaling = getattr(self.model.config.get_text_config(), "logits_scaling", 1.0)  # Granite's
        with self.precision():
            logits = self.model.lm_head(hidden).float() / scaling
        logits[:, self.suppressed_ids] = -torch.inf
        return logits

    def precision(self) -> torch.autocast:
        """Return the context of a forward pass. Weights that it casts are kept until the outermost
        one ends."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed)

    def batch_hidden(self, batch: Batch) -> Tensor:
        """Return the last hidden states of a right-padded batch, [B, T, hidden]."""
        rows = zip(batch.tokens.tolist(), batch.images)
        positions = [self.positions(tokens, images) for tokens, images in rows]  # B of [3, T]
        return self.hidden(batch.tokens, torch.stack(positions, dim=1), sum(batch.images, []))

    def copy(self) -> "Policy":
        """Return a copy, which shares a frozen vision tower and its features."""
        shared = {}  # what `deepcopy` takes as copied already
        for parameter in self.model.parameters():
            if self.freeze_vision and not parameter.requires_grad:
                shared[id(parameter)] = parameter
        return replace(self, model=copy.deepcopy(self.model, shared))

    def save(self, folder: str, parameters: dict[str, Tensor] | None = None) -> None:
        """Write the model, tokenizer and image processor in the Hugging Face format. `parameters`
        are whole ones by name, if the model's own are not whole."""
        # In one file, which a sync of vLLM replaces. It would go on reading shards.
        self.model.save_pretrained(folder, state_dict=parameters, max_shard_size="1000TB")
        self.tokenizer.save_pretrained(folder)
        if self.image_processor:
            self.image_processor.save_pretrained(folder)


def check_family(config: transformers.PretrainedConfig, max_tokens: int) -> None:
    """Raise UserError unless this code computes a model correctly for `max_tokens` tokens."""
    kind = config.model_type
    if kind not in FAMILIES:
        raise UserError(
            f"it is a {kind}, but must be one of {', '.join(FAMILIES)}: add it to FAMILIES in "
            "freshper/models.py once it passes tests/test_families.py"
        )
    text = config.get_text_config()
    rope = text.rope_parameters["rope_type"]
    if rope not in ROPES:
        raise UserError(f"its rope is of the type {rope}, but must be one of {', '.join(ROPES)}")
    # The engine's cache knows no sliding windows.
    window = getattr(text, "sliding_window", None) or math.inf
    longest = min(text.max_position_embeddings, window)
    if max_tokens > longest:
        raise UserError(
            f"--max_tokens is {max_tokens}, but must be at most {longest}, its window of attention"
        )


def load_policy(
    name: str,
    device: str,
    dtype: torch.dtype,
    max_tokens: int = 0,
    **fields: Any,
) -> Policy:
    """Load a policy from a hub id or a folder. Pickled weights are not read. `fields` are those of
    `Policy`. Raises OSError if there is no model or no tokenizer.json there, UserError if it is of
    another family, or if weights are missing, of another shape, or have no place."""
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    check_family(config, max_tokens)
    auto_class = transformers.AutoModelForCausalLM
    image_processor = None
    if config.model_type in VISION_FAMILIES:
        auto_class = transformers.AutoModelForImageTextToText
        image_processor = transformers.AutoImageProcessor.from_pretrained(name)

    # What tokenizer.json says. AutoTokenizer would take its vocabulary alone, and the rest from the
    # class that the folder names: spaces and newlines may be lost.
    transformers.utils.cached_file(name, "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(
        name, clean_up_tokenization_spaces=False
    )

    model, loaded = auto_class.from_pretrained(
        name,
        config=config,
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        use_safetensors=True,
    )
    # transformers would make random ones for those that are missing.
    misfits = sorted(map(str, set().union(*loaded.values())))
    if misfits:
        raise UserError(f"its weights lack, or have no place for, {', '.join(misfits)}")
    # Out of the file's mapping, whose alignment can show in a last bit.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return Policy(model.to(device), tokenizer, image_processor, **fields)
