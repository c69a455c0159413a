/* Where a search may find most: problems that nobody has tuned a kernel for, ranked by expected gain
 * (docs/manual/evolve.md, "Survey"). Arithmetic only: nothing is compiled or timed here. */
#ifndef SEARCH_SURVEY_H
#define SEARCH_SURVEY_H

#include <jansson.h>
#include <stdbool.h>

#include "internal.h"

/* The problems that a survey looks at unless told others: none of them is a row of the README. */
extern const char *const survey_grid[];
extern const size_t survey_grid_count;

/* Why a gain is expected. */
typedef enum survey_reason {
    SURVEY_NONE, /* nothing runs it, or nothing is in sight */
    SURVEY_ROOFLINE,
    SURVEY_NEIGHBOURS,
    SURVEY_PEER
} survey_reason;
const char *survey_reason_text(survey_reason reason);

typedef struct survey_item {
    char text[ACR_PROBLEM_TEXT_MAX];
    acr_problem problem; /* canonical */
    bool ranked;         /* false: a measured problem that is only a neighbour */
    bool measured;       /* time_us is; else it is the cost model's estimate */
    char kernel[WISDOM_KERNEL_MAX];
    char planned[WISDOM_KERNEL_MAX]; /* what the cost models would choose; "" = nothing */
    double planned_us;               /* its time where it was measured here, else NaN */
    double time_us;                  /* of the fastest kernel; NaN = none runs it, and it is never a neighbour */
    double attainable_us; /* what nobody is known to beat: a launch, and the floor at SURVEY_SUSTAINED of its rate */
    char peer[32];
    double peer_us; /* of the fastest peer; NaN = not known */
    /* What survey_rank finds. Ratios are our time to the other's, NaN = not known. */
    double to_roofline, to_neighbours, to_peer;
    double gain; /* the speed-up to be expected; 1 = none */
    survey_reason reason;
} survey_item;

/* Of the floor's rate, after the launch: as in `roofline --target`. */
#define SURVEY_SUSTAINED 0.7

/* Fills in the ratios and sorts: ranked ones first, by gain, then by text. */
void survey_rank(survey_item *items, size_t count);

/* Takes bench records of the named device: the fastest kernel's time and the fastest peer's, in stream mode, of
 * problems among the items; of others that a kernel runs, items that are not ranked are added (*items is realloc'd;
 * their attainable_us is the records' floor with launch_us). Errors: ACR_NO_MEMORY. */
acr_status survey_take_records(survey_item **items, size_t *count, const json_t *records, const char *device,
                               double launch_us);

/* The seconds of left_s that the first of `count` ranked items gets, by its share of the gains' logarithms. */
double survey_share(const survey_item *items, size_t count, double left_s);

#endif
