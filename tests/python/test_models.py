#!/usr/bin/env python3
"""Models of transformers and diffusers, unchanged but for activate_flash_attention_impl("ACROMION"): what they compute,
and that acromion computed all their attention. Needs the installed package, PyTorch and transformers, and for one model
diffusers, which CI has."""
import contextlib
import importlib.util
import unittest

import torch
import torch.nn.functional as F
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

import acromion

DEVICE, DTYPE, TOLERANCE = ("cuda", torch.float16, 2e-2) if torch.cuda.is_available() else ("cpu", torch.float32, 1e-4)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, DTYPE)


class Calls(contextlib.AbstractContextManager):
    """Counts calls of scaled_dot_product_attention by whoever looks it up in torch.nn.functional."""

    def __enter__(self):
        self.count, self.theirs = 0, F.scaled_dot_product_attention

        def counted(*arguments, **keywords):
            self.count += 1
            return self.theirs(*arguments, **keywords)
        F.scaled_dot_product_attention = counted
        return self

    def __exit__(self, *_):
        F.scaled_dot_product_attention = self.theirs


class Models(unittest.TestCase):
    def compare(self, model, call, attentions):
        """What the model gives, with and without the line. Strict: acromion raises where it would hand a call over."""
        model = model.to(DEVICE, DTYPE).eval()
        with torch.no_grad():
            wanted = call(model)
            acromion.register_torch(strict=True)
            self.addCleanup(acromion.register_torch)
            activate_flash_attention_impl("ACROMION")
            try:
                with Calls() as calls:
                    found = call(model)
                self.assertEqual((calls.count, acromion.fallbacks()), (attentions, {}))
            finally:
                restore_flash_attention_impl()
            self.assertFalse(torch.equal(found, wanted))  # other kernels round otherwise
            torch.testing.assert_close(found, wanted, atol=TOLERANCE * wanted.abs().max().item(), rtol=0)
            self.assertTrue(torch.equal(call(model), wanted))

    def test_vit(self):
        torch.manual_seed(1)
        model = ViTModel(ViTConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
                                   image_size=64, patch_size=8, attn_implementation="sdpa"))
        images = normal(3, 3, 64, 64)
        self.compare(model, lambda model: model(images)[0], 3)

    def test_llama(self):
        """Grouped heads, causal."""
        torch.manual_seed(1)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation="sdpa"))
        tokens = torch.arange(96, device=DEVICE).reshape(2, 48)
        self.compare(model, lambda model: model(tokens, use_cache=False).logits, 3)

    @unittest.skipUnless(importlib.util.find_spec("diffusers"), "diffusers is not installed")
    def test_unet(self):
        """A diffusion model of diffusers: attention between places and to a prompt, down, in the middle and up."""
        from diffusers import UNet2DConditionModel
        torch.manual_seed(1)
        model = UNet2DConditionModel(sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 64),
                                     down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                                     up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), layers_per_block=1,
                                     cross_attention_dim=48, attention_head_dim=4, norm_num_groups=8)
        latent, prompt = normal(2, 4, 16, 16), normal(2, 77, 48)
        self.compare(model, lambda model: model(latent, 10, encoder_hidden_states=prompt).sample, 8)


if __name__ == "__main__":
    unittest.main()
