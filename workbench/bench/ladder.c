/* The ladder's rungs and predictions, see ladder.h. */
#include "ladder.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const char *const ideas[LADDER_RUNGS] = {
    "scalar, online softmax",    "16-byte loads, shared tiles, cp.async",
    "tensor cores by WMMA",      "softmax in registers",
    "three stages, XOR swizzle", "producer warp, persistent CTAs",
};

/* Written down before the first run, for one H200 in stream mode. */
static const struct {
    const char *problem;
    double us[LADDER_RUNGS];
} predictions[] = {
    {"b2:h8:s512:d64", {300, 50, 28, 20, 9, 9.5}},
    {"b2:h8:s512:d64:causal", {300, 50, 28, 20, 9, 9.5}},
    {"b4:h16:s2048:d64", {6000, 2800, 1400, 1050, 290, 280}},
    {"b4:h16:s2048:d64:causal", {3500, 1500, 800, 600, 180, 155}},
};

int ladder_rung(const acr__kernel *kernel)
{
    for (int rung = 0; rung < LADDER_RUNGS; ++rung) {
        char family[24];
        snprintf(family, sizeof family, "fwd_ladder%d", rung);
        if (strcmp(kernel->family, family) == 0) {
            return rung;
        }
    }
    return -1;
}

const char *ladder_idea(int rung)
{
    return ideas[rung];
}

double ladder_predicted_us(int rung, const char *problem)
{
    for (size_t i = 0; i < sizeof predictions / sizeof predictions[0]; ++i) {
        if (strcmp(predictions[i].problem, problem) == 0) {
            return predictions[i].us[rung];
        }
    }
    return NAN;
}

double ladder_predicted_gain(int rung, const char *problem)
{
    return rung > 0 ? ladder_predicted_us(rung - 1, problem) / ladder_predicted_us(rung, problem) : NAN;
}
