/* The statistics of timings: known data with numbers from numpy and scipy, and a simulated noisy clock on which
 * differences that are there must be found and others not claimed. */
#include "support.h"

#include <math.h>
#include <stdlib.h>

#include "bench/stats.h"

static void check_near(double got, double wanted)
{
    if (got != wanted && !(fabs(got - wanted) <= 1e-12 * fmax(1.0, fabs(wanted))))
        fail_msg("got %.17g, wanted %.17g", got, wanted);
}

/* ---- order statistics ---- */

static const double ten[] = {3.1, 2.7, 9.4, 1.5, 6.2, 5.3, 5.8, 4.4, 7.7, 3.6};

static void percentiles_interpolate(void **state)
{
    (void)state;
    /* numpy.percentile(ten, 100 * p), its default method "linear" */
    const struct {
        double p, value;
    } known[] = {{0, 1.5}, {0.01, 1.608}, {0.25, 3.225}, {0.5, 4.85}, {0.9, 7.87}, {0.99, 9.247}, {1, 9.4}};
    for (size_t i = 0; i < COUNT_OF(known); i++)
        check_near(stats_percentile(ten, COUNT_OF(ten), known[i].p), known[i].value);
    check_near(stats_percentile(ten, 3, 0.5), 3.1); /* an odd count: a sample itself */
    check_near(stats_percentile(ten, 1, 0.99), 3.1);
}

static void samples_stay_as_they_are(void **state)
{
    (void)state;
    double samples[COUNT_OF(ten)];
    memcpy(samples, ten, sizeof ten);
    stats_percentile(samples, COUNT_OF(samples), 0.5);
    stats_percentile_interval(samples, COUNT_OF(samples), 0.5);
    stats_summarise(samples, COUNT_OF(samples));
    assert_memory_equal(samples, ten, sizeof ten);
}

static void a_nan_makes_all_nan(void **state)
{
    (void)state;
    const double samples[] = {1, 2, NAN, 4, 5, 6, 7, 8};
    assert_true(isnan(stats_percentile(samples, COUNT_OF(samples), 0.0)));
    assert_true(isnan(stats_percentile_interval(samples, COUNT_OF(samples), 0.5).low));
    assert_true(isnan(stats_percentile_interval(samples, COUNT_OF(samples), 0.5).high));
    stats_summary summary = stats_summarise(samples, COUNT_OF(samples));
    assert_int_equal(summary.count, COUNT_OF(samples));
    assert_true(isnan(summary.min) && isnan(summary.p50) && isnan(summary.p90) && isnan(summary.p99) &&
                isnan(summary.mean));
    assert_true(isnan(summary.iqr) && isnan(summary.mad) && isnan(summary.p50_ci95.low) &&
                isnan(summary.p50_ci95.high));
    assert_true(isnan(stats_percentile(ten, 0, 0.5))); /* no sample */
    assert_true(isnan(stats_percentile(ten, COUNT_OF(ten), 1.5)));
    assert_true(isnan(stats_percentile_interval(ten, COUNT_OF(ten), -0.1).low));
}

static void infinite_samples_are_samples(void **state)
{
    (void)state;
    const double samples[] = {INFINITY, 1, 2, INFINITY};
    check_near(stats_percentile(samples, 4, 0.0), 1);
    check_near(stats_percentile(samples, 4, 0.9), INFINITY);
}

static void a_summary_holds_the_known_figures(void **state)
{
    (void)state;
    stats_summary summary = stats_summarise(ten, COUNT_OF(ten));
    assert_int_equal(summary.count, 10);
    check_near(summary.min, 1.5);
    check_near(summary.p50, 4.85);
    check_near(summary.p90, 7.87);
    check_near(summary.p99, 9.247);
    check_near(summary.mean, 4.97);
    check_near(summary.iqr, 2.875);        /* scipy.stats.iqr */
    check_near(summary.mad, 1.55);         /* scipy.stats.median_abs_deviation, unscaled */
    check_near(summary.p50_ci95.low, 2.7); /* ranks 2 and 9 of 10: 1 - 2 (1 + 10) / 2^10 = 97.85 % */
    check_near(summary.p50_ci95.high, 7.7);
}

/* ---- intervals of percentiles ---- */

/* The samples 1..count in a scattered order, so that a bound is its own rank. To be freed. */
static double *scattered_ranks(size_t count)
{
    const size_t step = 7919; /* a prime that divides no count below */
    double *samples = malloc(count * sizeof *samples);
    assert_non_null(samples);
    for (size_t i = 0; i < count; i++)
        samples[i] = (double)(i * step % count + 1);
    return samples;
}

static void intervals_are_the_binomial_ones(void **state)
{
    (void)state;
    /* Ranks of the bounds, from scipy.stats.binom.cdf(rank - 1, count, p) and .sf; coverage behind them. */
    const struct {
        size_t count;
        double p, low, high;
    } known[] = {
        {1, 0.5, -INFINITY, INFINITY},
        {5, 0.5, -INFINITY, INFINITY},   /* the whole range covers only 93.75 % */
        {6, 0.5, 1, 6},                  /* 96.88 % */
        {13, 0.5, 3, 11},                /* 97.75 % */
        {20, 0.5, 6, 15},                /* 95.86 % */
        {100, 0.5, 40, 61},              /* 96.48 % */
        {400, 0.5, 180, 221},            /* 95.98 % */
        {104, 0.9, 87, 100},             /* 96.73 % */
        {400, 0.9, 348, 372},            /* 95.48 % */
        {100, 0.99, 97, INFINITY},       /* 98.16 % */
        {298, 0.99, 291, INFINITY},      /* 0.99^298 = 5.004 %: the highest of 298 samples is no bound yet */
        {299, 0.99, 289, 299},           /* 95.02 %: 0.99^299 = 4.954 % above, the little that is left below */
        {299, 0.01, 1, 11},              /* the mirror image */
        {367, 0.99, 359, 367},           /* 96.24 % */
        {368, 0.99, 360, 368},           /* 96.24 %: the first even split, 0.99^368 = 2.48 % */
        {400, 0.99, 392, 400},           /* 96.13 % */
        {50, 0.05, -INFINITY, 7},        /* 98.82 % */
        {1000000, 0.5, 499020, 500981},  /* 95.01 % */
        {1000000, 0.9, 899412, 900589},  /* 95.02 % */
        {1000000, 0.99, 989805, 990196}, /* 95.06 % */
        {1000000, 1e-6, -INFINITY, 4},   /* 98.10 % */
        {10, 0, -INFINITY, 1},           /* the least possible value is at most the lowest sample */
        {10, 1, 10, INFINITY},
    };
    for (size_t i = 0; i < COUNT_OF(known); i++) {
        double *samples = scattered_ranks(known[i].count);
        stats_interval got = stats_percentile_interval(samples, known[i].count, known[i].p);
        free(samples);
        if (got.low != known[i].low || got.high != known[i].high)
            fail_msg("p%g of %zu: ranks %g..%g, wanted %g..%g", 100 * known[i].p, known[i].count, got.low, got.high,
                     known[i].low, known[i].high);
    }
}

/* ---- comparison ---- */

enum {
    BLOCKS_MOST = 50,
    SAMPLES_PER_SLOT = 4,
    SAMPLES_PER_SIDE = 2 * SAMPLES_PER_SLOT
};

/* Blocks of one sample a side, whose log-ratios are given. */
typedef struct made_blocks {
    double baseline[BLOCKS_MOST], candidate[BLOCKS_MOST];
    stats_block blocks[BLOCKS_MOST];
} made_blocks;

static void make_blocks(made_blocks *made, const double *log_ratios, size_t count)
{
    assert_in_range(count, 1, BLOCKS_MOST);
    for (size_t i = 0; i < count; i++) {
        made->baseline[i] = 100.0 * exp(log_ratios[i]);
        made->candidate[i] = 100.0;
        made->blocks[i] = (stats_block){&made->baseline[i], &made->candidate[i], 1, 1};
    }
}

static const double thirteen[] = {0.031, 0.024, 0.026, 0.022, 0.021, 0.035, 0.023,
                                  0.028, 0.025, 0.029, 0.027, 0.300, -0.2};

static void the_effect_is_the_median_of_blocks(void **state)
{
    (void)state;
    made_blocks made;
    make_blocks(&made, thirteen, COUNT_OF(thirteen));
    stats_comparison comparison = stats_compare(made.blocks, COUNT_OF(thirteen), 0.01);
    assert_int_equal(comparison.blocks, 13);
    check_near(comparison.noise_floor, 0.01);
    check_near(comparison.speedup, exp(0.026));
    /* Ranks 3 and 11 of the sorted effects (scipy, above). */
    check_near(comparison.ci95.low, exp(0.022));
    check_near(comparison.ci95.high, exp(0.031));
    assert_int_equal(comparison.verdict, STATS_FASTER);
}

static void a_block_weighs_its_medians(void **state)
{
    (void)state;
    const double baseline[] = {10, 90, 12, 11}, candidate[] = {5, 4, 400}; /* medians 11.5 and 5 */
    stats_block blocks[6];
    for (size_t i = 0; i < COUNT_OF(blocks); i++)
        blocks[i] = (stats_block){baseline, candidate, COUNT_OF(baseline), COUNT_OF(candidate)};
    stats_comparison comparison = stats_compare(blocks, COUNT_OF(blocks), 0.01);
    check_near(comparison.speedup, 2.3);
    check_near(comparison.ci95.low, 2.3);
    check_near(comparison.ci95.high, 2.3);
}

static void roles_can_be_exchanged(void **state)
{
    (void)state;
    double opposite[COUNT_OF(thirteen)];
    for (size_t i = 0; i < COUNT_OF(thirteen); i++)
        opposite[i] = -thirteen[i];
    made_blocks made, mirrored;
    make_blocks(&made, thirteen, COUNT_OF(thirteen));
    make_blocks(&mirrored, opposite, COUNT_OF(thirteen));
    stats_comparison one = stats_compare(made.blocks, COUNT_OF(thirteen), 0.01);
    stats_comparison other = stats_compare(mirrored.blocks, COUNT_OF(thirteen), 0.01);
    check_near(one.speedup * other.speedup, 1.0);
    check_near(one.ci95.low * other.ci95.high, 1.0);
    check_near(one.ci95.high * other.ci95.low, 1.0);
    assert_int_equal(other.verdict, STATS_SLOWER);
}

static void the_verdict_follows_the_interval(void **state)
{
    (void)state;
    const struct {
        double low, high; /* of the effects: half of the blocks each, so that the interval ends there */
        double noise_floor;
        stats_verdict verdict;
    } cases[] = {
        {0.00996, 0.03, 0.01, STATS_FASTER}, /* log 1.01 = 0.009950 */
        {0.00994, 0.03, 0.01, STATS_AMBIGUOUS},
        {-0.03, -0.00996, 0.01, STATS_SLOWER},
        {-0.03, -0.00994, 0.01, STATS_AMBIGUOUS},
        {-0.00994, 0.00994, 0.01, STATS_SAME},
        {-0.00996, 0.00994, 0.01, STATS_AMBIGUOUS},
        {-0.00994, 0.00996, 0.01, STATS_AMBIGUOUS},
        {-0.03, 0.03, 0.01, STATS_AMBIGUOUS},
        {0.0101, 0.03, 0.05, STATS_SAME},
        {0.001, 0.002, 0, STATS_FASTER},
        {0, 0, 0, STATS_SAME},
        {0.02, 0.03, NAN, STATS_AMBIGUOUS},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        double effects[20];
        for (size_t block = 0; block < COUNT_OF(effects); block++)
            effects[block] = block % 2 ? cases[i].high : cases[i].low;
        made_blocks made;
        make_blocks(&made, effects, COUNT_OF(effects));
        stats_comparison comparison = stats_compare(made.blocks, COUNT_OF(effects), cases[i].noise_floor);
        if (comparison.verdict != cases[i].verdict)
            fail_msg("case %zu: %s, wanted %s", i, stats_verdict_text(comparison.verdict),
                     stats_verdict_text(cases[i].verdict));
    }
}

static void few_blocks_decide_nothing(void **state)
{
    (void)state;
    const double clear[] = {0.5, 0.5, 0.5, 0.5, 0.5, 0.5};
    made_blocks made;
    make_blocks(&made, clear, COUNT_OF(clear));
    for (size_t count = 1; count <= 5; count++) {
        stats_comparison comparison = stats_compare(made.blocks, count, 0.01);
        check_near(comparison.speedup, exp(0.5));
        check_near(comparison.ci95.low, 0.0);
        check_near(comparison.ci95.high, INFINITY);
        assert_int_equal(comparison.verdict, STATS_AMBIGUOUS);
    }
    assert_int_equal(stats_compare(made.blocks, 6, 0.01).verdict, STATS_FASTER);
}

static void no_time_no_verdict(void **state)
{
    (void)state;
    const double bad[] = {NAN, 0.0, -1.0};
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        made_blocks made;
        make_blocks(&made, thirteen, COUNT_OF(thirteen));
        made.candidate[4] = bad[i];
        stats_comparison comparison = stats_compare(made.blocks, COUNT_OF(thirteen), 0.01);
        assert_true(isnan(comparison.speedup) && isnan(comparison.ci95.low) && isnan(comparison.ci95.high));
        assert_int_equal(comparison.verdict, STATS_AMBIGUOUS);
        assert_true(isnan(stats_noise_floor(made.blocks, COUNT_OF(thirteen))));
    }
    assert_int_equal(stats_compare(NULL, 0, 0.01).verdict, STATS_AMBIGUOUS);
}

static void verdicts_have_texts(void **state)
{
    (void)state;
    assert_string_equal(stats_verdict_text(STATS_SAME), "SAME");
    assert_string_equal(stats_verdict_text(STATS_FASTER), "FASTER");
    assert_string_equal(stats_verdict_text(STATS_SLOWER), "SLOWER");
    assert_string_equal(stats_verdict_text(STATS_AMBIGUOUS), "AMBIGUOUS");
}

static void the_noise_floor_is_the_95th_percentile(void **state)
{
    (void)state;
    double effects[21];
    for (size_t i = 0; i < COUNT_OF(effects); i++)
        effects[i] = (i % 2 ? -0.002 : 0.002) * (double)i; /* magnitudes 0 .. 0.040: the 95th percentile is 0.038 */
    made_blocks made;
    make_blocks(&made, effects, COUNT_OF(effects));
    check_near(stats_noise_floor(made.blocks, COUNT_OF(effects)), exp(0.038) - 1);
    check_near(stats_noise_floor(made.blocks, 4), 0.01); /* magnitudes up to 0.006: the least that is assumed */
}

static void geometric_means_are_known(void **state)
{
    (void)state;
    const double ratios[] = {1.2, 0.8, 2.5}, weights[] = {1, 2, 3};
    check_near(stats_geomean(ratios, NULL, 3), 1.338865900164339);     /* scipy.stats.gmean */
    check_near(stats_geomean(ratios, weights, 3), 1.5130857494229015); /* the same with weights */
    check_near(stats_geomean(ratios, NULL, 1), 1.2);
    assert_true(isnan(stats_geomean(ratios, NULL, 0)));
}

/* ---- a simulated noisy clock ---- */

/* Twice as bad as a GPU whose launches are replayed back to back (0.3 to 0.5 % from sample to sample, 0.5 % of drift),
 * and throttled for a sixth of the time besides. */
static const double jitter = 0.01;        /* standard deviation of the logarithm of a sample */
static const double drift = 0.01;         /* amplitude of the slow swing of the clock rate, */
static const double drift_period = 1100;  /* in samples: a run of 50 blocks has 800 */
static const double outlier_share = 0.02; /* of the samples, these take up to twice as long */
static const double throttle_chance =
    0.003; /* of a sample to begin a stretch of 20 to 119 that take a quarter longer */
static const double throttle_factor = 1.25;

typedef struct noisy_clock {
    generator random;
    double phase;
    size_t samples_read, throttled_left;
} noisy_clock;

static double uniform(generator *g)
{
    return (double)(next_u64(g) >> 11) * 0x1p-53;
}

static noisy_clock clock_of_run(uint64_t seed, uint64_t run)
{
    noisy_clock clock = {.random = {seed ^ run << 32}};
    clock.phase = uniform(&clock.random);
    return clock;
}

static double timed(noisy_clock *clock, double true_us)
{
    generator *random = &clock->random;
    double turn = clock->phase + (double)clock->samples_read++ / drift_period;
    double us = true_us * exp(jitter * next_normal(random) + drift * sin(2.0 * 3.14159265358979 * turn));
    if (uniform(random) < outlier_share)
        us *= 1.0 + uniform(random);
    if (clock->throttled_left == 0 && uniform(random) < throttle_chance)
        clock->throttled_left = 20 + (size_t)(next_u64(random) % 100);
    if (clock->throttled_left == 0)
        return us;
    clock->throttled_left--;
    return us * throttle_factor;
}

static void time_slot(noisy_clock *clock, double true_us, double *samples)
{
    for (size_t i = 0; i < SAMPLES_PER_SLOT; i++)
        samples[i] = timed(clock, true_us);
}

typedef struct simulated_run {
    double baseline[BLOCKS_MOST][SAMPLES_PER_SIDE], candidate[BLOCKS_MOST][SAMPLES_PER_SIDE];
    stats_block blocks[BLOCKS_MOST];
} simulated_run;

static const double baseline_us = 5.0;

static void list_blocks(simulated_run *run)
{
    for (size_t block = 0; block < BLOCKS_MOST; block++)
        run->blocks[block] =
            (stats_block){run->baseline[block], run->candidate[block], SAMPLES_PER_SIDE, SAMPLES_PER_SIDE};
}

/* A B B A, or B A A B by chance. */
static void time_interleaved(simulated_run *run, noisy_clock *clock, double speedup, size_t blocks)
{
    for (size_t block = 0; block < blocks; block++) {
        int mirrored = (int)(next_u64(&clock->random) & 1);
        double *outer = mirrored ? run->candidate[block] : run->baseline[block];
        double *inner = mirrored ? run->baseline[block] : run->candidate[block];
        double outer_us = mirrored ? baseline_us / speedup : baseline_us;
        double inner_us = mirrored ? baseline_us : baseline_us / speedup;
        time_slot(clock, outer_us, outer);
        time_slot(clock, inner_us, inner);
        time_slot(clock, inner_us, inner + SAMPLES_PER_SLOT);
        time_slot(clock, outer_us, outer + SAMPLES_PER_SLOT);
    }
    list_blocks(run);
}

/* All of the baseline, then all of the candidate: what the blocks are there to avoid. */
static void time_one_after_the_other(simulated_run *run, noisy_clock *clock, double speedup)
{
    for (size_t block = 0; block < BLOCKS_MOST; block++) {
        time_slot(clock, baseline_us, run->baseline[block]);
        time_slot(clock, baseline_us, run->baseline[block] + SAMPLES_PER_SLOT);
    }
    for (size_t block = 0; block < BLOCKS_MOST; block++) {
        time_slot(clock, baseline_us / speedup, run->candidate[block]);
        time_slot(clock, baseline_us / speedup, run->candidate[block] + SAMPLES_PER_SLOT);
    }
    list_blocks(run);
}

static int excludes_one(stats_interval interval)
{
    return interval.low > 1.0 || interval.high < 1.0;
}

static void two_percent_are_found(void **state)
{
    (void)state;
    const size_t runs = 200;
    size_t found = 0;
    for (size_t i = 0; i < runs; i++) {
        simulated_run run;
        noisy_clock clock = clock_of_run(20, i);
        double speedup = i % 2 ? 1.02 : 1 / 1.02;
        time_interleaved(&run, &clock, speedup, BLOCKS_MOST);
        found += stats_compare(run.blocks, BLOCKS_MOST, 0.01).verdict == (i % 2 ? STATS_FASTER : STATS_SLOWER);
    }
    print_message("2 %%, 50 blocks: found in %zu of %zu runs\n", found, runs);
    assert_true(found * 100 >= 95 * runs);
}

static const size_t equal_runs = 400;

/* Of so many comparisons of equal kernels: how many claim a difference with the floor, how many would with none (the
 * interval leaves out 1), and how many are told the same. */
typedef struct claims {
    size_t beyond_floor, beyond_one, same;
} claims;

static claims claims_of_equal_kernels(size_t blocks, uint64_t seed)
{
    claims sum = {0, 0, 0};
    for (size_t i = 0; i < equal_runs; i++) {
        simulated_run run;
        noisy_clock clock = clock_of_run(seed, i);
        time_interleaved(&run, &clock, 1.0, blocks);
        stats_comparison comparison = stats_compare(run.blocks, blocks, 0.01);
        sum.beyond_floor += comparison.verdict == STATS_FASTER || comparison.verdict == STATS_SLOWER;
        sum.same += comparison.verdict == STATS_SAME;
        sum.beyond_one += (size_t)excludes_one(comparison.ci95);
    }
    print_message("equal, %zu blocks: of %zu runs %zu claim a difference, %zu would without a floor, %zu say SAME\n",
                  blocks, equal_runs, sum.beyond_floor, sum.beyond_one, sum.same);
    return sum;
}

static void equal_kernels_are_the_same(void **state)
{
    (void)state;
    claims published = claims_of_equal_kernels(50, 21);
    assert_true(published.beyond_floor * 20 < equal_runs);
    assert_true(published.beyond_one * 20 < equal_runs); /* the interval's own 5 %, without the floor's help */
    assert_true(published.same * 100 >= 95 * equal_runs);
    claims searched = claims_of_equal_kernels(13, 22);
    assert_true(searched.beyond_floor * 20 < equal_runs);
    assert_true(searched.beyond_one * 20 < equal_runs);
}

/* The clock is bad enough for these tests to mean something: without interleaving it fools the same method. */
static void the_clock_fools_a_plain_comparison(void **state)
{
    (void)state;
    const size_t runs = 100;
    size_t fooled = 0;
    for (size_t i = 0; i < runs; i++) {
        simulated_run run;
        noisy_clock clock = clock_of_run(23, i);
        time_one_after_the_other(&run, &clock, 1.0);
        stats_verdict verdict = stats_compare(run.blocks, BLOCKS_MOST, 0.01).verdict;
        fooled += verdict == STATS_FASTER || verdict == STATS_SLOWER;
    }
    print_message("equal, not interleaved: %zu of %zu runs claim a difference\n", fooled, runs);
    assert_true(fooled * 4 >= runs);
}

/* ---- processes that differ as a whole ---- */

/* A search whose candidates are all equal to the incumbent, at its end: up to three that looked faster are confirmed,
 * the first confirmation counts. Each process is biased; its blocks scatter as well. Returns whether one is claimed. */
static int claims_one(generator *random, double bias, double speedup, size_t processes, size_t blocks)
{
    enum {
        CONFIRMED_MOST = 3,
        BLOCKS_ALL = 128
    };
    static const double scatter = 0.005, floor = 0.01, one = 1.0;
    static double ratios[BLOCKS_ALL];
    static stats_block views[BLOCKS_ALL];
    for (int candidate = 0; candidate < CONFIRMED_MOST; candidate++) {
        for (size_t p = 0; p < processes; p++) {
            const double process = speedup * exp(bias * next_normal(random));
            for (size_t b = p * blocks; b < (p + 1) * blocks; b++) {
                ratios[b] = process * exp(scatter * next_normal(random));
                views[b] = (stats_block){&ratios[b], &one, 1, 1};
            }
        }
        if (stats_compare_processes(views, processes * blocks, processes, floor).verdict == STATS_FASTER)
            return 1;
    }
    return 0;
}

static double share_claimed(double bias, double speedup, size_t processes, size_t blocks)
{
    enum {
        SEARCHES = 4000
    };
    generator random = {(uint64_t)(1e6 * bias) + processes};
    int claimed = 0;
    for (int i = 0; i < SEARCHES; i++)
        claimed += claims_one(&random, bias, speedup, processes, blocks);
    return (double)claimed / SEARCHES;
}

/* The table of docs/statistics.md. */
static void a_biased_process_makes_no_claim(void **state)
{
    (void)state;
    static const double biases[] = {0.0, 0.01, 0.02};
    static const double at_least[] = {0.0, 0.28, 0.55}, at_most[] = {0.001, 0.42, 0.70};
    for (size_t i = 0; i < COUNT_OF(biases); i++) {
        const double alone = share_claimed(biases[i], 1.0, 1, 50), six = share_claimed(biases[i], 1.0, 6, 13);
        const double three = share_claimed(biases[i], 1.03, 6, 13), tenth = share_claimed(biases[i], 1.10, 6, 13);
        print_message("bias %.0f %%: equal, claimed by one process %.1f %%, by six %.2f %%; found by six: 3 %% in "
                      "%.1f %%, 10 %% in %.1f %%\n",
                      100 * biases[i], 100 * alone, 100 * six, 100 * three, 100 * tenth);
        assert_true(alone >= at_least[i] && alone <= at_most[i]);
        assert_true(six <= 0.01);
        assert_true(tenth >= 0.95);
    }
}

static void few_processes_decide_nothing(void **state)
{
    (void)state;
    enum {
        PROCESSES = 6
    };
    static const double two[PROCESSES] = {2, 2, 2, 2, 2, 2}, one = 1.0;
    stats_block views[PROCESSES];
    for (size_t i = 0; i < PROCESSES; i++)
        views[i] = (stats_block){&two[i], &one, 1, 1};
    assert_int_equal(stats_compare_processes(views, 6, 6, 0.01).verdict, STATS_FASTER);
    assert_int_equal(stats_compare_processes(views, 6, 6, 0.01).blocks, 6);
    assert_int_equal(stats_compare_processes(views, 6, 3, 0.01).verdict, STATS_AMBIGUOUS);
    assert_int_equal(stats_compare_processes(views, 6, 1, 0.01).verdict, STATS_FASTER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(percentiles_interpolate),
        cmocka_unit_test(samples_stay_as_they_are),
        cmocka_unit_test(a_nan_makes_all_nan),
        cmocka_unit_test(infinite_samples_are_samples),
        cmocka_unit_test(a_summary_holds_the_known_figures),
        cmocka_unit_test(intervals_are_the_binomial_ones),
        cmocka_unit_test(the_effect_is_the_median_of_blocks),
        cmocka_unit_test(a_block_weighs_its_medians),
        cmocka_unit_test(roles_can_be_exchanged),
        cmocka_unit_test(the_verdict_follows_the_interval),
        cmocka_unit_test(few_blocks_decide_nothing),
        cmocka_unit_test(no_time_no_verdict),
        cmocka_unit_test(verdicts_have_texts),
        cmocka_unit_test(the_noise_floor_is_the_95th_percentile),
        cmocka_unit_test(geometric_means_are_known),
        cmocka_unit_test(two_percent_are_found),
        cmocka_unit_test(equal_kernels_are_the_same),
        cmocka_unit_test(the_clock_fools_a_plain_comparison),
        cmocka_unit_test(a_biased_process_makes_no_claim),
        cmocka_unit_test(few_processes_decide_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
