#!/usr/bin/env python3
"""attn_implementation="acromion": small randomly initialised models beside transformers' SDPA, and the masks that are
refused. Needs the installed package, PyTorch and transformers."""
import unittest

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.cache_utils import StaticCache

import acromion

HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.float16) if HAS_GPU else ("cpu", torch.float32)
TOLERANCE = {"atol": 2e-2, "rtol": 1e-2} if HAS_GPU else {"atol": 2e-5, "rtol": 1e-4}
SIZES = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
         "num_attention_heads": 4}
RIGHT = torch.tensor([[1] * 12, [1] * 7 + [0] * 5, [1] * 1 + [0] * 11], device=DEVICE)
LEFT = RIGHT.flip(1)


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

    def test_window_that_is_not_filled(self):
        self.compare(build(MistralForCausalLM, MistralConfig, num_key_value_heads=2, sliding_window=64))

    def test_compiled(self):
        self.llama.set_attn_implementation("acromion")
        compiled = torch.compile(self.llama, backend="aot_eager")
        with torch.no_grad():
            found = compiled(tokens(), attention_mask=RIGHT, use_cache=False).logits
            wanted = self.llama(tokens(), attention_mask=RIGHT, use_cache=False).logits
        torch.testing.assert_close(found[RIGHT.bool()], wanted[RIGHT.bool()], **TOLERANCE)

    def refuse(self, text, model, *args, **kwargs):
        model.set_attn_implementation("acromion")
        with torch.no_grad(), self.assertRaisesRegex(NotImplementedError, text):
            model(*args, **kwargs)

    def test_refusals(self):
        holes = RIGHT.clone()
        holes[0, 3] = 0
        for padding in (LEFT, holes):
            self.refuse("no padding on the right", self.llama, tokens(), attention_mask=padding)
            self.refuse("no padding on the right", self.bert, tokens(), attention_mask=padding)
        self.refuse("a mask of its own, a Tensor", self.llama, tokens(),
                    attention_mask=torch.ones(3, 1, 12, 12, dtype=torch.bool, device=DEVICE))
        window = build(MistralForCausalLM, MistralConfig, num_key_value_heads=2, sliding_window=4)
        self.refuse("neither causal nor bidirectional: a sliding window .*size 4, 12 keys", window, tokens())
        packed = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], device=DEVICE).expand(3, 12)
        self.refuse("packed sequences", self.llama, tokens(), position_ids=packed, use_cache=False)
        self.bert.config.attention_probs_dropout_prob = 0.1
        self.bert.train()
        try:
            self.refuse("dropout 0.1", self.bert, tokens())
        finally:
            self.bert.eval()

    def test_several_tokens_over_a_padded_cache(self):
        self.llama.set_attn_implementation("acromion")
        with torch.no_grad():
            cache = self.llama(tokens()[:, :6], attention_mask=RIGHT[:, :6]).past_key_values
            with self.assertRaisesRegex(NotImplementedError, "several new tokens over cached ones"):
                self.llama(tokens()[:, 6:], attention_mask=RIGHT, past_key_values=cache)


if __name__ == "__main__":
    unittest.main()
