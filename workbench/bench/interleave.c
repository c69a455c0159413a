/* Interleaved timing, see interleave.h. */
#include "interleave.h"

#include <math.h>
#include <stdlib.h>

#include "base/progress.h"
#include "check/inputs.h"
#include "internal.h"

enum {
    SLOTS = 4,
    STREAM_MIRROR = 64 /* of random_bits */
};

static acr_status warm_up(const interleave_side *baseline, const interleave_side *candidate, double seconds)
{
    double start_s = monotonic_s(), ignored[1];
    acr_status status = ACR_OK;
    while (status == ACR_OK && monotonic_s() - start_s < seconds) {
        status = baseline->sample(baseline->arg, 1, ignored);
        if (status == ACR_OK) {
            status = candidate->sample(candidate->arg, 1, ignored);
        }
    }
    return status;
}

static bool is_disturbed(const interleave_design *design)
{
    return design->disturbed && design->disturbed(design->disturbed_arg);
}

/* One block into the samples that follow those of the blocks already kept. *kept tells whether it counts. */
static acr_status run_block(interleave_result *r, const interleave_side *baseline, const interleave_side *candidate,
                            const interleave_design *design, bool *kept)
{
    int attempt = r->blocks + r->discarded;
    bool mirrored = random_bits(design->seed, STREAM_MIRROR, (uint64_t)attempt) & 1;
    double *baseline_us = r->baseline_us + (size_t)r->blocks * INTERLEAVE_BLOCK_SAMPLES;
    double *candidate_us = r->candidate_us + (size_t)r->blocks * INTERLEAVE_BLOCK_SAMPLES;
    *kept = !is_disturbed(design);
    for (int slot = 0; slot < SLOTS; ++slot) {
        bool outer = slot == 0 || slot == SLOTS - 1;
        bool first_half = slot < SLOTS / 2; /* each side has one slot in either half */
        const interleave_side *side = outer != mirrored ? baseline : candidate;
        double *samples = (outer != mirrored ? baseline_us : candidate_us) + (first_half ? 0 : INTERLEAVE_SLOT_SAMPLES);
        acr_status status = side->sample(side->arg, INTERLEAVE_SLOT_SAMPLES, samples);
        if (status != ACR_OK) {
            return status;
        }
        for (int i = 0; i < INTERLEAVE_SLOT_SAMPLES; ++i) {
            samples[i] *= 1e6;
        }
        *kept = !is_disturbed(design) && *kept;
    }
    return ACR_OK;
}

/* How many blocks fit the budget, known after the first. */
static int affordable(const interleave_design *design, double block_s)
{
    double fit = block_s > 0 ? floor(design->budget_s / block_s) : design->blocks;
    if (fit >= design->blocks) {
        return design->blocks;
    }
    int least = design->blocks < INTERLEAVE_BLOCKS_SEARCH ? design->blocks : INTERLEAVE_BLOCKS_SEARCH;
    return fit < least ? least : (int)fit;
}

static acr_status run_blocks(interleave_result *r, const interleave_side *baseline, const interleave_side *candidate,
                             const interleave_design *design)
{
    int wanted = design->blocks;
    while (r->blocks < wanted) {
        bool kept;
        double start_s = monotonic_s();
        acr_status status = run_block(r, baseline, candidate, design, &kept);
        if (status != ACR_OK) {
            return status;
        }
        if (r->blocks + r->discarded == 0) {
            wanted = affordable(design, monotonic_s() - start_s);
        }
        *(kept ? &r->blocks : &r->discarded) += 1;
        if (kept && design->enough && design->enough(design->enough_arg, r->views, r->blocks)) {
            return ACR_OK;
        }
        if (r->discarded > design->blocks) {
            return acr__fail(ACR_DEVICE_FAULT, "%d blocks were discarded: the clock stays far below nominal",
                             r->discarded);
        }
    }
    return ACR_OK;
}

static acr_status allocate(interleave_result *r, int blocks)
{
    size_t samples = (size_t)blocks * INTERLEAVE_BLOCK_SAMPLES;
    *r = (interleave_result){.baseline_us = calloc(samples, sizeof(double)),
                             .candidate_us = calloc(samples, sizeof(double)),
                             .views = calloc((size_t)blocks, sizeof(stats_block))};
    if (!r->baseline_us || !r->candidate_us || !r->views) {
        return acr__fail(ACR_NO_MEMORY, "no memory for %d blocks", blocks);
    }
    for (int i = 0; i < blocks; ++i) {
        size_t first = (size_t)i * INTERLEAVE_BLOCK_SAMPLES;
        r->views[i] = (stats_block){r->baseline_us + first, r->candidate_us + first, INTERLEAVE_BLOCK_SAMPLES,
                                    INTERLEAVE_BLOCK_SAMPLES};
    }
    return ACR_OK;
}

acr_status interleave_run(interleave_result *out, const interleave_side *baseline, const interleave_side *candidate,
                          const interleave_design *design)
{
    interleave_result r;
    acr_status status = allocate(&r, design->blocks);
    if (status == ACR_OK) {
        status = warm_up(baseline, candidate, design->warm_up_s);
    }
    if (status == ACR_OK) {
        status = run_blocks(&r, baseline, candidate, design);
    }
    if (status != ACR_OK) {
        interleave_free(&r);
        return status;
    }
    *out = r;
    return ACR_OK;
}

void interleave_free(interleave_result *result)
{
    free(result->baseline_us);
    free(result->candidate_us);
    free(result->views);
    *result = (interleave_result){.blocks = 0};
}
