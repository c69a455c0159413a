/* Order statistics, their intervals, and the comparison of two kernels by blocks: the arithmetic behind stats.h. */
#include "stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double tail_miss = 0.025;        /* a 95 % interval may miss by this on either side */
static const double least_noise_floor = 0.01; /* below it, differences come and go with placement and clocks */
static const double noise_floor_quantile = 0.95;

/* ---- order statistics ---- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* To be freed. NULL when there are no order statistics: no sample, a NaN among them, or no memory. */
static double *sorted_copy(const double *samples, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (isnan(samples[i]))
            return NULL;
    }
    double *sorted = count ? malloc(count * sizeof *sorted) : NULL;
    if (!sorted)
        return NULL;
    memcpy(sorted, samples, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, compare_doubles);
    return sorted;
}

static double sorted_percentile(const double *sorted, size_t count, double p)
{
    double position = p * (double)(count - 1);
    size_t below = (size_t)position;
    double fraction = position - (double)below;
    if (below + 1 >= count || sorted[below] == sorted[below + 1]) /* equal: also infinities, whose difference is NaN */
        return sorted[below];
    return sorted[below] + fraction * (sorted[below + 1] - sorted[below]);
}

static int is_share(double p)
{
    return p >= 0.0 && p <= 1.0;
}

double stats_percentile(const double *samples, size_t count, double p)
{
    double *sorted = sorted_copy(samples, count);
    double value = sorted && is_share(p) ? sorted_percentile(sorted, count, p) : NAN;
    free(sorted);
    return value;
}

/* ---- intervals of percentiles ---- */

/* How many of count independent samples lie below the true percentile p is binomial. Returns the largest rank r (1 =
 * lowest sample) for which fewer than r lie below it with probability `miss` at most: otherwise the percentile is at
 * least the r-th sample. 0: no such rank.
 *
 * Stable for any count: the probabilities are walked outwards from the most likely number, in units of its own, so that
 * nothing over- or underflows before it is negligible, and only positive numbers are added. Some 20 standard deviations
 * of steps: 10^4 for 10^6 samples. */
static size_t lower_rank(size_t count, double p, double miss)
{
    const double negligible = 1e-20, rounding = 1e-9;
    size_t mode = (size_t)((double)(count + 1) * p);
    mode = mode < count ? mode : count;

    size_t first = mode; /* becomes the lowest number that is not negligible, and `weight` its weight */
    double weight = 1.0, total = 1.0;
    while (first > 0) {
        double next = weight * ((double)first * (1.0 - p)) / ((double)(count - first + 1) * p);
        if (next < negligible)
            break;
        weight = next;
        total += next;
        first--;
    }
    double above = 1.0;
    for (size_t below = mode; below < count && above >= negligible; below++) {
        above *= ((double)(count - below) * p) / ((double)(below + 1) * (1.0 - p));
        total += above;
    }

    size_t rank = first;
    double below_rank = weight; /* of at most `rank` samples */
    while (rank < count && below_rank <= miss * total * (1.0 + rounding)) {
        weight *= ((double)(count - rank) * p) / ((double)(rank + 1) * (1.0 - p));
        below_rank += weight;
        rank++;
    }
    return rank;
}

/* The share of the 5 % that a side gets whose extreme sample misses with probability `least` (`other`: the opposite
 * side's): half, unless only an uneven split bounds both sides. */
static double side_miss(double least, double other)
{
    if (least + other > 2.0 * tail_miss)
        return tail_miss;
    return fmin(fmax(tail_miss, least), 2.0 * tail_miss - other);
}

static stats_interval sorted_percentile_interval(const double *sorted, size_t count, double p)
{
    double least_low = pow(1.0 - p, (double)count), least_high = pow(p, (double)count);
    size_t low = lower_rank(count, p, side_miss(least_low, least_high));
    size_t high = lower_rank(count, 1.0 - p, side_miss(least_high, least_low)); /* counted from the highest sample */
    return (stats_interval){low ? sorted[low - 1] : -INFINITY, high ? sorted[count - high] : INFINITY};
}

stats_interval stats_percentile_interval(const double *samples, size_t count, double p)
{
    double *sorted = sorted_copy(samples, count);
    stats_interval interval = {NAN, NAN};
    if (sorted && is_share(p))
        interval = sorted_percentile_interval(sorted, count, p);
    free(sorted);
    return interval;
}

/* ---- one series ---- */

static double mean_of(const double *values, size_t count)
{
    double sum = 0.0;
    for (size_t i = 0; i < count; i++)
        sum += values[i];
    return sum / (double)count;
}

/* Overwrites the values. */
static double median_deviation(double *values, size_t count, double median)
{
    for (size_t i = 0; i < count; i++)
        values[i] = fabs(values[i] - median);
    qsort(values, count, sizeof *values, compare_doubles);
    return sorted_percentile(values, count, 0.5);
}

stats_summary stats_summarise(const double *samples, size_t count)
{
    double *sorted = sorted_copy(samples, count);
    if (!sorted)
        return (stats_summary){count, NAN, NAN, NAN, NAN, NAN, NAN, NAN, {NAN, NAN}};
    stats_summary summary = {
        .count = count,
        .min = sorted[0],
        .p50 = sorted_percentile(sorted, count, 0.50),
        .p90 = sorted_percentile(sorted, count, 0.90),
        .p99 = sorted_percentile(sorted, count, 0.99),
        .mean = mean_of(sorted, count),
        .iqr = sorted_percentile(sorted, count, 0.75) - sorted_percentile(sorted, count, 0.25),
        .p50_ci95 = sorted_percentile_interval(sorted, count, 0.50),
    };
    summary.mad = median_deviation(sorted, count, summary.p50);
    free(sorted);
    return summary;
}

/* ---- comparison by blocks ---- */

/* What a block says: log(baseline time / candidate time); NaN when a median is no positive time. */
static double block_effect(const stats_block *block)
{
    double baseline = stats_percentile(block->baseline, block->baseline_count, 0.5);
    double candidate = stats_percentile(block->candidate, block->candidate_count, 0.5);
    return baseline > 0.0 && candidate > 0.0 ? log(baseline / candidate) : NAN;
}

/* The blocks' effects, sorted; with `magnitude`, without their signs. NULL when there are none, see sorted_copy. */
static double *sorted_effects(const stats_block *blocks, size_t count, int magnitude)
{
    double *effects = count ? malloc(count * sizeof *effects) : NULL;
    if (!effects)
        return NULL;
    for (size_t i = 0; i < count; i++) {
        double effect = block_effect(&blocks[i]);
        effects[i] = magnitude ? fabs(effect) : effect;
    }
    double *sorted = sorted_copy(effects, count);
    free(effects);
    return sorted;
}

/* A NaN anywhere makes every comparison false, and so the verdict ambiguous. */
static stats_verdict verdict_of(stats_interval effect, double floor_effect)
{
    if (effect.low > floor_effect)
        return STATS_FASTER;
    if (effect.high < -floor_effect)
        return STATS_SLOWER;
    if (effect.low >= -floor_effect && effect.high <= floor_effect)
        return STATS_SAME;
    return STATS_AMBIGUOUS;
}

stats_comparison stats_compare(const stats_block *blocks, size_t count, double noise_floor)
{
    stats_comparison comparison = {NAN, {NAN, NAN}, noise_floor, STATS_AMBIGUOUS, count};
    double *effects = sorted_effects(blocks, count, 0);
    if (!effects)
        return comparison;
    stats_interval effect = sorted_percentile_interval(effects, count, 0.5);
    comparison.speedup = exp(sorted_percentile(effects, count, 0.5));
    comparison.ci95 = (stats_interval){exp(effect.low), exp(effect.high)};
    comparison.verdict = verdict_of(effect, log1p(noise_floor));
    free(effects);
    return comparison;
}

stats_comparison stats_compare_few(const stats_block *blocks, size_t count, double noise_floor)
{
    stats_comparison comparison = stats_compare(blocks, count, noise_floor);
    double least[2] = {INFINITY, INFINITY}, most[2] = {0.0, 0.0};
    for (size_t b = 0; b < count; b++) {
        for (size_t i = 0; i < blocks[b].baseline_count; i++) {
            least[0] = fmin(least[0], blocks[b].baseline[i]);
            most[0] = fmax(most[0], blocks[b].baseline[i]);
        }
        for (size_t i = 0; i < blocks[b].candidate_count; i++) {
            least[1] = fmin(least[1], blocks[b].candidate[i]);
            most[1] = fmax(most[1], blocks[b].candidate[i]);
        }
    }
    if (!(comparison.speedup > 0.0) || !(least[0] > 0.0 && least[1] > 0.0))
        return comparison;
    comparison.ci95 = (stats_interval){least[0] / most[1], most[0] / least[1]};
    comparison.verdict =
        verdict_of((stats_interval){log(comparison.ci95.low), log(comparison.ci95.high)}, log1p(noise_floor));
    return comparison;
}

stats_comparison stats_compare_processes(const stats_block *blocks, size_t count, size_t processes, double noise_floor)
{
    static const double one = 1.0;
    const stats_comparison none = {NAN, {NAN, NAN}, noise_floor, STATS_AMBIGUOUS, processes};
    if (processes <= 1)
        return stats_compare(blocks, count, noise_floor);
    double *effects = calloc(processes, sizeof *effects);
    stats_block *views = calloc(processes, sizeof *views);
    stats_comparison comparison = none;
    if (effects && views) {
        for (size_t p = 0; p < processes; p++) {
            const size_t each = count / processes;
            effects[p] = stats_compare(blocks + p * each, each, noise_floor).speedup;
            views[p] = (stats_block){&effects[p], &one, 1, 1};
        }
        comparison = stats_compare(views, processes, noise_floor);
    }
    free(effects);
    free(views);
    return comparison;
}

double stats_noise_floor(const stats_block *self_blocks, size_t count)
{
    double *effects = sorted_effects(self_blocks, count, 1);
    if (!effects)
        return NAN;
    double noise = expm1(sorted_percentile(effects, count, noise_floor_quantile));
    free(effects);
    return fmax(least_noise_floor, noise);
}

const char *stats_verdict_text(stats_verdict verdict)
{
    switch (verdict) {
    case STATS_SAME:
        return "SAME";
    case STATS_FASTER:
        return "FASTER";
    case STATS_SLOWER:
        return "SLOWER";
    case STATS_AMBIGUOUS:
        return "AMBIGUOUS";
    }
    return "unknown verdict";
}

/* ---- several problems ---- */

double stats_geomean(const double *ratios, const double *weights, size_t count)
{
    double log_sum = 0.0, weight_sum = 0.0;
    for (size_t i = 0; i < count; i++) {
        double weight = weights ? weights[i] : 1.0;
        log_sum += weight * log(ratios[i]);
        weight_sum += weight;
    }
    return weight_sum > 0.0 ? exp(log_sum / weight_sum) : NAN;
}
