/* acromion evolve --survey: ranks problems by expected gain, and spends a budget by rank. */
#ifndef SEARCH_EVOLVE_SURVEY_H
#define SEARCH_EVOLVE_SURVEY_H

#include <stdbool.h>
#include <sys/types.h>

#include "base/options.h"
#include "machine/gpus.h"

typedef struct survey_request {
    const common_options *common;
    const gpu_model *gpu; /* rank for this GPU instead of the device that is here; NULL = that */
    double measure_s;     /* time the kernels of each problem here, for so long in all; 0 = do not */
    const char *results;  /* a file of bench records; NULL = estimates only */
    bool all;             /* every problem on a line, not the first ten */
    int top;              /* so many are searched */
    const char *into;     /* spend the budget: the folder of the stores; NULL = rank only */
    double time_s;        /* the budget */
    char **problems;      /* instead of the grid */
    int problem_count;
    char **options; /* of the command line, which searches get as they are */
    int option_count;
    const volatile int *stop;  /* not 0: no further search is begun */
    volatile pid_t *searching; /* the search that runs, for whoever tells it of signals */
} survey_request;

/* Returns the exit code. */
int evolve_survey(const survey_request *request);

#endif
