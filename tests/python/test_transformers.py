#!/usr/bin/env python3
"""attn_implementation="acromion": small randomly initialised models beside transformers' SDPA and its eager attention.
Needs the installed package, PyTorch and transformers."""
import itertools
import unittest

import torch
import transformers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import StaticCache

import acromion

HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.float16) if HAS_GPU else ("cpu", torch.float32)
TOLERANCE = {"atol": 2e-2, "rtol": 1e-2} if HAS_GPU else {"atol": 2e-5, "rtol": 1e-4}
SIZES = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4}
RIGHT = torch.tensor([[1] * 12, [1] * 7 + [0] * 5, [1] * 1 + [0] * 11], device=DEVICE)
LEFT = RIGHT.flip(1)
BOTH = torch.tensor([[0] * 2 + [1] * 8 + [0] * 2, [1] * 12, [0] * 5 + [1] * 7], device=DEVICE)


def build(kind, config, **sizes):
    torch.manual_seed(1)
    return kind(config(**SIZES, **sizes)).to(DEVICE, DTYPE).eval()


def tokens(length=12):
    return torch.randint(100, (3, length), generator=torch.Generator().manual_seed(2)).to(DEVICE)


class Models(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        acromion.register_transformers()
        cls.llama = build(LlamaForCausalLM, LlamaConfig, num_key_value_heads=2)
        cls.bert = build(BertModel, BertConfig)

    def both(self, model, *args, **kwargs):
        """What the model gives with acromion, and with transformers' SDPA."""
        results = []
        for implementation in ("acromion", "sdpa"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                results.append(model(*args, **kwargs)[0])
        return results

    def compare(self, model, padding=None, **kwargs):
        ours, theirs = self.both(model, tokens(), attention_mask=padding, **kwargs)
        kept = slice(None) if padding is None else padding.bool()
        torch.testing.assert_close(ours[kept], theirs[kept], **TOLERANCE)

    def test_causal_with_grouped_heads(self):
        self.compare(self.llama)
        self.compare(self.llama, torch.ones_like(RIGHT))

    def test_causal_padded_on_the_right(self):
        self.compare(self.llama, RIGHT)

    def test_bidirectional(self):
        self.compare(self.bert)
        self.compare(self.bert, torch.ones_like(RIGHT))
        self.compare(self.bert, RIGHT)

    def test_generation(self):
        found = []
        for implementation in ("acromion", "sdpa"):
            self.llama.set_attn_implementation(implementation)
            found.append(self.llama.generate(tokens(), attention_mask=torch.ones_like(RIGHT), max_new_tokens=8,
                                             do_sample=False, pad_token_id=0, eos_token_id=None))
        if HAS_GPU:  # rounding may tip one choice, and everything after it
            self.assertGreater((found[0] == found[1]).float().mean().item(), 0.8)
        else:
            self.assertTrue(torch.equal(*found))

    def cached(self, implementation, cache):
        """Two calls of several tokens and one of a single token over a cache."""
        self.llama.set_attn_implementation(implementation)
        with torch.no_grad():
            results = [self.llama(tokens()[:, first:end], past_key_values=cache).logits
                       for first, end in ((0, 5), (5, 11), (11, 12))]
        return torch.cat(results, 1)

    def test_chunks_over_a_cache(self):
        from transformers.cache_utils import DynamicCache
        ours, theirs = (self.cached(name, DynamicCache(config=self.llama.config)) for name in ("acromion", "sdpa"))
        torch.testing.assert_close(ours, theirs, **TOLERANCE)

    def test_chunks_over_a_static_cache(self):
        ours, theirs = (self.cached(name, StaticCache(config=self.llama.config, max_cache_len=32))
                        for name in ("acromion", "sdpa"))
        torch.testing.assert_close(ours, theirs, **TOLERANCE)

    def test_padded_on_the_left_and_with_holes(self):
        holes = RIGHT.clone()
        holes[0, 3] = 0
        for padding in (LEFT, BOTH, holes):
            for model in (self.llama, self.bert):
                self.compare(model, padding)

    def test_generation_in_a_batch_padded_on_the_left(self):
        found = []
        for implementation in ("acromion", "sdpa"):
            self.llama.set_attn_implementation(implementation)
            found.append(self.llama.generate(tokens(), attention_mask=LEFT, max_new_tokens=6, do_sample=False,
                                             pad_token_id=0, eos_token_id=None, output_logits=True,
                                             return_dict_in_generate=True).logits[0])
        torch.testing.assert_close(*found, **TOLERANCE)

    def test_masks_of_the_caller(self):
        """Of four dimensions: boolean ones, and such that are added."""
        said = torch.rand(3, 1, 12, 12, generator=torch.Generator().manual_seed(3)).to(DEVICE) < 0.7
        said |= torch.eye(12, dtype=torch.bool, device=DEVICE)
        for mask in (said, torch.zeros_like(said, dtype=DTYPE).masked_fill(~said, torch.finfo(DTYPE).min)):
            torch.testing.assert_close(*self.both(self.llama, tokens(), attention_mask=mask), **TOLERANCE)

    def test_packed_sequences(self):
        packed = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], device=DEVICE).expand(3, 12)
        torch.testing.assert_close(*self.both(self.llama, tokens(), position_ids=packed, use_cache=False), **TOLERANCE)

    def gradients(self, implementation, kept, **kwargs):
        """Of all parameters, of a loss that asks for the kept positions."""
        self.llama.set_attn_implementation(implementation)
        self.llama.zero_grad()
        logits = self.llama(tokens(), use_cache=False, **kwargs).logits
        logits[kept].float().log_softmax(-1)[:, 7].mean().neg().backward()
        return [parameter.grad.clone() for parameter in self.llama.parameters()]

    def test_training(self):
        """Padding, masks of the caller and packed sequences, which are boolean masks."""
        holes = RIGHT.clone()
        holes[0, 3] = 0
        said = torch.ones(3, 1, 12, 12, dtype=torch.bool, device=DEVICE).tril()
        said[:, :, 5:, 2] = False
        packed = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], device=DEVICE).expand(3, 12)
        everywhere = torch.ones_like(RIGHT).bool()
        cases = [(padding.bool(), {"attention_mask": padding}) for padding in (RIGHT, LEFT, holes)]
        cases += [(everywhere, {"attention_mask": said}), (everywhere, {"position_ids": packed})]
        for kept, kwargs in cases:
            for ours, theirs in zip(self.gradients("acromion", kept, **kwargs),
                                    self.gradients("sdpa", kept, **kwargs), strict=True):
                torch.testing.assert_close(ours, theirs, **TOLERANCE)

    def test_several_tokens_over_a_padded_cache(self):
        found = []
        for implementation in ("acromion", "sdpa"):
            self.llama.set_attn_implementation(implementation)
            with torch.no_grad():
                cache = self.llama(tokens()[:, :6], attention_mask=RIGHT[:, :6]).past_key_values
                found.append(self.llama(tokens()[:, 6:], attention_mask=RIGHT, past_key_values=cache).logits[:2, 0])
        torch.testing.assert_close(*found, **TOLERANCE)

    def test_compiled(self):
        self.llama.set_attn_implementation("acromion")
        compiled = torch.compile(self.llama, backend="aot_eager")
        with torch.no_grad():
            found = compiled(tokens(), attention_mask=RIGHT, use_cache=False).logits
            wanted = self.llama(tokens(), attention_mask=RIGHT, use_cache=False).logits
        torch.testing.assert_close(found[RIGHT.bool()], wanted[RIGHT.bool()], **TOLERANCE)

    def test_refusals(self):
        self.bert.config.attention_probs_dropout_prob = 0.1
        self.bert.train()
        self.bert.set_attn_implementation("acromion")
        try:
            with torch.no_grad(), self.assertRaisesRegex(NotImplementedError, "dropout 0.1"):
                self.bert(tokens())
        finally:
            self.bert.eval()


class TodaysModels(unittest.TestCase):
    """Logits beside those of transformers' eager attention: windows, soft caps, sinks, chunks, position biases; whole,
    padded on either side, and token by token over a cache."""

    @classmethod
    def setUpClass(cls):
        acromion.register_transformers()

    def check(self, kind, config, paddings=(None, LEFT, RIGHT), cached=True, **sizes):
        try:
            model = build(getattr(transformers, kind), getattr(transformers, config), **sizes)
        except AttributeError:
            self.skipTest(f"transformers {transformers.__version__} has no {kind}")
        found = {}
        for implementation in ("acromion", "eager"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                whole = [model(tokens(), attention_mask=padding, use_cache=False).logits[... if padding is None
                                                                                           else padding.bool()]
                         for padding in paddings]
                if cached:
                    first = model(tokens()[:, :7], use_cache=True)
                    second = model(tokens()[:, 7:11], past_key_values=first.past_key_values)
                    third = model(tokens()[:, 11:], past_key_values=second.past_key_values)
                    whole.append(torch.cat([first.logits, second.logits, third.logits], 1))
                found[implementation] = whole
        for ours, theirs in zip(found["acromion"], found["eager"]):
            torch.testing.assert_close(ours, theirs, **TOLERANCE)

    def test_mistral(self):
        self.check("MistralForCausalLM", "MistralConfig", num_key_value_heads=2, sliding_window=4)

    def test_mistral_whose_window_is_not_filled(self):
        self.check("MistralForCausalLM", "MistralConfig", num_key_value_heads=2, sliding_window=64)

    def test_gemma2(self):
        self.check("Gemma2ForCausalLM", "Gemma2Config", num_key_value_heads=2, head_dim=32, sliding_window=4,
                   attn_logit_softcapping=0.5, query_pre_attn_scalar=1)

    def test_gemma3(self):
        self.check("Gemma3ForCausalLM", "Gemma3TextConfig", num_key_value_heads=2, head_dim=32, sliding_window=4,
                   layer_types=["sliding_attention", "full_attention"])

    def test_gpt_oss(self):
        self.check("GptOssForCausalLM", "GptOssConfig", num_key_value_heads=2, head_dim=32, sliding_window=4,
                   layer_types=["sliding_attention", "full_attention"], num_local_experts=2, num_experts_per_tok=1)

    def test_llama4(self):
        self.check("Llama4ForCausalLM", "Llama4TextConfig", num_key_value_heads=2, head_dim=32, attention_chunk_size=5,
                   intermediate_size_mlp=256, num_local_experts=2, num_experts_per_tok=1,
                   layer_types=["chunked_attention", "full_attention"])

    def test_t5(self):
        torch.manual_seed(1)
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=100, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)).to(DEVICE, DTYPE).eval()
        found = []
        for implementation in ("acromion", "eager"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                found.append([model(tokens(), attention_mask=padding, decoder_input_ids=tokens(5)).logits
                              for padding in (None, RIGHT, LEFT)])
        for ours, theirs in zip(*found):
            torch.testing.assert_close(ours, theirs, **TOLERANCE)


class Forms(unittest.TestCase):
    """What becomes of transformers' masks: limits where limits say it, else a boolean mask; against its own mask."""

    def test_as_transformers_says(self):
        from transformers import masking_utils as m

        from acromion import _transformers
        from reference import visible
        functions = {
            "causal": m.causal_mask_function, "window": m.sliding_window_causal_mask_function(4),
            "both sides": m.sliding_window_bidirectional_mask_function(3),
            "bidirectional": m.bidirectional_mask_function,
            "chunks": None,
            "an overlay": m.and_masks(m.causal_mask_function, lambda b, h, q, k: (q + k) % 3 > 0),
            "a union": m.or_masks(m.causal_mask_function, m.blockwise_overlay(torch.arange(12).expand(3, 12) // 4)),
        }
        paddings = {"none": None, "full": torch.ones_like(RIGHT), "right": RIGHT, "left": LEFT, "both": BOTH}
        for name, function in functions.items():
            for (q_length, q_offset, kv_offset), (told, padding) in itertools.product(
                    ((12, 0, 0), (1, 11, 0), (3, 9, 0), (5, 0, 0), (1, 11, 4), (4, 4, 0)), paddings.items()):
                kv_length = 12 - kv_offset
                if name == "chunks":  # as create_chunked_causal_mask does
                    before = torch.zeros(3) if padding is None else (padding.cpu().cumsum(-1) == 0).sum(-1)
                    function = m.chunked_causal_mask_function(5, before)
                with self.subTest(f"{name}, {q_length} at {q_offset} over {kv_length} from {kv_offset}, padded {told}"):
                    given = {"batch_size": 3, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
                             "kv_offset": kv_offset, "mask_function": function,
                             "attention_mask": None if padding is None else padding.cpu().bool()}
                    said = _transformers.mask(**given)
                    wanted = m.sdpa_mask(**given, allow_is_causal_skip=False)
                    found = said.attn_mask
                    if found is None:
                        found = visible(q_length, kv_length, said.causal_align is not None, said.causal_align,
                                        said.window, said.chunk, said.kv_lens, said.kv_starts, batch=3)
                    else:
                        self.assertIn(name, ("an overlay", "a union", "both sides", "chunks", "causal", "window"))
                    exists = torch.ones(3, 12) if padding is None else padding.cpu()
                    rows = exists[:, q_offset:q_offset + q_length].bool()[:, None, :, None]  # the others: nobody reads
                    self.assertTrue(torch.equal(found & rows, wanted & rows))

    def test_limits_need_no_mask(self):
        from transformers import masking_utils as m

        from acromion import _transformers
        for function, padding in ((m.sliding_window_causal_mask_function(4), LEFT),
                                  (m.chunked_causal_mask_function(5, torch.tensor([0, 5, 11])), LEFT),
                                  (m.causal_mask_function, BOTH), (m.bidirectional_mask_function, BOTH)):
            said = _transformers.mask(3, 12, 12, mask_function=function, attention_mask=padding.cpu())
            self.assertIsNone(said.attn_mask)
            self.assertIsNotNone(said.kv_starts)


if __name__ == "__main__":
    unittest.main()
