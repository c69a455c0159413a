/* Statistics of timings: percentiles with intervals, comparison of two kernels by interleaved blocks, the noise floor,
 * the verdict. Pure arithmetic on samples in microseconds: no clock, no device. Method: docs/manual/measuring.md.
 * Samples are never changed. Without samples, with a NaN among them or without memory for a sorted copy, every figure
 * is NaN, and a verdict AMBIGUOUS. */
#ifndef ACROMION_STATS_H
#define ACROMION_STATS_H

#include <stddef.h>

/* An interval [low, high]. */
typedef struct stats_interval {
    double low, high;
} stats_interval;

/* The value below which a share p (0..1) of the samples lies, by linear interpolation between order statistics (type
 * 7). Samples in any order, count >= 1; NaN when a sample is NaN. */
double stats_percentile(const double *samples, size_t count, double p);

/* The distribution-free interval that covers the true percentile with at least 95 % probability, from order statistics
 * (binomial). Where the sample is too small to bound it, the side without a bound is -/+ infinity (p99 needs 299
 * samples for its upper bound, say). Each side may miss by 2.5 %; where the extreme sample of one side alone misses by
 * more, the split is uneven, 5 % together (p99 of 299 to 367 samples). */
stats_interval stats_percentile_interval(const double *samples, size_t count, double p);

typedef struct stats_summary {
    size_t count;
    double min, p50, p90, p99, mean;
    double iqr; /* p75 - p25 */
    double mad; /* median of |sample - p50|, not scaled */
    stats_interval p50_ci95;
} stats_summary;

/* What is reported of one series of samples. count >= 1. */
stats_summary stats_summarise(const double *samples, size_t count);

typedef enum stats_verdict {
    STATS_SAME,   /* the interval lies inside the noise floor */
    STATS_FASTER, /* the candidate is: the whole interval lies beyond the noise floor */
    STATS_SLOWER,
    STATS_AMBIGUOUS /* the interval crosses the noise floor: measure more */
} stats_verdict;

const char *stats_verdict_text(stats_verdict verdict); /* "SAME", "FASTER", ... */

/* Interleaved blocks A B B A: in each block, the samples of baseline and candidate taken within the same stretch of
 * time. */
typedef struct stats_block {
    const double *baseline, *candidate;
    size_t baseline_count, candidate_count;
} stats_block;

enum {
    STATS_BLOCKS_LEAST = 6 /* fewer give no interval of 95 % without assuming a distribution */
};

typedef struct stats_comparison {
    /* Baseline time / candidate time: exp of the median over blocks of log(median baseline / median candidate). */
    double speedup;
    /* Of speedup, over blocks (not over samples, which are correlated): the median's, by order statistics. Below 6
     * blocks [0, inf]. A bootstrap would be too narrow for few blocks (docs/manual/measuring.md). */
    stats_interval ci95;
    double noise_floor; /* relative, as given */
    stats_verdict verdict;
    size_t blocks;
} stats_comparison;

/* Compares by blocks; noise_floor is relative (0.01 = 1 %) and reaches from 1 / (1 + noise_floor) to 1 + noise_floor,
 * so that exchanging the roles exchanges FASTER and SLOWER. blocks >= 2; below 6 always AMBIGUOUS. */
stats_comparison stats_compare(const stats_block *blocks, size_t count, double noise_floor);

/* The same with an interval that few blocks allow, too: from the least to the largest ratio of any two samples. It says
 * that sides are far apart, never how far, and nothing that is claimed may rest on it. */
stats_comparison stats_compare_few(const stats_block *blocks, size_t count, double noise_floor);

/* The same of `count` blocks that several processes measured, one after another as many each: a process is then what
 * counts as one, since where its memory and code lie makes it faster or slower as a whole. The effect of a process is
 * the median of its blocks'; interval and verdict are of the median over processes. count is a multiple of processes;
 * one process: stats_compare. Below 6 processes always AMBIGUOUS. */
stats_comparison stats_compare_processes(const stats_block *blocks, size_t count, size_t processes, double noise_floor);

/* The noise floor that A/A comparisons support: max(1 %, exp(x) - 1), where x is the 95th percentile of |log speedup|
 * over blocks of a kernel against itself. */
double stats_noise_floor(const stats_block *self_blocks, size_t count);

/* Geometric mean of positive ratios with weights (NULL = equal). NaN of none. */
double stats_geomean(const double *ratios, const double *weights, size_t count);

#endif
