/* Positive controls of a gate: a kernel with one mistake at a time, each of which a case must catch. */
#ifndef ACR_TESTS_FLAWS_H
#define ACR_TESTS_FLAWS_H

#include "support.h"

typedef struct flawed_kernel {
    const acr__kernel *kernel;
    int *present; /* the mistake that the kernel makes: 0 = none, to count - 1 */
    int count;
    const char *const *names; /* of the mistakes */
    int sampled_rows;         /* that are compared, as in reference_request */
    bool last_first;          /* the list's last cases first */
} flawed_kernel;

/* Fails the test unless the kernel passes all its cases without a mistake and fails one with each. Prints which. */
void check_flaws(const flawed_kernel *control);

#endif
