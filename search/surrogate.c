/* A Gaussian process by Cholesky, see surrogate.h. */
#include "surrogate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    DIMENSIONS_MAX = 48,
    CATEGORIES = 2,         /* family and architecture, before the parameters: equal or not */
    TRIALS_FOR_SCALES = 96, /* the latest, to which the length scales are fitted */
    PASSES = 2              /* over all dimensions */
};

static const double SCALES[] = {0.25, 0.6, 1.5, 4.0, 12.0}, FIRST_SCALE = 1.5;
static const double NOISES[] = {1e-4, 1e-3, 1e-2, 1e-1}, FIRST_NOISE = 1e-3;
/* A scale far from 1 has to earn it: else eight trials would choose among hundreds of sets of scales. */
static const double SCALE_PRIOR = 1.5;

typedef struct encoded {
    double at[DIMENSIONS_MAX];
} encoded;

struct surrogate {
    const space_list *spaces;
    int dimensions;
    char names[DIMENSIONS_MAX][SPACE_NAME_MAX]; /* of the parameters, from CATEGORIES on */
    size_t count;                               /* trials, the unfinished ones last */
    encoded points[SURROGATE_TRIALS_MAX];
    double values[SURROGATE_TRIALS_MAX]; /* standardised */
    double mean, scale;                  /* value * scale + mean = logarithm of the speed-up */
    double scales[DIMENSIONS_MAX], noise, variance, best;
    uint64_t scaled_to; /* a digest of the trials that scales and noise are fitted to; 0 = none yet */
    double factor[SURROGATE_TRIALS_MAX * SURROGATE_TRIALS_MAX]; /* lower triangle, rows of `count` */
    double weights[SURROGATE_TRIALS_MAX];
    size_t legal_count; /* 0 = not counted yet */
    genome legal[SURROGATE_POINTS_MAX];
};

/* ---- Points as numbers ---- */

static int dimension_of(const surrogate *s, const char *name)
{
    for (int i = CATEGORIES; i < s->dimensions; ++i) {
        if (strcmp(s->names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

/* Families share a dimension where they share a parameter's name. What has no dimension left is not seen. */
static void find_dimensions(surrogate *s)
{
    s->dimensions = CATEGORIES;
    for (int i = 0; i < s->spaces->count; ++i) {
        const space *family = &s->spaces->items[i];
        for (int k = 0; k < family->gene_count && s->dimensions < DIMENSIONS_MAX; ++k) {
            if (dimension_of(s, family->genes[k].name) < 0) {
                memcpy(s->names[s->dimensions++], family->genes[k].name, SPACE_NAME_MAX);
            }
        }
    }
}

/* A parameter's value is its place in the list of values, which whoever wrote the list made even steps of. */
static void encode(const surrogate *s, const genome *g, encoded *out)
{
    const space *family = &s->spaces->items[g->space];
    for (int i = CATEGORIES; i < s->dimensions; ++i) {
        out->at[i] = 0.5; /* a family without the parameter */
    }
    out->at[0] = g->space;
    out->at[1] = g->arch;
    for (int k = 0; k < family->gene_count; ++k) {
        const int dimension = dimension_of(s, family->genes[k].name);
        if (dimension >= 0 && family->genes[k].count > 1) {
            out->at[dimension] = (double)g->choice[k] / (family->genes[k].count - 1);
        }
    }
}

/* Matern's covariance with 5/2: twice differentiable, which is all that times are. */
static double covariance(const surrogate *s, const encoded *a, const encoded *b)
{
    double sum = 0.0;
    for (int i = 0; i < s->dimensions; ++i) {
        const double apart = i < CATEGORIES ? (double)(a->at[i] != b->at[i]) : a->at[i] - b->at[i];
        sum += apart * apart / (s->scales[i] * s->scales[i]);
    }
    const double r = sqrt(5.0 * sum);
    return (1.0 + r + r * r / 3.0) * exp(-r);
}

/* ---- Linear algebra, of the trials from `first` on ---- */

/* Cholesky's factor of their covariances with the noise; returns the logarithm of the determinant. */
static double factorise(surrogate *s, size_t first, size_t count)
{
    double logarithm = 0.0;
    for (size_t i = 0; i < count; ++i) {
        double *row = s->factor + i * count;
        for (size_t k = 0; k <= i; ++k) {
            const double *other = s->factor + k * count;
            double sum = covariance(s, &s->points[first + i], &s->points[first + k]) + (i == k ? s->noise : 0.0);
            for (size_t j = 0; j < k; ++j) {
                sum -= row[j] * other[j];
            }
            row[k] = i == k ? sqrt(fmax(sum, 1e-12)) : sum / other[k];
        }
        logarithm += 2.0 * log(row[i]);
    }
    return logarithm;
}

static void solve_lower(const surrogate *s, size_t count, const double *right, double *out)
{
    for (size_t i = 0; i < count; ++i) {
        double sum = right[i];
        for (size_t k = 0; k < i; ++k) {
            sum -= s->factor[i * count + k] * out[k];
        }
        out[i] = sum / s->factor[i * count + i];
    }
}

static void solve_upper(const surrogate *s, size_t count, double *inout)
{
    for (size_t i = count; i-- > 0;) {
        double sum = inout[i];
        for (size_t k = i + 1; k < count; ++k) {
            sum -= s->factor[k * count + i] * inout[k];
        }
        inout[i] = sum / s->factor[i * count + i];
    }
}

static double square_sum(const double *values, size_t count)
{
    double sum = 0.0;
    for (size_t i = 0; i < count; ++i) {
        sum += values[i] * values[i];
    }
    return sum;
}

/* ---- Scales ---- */

static uint64_t mixed(uint64_t digest, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (digest ^ bits) * 0x9e3779b97f4a7c15u ^ digest >> 29;
}

/* How well the scales explain the values: the logarithm of the marginal likelihood, at the best variance, and the
 * prior. */
static double evidence(surrogate *s, size_t first, size_t count)
{
    double whitened[SURROGATE_TRIALS_MAX] = {0.0}, prior = 0.0;
    const double logarithm = factorise(s, first, count);
    solve_lower(s, count, s->values + first, whitened);
    for (int i = 0; i < s->dimensions; ++i) {
        const double off = log(s->scales[i]) / SCALE_PRIOR;
        prior -= 0.5 * off * off;
    }
    return prior - 0.5 * logarithm - 0.5 * (double)count * log(square_sum(whitened, count) / (double)count + 1e-9);
}

/* Takes the best of some values for one of the scales, or the noise. */
static void choose(surrogate *s, double *parameter, const double *values, size_t value_count, size_t first,
                   size_t count)
{
    double best = *parameter, best_evidence = evidence(s, first, count);
    for (size_t i = 0; i < value_count; ++i) {
        *parameter = values[i];
        const double now = evidence(s, first, count);
        if (now > best_evidence) {
            best_evidence = now;
            best = values[i];
        }
    }
    *parameter = best;
}

static bool varies(const surrogate *s, int dimension)
{
    for (size_t i = 1; i < s->count; ++i) {
        if (s->points[i].at[dimension] != s->points[0].at[dimension]) {
            return true;
        }
    }
    return false;
}

/* Of all trials: which dimensions vary is a matter of the older ones, too. */
static uint64_t digest_of_trials(const surrogate *s)
{
    uint64_t digest = s->count;
    for (size_t i = 0; i < s->count; ++i) {
        for (int k = 0; k < s->dimensions; ++k) {
            digest = mixed(digest, s->points[i].at[k]);
        }
        digest = mixed(digest, s->values[i]);
    }
    return digest ? digest : 1;
}

/* The trials of a round's proposals are the same, so their scales are: fitted by the first. */
static void fit_scales(surrogate *s)
{
    const size_t count = s->count < TRIALS_FOR_SCALES ? s->count : TRIALS_FOR_SCALES, first = s->count - count;
    const uint64_t digest = digest_of_trials(s);
    if (s->scaled_to == digest) {
        return;
    }
    s->scaled_to = digest;
    for (int i = 0; i < s->dimensions; ++i) {
        s->scales[i] = FIRST_SCALE;
    }
    s->noise = FIRST_NOISE;
    for (int pass = 0; pass < PASSES; ++pass) {
        for (int i = 0; i < s->dimensions; ++i) {
            if (varies(s, i)) {
                choose(s, &s->scales[i], SCALES, sizeof SCALES / sizeof SCALES[0], first, count);
            }
        }
        choose(s, &s->noise, NOISES, sizeof NOISES / sizeof NOISES[0], first, count);
    }
}

/* ---- Fitting ---- */

static bool has_say(const member *m)
{
    return m->has_genome && (m->distinct || m->trial == 0);
}

static bool is_timed(const member *m)
{
    return m->valid && isfinite(m->speedup) && m->speedup > 0.0;
}

/* The latest trials that have a say, the slowest valid one's value for those that are not valid. */
static void take_trials(surrogate *s, const archive *learnt)
{
    size_t having = 0, room = SURROGATE_TRIALS_MAX * 3 / 4; /* the rest is for the unfinished */
    double slowest = 0.0;
    for (size_t i = 0; i < learnt->count; ++i) {
        having += has_say(&learnt->items[i]);
        if (has_say(&learnt->items[i]) && is_timed(&learnt->items[i])) {
            slowest = fmin(slowest, log(learnt->items[i].speedup));
        }
    }
    s->count = 0;
    for (size_t i = 0; i < learnt->count; ++i) {
        const member *m = &learnt->items[i];
        if (has_say(m) && having-- <= room) {
            encode(s, &m->genome, &s->points[s->count]);
            s->values[s->count++] = is_timed(m) ? log(m->speedup) : slowest;
        }
    }
}

static void standardise(surrogate *s)
{
    double sum = 0.0, squares = 0.0;
    for (size_t i = 0; i < s->count; ++i) {
        sum += s->values[i];
    }
    s->mean = sum / (double)s->count;
    for (size_t i = 0; i < s->count; ++i) {
        squares += (s->values[i] - s->mean) * (s->values[i] - s->mean);
    }
    s->scale = fmax(sqrt(squares / (double)s->count), 1e-6);
    s->best = -INFINITY;
    for (size_t i = 0; i < s->count; ++i) {
        s->values[i] = (s->values[i] - s->mean) / s->scale;
        s->best = fmax(s->best, s->values[i]);
    }
}

/* Factor and weights of all trials that there are now. */
static void solve(surrogate *s)
{
    factorise(s, 0, s->count);
    solve_lower(s, s->count, s->values, s->weights);
    s->variance = square_sum(s->weights, s->count) / (double)s->count;
    solve_upper(s, s->count, s->weights);
}

/* Mean and deviation of the standardised value. */
static void predict(const surrogate *s, const encoded *point, double *mean, double *deviation)
{
    double towards[SURROGATE_TRIALS_MAX] = {0.0}, whitened[SURROGATE_TRIALS_MAX];
    *mean = 0.0;
    for (size_t i = 0; i < s->count; ++i) {
        towards[i] = covariance(s, point, &s->points[i]);
        *mean += towards[i] * s->weights[i];
    }
    solve_lower(s, s->count, towards, whitened);
    *deviation = sqrt(s->variance * fmax(1.0 - square_sum(whitened, s->count), 0.0));
}

static bool is_finished(const surrogate *s, const archive *learnt, const genome *g)
{
    return archive_has(learnt, s->spaces, g);
}

/* What is expected of the unfinished becomes what they have shown: the mean stays as it is, their deviation goes. */
static void add_unfinished(surrogate *s, const archive *learnt, const archive *proposed)
{
    const size_t finished = s->count;
    const double variance = s->variance;
    size_t count = finished;
    for (size_t i = 0; i < proposed->count && count < SURROGATE_TRIALS_MAX; ++i) {
        const member *m = &proposed->items[i];
        if (m->has_genome && !is_finished(s, learnt, &m->genome)) {
            double deviation;
            encode(s, &m->genome, &s->points[count]);
            predict(s, &s->points[count], &s->values[count], &deviation);
            ++count;
        }
    }
    if (count > finished) {
        s->count = count;
        solve(s);
        s->variance = variance;
    }
}

acr_status surrogate_create(surrogate **out, const space_list *spaces)
{
    *out = calloc(1, sizeof **out);
    if (!*out) {
        return acr__fail(ACR_NO_MEMORY, "no memory for a surrogate");
    }
    (*out)->spaces = spaces;
    find_dimensions(*out);
    return ACR_OK;
}

void surrogate_free(surrogate *s)
{
    free(s);
}

static bool note_legal(void *arg, const genome *g)
{
    surrogate *s = arg;
    s->legal[s->legal_count++] = *g;
    return true;
}

bool surrogate_fit(surrogate *s, const archive *learnt, const archive *proposed)
{
    take_trials(s, learnt);
    if (s->count < SURROGATE_TRIALS_MIN) {
        return false;
    }
    if (s->legal_count == 0) {
        genome_count(s->spaces, SURROGATE_POINTS_MAX, note_legal, s);
    }
    standardise(s);
    fit_scales(s);
    solve(s);
    add_unfinished(s, learnt, proposed);
    return true;
}

const genome *surrogate_points(const surrogate *s, size_t *count)
{
    *count = s->legal_count;
    return s->legal;
}

surrogate_view surrogate_predict(const surrogate *s, const genome *g)
{
    encoded point = {{0.0}};
    surrogate_view view = {0.0, 0.0, 0.0};
    double mean, deviation;
    encode(s, g, &point);
    predict(s, &point, &mean, &deviation);
    if (deviation > 0.0) {
        const double z = (mean - s->best) / deviation;
        const double below = 0.5 * erfc(-z * M_SQRT1_2), density = exp(-0.5 * z * z) / sqrt(2.0 * M_PI);
        view.improvement = s->scale * deviation * (z * below + density);
    }
    view.mean = s->mean + s->scale * mean;
    view.deviation = s->scale * deviation;
    return view;
}
