/* Ranking problems by expected gain, see survey.h. */
#include "survey.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Odd lengths and dims, few heads, batch 1, GQA decode, head dims 40 to 256, fp8, packed, bf16, windows, gradients. */
const char *const survey_grid[] = {
    "b1:h3:s77:d40",
    "b1:h5:s333:d48",
    "b2:h7:s197:d80",
    "b1:h1:s1023:d64",
    "b1:h2:s4095:d128",
    "b3:h5:s511:d96",
    "b1:h4:s1000:d72",
    "b1:h12:s577:d88",
    "b4:h6:s49:d40",
    "b16:h3:s50:d64",
    "b1:h16:s1370:d88",
    "b1:h1:s257:d256",
    "b1:h2:s640:d160",
    "b2:h3:s129:d192",
    "b1:h8:s129:d64",
    "b1:h8:s513:d64:causal",
    "b1:h8:s1025:d128:causal",
    "b1:h1:s8191:d64:causal",
    "b1:h2:s2047:d80:causal",
    "b2:h5:s700:d112:causal",
    "b1:h6:s1500:d64:causal",
    "b1:h10/5:s1777:d64:causal",
    "b1:h9/3:s900:d96:causal",
    "b1:h14/2:s3000:d64:causal",
    "b1:h28/4:s1111:d128:causal",
    "b1:h71/1:s600:d64:causal",
    "b1:h32/8:s1/1000:d128",
    "b1:h32/8:s1/30000:d128",
    "b3:h32/8:s1/5001:d128",
    "b1:h14/2:s1/4097:d64",
    "b2:h28/4:s1/777:d128",
    "b1:h64/8:s1/12345:d64",
    "b7:h16/2:s1/3333:d96",
    "b1:h8/1:s1/9999:d256",
    "b1:h32/8:s3/6000:d128",
    "b1:h16/4:s7/2500:d80",
    "b1:h8:s1/511:d40",
    "b1:h5:s77/1001:d64",
    "b2:h6:s300/77:d64",
    "b2:h10:s1024/77:d64",
    "bf16:b1:h3:s99:d56",
    "bf16:b1:h6:s1234:d128:causal",
    "bf16:b1:h16/2:s2222:d128:causal",
    "bf16:b1:h40/8:s1/7001:d128",
    "bf16:b2:h9:s333:d96",
    "bf16:b1:h4:s3001:d256:causal",
    "bf16:b1:h12:s1500:d64",
    "bf16:b1:h25:s1025:d64:causal",
    "bf16:b1:h8/1:s800:d256:causal:win512",
    "bf16:b1:h28/4:s5000:d128:causal:win1024",
    "b1:h4:s3000:d64:causal:win100",
    "b1:h6:s2000:d128:causal:win333",
    "b1:h7:s1500:d80:win64/64",
    "b1:h3:s6000:d96:causal:win511",
    "e4m3:b1:h8:s512:d128",
    "e4m3:b1:h3:s777:d64",
    "e4m3:b1:h5:s2049:d128:causal",
    "e4m3:b1:h2:s6000:d256",
    "e4m3:b1:h32/8:s1/4001:d128",
    "e4m3:b1:h6:s1500:d96",
    "e4m3:b3:h7:s300:d128:causal",
    "b5:h4:s333:d64:bshd:packed",
    "b9:h3:s1000:d80:causal:bshd:packed",
    "b3:h12/4:s2000:d128:causal:bshd:packed",
    "bf16:b6:h8:s700:d128:causal:bshd:packed",
    "bf16:b11:h5:s250:d64:bshd:packed",
    "bwd:b1:h3:s77:d40",
    "bwd:b1:h12:s577:d64",
    "bwd:bf16:b2:h5:s511:d96",
    "bwd:bf16:b1:h10/5:s1777:d64:causal",
    "bwd:bf16:b1:h28/4:s3000:d128:causal",
    "bwd:bf16:b3:h12/4:s700:d128:causal:bshd:packed",
};
const size_t survey_grid_count = sizeof survey_grid / sizeof survey_grid[0];

const char *survey_reason_text(survey_reason reason)
{
    static const char *const texts[] = {
        [SURVEY_NONE] = "", [SURVEY_ROOFLINE] = "roofline", [SURVEY_NEIGHBOURS] = "neighbours", [SURVEY_PEER] = "peer"};
    return texts[reason];
}

/* ---- Neighbours ---- */

enum {
    NEIGHBOURS = 5
};

static double square_of_ratio(double a, double b)
{
    const double octaves = log2(a / b);
    return octaves * octaves;
}

/* How unlike two problems are, in octaves squared; what a kernel family treats apart counts as two of them. */
static double distance(const acr_problem *a, const acr_problem *b)
{
    static const double APART = 4.0;
    const double rows_a = (double)a->batch * (double)a->q_heads, rows_b = (double)b->batch * (double)b->q_heads;
    const bool mask_a = a->mask != ACR_MASK_NONE, mask_b = b->mask != ACR_MASK_NONE;
    const bool window_a = a->window_left != 0 || a->window_right != 0;
    const bool window_b = b->window_left != 0 || b->window_right != 0;
    double sum = square_of_ratio(rows_a, rows_b) + square_of_ratio((double)a->q_len, (double)b->q_len) +
                 square_of_ratio((double)a->kv_len, (double)b->kv_len) +
                 4.0 * square_of_ratio((double)a->qk_dim, (double)b->qk_dim) +
                 square_of_ratio((double)a->q_heads / (double)a->kv_heads, (double)b->q_heads / (double)b->kv_heads);
    sum += mask_a != mask_b ? APART : 0.0;
    sum += window_a != window_b ? APART : 0.0;
    sum += a->dtype != b->dtype ? (a->dtype == ACR_E4M3) != (b->dtype == ACR_E4M3) ? 4.0 * APART : 0.25 : 0.0;
    sum += (a->flags & ACR_PACKED) != (b->flags & ACR_PACKED) ? APART : 0.0;
    sum += a->pass != b->pass ? 4.0 * APART : 0.0;
    return sum;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y ? 1 : 0;
}

/* The share of what is attainable that the nearest problems reach, in the middle of them; NaN with fewer than three. */
static double neighbours_share(const survey_item *items, size_t count, size_t of)
{
    double nearest[NEIGHBOURS], shares[NEIGHBOURS];
    int found = 0;
    for (size_t i = 0; i < count; ++i) {
        if (i == of || !isfinite(items[i].time_us)) {
            continue;
        }
        const double d = distance(&items[of].problem, &items[i].problem);
        int at = found;
        for (; at > 0 && d < nearest[at - 1]; --at) {
            if (at < NEIGHBOURS) {
                nearest[at] = nearest[at - 1];
                shares[at] = shares[at - 1];
            }
        }
        if (at < NEIGHBOURS) {
            nearest[at] = d;
            shares[at] = items[i].attainable_us / items[i].time_us;
            found += found < NEIGHBOURS;
        }
    }
    if (found < 3) {
        return NAN;
    }
    qsort(shares, (size_t)found, sizeof shares[0], by_value);
    return shares[found / 2];
}

/* ---- Ranking ---- */

/* How much of a distance can be expected to be made good, in logarithms: what a peer does can be done; what neighbours
 * reach mostly; the roofline is far from every small problem. */
static void expect(survey_item *item)
{
    const struct {
        double ratio, worth;
        survey_reason reason;
    } ways[] = {{item->to_peer, 1.0, SURVEY_PEER},
                {item->to_neighbours, 0.75, SURVEY_NEIGHBOURS},
                {item->to_roofline, 0.25, SURVEY_ROOFLINE}};
    item->gain = 1.0;
    item->reason = SURVEY_NONE;
    for (size_t i = 0; i < sizeof ways / sizeof ways[0]; ++i) {
        const double gain = ways[i].ratio > 1.0 ? pow(ways[i].ratio, ways[i].worth) : 1.0; /* NaN is none */
        if (gain > item->gain) {
            item->gain = gain;
            item->reason = ways[i].reason;
        }
    }
}

static int by_gain(const void *a, const void *b)
{
    const survey_item *x = a, *y = b;
    return x->ranked != y->ranked ? (x->ranked ? -1 : 1)
           : x->gain > y->gain    ? -1
           : x->gain < y->gain    ? 1
                                  : strcmp(x->text, y->text);
}

void survey_rank(survey_item *items, size_t count)
{
    for (size_t i = 0; i < count; ++i) {
        survey_item *item = &items[i];
        item->to_roofline = item->time_us / item->attainable_us;
        item->to_neighbours = item->to_roofline * neighbours_share(items, count, i);
        item->to_peer = item->time_us / item->peer_us;
        expect(item);
    }
    qsort(items, count, sizeof *items, by_gain);
}

double survey_share(const survey_item *items, size_t count, double left_s)
{
    double sum = 0.0;
    for (size_t i = 0; i < count; ++i) {
        sum += log(items[i].gain);
    }
    return sum > 0.0 ? left_s * log(items[0].gain) / sum : 0.0;
}

/* ---- Records ---- */

static survey_item *find_item(survey_item *items, size_t count, const char *text)
{
    for (size_t i = 0; i < count; ++i) {
        if (strcmp(items[i].text, text) == 0) {
            return &items[i];
        }
    }
    return NULL;
}

static acr_status add_neighbour(survey_item **items, size_t *count, const char *text, const json_t *record,
                                double launch_us)
{
    acr_problem problem;
    const double floor_us = json_number_value(json_object_get(record, "floor_us"));
    if (!json_object_get(record, "kernel") || !(floor_us > 0.0) || acr_problem_parse(&problem, text, NULL) != ACR_OK ||
        acr_problem_canonical(&problem, &problem) != ACR_OK) {
        return ACR_OK; /* no kernel's, or of an older grammar */
    }
    survey_item *more = realloc(*items, (*count + 1) * sizeof *more);
    if (!more) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a survey");
    }
    *items = more;
    survey_item *item = &more[(*count)++];
    *item = (survey_item){
        .problem = problem, .time_us = NAN, .peer_us = NAN, .attainable_us = launch_us + floor_us / SURVEY_SUSTAINED};
    snprintf(item->text, sizeof item->text, "%s", text);
    return ACR_OK;
}

acr_status survey_take_records(survey_item **items, size_t *count, const json_t *records, const char *device,
                               double launch_us)
{
    for (size_t i = 0; i < json_array_size(records); ++i) {
        const json_t *r = json_array_get(records, i);
        const char *text = json_string_value(json_object_get(r, "problem"));
        const char *on = json_string_value(json_object_get(r, "device"));
        const char *mode = json_string_value(json_object_get(r, "mode"));
        const char *kernel = json_string_value(json_object_get(r, "kernel"));
        const char *peer = json_string_value(json_object_get(r, "peer"));
        const double us = json_number_value(json_object_get(r, "p50_us"));
        const bool of_step = json_is_true(json_object_get(r, "with_forward")); /* its time is of two passes */
        if (!text || !on || !mode || of_step || strcmp(on, device) != 0 || strcmp(mode, "stream") != 0 || !(us > 0.0)) {
            continue;
        }
        survey_item *item = find_item(*items, *count, text);
        if (!item) {
            acr_status status = add_neighbour(items, count, text, r, launch_us);
            if (status != ACR_OK) {
                return status;
            }
            item = find_item(*items, *count, text);
        }
        if (item && kernel && (!item->measured || us < item->time_us)) {
            item->measured = true;
            item->time_us = us;
            snprintf(item->kernel, sizeof item->kernel, "%s", kernel);
        }
        if (item && peer && !(us >= item->peer_us)) {
            item->peer_us = us;
            snprintf(item->peer, sizeof item->peer, "%s", peer);
        }
    }
    return ACR_OK;
}
