#!/usr/bin/env python3
"""Device code on the CPU: `acromion check` over the fake driver, whose launches the PTX machine executes.

    device.py PROGRAM FAKE_DRIVER_FOLDER IMAGES GROUP     one of GROUPS below
    device.py PROGRAM FAKE_DRIVER_FOLDER IMAGES one:GROUP the first kernel of a group on its first problem
    device.py PROGRAM FAKE_DRIVER_FOLDER IMAGES kernel:NAME:ARCH  one kernel, whose image is for ARCH, say 80
    device.py PROGRAM FAKE_DRIVER_FOLDER IMAGES flaws     kernels with a fault made into them must fail
    device.py PROGRAM FAKE_DRIVER_FOLDER IMAGES races     each wait that is taken out of a kernel must be missed
    device.py ISOLATION FAKE_DRIVER_FOLDER IMAGES isolation_hopper  what isolation.c checks on sm_90
    device.py ISOLATION FAKE_DRIVER_FOLDER IMAGES isolation    the same elsewhere, and that it finds faults
    device.py OPS FAKE_DRIVER_FOLDER IMAGES ops          what ops.c checks; one:ops a few of its cases
    device.py CACHES FAKE_DRIVER_FOLDER IMAGES caches    what caches.c checks
    device.py PROGRAM FAKE_DRIVER_FOLDER IMAGES unlisted ISOLATION  lines of unlisted.def; both kinds of checks

A failure prints the command that repeats it, its environment included. FAKE_CUDA_RACES=1 in the environment looks for
races in every order, not in one of them only."""
import fnmatch
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
ALL_BY_ALL = os.environ.get("DEVICE_ALL") == "1"  # every problem in every order and type, not dealt out in turn

# Asynchronous work late or at once, with an order of warps of its own: seed, eager, races looked for.
LATE, LATE_TOO, EAGER = ("1", "0", "1"), ("7", "0", "0"), ("2", "1", "0")
LATE_WITHOUT_RACES = ("1", "0", "0")  # what the order alone brings to light

# How long problems of these kernels may be: whole tiles, and tails of them.
SHAPES = ["b1:h2:s70/130:d{d}:causal:lse", "b2:h4/2:s65/97:d{d}:kvlens", "b1:h2:s33:d{d}:causal-tl:bshd",
          "b3:h2:s70/50:d{d}:causal:bshd:packed", "b1:h4/1:s1/200:d{d}", "b2:h2:s70/210:d{d}:win40/9:kvlens"]
LONG = ["b1:h2:s200/300:d{d}:causal:lse", "b2:h2/1:s260/129:d{d}:kvlens", "b3:h2:s150/170:d{d}:bshd:packed:lse"]
WINDOWS = ["b1:h2:s70/130:d{d}:causal:lse:win20", "b2:h4/2:s65/97:d{d}:kvlens:win7/3",
           "b1:h2:s200/700:d{d}:causal-tl:win64", "b1:h1:s300/900:d{d}:lse:win100", "b1:h1:s40/500:d{d}:win260/33",
           "b1:h2:s150/40:d{d}:causal-tl:win7:lse"]  # the last rows see none
EXACT = [  # of lines for exactly 512 keys; the first goes to all lines, so that these have one, too
    "b1:h1:s100/512:d{d}:lse", "b1:h1:s512:d{d}:causal:lse"]
PACKED_WINDOWS = ["b3:h2:s70/130:d{d}:causal:lse:bshd:packed:win20", "b2:h1:s200/400:d{d}:bshd:packed:win150/33",
                  "b3:h1:s150/60:d{d}:causal-tl:bshd:packed:win20"]
# Eight query heads of a key head in a tile.
GROUPED = ["b1:h16/2:s70/130:d{d}:causal:lse:win20:sinks", "b2:h8/1:s65/97:d{d}:kvlens:win7/3",
           "b1:h8/1:s60/300:d{d}:causal:lse:win128:sinks", "b1:h16/1:s33:d{d}:causal-tl:bshd"]
# The query heads of a key head in the rows of a tile.
# MLA: of heads in whole tiles, in parts of one, and of several positions in one; keys that several clusters share.
VALUES_IN_KEYS = ["b2:h128/1:s1/200:d{d}:v-in-k:kvlens:lse", "b1:h16/1:s5/700:d{d}:v-in-k:causal:win500:lse",
                  "b2:h48/1:s3/260:d{d}:v-in-k:kvlens:page16:causal",
                  "b3:h32/2:s2/333:d{d}:v-in-k:kvlens:page128:bshd:packed:lse"]
SINKS = ["b1:h2:s70/130:d{d}:causal:lse:sinks", "b2:h4/2:s65/97:d{d}:kvlens:sinks"]
CAPS = ["b1:h2:s70/130:d{d}:causal:lse:cap30", "b2:h2/1:s65/200:d{d}:kvlens:cap5"]
BIASES = ["b1:h2:s70/130:d{d}:causal:lse:bias-f16/0,0,136", "b2:h2/1:s65/200:d{d}:kvlens:bias-f32/200,0,0",
          "b1:h2:s40/150:d{d}:mask/0,0,151"]
# Of lines that take biases as tiles: whole tiles hidden and unchanged, that a survey finds or, of biases that heads do
# not share, nobody does; rows at 16 bytes or not; of a broadcast row; each head's own mask.
BIAS_TILES = ["b2:h2:s200/520:d{d}:mask/0,0,528:lse", "b1:h2:s140/390:d{d}:causal:bias-bf16/0,0,392:lse",
              "b2:h2/1:s140/270:d{d}:bias-f16/0,38080,272:kvlens", "b2:h1:s200/390:d{d}:mask/390,0,0",
              "b1:h2:s150/261:d{d}:bias-bf16/0,0,261", "b1:h2:s150/261:d{d}:mask/0,39150,261:causal-tl:lse"]
# Of masks alone: of all heads, of each entry, of each head, that hide what no causal mask does.
MASKS = [BIAS_TILES[0], BIAS_TILES[3], "b2:h2/1:s140/390:d{d}:causal:mask/140000,60000,392:lse"]
# What the survey sees lies behind the keys that the rule or a key length leaves.
BIAS_BEHIND = ["b1:h1:s1/389:d{d}:causal-tl:mask/0,0,0", "b3:h5:s259/131:d{d}:causal:mask/0,33929,131:kvlens",
               "b3:h4/1:s400/129:d{d}:win128:mask/0,51600,129:lse:kvlens"]
# A running maximum that has to begin late, of kernels that take the first keys' for the row's.
LATE_MAXIMA = ["b1:h2:s70/256:d{d}", "b1:h2:s70/512:d{d}"]
# The same under softcaps whose scores may still differ by more than fp16 holds.
LATE_CAPPED_MAXIMA = ["b1:h2:s70/512:d{d}:cap50", "b1:h2:s200/400:d{d}:causal:cap80:lse"]
DECODING = ["b2:h8/2:s1/300:d{d}:lse:kvlens", "b1:h4/1:s5/513:d{d}:causal", "b1:h2:s17/70:d{d}:causal-tl:bshd",
            "b1:h4/1:s5/513:d{d}:causal:win100:lse"]
PAGED = ["b2:h8/2:s1/300:d{d}:lse:kvlens:page16"]
# Prompts over caches; pages that tensor maps take, and others.
PAGED_PROMPTS = ["b2:h4/2:s70/330:d{d}:kvlens:causal:page16:lse", "b3:h2:s20/290:d{d}:kvlens:page128:bshd",
                 "b4:h2/1:s150/290:d{d}:kvlens:causal:win90:page16:bshd:packed:lse"]
CACHED_PROMPTS = ["b3:h2:s20/90:d{d}:kvlens:page7:bshd:packed:causal:lse",
                  "b2:h4/2:s33/200:d{d}:kvlens:page24:causal:kv-e4m3:lse"]
# The same of e4m3, in pages and not, with several work tiles a CTA, of one key tile and of more than a ring has slots.
NARROW_PROMPTS = ["b1:h2:s200/700:d{d}:causal:kv-e4m3:lse", "b2:h4/2:s70/330:d{d}:kvlens:kv-e4m3:lse",
                  "b1:h2:s33:d{d}:causal-tl:bshd:kv-e4m3", "b3:h2:s20/290:d{d}:kvlens:page128:bshd:kv-e4m3",
                  "b2:h2:s70/330:d{d}:kvlens:causal:page16:kv-e4m3:lse",
                  "b3:h2/1:s150/290:d{d}:kvlens:causal:page16:bshd:packed:kv-e4m3:lse"]

# Every term, on lines that are compiled with it: alone or with what it meets; the biases' rows aligned and not.
TERMS = ["b1:h4/2:s70/200:d{d}:cap30:sinks:lse", "b1:h2:s40/150:d{d}:causal:win40:sinks:alibi:lse",
         "b2:h2:s40/150:d{d}:causal:ranges2", "b2:h4/1:s6/130:d{d}:causal:tree:kvlens",
         "b2:h2:s70/130:d{d}:causal:kvstarts:chunk32:lse", "b2:h4/2:s33/133:d{d}:bias-f32/0,4389,133",
         "b2:h2:s33/133:d{d}:mask/4389,0,133:lse", "b2:h4/2:s33/134:d{d}:causal:bias-bf16/0,4422,134"]
PACKED_TERMS = ["b3:h2:s70/50:d{d}:causal:bshd:packed:cap50:sinks:alibi:ranges2:lse"]
# Of lines for any keys, every term but biases and the tree: keys plain, packed, and in pages.
ANY_KEYS = [*TERMS[:3], TERMS[4], *PACKED_TERMS, "b2:h4/2:s70/330:d{d}:kvlens:causal:sinks:alibi:page128:lse",
            "b3:h2/1:s150/290:d{d}:kvlens:causal:win90:cap30:sinks:page16:bshd:packed:lse",
            "b1:h16/2:s150/170:d{d}:causal-tl:win128:sinks"]
DECODING_TERMS = ["b2:h8/2:s1/300:d{d}:lse:kvlens:cap30:sinks", "b1:h4/1:s5/313:d{d}:causal:win100:alibi:lse:sinks",
                  "b2:h4/1:s6/130:d{d}:causal:ranges2:tree", "b2:h4/2:s3/200:d{d}:kvstarts:lse:causal:chunk100",
                  "b2:h4/2:s3/133:d{d}:bias-f32/0,399,133", "b2:h4/2:s3/134:d{d}:bias-bf16/0,402,134:causal",
                  "b2:h4/2:s3/133:d{d}:mask/399,0,133:lse"]

# Softcap, sinks and limits of fwd_short: starts behind the first keys, rows without a key but their sink; last, tiles
# whose rows are of two chunks, so that some have no reference at first, which large scores show.
SHORT_TERMS = ["b1:h4/2:s70/200:d{d}:cap30:sinks:lse", "b2:h4/1:s65/97:d{d}:kvlens:causal:sinks",
               "b2:h2:s100/600:d{d}:causal:kvstarts:lse:sinks:cap50", "b1:h2:s200/400:d{d}:causal:chunk300:sinks",
               "b2:h2:s150/260:d{d}:kvstarts:chunk64:kvlens:lse", "b1:h2:s150/40:d{d}:causal-tl:win7:lse:sinks",
               "b1:h16/2:s100/300:d{d}:causal:win128:sinks:lse", "b1:h2:s200/400:d{d}:causal:chunk300:lse"]

# Gradients: a whole tile of queries; dq in the order of more than eight key tiles, and by atomics of as many.
GRADIENTS = ["bwd:b1:h2:s130/190:d{d}:causal", "bwd:b2:h4/2:s65/97:d{d}:kvlens:grad-f32",
             "bwd:b1:h2:s33:d{d}:causal-tl:bshd:sinks", "bwd:b2:h1:s70/210:d{d}:win40/9:atomics",
             "bwd:b1:h2/1:s40/1190:d{d}:win700/300", "bwd:b1:h1:s150/1190:d{d}:atomics"]
OTHER_GRADIENTS = ["bwd:b3:h2/1:s70/50:d{d}:causal:bshd:packed", "bwd:b2:h1:s20/1100:d{d}:bshd:packed",
                   "bwd:b1:h2:s70/130:d{d}:causal:cap5"]
# Of pairs of key tiles: an even and an odd number of them, keys that do not exist, visits for one of a pair alone.
PAIRED_GRADIENTS = ["bwd:b1:h2:s330/390:d{d}:causal", "bwd:b2:h2/1:s200/700:d{d}:kvlens:causal",
                    "bwd:b1:h1:s520:d{d}:causal:win100"]
# Work for 72 CTAs and more, and all keys seen: dQ is converted by the CTAs that add it up.
CONVERTED_GRADIENTS = ["bwd:b5:h16/8:s70/40:d{d}:grad-f32", "bwd:b2:h10:s40/520:d{d}",
                       "bwd:b4:h10:s33/190:d{d}:sinks:bshd"]
# Of lines that are keys or queries: groups of heads, halves apart under a mask and beside each other under a window,
# lengths within a tile, an odd number of halves, a ring that goes round, lines without a partner.
SHORT_GRADIENTS = ["bwd:b1:h2:s130/190:d{d}:causal", "bwd:b2:h4/2:s65/97:d{d}:kvlens:grad-f32",
                   "bwd:b1:h2:s33:d{d}:causal-tl:bshd", "bwd:b2:h1:s70/210:d{d}:win40/9:atomics",
                   "bwd:b1:h2/1:s40/1190:d{d}:win700/300", "bwd:b1:h2:s520/130:d{d}:causal",
                   "bwd:b3:h2/1:s1/5:d{d}:kvlens:causal", "bwd:b1:h1:s320/330:d{d}:causal:win70"]
# Of lines whose CTAs own keys and queries of one head; either may be more.
MIXED_GRADIENTS = [*(SHORT_GRADIENTS[i] for i in (0, 2, 3, 5, 7)), "bwd:b2:h2:s65/197:d{d}:grad-f32"]
# Rows and keys that biases hide, alone and with the rest; broadcast over heads, entries and rows; none at all.
BIAS_GRADIENTS = ["bwd:b2:h4/2:s33/133:d{d}:bias-f32/0,4389,133:grad-f32", "bwd:b2:h2:s70/133:d{d}:mask/9310,0,133",
                  "bwd:b2:h4/2:s33/134:d{d}:causal:bias-bf16/0,4422,134:cap30:sinks",
                  "bwd:b3:h2/1:s70/50:d{d}:causal:bshd:packed:mask/3500,0,50", "bwd:b2:h2:s150/97:d{d}:mask/97,0,0",
                  "bwd:b1:h2:s50/70:d{d}:bias-f16/0,3500,70:alibi:kvlens"]
# Masks alone: of each head, of an entry's rows at once, beside a causal mask and key lengths, in rows of 16 bytes; that
# hide query tiles from whole work tiles.
MASK_GRADIENTS = [BIAS_GRADIENTS[1], BIAS_GRADIENTS[4], "bwd:b2:h2/1:s330/390:d{d}:causal:mask/0,0,400",
                  "bwd:b2:h2:s200/270:d{d}:mask/0,54400,272:kvlens:grad-f32",
                  "bwd:b1:h4/2:s520/300:d{d}:mask/0,156000,300:atomics",
                  "bwd:b1:h1:s1333/389:d{d}:causal:win128:mask/0,0,400:kvlens",
                  "bwd:b1:h2/1:s300/700:d{d}:mask/0,210000,700"]
# Biases of 16 bits: of each head, of heads at once, in rows of 16 bytes and not, beside the rules.
NARROW_BIAS_GRADIENTS = [BIAS_GRADIENTS[2].replace(":cap30", ""), BIAS_GRADIENTS[5].replace(":alibi", ""),
                         "bwd:b2:h2/1:s330/390:d{d}:causal:bias-bf16/0,0,392",
                         "bwd:b2:h4/2:s150/97:d{d}:bias-f16/97,0,0",
                         "bwd:b2:h2:s200/270:d{d}:bias-bf16/0,54400,272:kvlens:grad-f32"]
SOME_BIASES = [MASK_GRADIENTS[0], NARROW_BIAS_GRADIENTS[0]]
TERM_GRADIENTS = ["bwd:b2:h2/1:s40/100:d{d}:causal:kvstarts:chunk32:dos=0,0,{d}", "bwd:b1:h2:s50/70:d{d}:alibi",
                  "bwd:b1:h2:s50/70:d{d}:causal:alibi:cap30"]


# Shapes that any line can run: each goes to one of fp16 and bf16, with the next head dim to the other.
COMMON = [shape for shape in SHAPES + LONG if "packed" not in shape and "win" not in shape]


def problems(shapes, dims, dtypes=("f16", "bf16")):
    dealt = dtypes == ("f16", "bf16") and not ALL_BY_ALL
    return [f"{dtype}:{shape.format(d=d)}" for i, dtype in enumerate(dtypes) for j, d in enumerate(dims)
            for k, shape in enumerate(shapes) if not dealt or shape not in COMMON or (i + j + k) % 2 == 0]


# A group: which GPU, how many SMs (few, so that persistent kernels have several tiles each), which kernels, in which
# orders, the problems that each of them gets if it can run them, and the kind of inputs, if not normal.
GROUPS = {
    "simt": [(90, 4, "fwd_simt_f32_*", [LATE, EAGER], problems(SHAPES, [40, 128], ["f32"])),
             (80, 4, "fwd_simt_*16_*", [LATE], problems(SHAPES, [72, 256])),
             (89, 4, "fwd_simt_e4m3_*", [LATE], problems(SHAPES, [64], ["e4m3", "e4m3:of16"]))],
    "terms": [(90, 4, "fwd_simt_f32_d128_*", [LATE], problems(TERMS + PACKED_TERMS, [40], ["f32"])),
              (80, 4, "fwd_simt_e4m3_*", [LATE], problems(TERMS[:3] + PACKED_TERMS, [64], ["e4m3"]), "head-scaled"),
              (90, 4, "fwd_mma_f16_d64_*_terms_*", [LATE], problems(TERMS + PACKED_TERMS, [64], ["f16"])),
              (80, 4, "fwd_mma_bf16_d128_*_terms_*", [EAGER], problems(TERMS[:3] + PACKED_TERMS, [128], ["bf16"])),
              (90, 4, "fwd_mma_f16_d256_*_terms_*", [LATE_TOO], problems(TERMS[:2], [256], ["f16"])),
              (90, 4, "fwd_mma_bf16_d512_*", [LATE], problems(SHAPES[:3], [512, "264/496"], ["bf16"])),
              (80, 4, "fwd_mma_f16_d512_*_terms_*", [EAGER], problems(TERMS[:2] + PACKED_TERMS, [512], ["f16"])),
              (90, 2, "fwd_wgmma_*_d64_*_terms_*", [LATE, EAGER], problems(ANY_KEYS, [64])),
              (90, 2, "fwd_wgmma_*_d128_*_terms_*", [LATE_TOO, LATE], problems([*ANY_KEYS[:3], *ANY_KEYS[4:7]], [128])),
              (90, 4, "fwd_short_*_terms_*", [LATE, EAGER], problems(SHORT_TERMS, [64])),
              (90, 4, "fwd_short_*_terms_*", [LATE], problems(SHORT_TERMS[-1:], [64]), "large"),
              (90, 32, "fwd_split_f16_d64_*_terms_*", [LATE], problems(DECODING_TERMS, [64], ["f16"])),
              (80, 8, "fwd_split_bf16_d128_*_terms_*", [EAGER], problems(DECODING_TERMS, [128], ["bf16"])),
              (80, 8, "fwd_split_f16_d256_*_terms_*", [LATE_TOO], problems(DECODING_TERMS[:3], [256], ["f16"]))] +
             [(90, sms, f"fwd_decode_*_d{d}_*_terms_*", [order], problems(DECODING_TERMS, [d]))
              for d, sms, order in ((64, 2, EAGER), (128, 16, LATE))],
    "ladder": [(80, 4, "fwd_ladder0_*", [LATE], problems(SHAPES, [64], ["f16"])),
               (80, 4, "fwd_ladder*_64x64_*", [LATE, LATE_TOO, EAGER], problems(SHAPES + LONG, [64], ["f16"]))],
    "split": [(arch, 8, "fwd_split_*_sm80", orders, problems(DECODING + SHAPES + PAGED, [64, 128]))
              for arch, orders in ((80, [LATE, EAGER]), (90, [LATE_TOO]))] +
             [(arch, 8, "fwd_split_*_16x*_sm80", [LATE], problems(DECODING + PAGED, [64, 192])) for arch in (89, 120)] +
             [(89, 8, "fwd_split_*_kv8_sm89", [LATE], problems([PAGED[0] + ":kv-e4m3"], [128]))],
    # The host makes clusters of 8, 4, 2 and CTAs alone, the fewer the SMs; CTAs alone have several turns of the ring.
    # The fewer the SMs, the smaller the clusters: of 8, 4 and 2 CTAs, and CTAs alone, which go round the ring.
    "decode": [(90, sms, f"fwd_decode_*_d{d}_*", orders, problems(shapes + (PAGED if d == 128 else []), dims))
               for sms, orders, shapes in ((2, [LATE], DECODING + SHAPES), (8, [LATE_TOO], DECODING + SHAPES),
                                           (16, [EAGER], DECODING + SHAPES), (32, [LATE], DECODING[:2]))
               for d, dims in ((64, [64, "40/64"]), (128, [72, "128/104"]), (256, ["168/256"]))
               if d < 256 or sms > 2],
    "wgmma": [(90, 2, f"fwd_wgmma_*_d{d}_*[!8]_sm90a", orders,
               problems(SHAPES + LONG + PAGED_PROMPTS[:1] + ([SHAPES[0] + ":of32"] if d in (64, 128) else []), [d]))
              for d, orders in ((64, [LATE, LATE_TOO, EAGER]), (96, [LATE]), (128, [LATE, EAGER]), (256, [LATE]))] +
             [(90, 2, "fwd_wgmma_*_d192_*", [LATE], problems(SHAPES, ["192", "192/128"]))] +
             [(90, 2, f"fwd_wgmma_*_{line}_sm90a", orders, problems(WINDOWS, [d]))
              for line, d, orders in (("d64_128x128_s3", 64, [LATE_TOO, EAGER]),
                                      ("d128_128x128_s2_ahead", 128, [LATE, EAGER]),
                                      ("d192_128x128_s2_v128", "192/128", [LATE]))] +
             [(90, 2, "fwd_wgmma_*_h8_*", [LATE, EAGER], problems(GROUPED, [64])),
              (90, 2, "fwd_wgmma_*_sinks_*", [LATE], problems(SINKS, [64, 128])),
              (90, 2, "fwd_wgmma_*_cap_*", [LATE], problems(CAPS, [64, 128])),
              (90, 2, "fwd_wgmma_*_bias_*", [LATE], problems(BIASES, [64, 128])),
              (90, 2, "fwd_wgmma_f16_d64_*_mask_tiles_*", [LATE, EAGER], problems(MASKS + BIAS_BEHIND, [64], ["f16"])),
              (90, 2, "fwd_wgmma_bf16_d64_*_mask_tiles_*", [LATE_TOO], problems(MASKS, [64], ["bf16"])),
              (90, 2, "fwd_wgmma_*_d64_*_bias_first_*", [LATE_TOO], problems(BIAS_TILES, [64])),
              (90, 2, "fwd_wgmma_f16_d64_*_bias_first_*", [LATE], problems(BIAS_TILES[1:3], [64], ["f16"]), "large"),
              (90, 2, "fwd_wgmma_bf16_d128_*_bias_tiles_*", [LATE, EAGER],
               problems([*BIAS_TILES[1:3], BIAS_TILES[4]], [128], ["bf16"])),
              (90, 2, "fwd_wgmma_*_d128_*_bias_tiles_*", [LATE], problems(BIAS_TILES[1:3], [128]), "large"),
              (90, 2, "fwd_wgmma_*_d64_*_cap_*", [EAGER], problems(LATE_CAPPED_MAXIMA, [64]), "large"),
              (90, 2, "fwd_wgmma_bf16_d128_*_mask_tiles_*", [LATE, EAGER],
               problems(MASKS + BIAS_BEHIND[:1], [128], ["bf16"])),
              (90, 2, "fwd_wgmma_f16_d128_*_mask_tiles_*", [LATE], problems(MASKS[:1], [128], ["f16"]))] +
             [(90, 2, f"fwd_wgmma_*_d{d}_*_paged_sm90a", [order], problems(PAGED_PROMPTS[1:], [d]))
              for d, order in ((64, EAGER), (128, LATE))] +
             [(90, 2, f"fwd_wgmma_*_d{d}_*_kv8_*", orders, problems(NARROW_PROMPTS, [d]))
              for d, orders in ((64, [LATE, EAGER]), (128, [LATE_TOO, EAGER]))] +
             [(90, 2, "fwd_wgmma_*_d64_*_kv8_*", [LATE_TOO], problems([SHAPES[-1] + ":kv-e4m3"], [64])),
              (90, 2, "fwd_wgmma_*_d64_*_kv8_*", [LATE_TOO], problems(NARROW_PROMPTS[1:3], ["48/32"]), "head-scaled"),
              (90, 2, "fwd_wgmma_*_d128_*_kv8_*", [LATE], problems(NARROW_PROMPTS[1:3], ["80/112"]), "head-scaled")] +
             [(90, 2, f"fwd_wgmma_*_d{d}_*_o32_sm90a", [LATE, EAGER],
               problems([f"{shape}:of32" for shape in SHAPES + LONG], [d])) for d in (64, 128)] +
             [(90, 2, f"fwd_wgmma_*_d{d}_*_packed_*", [LATE, EAGER], problems(PACKED_WINDOWS, [d]))
              for d in (64, 128)],
    "wide": [(90, 4, "fwd_wide_f16_d512_*", [LATE], problems([SHAPES[0], SHAPES[3]], [512], ["f16"])),
             (90, 4, "fwd_wide_bf16_d512_*", [EAGER], problems([SHAPES[5]], [512], ["bf16"]) +
              problems([SHAPES[1]], ["264/496"], ["bf16"])),
             (90, 8, "fwd_wide_f16_*_mla_*", [LATE], problems(VALUES_IN_KEYS[:2], ["576/512"], ["f16"])),
             (90, 8, "fwd_wide_bf16_*_mla_*", [EAGER], problems(VALUES_IN_KEYS[2:], ["520/400"], ["bf16"]))],
    "short": [(90, 4, "fwd_short_*f16_d64_*", [LATE, EAGER], problems(SHAPES + LONG + EXACT[:1], [64])),
              (90, 4, "fwd_short_*f16_d128_*", [LATE_TOO, EAGER], problems(SHAPES + LONG, [128])),
              (90, 4, "fwd_short_*_d64_*_window_*", [LATE, EAGER], problems(WINDOWS, [64])),
              (90, 4, "fwd_short_*_d128_*_window_*", [EAGER, LATE], problems(WINDOWS, [128])),
              (90, 4, "fwd_short_*_exact_*", [LATE, EAGER], problems(EXACT[1:], [64])),
              (90, 4, "fwd_short_f16_d64_*", [LATE], problems(LATE_MAXIMA, [64], ["f16"]), "lowest-keys"),
              (90, 4, "fwd_short_bf16_d128_*", [LATE], problems(LATE_MAXIMA[:1], [128], ["bf16"]), "lowest-keys"),
              # Rows that leave fp16's range are computed again.
              (90, 4, "fwd_short_*16_d64_*", [LATE], problems([*SHAPES[:2], EXACT[0]], [64]), "large")],
    "short8": [(90, 4, f"fwd_short_e4m3_d{d}_*", orders, problems(SHAPES + LONG, [d], ["e4m3", "e4m3:obf16"]))
               for d, orders in ((64, [LATE, EAGER]), (128, [LATE_TOO, EAGER]))],
    "fp8": [(90, 2, f"fwd_fp8_*_d{d}_*", [LATE, LATE_TOO, EAGER],
             problems(SHAPES + LONG, [d], ["e4m3", "e4m3:obf16"])) for d in (64, 128)] +
           [(90, 2, f"fwd_fp8_*_d{d}_*", [LATE], problems(SHAPES[:3] + LONG[:1], [d], ["e4m3"])) for d in (192, 256)] +
           [(90, 2, f"fwd_fp8_*_{line}*", orders, problems(WINDOWS, [d], ["e4m3"]))
            for line, d, orders in (("d64_1", 64, [LATE, EAGER]), ("d128_", 128, [LATE_TOO]), ("d256_", 256, [LATE]))],
    "bwd": [(90, 2, "bwd_wgmma_*_d64_*", [LATE], problems(GRADIENTS + OTHER_GRADIENTS + SOME_BIASES, [64])),
            (90, 2, "bwd_wgmma_f16_d64_*", [EAGER],
             problems(GRADIENTS + OTHER_GRADIENTS + SOME_BIASES, [64], ["f16"])),
            (90, 2, "bwd_wgmma_*_d128_*_pair_[sc]*", [LATE], problems(GRADIENTS, [128])),
            *((90, 6, f"bwd_wgmma_*_d{d}_*_pair_sm90a", orders, problems(PAIRED_GRADIENTS + GRADIENTS[2:5], [d]))
              for d, orders in ((64, [LATE_TOO, EAGER]), (128, [LATE, EAGER]), (256, [EAGER, LATE]))),
            *((90, 80, f"bwd_wgmma_*_d{d}_*_pair_sm90a", [order], problems(CONVERTED_GRADIENTS, [d]))
              for d, order in ((64, LATE), (128, LATE_TOO), (256, LATE))),
            (90, 4, "bwd_wgmma_*_d64_*_mask_*", [LATE, EAGER], problems(MASK_GRADIENTS, [64])),
            (90, 4, "bwd_wgmma_*_d64_*_bias_*", [LATE, EAGER], problems(NARROW_BIAS_GRADIENTS, [64])),
            (90, 4, "bwd_wgmma_*_d128_*_mask_*", [LATE_TOO], problems(MASK_GRADIENTS, [128])),
            (90, 2, "bwd_wgmma_*_d128_*_packed_*", [EAGER], problems(OTHER_GRADIENTS[:2], [128])),
            (90, 2, "bwd_wgmma_*_d128_*_cap_*", [LATE], problems(OTHER_GRADIENTS[2:], [96])),
            (90, 4, "bwd_wgmma_*_d128_*_pair_[sc]*", [EAGER], problems(GRADIENTS[:2], ["72/104"])),
            (90, 2, "bwd_wgmma_*_d256_64x64_s2_pair_sm90a", [LATE, EAGER], problems(GRADIENTS[:2], [256])),
            (90, 4, "bwd_wgmma_*_d256_64x64_s2_pair_sm90a", [EAGER], problems(GRADIENTS[:1], ["136/200"])),
            (90, 2, "bwd_wgmma_*_d256_*_packed_*", [EAGER, LATE], problems(OTHER_GRADIENTS[:2], [256])),
            (90, 2, "bwd_wgmma_*_d256_*_cap_*", [LATE], problems(OTHER_GRADIENTS[2:], [192], ["bf16"])),
            (90, 4, "bwd_short_*_128x64_*", [LATE], problems(SHORT_GRADIENTS, [64])),
            (90, 2, "bwd_short_f16_d64_128x64_*", [EAGER, LATE_TOO],
             problems(SHORT_GRADIENTS[:5], ["40/56"], ["f16"])),
            (90, 4, "bwd_short_*_mixed_*", [LATE], problems(MIXED_GRADIENTS, [64])),
            (90, 2, "bwd_short_f16_*_mixed_*", [EAGER, LATE_TOO], problems(MIXED_GRADIENTS, ["40/56"], ["f16"])),
            (80, 4, "bwd_mma_f16_d64_*", [LATE], problems(GRADIENTS[:4] + TERM_GRADIENTS, [64], ["f16"])),
            (90, 4, "bwd_mma_bf16_d64_*", [EAGER], problems([GRADIENTS[1], *OTHER_GRADIENTS[::2]], [64], ["bf16"])),
            (89, 4, "bwd_mma_bf16_d128_*", [LATE], problems(GRADIENTS[1:3] + TERM_GRADIENTS[:1], [128], ["bf16"])),
            (80, 4, "bwd_mma_f16_d64_*_bias_*", [LATE, EAGER], problems(BIAS_GRADIENTS, [64], ["f16"])),
            (90, 4, "bwd_mma_bf16_d64_*_bias_*", [LATE_TOO], problems(BIAS_GRADIENTS[:3], [40], ["bf16"])),
            (89, 4, "bwd_mma_bf16_d128_*_bias_*", [EAGER], problems(BIAS_GRADIENTS[1:4], [128], ["bf16"])),
            (120, 4, "bwd_mma_f16_d128_*_bias_*", [LATE], problems(BIAS_GRADIENTS[::2], ["72/104"], ["f16"])),
            (120, 4, "bwd_mma_f16_d128_*", [EAGER], problems(GRADIENTS[:2] + OTHER_GRADIENTS[:1], ["72/104"],
                                                             ["f16"]))],
    # fp8 scales of batch entries and heads.
    "scales": [(90, 2, f"fwd_fp8_*_d{d}_*", [LATE, EAGER], problems(SHAPES[:2] + LONG[1:2], [d], ["e4m3"]),
                "head-scaled") for d in (64, 128, 192, 256)] +
              [(90, 4, f"fwd_short_e4m3_d{d}_*", [LATE], problems(SHAPES[:2] + LONG[1:2], [d], ["e4m3"]), "head-scaled")
               for d in (64, 128)] +
              [(arch, 4, kernels, [LATE], problems(SHAPES[1:4], [64], ["e4m3"]), "head-scaled")
               for arch, kernels in ((80, "fwd_simt_e4m3_*"), (89, "*_e4m3_*_sm8*"))],
    "mma": [(arch, 4, f"fwd_mma_*_d{d}_*", orders, problems(SHAPES + PAGED_PROMPTS[:1], [d]))
            for arch, orders in ((80, [LATE, EAGER]), (89, [LATE]), (90, [LATE_TOO]), (120, [EAGER]))
            for d in (32, 64, 96, 128)] +
           [(arch, 4, f"fwd_mma_*_d{d}_*", [LATE], problems(SHAPES, [d])) for arch in (80, 89) for d in (192, 256)] +
           [(arch, 4, f"fwd_mma_*_d{d}_*_paged_*", [order], problems(CACHED_PROMPTS, [d]))
            for arch, d, order in ((80, 64, LATE), (89, 128, LATE_TOO), (90, 64, EAGER))],
    "mma8": [(arch, 4, f"fwd_mma8_*_d{d}_*", orders, problems(SHAPES + LONG, [d], ["e4m3", "e4m3:obf16"]))
             for arch, orders in ((89, [LATE, EAGER]), (120, [LATE_TOO])) for d in (64, 128)] +
            [(89, 4, "fwd_mma8_*_d256_*", [LATE], problems(SHAPES, [160, 256], ["e4m3"])),
             (90, 4, "fwd_mma8_*_d64_*", [LATE], problems(SHAPES, [48], ["e4m3"]))],
}


def in_turn(orders, asked):
    """Pairs of an order and what runs in it: each problem in one order, that of the next data type in the next, so that
    every kernel meets every order and every problem without a run of all by all. DEVICE_ALL=1 in the environment asks
    for that."""
    if ALL_BY_ALL or len(orders) == 1:
        return [(order, asked) for order in orders]
    shares, dtypes, counts = [[] for _ in orders], [], {}
    for problem in asked:
        dtype = re.split(r":(?:bwd:)?b\d", problem)[0]
        dtypes += [dtype] if dtype not in dtypes else []
        counts[dtype] = counts.get(dtype, 0) + 1
        shares[(counts[dtype] + dtypes.index(dtype) - 1) % len(orders)].append(problem)
    return [(order, share) for order, share in zip(orders, shares) if share]


def environment(driver, images, arch, sms, order):
    seed, eager, races = order
    return {"LD_LIBRARY_PATH": driver, "FAKE_CUDA_EXECUTE": images, "FAKE_CUDA_ARCH": str(arch),
            "FAKE_CUDA_SMS": str(sms), "FAKE_CUDA_SEED": seed, "FAKE_CUDA_EAGER": eager,
            "FAKE_CUDA_RACES": os.environ.get("FAKE_CUDA_RACES", races)}


def check(program, chosen, kernels, asked, inputs="normal"):
    """Runs `acromion check`; returns what became of it and the command."""
    return execute([program, "check", "--backend", "cuda", "--threads", "2", "-k", kernels, "--inputs", inputs, *asked],
                   chosen)


def execute(command, chosen):
    done = subprocess.run(command, env={**os.environ, **chosen}, cwd=ROOT, capture_output=True, text=True)
    shown = " ".join([*(f"{name}={value}" for name, value in chosen.items()), *command])
    return done, shown


def first_of(program, group):
    """A group's first kernel on its first problem, in the first order."""
    arch, sms, kernels, orders, asked, *inputs = group[0]
    listed = json.loads(subprocess.run([program, "info", "--json"], capture_output=True, text=True, check=True).stdout)
    found = [kernel["name"] for kernel in listed["kernels"] if fnmatch.fnmatchcase(kernel["name"], kernels)]
    if not found:
        sys.exit(f"device.py: this build has no kernel {kernels}")
    return [(arch, sms, found[0], orders[:1], asked[:1], *inputs)]


def of_kernel(kernel, arch):
    """What the groups ask of one kernel, on the architecture that its image is for, in one order, and once."""
    chosen, asked_before = [], set()
    for _, sms, kernels, orders, asked, *inputs in (entry for group in GROUPS.values() for entry in group):
        if not fnmatch.fnmatchcase(kernel, kernels):
            continue
        asked = [problem for problem in asked if (problem, *inputs) not in asked_before]
        asked_before.update((problem, *inputs) for problem in asked)
        if asked:
            chosen.append((arch, sms, kernel, orders[:1], asked, *inputs))
    if not chosen:
        sys.exit(f"device.py: no group has {kernel}")
    return chosen


def run_group(program, driver, images, name):
    kind, _, of = name.partition(":")
    if kind == "one":
        entries = first_of(program, GROUPS[of])
    elif kind == "kernel":
        kernel, _, arch = of.partition(":")
        entries = of_kernel(kernel, int(arch))
    else:
        entries = GROUPS[name]
    failures, ran = 0, 0
    for arch, sms, kernels, orders, asked, *inputs in entries:
        idle = []  # of each run, the kernels that had no problem
        for order, share in in_turn(orders, asked):
            began = time.monotonic()
            done, shown = check(program, environment(driver, images, arch, sms, order), kernels, share, *inputs)
            summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
            idle.append(set(re.findall(r"^not run +(\S+)", done.stdout, re.M)))
            if "nothing was checked" in done.stderr:
                continue  # problems of the group's other kernels, or of this kernel in another order
            ran += 1
            if done.returncode != 0 or not re.search(r"(\d+) cases passed, 0 failed", summary):
                failures += 1
                print(f"FAILED: {shown}\n{done.stdout}{done.stderr}", flush=True)
            print(f"sm_{arch} {kernels} seed {order[0]} eager {order[1]}: {summary}; "
                  f"{time.monotonic() - began:.1f} s", flush=True)
        never = set.intersection(*idle)
        if never and kind != "kernel":
            failures += 1
            print(f"FAILED: no problem of {kernels} is for {' '.join(sorted(never))}", flush=True)
    if not ran:
        print(f"FAILED: no problem of its groups is for {name}")
    return failures or not ran


# Faults: kernel, GPU, what is wrong, the edit of the PTX that makes it so, and the kind of inputs, if not normal.
MMA, LADDER = "fwd_mma_f16_d64_64x64_s2_g2w32_sm80", "fwd_ladder4_f16_d64_64x64_s3_sm80"
SPLIT, WGMMA = "fwd_split_f16_d64_16x32_s3_g4_sm80", "fwd_wgmma_f16_d64_128x128_s3_sm90a"
SHORT, FP8 = "fwd_short_f16_d64_128x64_s6_ring_sm90a", "fwd_fp8_e4m3_d64_128x128_s2_sm90a"
SHORT8, WIDE = "fwd_short_e4m3_d64_64x128_s4_ring_sm90a", "fwd_wide_f16_d512_64x64_s4_sm90a"
MLA = "fwd_wide_f16_d576_64x64_s2_mla_sm90a"
BWD_MMA, BWD_SHORT = "bwd_mma_f16_d64_128x32_s2_w32_sm80", "bwd_short_f16_d64_128x64_s4_sm90a"
BWD_WGMMA, BWD_PAIR = "bwd_wgmma_f16_d64_128x128_s2_sm90a", "bwd_wgmma_f16_d128_64x128_s2_pair_sm90a"
NARROW = "fwd_wgmma_bf16_d64_128x128_s5_paged_kv8_sm90a"
MMA8, DECODE = "fwd_mma8_e4m3_d64_64x64_s3_r120_sm89", "fwd_decode_f16_d64_8x64_s4_sm90a"
COPIES_WAIT, PRODUCTS_WAIT = r"cp\.async\.wait_group (\d);", r"wgmma\.wait_group\.sync\.aligned 0;"
LAST_BYTES_BEFORE_CLUSTER = r"(expect_tx\S+ _, \[%r\d+\]), %r\d+;(?=(?:(?!expect_tx)[\s\S])*barrier\.cluster\.arrive)"
PHASE = r"(try_wait\.parity\.shared::cta\.b64 p, \[%r\d+\]), %r\d+;"
VALUE_SCALES = r"(ld\.param\.u64\s+%rd\d+, \[%rd\d+)\+256\]"  # of fwd_args v_scales; k_scales lie at 248
NARROW_VALUE_SCALES = VALUE_SCALES.replace("256", "208")  # from a register that points 48 bytes into them
FLAWS = [
    (MMA, 80, "one group of copies too few is waited for", COPIES_WAIT,
     lambda m: f"cp.async.wait_group {int(m[1]) + 1};"),
    (MMA, 80, "warps end their tiles on their own", r"bar\.sync %r\d+, %r\d+;", ""),
    (LADDER, 80, "warps do not wait for each other's copies", r"bar\.sync\s+0;", ""),
    (SPLIT, 80, "copies are not waited for", COPIES_WAIT, "cp.async.wait_group 9;"),
    (SPLIT, 80, "a split counts as the last one too early", r"(atom\.acq_rel\.gpu\.global)\.inc\.u32", r"\1.max.u32"),
    (DECODE, 90, "what the cluster sends is not waited for", r"mbarrier\.try_wait\.parity\.acquire\.cluster[^;]*;",
     "setp.eq.u32 p, 0, 0;"),
    (DECODE, 90, "what the cluster sends is miscounted", LAST_BYTES_BEFORE_CLUSTER, r"\1, 64;"),
    (DECODE, 90, "every phase is the first", PHASE, r"\1, 0;"),
    (WGMMA, 90, "products are not waited for", PRODUCTS_WAIT, "wgmma.wait_group.sync.aligned 3;"),
    (WGMMA, 90, "every phase is the first", PHASE, r"\1, 0;"),
    (WGMMA, 90, "a tile's bytes are miscounted", r"(expect_tx\.shared::cta\.b64 _, \[%r\d+\]), %r\d+;", r"\1, 4096;"),
    (WGMMA, 90, "consumers release no slot", r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", ""),
    (WGMMA, 90, "cleared rows are not shown to wgmma", r"fence\.proxy\.async\.shared::cta;", ""),
    (NARROW, 90, "widened tiles are not shown to wgmma", r"fence\.proxy\.async\.shared::cta;", ""),
    (NARROW, 90, "every phase is the first", PHASE, r"\1, 0;"),
    (NARROW, 90, "values are scaled as keys are", NARROW_VALUE_SCALES, r"\1+200]", "head-scaled"),
    (WIDE, 90, "slots are not released", r"mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", ""),
    (WIDE, 90, "every phase is the first", PHASE, r"\1, 0;"),
    (MLA, 90, "parts of a row are weighed alike",
     r"(ld\.global\.v4\.f32[^v]{0,400}?)ex2\.approx\.ftz\.f32\s+(%f\d+), %f\d+;", r"\1mov.f32 \2, 0f3F800000;"),
    (SHORT, 90, "products are not waited for", PRODUCTS_WAIT, "wgmma.wait_group.sync.aligned 3;"),
    (SHORT8, 90, "widened values are not shown to wgmma", r"fence\.proxy\.async\.shared::cta;", ""),
    (SHORT8, 90, "every phase is the first", PHASE, r"\1, 0;"),
    (FP8, 90, "turned tiles are not shown to wgmma", r"fence\.proxy\.async\.shared::cta;", ""),
    (FP8, 90, "every phase is the first", PHASE, r"\1, 0;"),
    (FP8, 90, "values are scaled as keys are", VALUE_SCALES, r"\1+248]", "head-scaled"),
    (FP8, 90, "the output is scaled as the scores are",
     r"(st\.shared\.v4\.f32 \[%r\d+\], \{(%f\d+), %f\d+), (%f\d+), \3\}", r"\1, \2, \2}", "head-scaled"),
    (MMA8, 89, "one group of copies too few is waited for", COPIES_WAIT,
     lambda m: f"cp.async.wait_group {int(m[1]) + 1};"),
    (MMA8, 89, "even dims of V in place of odd ones", r"(mov\.u32\s+%r\d+), 30001;", r"\1, 25632;"),
    (MMA8, 89, "warps wait for nobody", r"bar\.sync\s+0;", ""),
    (BWD_MMA, 80, "copies are not waited for", COPIES_WAIT, "cp.async.wait_group 9;"),
    (BWD_MMA, 80, "warps wait for nobody", r"bar\.sync\s+0;", ""),
    (BWD_PAIR, 90, "the other CTA's score gradients are not released",
     r"mbarrier\.arrive\.shared::cluster\.b64 _, \[%r\d+\];", ""),
    (BWD_PAIR, 90, "score gradients are not shown to the copy engine", r"fence\.proxy\.async\.shared::cta;", ""),
    (BWD_PAIR, 90, "every phase is the first", PHASE, r"\1, 0;"),
    (BWD_SHORT, 90, "products are not waited for", PRODUCTS_WAIT, "wgmma.wait_group.sync.aligned 3;"),
    (BWD_SHORT, 90, "D is not taken off dP", r"sub(\.f32\s+%f\d+, %f\d+), %f\d+;", r"mov\1;"),
    (BWD_SHORT, 90, "every phase is the first", PHASE, r"\1, 0;"),
    (BWD_SHORT, 90, "cleared rows are not shown to wgmma", r"fence\.proxy\.async\.shared::cta;", ""),
]
FLAW_PROBLEMS = {SPLIT: "b1:h4/2:s5/1000:d64", DECODE: "b1:h4/1:s1/2100:d64", FP8: "e4m3:b1:h4/2:s200/700:d64",
                 SHORT8: "e4m3:b1:h4/2:s100/900:d64", NARROW: "bf16:b2:h2/1:s200/700:d64:kvlens:kv-e4m3",
                 WIDE: "b1:h1:s70/200:d512",
                 MLA: "b1:h16/1:s1/700:d576/512:v-in-k",
                 MMA8: "e4m3:b1:h4/2:s200/700:d64:kvlens", BWD_MMA: "bwd:b1:h1:s130/200:d64",
                 BWD_PAIR: "bwd:b1:h1:s330/300:d128", BWD_SHORT: "bwd:b2:h1:s130/600:d64:kvlens"}  # of the others:
FLAW_PROBLEM = "b2:h2/1:s200/700:d64:kvlens"


def ptx_of(images, kernel, arch):
    return pathlib.Path(images) / (f"{kernel}.ptx" if kernel.endswith("90a") else f"{kernel}.{arch}.ptx")


def check_flawed(program, chosen, kernel, inputs):
    return check(program, chosen, kernel, [FLAW_PROBLEMS.get(kernel, FLAW_PROBLEM)], *inputs)


def run_flawed(program, driver, images, folder, flaw, run=check_flawed):
    """Whether the unchanged kernel passes and the changed one does not."""
    kernel, arch, _, pattern, replacement, *inputs = flaw
    source = ptx_of(images, kernel, arch)
    text = source.read_text()
    changed, edits = re.subn(pattern, replacement, text)
    verdicts = []
    for name, content in (("whole", text), ("flawed", changed)):
        place = folder / name
        place.mkdir()
        (place / f"{kernel}.bin").symlink_to(pathlib.Path(images).resolve() / f"{kernel}.bin")
        (place / source.name).write_text(content)
        sms = 32 if kernel == SPLIT else 4  # its splits are as many as fill the GPU
        chosen = environment(driver, str(place), arch, sms, LATE_WITHOUT_RACES)
        verdicts.append(run(program, chosen, kernel, inputs))
    (whole, shown), (flawed, _) = verdicts
    found = flawed.stderr.strip().splitlines() + re.findall(r"^FAIL .*: .*", flawed.stdout, re.M)
    passed = edits > 0 and whole.returncode == 0 and flawed.returncode != 0 and found
    return passed, f"{edits} edits; {found[0][:400] if found else 'nothing found'}", shown, whole, flawed


def run_flaws(program, driver, images, flaws=None, run=check_flawed):
    failures = 0
    for flaw in flaws or FLAWS:
        with tempfile.TemporaryDirectory() as folder:
            passed, found, shown, whole, flawed = run_flawed(program, driver, images, pathlib.Path(folder), flaw, run)
        print(f"{flaw[0]}: {flaw[2]}: {found}", flush=True)
        if not passed:
            failures += 1
            print(f"FAILED: {shown}\nas it is: {whole.stdout}{whole.stderr}\nwith the flaw: {flawed.stdout}"
                  f"{flawed.stderr}")
    return failures


# Kernels all of whose waits the problems need (with so many SMs), and how a wait is taken out. That this is found must
# not hang on its having done harm in the order that warps happened to have.
WAITED_FOR_PROBLEMS = ["b1:h2:s130/300:d64", "b1:h2:s200:d64:causal"]
WAITED_FOR = [(MMA, 80, 1, WAITED_FOR_PROBLEMS), ("fwd_ladder5_f16_d64_64x64_s3_sm80", 80, 1, WAITED_FOR_PROBLEMS),
              (DECODE, 90, 2, ["b1:h4/1:s1/2100:d64", "b1:h2/1:s9/530:d64:causal", "b1:h1:s1/100:d64"])]
WAITS = [(r"(?:bar\.sync\s+|barrier\.cluster\.wait)[^;]*;", lambda m: ""),
         (COPIES_WAIT, lambda m: f"cp.async.wait_group {int(m[1]) + 1};"),
         (r"mbarrier\.(?:try|test)_wait[\w.:]*\s+(%?\w+),[^;]*;", lambda m: f"setp.eq.u32 {m[1]}, 0, 0;")]


def run_races(program, driver, images):
    failures = 0
    for kernel, arch, sms, asked in WAITED_FOR:
        source = ptx_of(images, kernel, arch)
        text = source.read_text()
        waits = [(m, replacement(m)) for pattern, replacement in WAITS for m in re.finditer(pattern, text)]
        for wait, replacement in waits:
            with tempfile.TemporaryDirectory() as folder:
                (pathlib.Path(folder) / f"{kernel}.bin").symlink_to(pathlib.Path(images).resolve() / f"{kernel}.bin")
                edited = pathlib.Path(folder) / source.name
                edited.write_text(text[:wait.start()] + replacement + text[wait.end():])
                done, shown = check(program, environment(driver, folder, arch, sms, LATE), kernel, asked)
            line = text.count("\n", 0, wait.start()) + 1
            told = [text for text in done.stderr.splitlines() if "race at" in text or "no mbarrier was init" in text]
            print(f"{kernel}: line {line}, `{wait[0]}`: {len(told)} pairs; {told[0][:300] if told else ''}", flush=True)
            if not told or done.returncode == 0:
                failures += 1
                print(f"FAILED: {shown}\n{done.stdout}{done.stderr}", flush=True)
        if len(waits) < 5:
            failures += 1
            print(f"FAILED: {source} has {len(waits)} waits: the patterns know others")
    return failures


# ---- What must not reach a row: tests/device/isolation.c ----

# Rows at the mask's edge, lengths, sequences, top-left, several positions of a group of heads, tails of tiles.
EDGES = ["b1:h2:s70/130:d64:causal", "b2:h4/2:s65/97:d64:kvlens", "b3:h2:s70/50:d64:causal:bshd:packed",
         "b1:h4/1:s5/131:d64:causal", "b1:h2:s33/45:d64:causal-tl:bshd", "b1:h2:s70/130:d64:causal:win20",
         "b1:h1:s200/330:d64:causal", "b12:h2/1:s3/150:d64:kvlens", "b1:h2:s70/200:d64:win30/9",
         "b1:h2:s33/70:d37:causal"]
ISOLATED = [(80, 4, "fwd_mma_*", ["f16", "bf16"]), (80, 4, "fwd_simt_*", ["f32", "f16", "bf16"]),
            (80, 4, "fwd_ladder*", ["f16"]), (80, 8, "fwd_split_*", ["f16", "bf16"]),
            (90, 8, "fwd_decode_*", ["f16", "bf16"]), (90, 2, "fwd_wgmma_*", ["f16", "bf16"]),
            (90, 4, "fwd_short_*", ["f16", "bf16", "e4m3"]),
            (90, 4, "fwd_short_*_exact_*", ["f16", "bf16"], ["b1:h1:s512:d64:causal"]),
            (90, 2, "fwd_fp8_*", ["e4m3"]), (90, 2, "fwd_fp8_*", ["e4m3:obf16"], EDGES[:3]),
            (89, 4, "fwd_mma8_*", ["e4m3", "e4m3:obf16"]), (89, 4, "fwd_simt_*", ["e4m3"])]
# Of kernels that split keys, on few SMs: contexts of several tiles a split, whose tails end in every group of four keys
# of a tile.
TAILS = [f"b1:h2:s1/{keys}:d64" for keys in range(642, 674, 4)]
# Gradients that a pair hidden from them must not spoil.
SPOILT_GRADIENTS = ["bwd:b1:h2/1:s70/130:d64:causal", "bwd:b1:h2:s70/90:d64:win20/9",
                    "bwd:b1:h1:s33/70:d64:causal:grad-f32"]
ISOLATED += [(80, 4, "bwd_mma_*_d64_*", ["f16", "bf16"], SPOILT_GRADIENTS),
             (80, 4, "bwd_mma_*_d128_*", ["f16"], ["bwd:b1:h1:s70/130:d128:causal:grad-f32"]),
             (90, 4, "bwd_short_*_128x64_*", ["f16", "bf16"], [*SPOILT_GRADIENTS, "bwd:b2:h4/2:s65/97:d64:kvlens"]),
             (90, 4, "bwd_short_*_mixed_*", ["f16", "bf16"], SPOILT_GRADIENTS[1:]),
             (90, 4, "bwd_wgmma_*_d64_128x128_s2_*sm90a", ["f16", "bf16"], SPOILT_GRADIENTS),
             (90, 4, "bwd_wgmma_*_d128_64x128_s2_pair_sm90a", ["f16"], ["bwd:b1:h2/1:s70/130:d128:causal:grad-f32"]),
             (90, 4, "bwd_wgmma_*_packed_*", ["f16"], ["bwd:b2:h2/1:s70/90:d64:causal:bshd:packed",
                                                       "bwd:b2:h1:s70/90:d128:causal:bshd:packed"]),
             (90, 4, "bwd_wgmma_*_cap_*", ["bf16"], ["bwd:b1:h2/1:s70/130:d64:causal:cap5",
                                                     "bwd:b1:h1:s33/70:d128:causal:cap5"])]
ISOLATED += [(90, 4, "bwd_wgmma_*_d256_64x64_s2_pair_sm90a", ["f16", "bf16"],
              [edge.replace("d64", "d256") for edge in SPOILT_GRADIENTS]),
             (90, 4, "bwd_wgmma_*_d256_*_packed_*", ["f16"], ["bwd:b2:h1:s70/90:d256:causal:bshd:packed"]),
             (90, 4, "bwd_wgmma_*_d256_*_cap_*", ["bf16"], ["bwd:b1:h1:s33/70:d256:causal:cap5"])]
HIDDEN_BY_TERMS = ["b1:h2:s70/130:d64:causal:sinks", "b2:h4/2:s65/97:d64:kvlens:cap30:win40/9",
                   "b2:h2:s70/200:d64:causal:kvstarts:cap30", "b1:h1:s200/330:d64:causal:chunk100"]
ISOLATED += [(90, 2, "fwd_wgmma_*_d64_*_terms_*", ["f16", "bf16"], HIDDEN_BY_TERMS),
             (90, 4, "fwd_short_*_terms_*", ["f16", "bf16"], HIDDEN_BY_TERMS)]
ISOLATED += [(90, 4, "fwd_wide_*_d512_*", ["f16", "bf16"], ["b1:h2:s70/130:d512:causal",
                                                            "b1:h1:s33/70:d264:causal-tl"])]
ISOLATED += [(90, 2, "fwd_wgmma_*_kv8_*", ["f16", "bf16"], [f"{edge}:kv-e4m3" for edge in EDGES[:2] + EDGES[4:7]])]
ISOLATED += [(90, 2, "fwd_wgmma_*_o32_*", ["f16", "bf16"], [f"{edge}:of32" for edge in EDGES[:2] + EDGES[4:7]])]
ISOLATED += [(80, 1, "fwd_split_*_d64_*", ["f16", "bf16"], TAILS), (90, 2, "fwd_decode_*_d64_*", ["f16"], TAILS)]
NEXT_ELEMENT_16 = r"(ld\.global\.u16\s+%rs\d+, \[%rd\d+)\+2\]"
ISOLATION_FLAWS = [
    (MMA, 80, "outputs that a hidden value spoilt stay so", r"st\.global\.u16[^;]*;", ""),
    (MMA, 80, "outputs are computed again from other elements", NEXT_ELEMENT_16, r"\1+4]"),
    (SPLIT, 80, "one key behind the last is read",
     r"setp\.lt(\.s32\s+%p\d+, %r\d+, %r\d+;\s+and\.pred[^;]*;\s+selp\.b32\s+%r\d+, 16, 0, )", r"setp.le\1"),
    (SPLIT, 80, "outputs are computed again from other elements", NEXT_ELEMENT_16, r"\1+4]"),
    (DECODE, 90, "outputs are computed again from other elements", NEXT_ELEMENT_16, r"\1+4]"),
    (MMA8, 89, "outputs are computed again from other elements", r"(ld\.global\.u8\s+%rs\d+, \[%rd\d+)\+1\]", r"\1+2]"),
]


GRADIENT_FLAWS = [(kernel, arch, "gradients that a hidden value spoilt stay so", r"st\.global\.[bu]16[^;]*;", "")
                  for kernel, arch in [(BWD_MMA, 80), (BWD_WGMMA, 90), (BWD_SHORT, 90)]]


# Kernels whose rows do not depend, bit for bit, on the rows beside them, and problems with tiles of several kinds.
INDEPENDENT = [(90, 4, "fwd_short_*", ["f16", "bf16", "e4m3", "e4m3:obf16"])]
NEIGHBOURS = ["b1:h2:s70/130:d64:causal:lse", "b1:h2:s200/300:d64:causal-tl", "b2:h4/2:s65/97:d64:kvlens",
              "b1:h1:s300/500:d64:lse", "b1:h1:s70/512:d64", "b1:h2:s100/200:d128:lse:causal"]
ROW_FLAWS = [(SHORT, 90, "all rows of a tile take the second pass",
              r"(0f476A6000;\s+(?:setp\.ne\.s32[^;]*;\s+)?and\.pred\s+%p\d+, )%p\d+, (%p\d+);", r"\1\2, \2;")]


def of_dtypes(dtypes, shapes):
    """The shapes dealt out to the data types in turn; each gets all of a short list."""
    apart = len(dtypes) if len(shapes) >= 2 * len(dtypes) and not ALL_BY_ALL else 1
    return [f"{dtype}:{shape}" for i, dtype in enumerate(dtypes) for shape in shapes[i % apart::apart]]


def isolate_rows(program, chosen, kernel, inputs):
    return execute([program, "--rows", "cuda", kernel, *of_dtypes(inputs or ["f16"], NEIGHBOURS)], chosen)


def isolate(program, chosen, kernel, inputs, edges=EDGES):
    dtypes = inputs or (["e4m3"] if "e4m3" in kernel else ["f16"])
    in_turn = ["--in-turn"] if edges in (EDGES, TAILS) and inputs and not ALL_BY_ALL else []
    return execute([program, *in_turn, "cuda", kernel, *of_dtypes(dtypes, edges)], chosen)


def isolate_gradients(program, chosen, kernel, inputs):
    return isolate(program, chosen, kernel, inputs, SPOILT_GRADIENTS)


def run_isolation(program, driver, images, lists):
    failures = 0
    for runs, listed in lists:
        arch, sms, kernels, dtypes, *edges = listed
        began = time.monotonic()
        done, shown = runs(program, environment(driver, images, arch, sms, LATE_WITHOUT_RACES), kernels, dtypes,
                          *edges)
        if done.returncode != 0:
            failures += 1
            print(f"FAILED: {shown}\n{done.stdout}{done.stderr}", flush=True)
        summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
        print(f"sm_{arch} {kernels}: {summary}; {time.monotonic() - began:.1f} s", flush=True)
    return failures


def run_isolation_on_hopper(program, driver, images):
    return run_isolation(program, driver, images, [(isolate, x) for x in ISOLATED if x[0] == 90])


def run_isolation_elsewhere(program, driver, images):
    lists = [(isolate, x) for x in ISOLATED if x[0] != 90] + [(isolate_rows, x) for x in INDEPENDENT]
    return (run_isolation(program, driver, images, lists) +
            run_flaws(program, driver, images, ISOLATION_FLAWS, isolate) +
            run_flaws(program, driver, images, GRADIENT_FLAWS, isolate_gradients) +
            run_flaws(program, driver, images, ROW_FLAWS, isolate_rows))


# ---- Operations beside attention: tests/device/ops.c ----

# On which GPU, in which order of warps, and which cases.
OPS = [(80, LATE, 0, 60), (90, LATE_TOO, 60, 60), (120, EAGER, 120, 20)]
OPS_QUICK = [(90, LATE, 0, 6)]


def run_ops(program, driver, images, cases=tuple(OPS)):
    failures = 0
    for arch, order, first, count in cases:
        done, shown = execute([program, str(first), str(count)], environment(driver, images, arch, 4, order))
        summary = done.stdout.strip().splitlines()[-1:]
        print(f"sm_{arch} ops {first}..{first + count}: {summary}", flush=True)
        if done.returncode != 0 or "0 failed" not in str(summary):
            failures += 1
            print(f"FAILED: {shown}\n{done.stdout}{done.stderr}", flush=True)
    return failures


# ---- Caches: tests/device/caches.c ----

# On which GPU, how many SMs (many: keys are split), in which order of warps, which problems, and, if not the lines for
# caches, which lines.
CACHES = [(80, 8, LATE, ["f16:b3:h8/2:s1/300:d64:lse:kvlens:page16", "bf16:b4:h4/1:s5/75:d128:causal:lse:kvlens:page1",
                         "f16:b2:h2:s3/140:d128:causal:win40:lse:kvlens:page7",
                         "f16:b4:h4/2:s4/130:d64:causal:lse:bshd:packed:kvlens:page8",
                         "bf16:b3:h2/1:s70/150:d64:causal:lse:kvlens:page24"]),
          (90, 32, EAGER, ["f16:b3:h4/1:s1/2100:d128:lse:kvlens:page128",
                           "bf16:b2:h2/1:s20/90:d40/56:causal:lse:kvlens:page3",
                           "bf16:b3:h4/1:s2/1300:d128:kvlens:page32:invariant",
                           "f16:b3:h2:s1/2500:d64:kvlens:page16:invariant",
                           "f16:b4:h2/1:s40/200:d64:causal:lse:kvlens:page16",
                           "bf16:b3:h2/1:s20/290:d128:lse:kvlens:page128",
                           "f16:b4:h2/1:s40/200:d64:causal:lse:kvlens:page16:kv-e4m3",
                           "bf16:b3:h2/1:s20/290:d128:causal:lse:kvlens:kv-e4m3",
                           "f16:b3:h2/1:s20/290:d112/80:lse:kvlens:page64:kv-e4m3"]),
          (89, 8, LATE_TOO, ["f16:b3:h8/2:s1/300:d128:lse:kvlens:page16:kv-e4m3",
                             "bf16:b2:h4/1:s5/70:d128:causal:lse:kvlens:page64:kv-e4m3",
                             "f16:b2:h4/1:s5/83:d96/80:causal:lse:kvlens:kv-e4m3",
                             "bf16:b4:h4/2:s9/130:d128:lse:bshd:packed:kvlens:page8:kv-e4m3",
                             "f16:b3:h4/1:s1/1300:d128:kvlens:page256:kv-e4m3:invariant"]),
          (90, 2, LATE, ["f16:b4:h2:s150/200:d64:causal:lse:bshd:packed:kvlens:page16",
                         "bf16:b3:h2/1:s140/300:d128:causal:win90:lse:bshd:packed:kvlens:page64",
                         "bf16:b4:h2/1:s40/200:d128:causal:lse:bshd:packed:kvlens:page8:kv-e4m3"], "fwd_wgmma"),
          (90, 8, LATE, ["f16:b3:h16/1:s1/900:d576/512:v-in-k:kvlens:page64:lse",
                         "f16:b3:h32/1:s3/300:d520/400:v-in-k:causal:lse:bshd:packed:kvlens:page16"], "_mla_"),
          (90, 8, LATE, ["f16:b3:h8/2:s1/300:d64:lse:kvlens:page16", "bf16:b4:h4/1:s5/75:d128:causal:lse:kvlens:page1",
                         "f16:b2:h2:s3/140:d128:causal:win40:lse:kvlens:page7",
                         "f16:b4:h4/2:s4/130:d64:causal:lse:bshd:packed:kvlens:page8"], "fwd_decode"),
          (90, 2, LATE_TOO, ["bf16:b3:h4/1:s1/1300:d64:lse:kvlens:page3", "f16:b2:h2/1:s1/900:d112/80:kvlens:page128"],
           "fwd_decode"),
          (90, 32, EAGER, ["f16:b3:h4/1:s1/2100:d128:lse:kvlens:page128",
                           "bf16:b3:h4/1:s2/4500:d128:causal:lse:bshd:packed:kvlens:page16",
                           "f16:b2:h2/1:s1/5000:d64:lse:kvlens:page5"], "fwd_decode")]


def run_caches(program, driver, images):
    failures = 0
    for arch, sms, order, asked, *lines in CACHES:
        done, shown = execute([program, *(lines or ["_paged_"]), *asked], environment(driver, images, arch, sms, order))
        summary = done.stdout.strip().splitlines()[-1:]
        print(f"sm_{arch} caches: {summary}", flush=True)
        if done.returncode != 0 or " 0 failed" not in str(summary):
            failures += 1
            print(f"FAILED: {shown}\n{done.stdout}{done.stderr}", flush=True)
    return failures


# ---- Lines that wait for a GPU (unlisted.def; those over pages are in CACHES) ----

# The line, SMs, orders, problems of terms, those of isolation.c, which takes no pages, and those of large inputs.
UNLISTED = []


def run_unlisted(program, driver, images, isolation):
    failures = 0
    for name, sms, orders, asked, edges, large in UNLISTED:
        check = [program, "check", "--backend", "cuda", "--threads", "2", "-k", name, "--inputs"]
        runs = [(order, [*check, inputs, *cases],
                 f"{len(cases)} cases passed, 0 failed")
                for order, inputs, cases in [*((order, "normal", asked) for order in orders),
                                             (orders[0], "large", large)] if cases]
        if edges:
            runs.append((LATE_WITHOUT_RACES, [isolation, "cuda", name, *edges], " 0 failed"))
        for order, command, wanted in runs:
            began = time.monotonic()
            done, shown = execute(command, environment(driver, images, 90, sms, order))
            summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
            if done.returncode != 0 or wanted not in summary:
                failures += 1
                print(f"FAILED: {shown}\n{done.stdout}{done.stderr}", flush=True)
            print(f"{name} seed {order[0]} eager {order[1]}: {summary}; {time.monotonic() - began:.1f} s", flush=True)
    return failures


def main():
    program, driver, images, name = sys.argv[1:5]
    special = {"flaws": run_flaws, "races": run_races, "isolation": run_isolation_elsewhere,
               "isolation_hopper": run_isolation_on_hopper, "ops": run_ops, "caches": run_caches,
               "one:ops": lambda *where: run_ops(*where, OPS_QUICK),
               "unlisted": lambda *where: run_unlisted(*where, sys.argv[5])}
    failures = special[name](program, driver, images) if name in special else run_group(program, driver, images, name)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
